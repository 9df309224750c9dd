"""Options that commands share, and checks of the places they name before any work begins."""

import errno
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Folder = Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to.")]
Count = Annotated[int, typer.Option(min=1, help="Examples to draw.")]
Inputs = Annotated[
    str | None, typer.Option(metavar="NAME", help="What the tokens are called, if not X.")
]
Outputs = Annotated[
    str | None, typer.Option(metavar="NAME", help="What the labels are called, if not Y.")
]
Mask = Annotated[
    str | None, typer.Option(metavar="NAME", help="Of those, a mask: 1 for tokens, 0 for padding.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
LayerFile = Annotated[Path, typer.Argument(metavar="LAYER", help="A layer file.")]
Noise = Annotated[
    float, typer.Option(min=0, help="Label noise, relative to the labels' root mean square.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
LayerOut = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Save the layer here (.safetensors).")
]
ReportOut = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a report here (.html).")
]
Bias = Annotated[bool, typer.Option("--bias", help="Learn key vectors and output bias.")]
Causal = Annotated[bool, typer.Option("--causal", help="Tokens see only earlier ones.")]
RopeBase = Annotated[
    str | None,
    typer.Option(metavar="BASE|auto", help="Rotary positions, all dimensions; or found."),
]
KvHeads = Annotated[
    str | None, typer.Option(metavar="N|auto", help="Heads of keys and values, if fewer; or found.")
]
Window = Annotated[
    str | None, typer.Option(metavar="N|auto", help="Tokens see those less than N away; or found.")
]
Sinks = Annotated[bool, typer.Option("--sinks", help="Heads have a learned sink.")]
Softcap = Annotated[
    str | None, typer.Option(metavar="C|auto", help="Logits are C tanh(l / C); or found.")
]


def read_kind(
    rope_base: str | None,
    kv_heads: str | None,
    window: str | None,
    sinks: bool,
    softcap: str | None,
) -> dict[str, Any]:
    """What heads have beside a Theta and a W, as `AttentionRegressor` takes it."""
    from mhalearn.layer.rope import Rope

    base = _number("--rope-base", rope_base)
    return {
        "rope": Rope(base) if isinstance(base, float) else base,
        "kv_heads": None if kv_heads is None else read_count("--kv-heads", kv_heads),
        "window": None if window is None else read_count("--window", window),
        "sinks": sinks,
        "softcap": _number("--softcap", softcap),
    }


def _number(option: str, text: str | None) -> float | Literal["auto"] | None:
    if text is None or text == "auto":
        return None if text is None else "auto"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} {text}: give a number, or auto") from None


def read_count(option: str, text: str) -> int | Literal["auto"]:
    """A number of at least one, or "auto"."""
    if text == "auto":
        return "auto"
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise ValueError(f"{option} {text}: give a number of at least 1, or auto")
    return count


def check_run(max_seconds: float | None, checkpoint: Path | None, *, resume: bool) -> None:
    """A time limit that can be kept, and a file to go on from."""
    if max_seconds is not None and not (math.isfinite(max_seconds) and max_seconds > 0):
        raise ValueError(f"--max-seconds {max_seconds}: give a positive number of seconds")
    if resume and checkpoint is None:
        raise ValueError("--resume needs --checkpoint FILE, the file to continue from")


@contextmanager
def make_folder(folder: Path, *names: str) -> Iterator[dict[str, Path]]:
    """A folder for the named files, each of which can be written in it; paths by stem.

    Folders that were made for it are removed again where writing fails and nothing is in them.
    """
    from mhalearn._runtime import storage

    missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    try:
        _make(folder)
        paths = {Path(name).stem: folder / name for name in names}
        for path in paths.values():
            storage.check_writable(path)
        yield paths
    except BaseException:
        with suppress(OSError):
            for place in missing:
                place.rmdir()
        raise


def _make(folder: Path) -> None:
    from mhalearn._runtime import storage

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        raise ValueError(
            f"--out {storage.show(folder)}: cannot be made a folder ({error.strerror}); "
            "choose another place"
        ) from None


def check_outputs(*examples: Path, **outputs: Path | None) -> None:
    """Every output can be written, and none would overwrite another or the examples.

    A layer's file says by its name what it is: other programs go by that.
    """
    from mhalearn._runtime import storage

    taken = {os.path.realpath(path): "the examples" for path in examples}
    for name, path in outputs.items():
        if path is None:
            continue
        if name == "out" and path.suffix != ".safetensors":
            raise ValueError(
                f"--out {storage.show(path)}: name a file that ends in .safetensors; "
                "for PyTorch, mhalearn export torch writes it as .pt afterwards"
            )
        storage.check_writable(path)
        other = taken.setdefault(os.path.realpath(path), f"--{name}")
        if other != f"--{name}":
            raise ValueError(f"--{name} {storage.show(path)} is {other} too: choose another name")
