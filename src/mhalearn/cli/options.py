"""Options that commands share, and checks of the places they name before any work begins."""

import errno
import os
from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to.")]
Count = Annotated[int, typer.Option(min=1, help="Examples to draw.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
LayerFile = Annotated[Path, typer.Argument(metavar="LAYER", help="A layer file.")]
Noise = Annotated[
    float, typer.Option(min=0, help="Label noise, relative to the labels' root mean square.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]


def make_folder(folder: Path, *names: str) -> dict[str, Path]:
    """Make a folder and check that the named files can be written in it; paths by stem."""
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
    paths = {Path(name).stem: folder / name for name in names}
    for path in paths.values():
        storage.check_writable(path)
    return paths


def check_outputs(examples: Path, **outputs: Path | None) -> None:
    """Every output can be written, and none would overwrite another or the examples.

    A layer's file says by its name what it is: other programs go by that.
    """
    from mhalearn._runtime import storage

    taken = {os.path.realpath(examples): "the examples"}
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
