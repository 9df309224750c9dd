"""The command line: arguments in, library calls, words and exit codes out. No mathematics.

Heavy modules are imported inside the commands, so that `--help` and `--version` answer at once.
"""

import contextlib
import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from mhalearn import __version__
from mhalearn.cli import (
    audit,
    bench,
    convert,
    demo,
    extract,
    generate,
    hard,
    judge,
    learn,
    plan,
    studio,
)
from mhalearn.cli.exit_codes import Exit, say
from mhalearn.cli.output import write

__all__ = ["main", "run"]

app = typer.Typer(
    name="mhalearn",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (
    demo,
    generate,
    learn,
    extract,
    plan,
    judge,
    audit,
    hard,
    convert,
    studio,
    bench,
):  # the order of --help
    app.add_typer(part.commands)


def main(arguments: list[str] | None = None) -> NoReturn:
    """The entry point: run a command and exit with its code."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        with contextlib.suppress(AttributeError, ValueError):
            getattr(sys, name).reconfigure(errors="backslashreplace")
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="mhalearn", standalone_mode=False)
    except _USAGE_ERROR as error:
        return _refuse_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        code = say("interrupted", Exit.INTERRUPTED)
    try:
        write("")  # what typer printed may still be in the buffer
    except OSError as error:
        return say(f"standard output: {error.strerror}", Exit.BROKEN)
    return int(code or 0)


# typer keeps its own copy of click in some versions; the base class is the same idea in all.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


def _refuse_usage(error: Any) -> int:
    path = "mhalearn" if error.ctx is None else error.ctx.command_path
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return Exit.BAD_INPUT
    message = error.format_message().rstrip(".")
    return say(f"{message}; see {path} --help", Exit.BAD_INPUT, path.partition(" ")[2])


def _show_version(asked: bool) -> bool:
    if asked:
        write(f"mhalearn {__version__}\n")
        raise typer.Exit(Exit.DONE)
    return asked


@app.callback(
    epilog="Start with [bold]mhalearn demo[/bold]. Every command explains itself: "
    "[bold]mhalearn learn --help[/bold].",
)
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Learn a multi-head attention layer exactly from labelled examples."""
