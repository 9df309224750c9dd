"""The command line: arguments in, library calls, words and exit codes out. No mathematics.

Heavy modules are imported inside the commands, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import functools
import hashlib
import json
import math
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, ParamSpec

import typer

if TYPE_CHECKING:
    from mhalearn.examples import Examples
    from mhalearn.layer import AttentionLayer
    from mhalearn.outcome import Event

P = ParamSpec("P")


class Exit(enum.IntEnum):
    """How a command ended, for whoever called it."""

    DONE = 0  # learn and certify: recovered; check: all conditions hold
    BAD_INPUT = 2
    NOT_RECOVERED = 3  # finished, but not recovered, or not all conditions hold
    BROKEN = 4  # from outside: a full disk, a lost shard, no memory
    INTERRUPTED = 130


class Method(enum.StrEnum):
    AUTO = "auto"
    NEWTON = "newton"
    ADAM = "adam"
    LBFGS = "lbfgs"
    LINEAR = "linear"


class Inputs(enum.StrEnum):
    BOOLEAN = "boolean"
    GAUSSIAN = "gaussian"


app = typer.Typer(
    name="mhalearn",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]


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
        code = _say("interrupted", Exit.INTERRUPTED)
    return _flush(int(code or 0))


# typer keeps its own copy of click in some versions; the base class is the same idea in all.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


def _refuse_usage(error: Any) -> int:
    path = "mhalearn" if error.ctx is None else error.ctx.command_path
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return Exit.BAD_INPUT
    message = error.format_message().rstrip(".")
    return _say(f"{message}; see {path} --help", Exit.BAD_INPUT, path.partition(" ")[2])


def _guarded(command: Callable[P, int]) -> Callable[P, int]:
    """Turn what a command raises into one line on standard error and an exit code."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> int:
        name = command.__name__
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt as stop:
            saved = getattr(stop, "saved", None)
            known = f"best layer so far saved to {saved}" if saved else "no layer saved"
            return _say(f"interrupted; {known}", Exit.INTERRUPTED, name)
        except ValueError as error:
            return _say(str(error), Exit.BAD_INPUT, name)
        except OSError as error:
            return _say(_why(error), Exit.BROKEN, name)
        except MemoryError:
            return _say("out of memory: use fewer examples or a smaller layer", Exit.BROKEN, name)
        except RuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):  # how XLA says that memory ran out
                raise
            return _say("out of memory: use fewer examples or a smaller layer", Exit.BROKEN, name)

    return guarded


def _why(error: OSError) -> str:
    if error.strerror is None:
        return str(error)
    place = f"{error.filename}: " if error.filename else ""
    remedy = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{place}{error.strerror}{remedy}"


def _say(message: str, code: Exit, command: str = "") -> Exit:
    """One line on standard error."""
    line = f"mhalearn {command}".rstrip() + ": " + " ".join(message.split())
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    return code


# Commands


def _show_version(asked: bool) -> bool:
    if asked:
        from mhalearn.storage import mhalearn_version

        _write(f"mhalearn {mhalearn_version()}\n")
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


