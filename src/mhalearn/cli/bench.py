"""bench: the comparison with other solvers, which comes with the source."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from mhalearn.cli.exit_codes import guarded

commands = typer.Typer()
_SCRIPT = Path("benchmarks") / "bench.py"


@commands.command(
    epilog="Examples:\n\n  mhalearn bench\n\n  mhalearn bench speed noise\n\n"
    "  mhalearn bench --method mine.py:descend\n\n"
    "Needs a clone of the source, and in it pip install '.\\[bench]'."
)
@guarded
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="speed, limit, noise, methods, hard, transformer, published; or all.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Your own optimiser, into the table of speed: docs/own_method.md.",
        ),
    ] = None,
) -> int:
    """Compare with Adam, L-BFGS, SciPy and optimistix, and with the figures committed before.

    Takes some twenty minutes on two cores. Ends with code 3 if a figure got worse.
    """
    if not _SCRIPT.exists():
        raise ValueError(
            f"{_SCRIPT} is not here: the comparison comes with the source; run it in a clone"
        )
    if method is not None:
        from mhalearn.learners import OwnOptimiser

        OwnOptimiser.from_file(method)  # one line now rather than a traceback later
    if importlib.util.find_spec("optimistix") is None:
        raise ValueError("optimistix is missing: pip install '.[bench]'")
    own = [] if method is None else ["--method", method]
    return subprocess.run([sys.executable, str(_SCRIPT), *(names or []), *own]).returncode
