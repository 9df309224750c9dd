"""audit: which attention a box really computes."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhalearn.cli.exit_codes import Exit, guarded
from mhalearn.cli.options import Inputs, Json, Mask, Outputs, Seed
from mhalearn.cli.output import print_json, write

if TYPE_CHECKING:
    from mhalearn.data import Examples

commands = typer.Typer()


@commands.command(
    "audit",
    epilog="Examples:\n\n"
    "  mhalearn audit layer.safetensors recorded.safetensors --report audit.html\n\n"
    "  mhalearn audit model.safetensors port:attention --config config.json --layer 3\n\n"
    "A box is a Python function, as MODULE:FUNCTION, from X (n, k, d) to Y; the module is looked "
    "for in the working folder too. Exit code 0: it computes what was claimed; 3: it differs.",
)
@guarded
def audit_command(
    claimed: Annotated[
        Path, typer.Argument(metavar="LAYER", help="A layer file, or a model's weights.")
    ],
    box: Annotated[str, typer.Argument(metavar="EXAMPLES", help="Examples, or MODULE:FUNCTION.")],
    config: Annotated[
        Path | None,
        typer.Option(help="The model's config.json, where it does not lie beside the weights."),
    ] = None,
    layer: Annotated[int, typer.Option(min=0, help="Which layer of a model.")] = 0,
    precision: Annotated[
        str | None, typer.Option(help="What the box computes in, if its labels do not tell.")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Faults together, at most.")] = 3,
    max_seconds: Annotated[
        float, typer.Option(help="After which no further pair of faults is tried.")
    ] = 60.0,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences a function is asked.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 64,
    seed: Seed = 0,
    inputs: Inputs = None,
    outputs: Outputs = None,
    mask: Mask = None,
    report: Annotated[Path | None, typer.Option(help="An HTML file to write.")] = None,
    as_json: Json = False,
) -> int:
    """Name what a box computes otherwise than a layer does."""
    import mhalearn as mha
    from mhalearn._runtime import storage

    if report is not None:
        storage.check_writable(report)
    found = mha.audit(
        claimed,
        _read_box(box, inputs, outputs, mask),
        config=None if config is None else _read_config(config),
        layer_index=layer,
        precision=precision,
        depth=depth,
        max_seconds=max_seconds,
        n=sequences,
        k=tokens,
        seed=seed,
    )
    if report is not None:
        found.write_report(report)
    if as_json:
        print_json(found.to_dict())
    else:
        write(f"{found}\n")
    return Exit.DONE if found.ok else Exit.NOT_RECOVERED


def _read_box(
    named: str, inputs: str | None, outputs: str | None, mask: str | None
) -> Examples | Callable[[Any], Any]:
    """Examples of a file or folder, or a function of a module."""
    import mhalearn as mha

    module, colon, function = named.rpartition(":")
    if os.path.lexists(named) or not colon or not module.replace(".", "").isidentifier():
        return mha.load_examples(Path(named), inputs=inputs, outputs=outputs, mask=mask)
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ValueError(f"{named}: {error}") from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise ValueError(f"{named}: {module} has no function {function!r}")
    return found


def _read_config(path: Path) -> dict[str, Any]:
    from mhalearn._runtime import storage

    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"--config {storage.show(path)}: not readable as the JSON of a model")
    return config