@app.command(
    epilog="Example:\n\n  mhalearn demo --out demo     [dim]# then open demo/report.html[/dim]"
)
@_guarded
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to.")] = Path("demo"),
    as_json: Json = False,
) -> int:
    """Draw a random layer, learn it back from 200 examples, certify and report.

    Writes examples.safetensors, truth.safetensors, layer.safetensors and report.html.
    """
    import mhalearn as mha

    began = time.monotonic()
    heads, dim, tokens, n, fresh = 3, 16, 8, 200, 1000
    _use_compilation_cache()
    truth = mha.random_layer(n_heads=heads, d=dim, seed=0)
    examples = _drawn(truth, "boolean", n, tokens, seed=0)
    paths = _folder(
        out, "examples.safetensors", "truth.safetensors", "layer.safetensors", "report.html"
    )
    examples.save(paths["examples"])
    truth.save(paths["truth"])
    estimator = _fit(
        mha.AttentionRegressor(n_heads=heads, random_state=0), examples, paths["layer"]
    )
    layer = estimator.layer_
    layer.save(paths["layer"])
    new = _drawn(truth, "boolean", fresh, tokens, seed=1)
    certificate = mha.certify(layer, new, learned_from=examples)
    comparison = mha.compare(layer, truth)
    solution = dataclasses.replace(estimator.solution_, certificate=certificate)
    mha.write_report(solution, paths["report"], truth=truth)
    recovered = (
        solution.outcome is mha.Outcome.RECOVERED
        and certificate.recovered
        and comparison.max_error <= 1e-10
    )
    limit = examples.counting_limit(heads)
    facts = {
        "outcome": solution.outcome.name,
        "reason": solution.reason,
        "recovered": recovered,
        "examples": n,
        "ratio": n / limit,
        "fresh_examples": fresh,
        "relative_mse": certificate.relative_mse,
        "max_error": comparison.max_error,
        "certificate": certificate.to_dict(),
        "files": {name: str(path) for name, path in paths.items()},
        "seconds": time.monotonic() - began,
    }
    if as_json:
        _print_json(facts)
    else:
        _print_verdict(
            solution.outcome.name,
            solution.reason,
            {
                "teacher": f"{heads} heads, d = {dim}, k = {tokens} tokens, random",
                "examples": f"{n}, uniform +-1: {_times(n, limit)}",
                "fresh error": f"{certificate.relative_mse:.1e} relative squared, "
                f"{fresh} new examples",
                "largest parameter error": f"{comparison.max_error:.1e} against the truth",
                "certificate": certificate.statement,
                "files": ", ".join(str(path) for path in paths.values()),
                "seconds": f"{facts['seconds']:.1f}",
            },
        )
    return Exit.DONE if recovered else Exit.NOT_RECOVERED


