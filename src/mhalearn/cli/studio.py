"""studio: the local page to play with."""

from typing import Annotated

import typer

from mhalearn.cli.cache import cache_folder
from mhalearn.cli.exit_codes import Exit, guarded, say
from mhalearn.cli.output import write

commands = typer.Typer()


@commands.command(
    epilog="Example:\n\n  mhalearn studio --open\n\n"
    "Needs pip install '.\\[studio]' in a clone. Answers this machine only; Ctrl-C ends it "
    "and its runs."
)
@guarded
def studio(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")
    ] = 8042,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> int:
    """Serve a page on which layers are drawn, learned and watched, live."""
    try:
        from mhalearn.studio.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio"):
            raise
        return say(
            f"{error.name} is missing: pip install 'mhalearn[studio]', in a clone '.[studio]'",
            Exit.BAD_INPUT,
            "studio",
        )

    def ready(address: str) -> None:
        write(f"{address}  (Ctrl-C ends the studio and its runs)\n")
        if open_page:
            import webbrowser

            webbrowser.open(address)

    try:
        serve(port, cache=cache_folder(), ready=ready)
    except KeyboardInterrupt:
        pass  # how a studio is left
    except OSError as error:
        raise ValueError(
            f"--port {port}: {error.strerror or error}; choose another, or 0 for any that is free"
        ) from None
    return Exit.DONE