@app.command(
    epilog="Examples:\n\n"
    "  mhalearn generate --out data\n\n"
    "  mhalearn generate --heads 4 --dim 32 --tokens 8 --examples 1000 --noise 0.01 --out noisy"
)
@_guarded
def generate(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to.")],
    heads: Annotated[int, typer.Option(min=1, help="Heads of the layer.")] = 3,
    dim: Annotated[int, typer.Option(min=1, help="Features of a token.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an example.")] = 8,
    examples: Annotated[int, typer.Option(min=1, help="Examples to draw.")] = 200,
    inputs: Annotated[Inputs, typer.Option(help="Distribution of the tokens.")] = Inputs.BOOLEAN,
    scale: Annotated[float, typer.Option(help="Norm of each attention matrix.")] = 2.0,
    noise: Annotated[
        float, typer.Option(min=0, help="Label noise, relative to the labels' root mean square.")
    ] = 0.0,
    rank: Annotated[
        int | None, typer.Option(min=1, help="Rank of the heads; full unless given.")
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """Draw a random layer and labelled examples of it.

    Writes examples.safetensors and layer.safetensors.
    """
    import mhalearn as mha

    layer = mha.random_layer(n_heads=heads, d=dim, scale=scale, rank=rank, seed=seed)
    drawn = _drawn(layer, inputs.value, examples, tokens, seed, noise)
    paths = _folder(out, "examples.safetensors", "layer.safetensors")
    drawn.save(paths["examples"])
    layer.save(paths["layer"])
    limit = drawn.counting_limit(heads, head_dim=rank)
    if as_json:
        _print_json(
            {
                "examples": examples,
                "ratio": examples / limit,
                "files": {name: str(path) for name, path in paths.items()},
            }
        )
    else:
        _print_facts(
            {
                "layer": f"{heads} heads, d = {dim}: {paths['layer']}",
                "examples": f"{examples} of {tokens} tokens, {_times(examples, limit)}: "
                f"{paths['examples']}",
                "next": f"mhalearn learn {paths['examples']} --heads {heads}",
            }
        )
    return Exit.DONE


@app.command(
    epilog="Examples:\n\n"
    "  mhalearn learn data/examples.safetensors --heads 3 --out layer.safetensors\n\n"
    "  mhalearn learn data.npz --report report.html --json > result.json\n\n"
    "  mhalearn learn shards/ --heads auto --checkpoint run.safetensors\n\n"
    "Exit code 0: recovered; 3: finished, not recovered; 2: bad input; 4: broken from outside; "
    "130: Ctrl-C, with the best layer so far in --out."
)
@_guarded
def learn(
    examples: Annotated[
        Path,
        typer.Argument(
            metavar="EXAMPLES",
            help="A .safetensors or .npz file with X and Y, or a folder of shards.",
        ),
    ],
    heads: Annotated[str, typer.Option(metavar="N|auto", help="Heads of the layer.")] = "auto",
    method: Annotated[Method, typer.Option(help="Which learner.")] = Method.AUTO,
    head_dim: Annotated[
        int | None, typer.Option(min=1, metavar="H", help="Learn heads of this rank.")
    ] = None,
    bias: Annotated[
        bool, typer.Option("--bias", help="Learn key vectors and output bias.")
    ] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Tokens see only earlier ones.")] = False,
    no_polish: Annotated[
        bool, typer.Option("--no-polish", help="Leave the last descent to machine precision out.")
    ] = False,
    seed: Seed = 0,
    max_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Stop after this many seconds.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the state of the run here.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the layer here (.safetensors).")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report here (.html).")
    ] = None,
    as_json: Json = False,
) -> int:
    """Learn a layer from examples and certify it."""
    n_heads = _heads(heads)
    if max_seconds is not None and not (math.isfinite(max_seconds) and max_seconds > 0):
        raise ValueError(f"--max-seconds {max_seconds}: give a positive number of seconds")
    if resume and checkpoint is None:
        raise ValueError("--resume needs --checkpoint FILE, the file to continue from")
    _check_outputs(examples, out=out, report=report, checkpoint=checkpoint)

    import mhalearn as mha

    began = time.monotonic()
    data = mha.load_examples(examples)
    _use_compilation_cache()
    estimator = mha.AttentionRegressor(
        n_heads=n_heads,
        method=method.value,
        head_dim=head_dim,
        bias=bias,
        causal=causal,
        polish=not no_polish,
        random_state=seed,
        max_seconds=max_seconds,
        checkpoint=None if checkpoint is None else str(checkpoint),
        resume=resume,
    )
    try:
        _fit(estimator, data, out)
    except _Stopped as stopped:
        if as_json:
            _print_json(
                {"interrupted": True, "outcome": None, "recovered": False, "layer": stopped.saved}
            )
        raise
    if out is not None:
        estimator.layer_.save(out)
    if report is not None:
        mha.write_report(estimator, report)
    solution, certificate = estimator.solution_, estimator.certificate_
    recovered = solution.outcome is mha.Outcome.RECOVERED
    seconds = time.monotonic() - began
    if as_json:
        _print_json(
            {
                "outcome": solution.outcome.name,
                "reason": solution.reason,
                "recovered": recovered,
                "interrupted": False,
                "n_heads": estimator.n_heads_,
                "examples": {"n": data.n, "k": data.k, "d": data.d, "out_dim": data.out_dim},
                "relative_mse": None if certificate is None else certificate.relative_mse,
                "certificate": None if certificate is None else certificate.to_dict(),
                "layer": None if out is None else str(out),
                "report": None if report is None else str(report),
                "seconds": seconds,
            }
        )
    else:
        limit = data.counting_limit(estimator.n_heads_, bias=bias, head_dim=head_dim)
        facts = {
            "layer": f"{estimator.n_heads_} heads, d = {data.d}: "
            + (str(out) if out else "not saved (add --out layer.safetensors)"),
            "examples": f"{data.n}: {_times(data.n, limit)}",
        }
        if certificate is not None:
            facts["held-out error"] = f"{certificate.relative_mse:.1e} relative squared"
            facts["certificate"] = certificate.statement
        if report is not None:
            facts["report"] = str(report)
        _print_verdict(
            solution.outcome.name, solution.reason, facts | {"seconds": f"{seconds:.1f}"}
        )
    return Exit.DONE if recovered else Exit.NOT_RECOVERED


@app.command(
    epilog="Example:\n\n"
    "  mhalearn certify layer.safetensors fresh.safetensors --delta 0.01\n\n"
    "The examples must be new: those the layer was learned from are refused."
)
@_guarded
def certify(
    layer: Annotated[Path, typer.Argument(metavar="LAYER", help="A layer file.")],
    examples: Annotated[
        Path, typer.Argument(metavar="EXAMPLES", help="Examples not learned from.")
    ],
    delta: Annotated[float, typer.Option(help="1 - delta is the confidence.")] = 0.05,
    as_json: Json = False,
) -> int:
    """State what is certain about a layer, from fresh examples."""
    import mhalearn as mha

    if not 0 < delta < 1:
        raise ValueError(f"--delta {delta}: give a number between 0 and 1, such as 0.05")
    learned, data = mha.load_layer(layer), mha.load_examples(examples)
    _use_compilation_cache()
    certificate = mha.certify(learned, data, delta=delta)
    if as_json:
        _print_json(certificate.to_dict())
    else:
        _print_verdict(
            "RECOVERED" if certificate.recovered else "NOT RECOVERED",
            certificate.reason,
            {
                "relative error": f"{certificate.relative_mse:.1e} squared, "
                f"{certificate.n_examples} examples",
                "certificate": certificate.statement,
            },
        )
    return Exit.DONE if certificate.recovered else Exit.NOT_RECOVERED


@app.command(
    epilog="Example:\n\n"
    "  mhalearn compare layer.safetensors truth.safetensors\n\n"
    "In JSON max_error is null, and comparable false, where heads or shapes differ."
)
@_guarded
def compare(
    learned: Annotated[Path, typer.Argument(metavar="LAYER", help="The learned layer.")],
    truth: Annotated[Path, typer.Argument(metavar="LAYER", help="The layer to compare with.")],
    as_json: Json = False,
) -> int:
    """Compare two layers head by head, up to the order of heads."""
    import mhalearn as mha

    first, second = mha.load_layer(learned), mha.load_layer(truth)
    found = mha.compare(first, second)
    if as_json:
        _print_json({"comparable": found.comparable, **dataclasses.asdict(found)})
    elif found.comparable:
        _print_table(
            ("head", "learned as", "error of Theta", "error of W"),
            [
                (str(i + 1), str(int(j) + 1), f"{theta:.1e}", f"{w:.1e}")
                for i, (j, theta, w) in enumerate(
                    zip(found.order, found.theta_errors, found.w_errors, strict=True)
                )
            ],
        )
        _print_facts({"largest relative error": f"{found.max_error:.1e}"})
    else:
        _print_facts({"not comparable": f"{first} against {second}: the error is infinite"})
    return Exit.DONE


@app.command(epilog="Example:\n\n  mhalearn check layer.safetensors --tokens 8")
@_guarded
def check(
    layer: Annotated[Path, typer.Argument(metavar="LAYER", help="A layer file.")],
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an example.")],
    as_json: Json = False,
) -> int:
    """Measure the non-degeneracy conditions under which learning is proved."""
    import mhalearn as mha

    subject = mha.load_layer(layer)
    _use_compilation_cache()
    found = mha.check_nondegeneracy(subject, k=tokens, seed=0)
    if as_json:
        names = ("name", "value", "threshold", "at_most", "ok", "explanation")
        items = [{name: getattr(item, name) for name in names} for item in found.items]
        _print_json({"ok": found.ok, "tokens": tokens, "items": items})
    else:
        _print_table(
            ("condition", "value", "asked for", "holds"),
            [
                (
                    item.name,
                    f"{item.value:.3g}",
                    f"{'at most' if item.at_most else 'at least'} {item.threshold:.3g}",
                    "yes" if item.ok else "NO",
                )
                for item in found.items
            ],
        )
    return Exit.DONE if found.ok else Exit.NOT_RECOVERED


# Parts of the commands


def _heads(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"--heads {text}: give a number of at least 1, or auto")
    return count


def _drawn(
    layer: AttentionLayer, inputs: str, n: int, tokens: int, seed: int, noise: float = 0.0
) -> Examples:
    import mhalearn as mha

    drawn = mha.Examples.from_callable(
        layer, inputs, n=n, k=tokens, d=layer.d, seed=seed, noise=noise
    )
    return drawn.subset(slice(None))


def _folder(folder: Path, *names: str) -> dict[str, Path]:
    """Make a folder and check that the named files can be written in it; paths by stem."""
    from mhalearn import storage

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


def _check_outputs(examples: Path, **outputs: Path | None) -> None:
    """Every output can be written, and none would overwrite another or the examples."""
    from mhalearn import storage

    taken = {os.path.realpath(examples): "the examples"}
    for name, path in outputs.items():
        if path is None:
            continue
        storage.check_writable(path)
        other = taken.setdefault(os.path.realpath(path), f"--{name}")
        if other != f"--{name}":
            raise ValueError(f"--{name} {storage.show(path)} is {other} too: choose another name")


class _Stopped(KeyboardInterrupt):
    """Ctrl-C while learning; `saved` is where the best layer so far is, if anywhere."""

    def __init__(self, saved: str | None) -> None:
        super().__init__()
        self.saved = saved


def _fit(estimator: Any, examples: Examples, out: Path | None) -> Any:
    """Fit behind the live line. On Ctrl-C the best layer so far is saved."""
    from mhalearn.terminal import Progress

    with _ctrl_c() as asked, Progress() as progress:

        def on_event(event: Event) -> None:
            # An interrupt that arrives inside a destructor or a callback is swallowed there.
            if asked():
                raise KeyboardInterrupt
            progress.on_event(event)

        try:
            return estimator.set_params(on_event=on_event).fit(examples)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the file is written in any case
            best = estimator.best_layer_so_far_()
            if best is None or out is None:
                raise _Stopped(None) from None
            best.replace(metadata={**best.metadata, "outcome": "interrupted"}).save(out)
            raise _Stopped(str(out)) from None


@contextlib.contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Remember that Ctrl-C was pressed, besides raising KeyboardInterrupt."""
    pressed = []

    def handle(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread: no signals here
        yield lambda: False
        return
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _times(n: int, limit: float) -> str:
    return f"{n / limit:.1f} times the counting limit of {limit:.1f}"


# The compilation cache


def _use_compilation_cache() -> None:
    """Keep compiled programs between runs, in the user's cache folder if it can be written.

    MHALEARN_CACHE_DIR names another folder; empty, it turns the cache off.
    """
    import jax

    folder = _cache_folder()
    if folder is None or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        return
    warnings.filterwarnings(
        "ignore", message="Error (reading|writing) persistent compilation cache"
    )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _cache_folder() -> Path | None:
    chosen = os.environ.get("MHALEARN_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) if chosen else None
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home folder
        return None
    return base / "mhalearn" / _processor()


def _processor() -> str:
    """A name for this kind of processor: compiled programs run on no other."""
    features = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


# Output


def _print_json(facts: Mapping[str, Any]) -> None:
    _write(json.dumps(_strict(facts), allow_nan=False) + "\n")


def _strict(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become null, arrays lists."""
    if isinstance(value, Mapping):
        return {str(name): _strict(item) for name, item in value.items()}
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _print_verdict(name: str, reason: str, facts: Mapping[str, str]) -> None:
    from rich.text import Text

    style = "bold green" if name == "RECOVERED" else "bold yellow"
    _show(Text.assemble((name, style), f"  {reason}"))
    _print_facts(facts)


def _print_facts(facts: Mapping[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(Text(name, "dim"), Text(value))
    _show(grid)


def _print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    _show(table)


def _show(renderable: Any) -> None:
    """Print with rich: styled and wrapped on a terminal, plain lines elsewhere."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
    with console.capture() as captured:
        console.print(renderable)
    _write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def _write(text: str) -> None:
    """Write to standard output. A reader that went away does not change how the command ended."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()


def _flush(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
    except OSError as error:
        return _say(f"standard output: {error.strerror}", Exit.BROKEN)
    return code


def _forget_stdout() -> None:
    """Send what is left in the buffer nowhere, so that the interpreter's last flush is quiet."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
