"""extract: from a box that can be asked to a layer, its certificate and its report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhalearn.cli.cache import use_compilation_cache
from mhalearn.cli.exit_codes import Exit, guarded
from mhalearn.cli.options import (
    Bias,
    Causal,
    Json,
    KvHeads,
    LayerOut,
    ReportOut,
    RopeBase,
    Seed,
    Sinks,
    Softcap,
    Window,
    check_outputs,
    check_run,
    read_count,
    read_kind,
)
from mhalearn.cli.output import print_json, print_verdict, say_heads

if TYPE_CHECKING:
    from mhalearn.extraction import Extraction

commands = typer.Typer()
Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help="At most so many in all.")]


@commands.command(
    "extract",
    epilog="Examples:\n\n"
    "  mhalearn extract boxes:attention --dim 8 --out layer.safetensors\n\n"
    "  mhalearn extract boxes:paid --dim 8 --max-calls 40 --checkpoint answers.sqlite --resume\n\n"
    "The function takes an array (n, k, d), or (k, d) with --one-by-one, and returns the outputs "
    "at all rows, at the last row, or one number a sequence. Ask only boxes that you may ask.\n\n"
    "Exit code 0: recovered; 3: finished, not recovered; 2: bad input; 4: the box failed, what it "
    "answered is in --checkpoint; 130: Ctrl-C.",
)
@guarded
def extract_command(
    box: Annotated[
        str,
        typer.Argument(metavar="MODULE:FUNCTION", help="The box, or a .safetensors layer file."),
    ],
    dim: Annotated[int, typer.Option(min=1, metavar="D", help="Features of a token.")],
    heads: Annotated[str, typer.Option(metavar="N|auto", help="Heads of the layer.")] = "auto",
    max_calls: Limit = None,
    max_tokens: Limit = None,
    max_scalars: Limit = None,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of the longest sequence.")] = 8,
    inputs: Annotated[
        str, typer.Option(metavar="any|cube|R|FILE.npy", help="Tokens that may be asked about.")
    ] = "any",
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="The box takes one sequence (k, d) a call.")
    ] = False,
    head_dim: Annotated[
        int | None, typer.Option(min=1, metavar="H", help="Heads of this rank.")
    ] = None,
    bias: Bias = False,
    causal: Causal = False,
    rope_base: RopeBase = None,
    kv_heads: KvHeads = None,
    window: Window = None,
    sinks: Sinks = False,
    softcap: Softcap = None,
    plan: Annotated[
        str, typer.Option(metavar="auto|algebra|random", help="Which sequences.")
    ] = "auto",
    seed: Seed = 0,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="S", help="Give a call up after this many seconds, and ask again."),
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Stop after this many seconds.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep every answer here, as it comes.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Ask for nothing that the checkpoint knows.")
    ] = False,
    out: LayerOut = None,
    report: ReportOut = None,
    as_json: Json = False,
) -> int:
    """Learn the layer inside a box by asking it about chosen sequences."""
    kind = read_kind(rope_base, kv_heads, window, sinks, softcap)
    check_run(max_seconds, checkpoint, resume=resume)
    if checkpoint is not None and checkpoint.exists() and not resume:
        raise ValueError(
            f"--checkpoint {checkpoint}: is there already; go on with --resume, or remove it"
        )
    check_outputs(out=out, report=report, checkpoint=checkpoint)

    import mhalearn as mha

    began = time.monotonic()
    asked, tokens = load_box(box), _read_inputs(inputs)
    use_compilation_cache()
    found = _extract(
        asked,
        dim,
        read_count("--heads", heads),
        max_calls=max_calls,
        max_tokens=max_tokens,
        max_scalars=max_scalars,
        seed=seed,
        max_length=max_length,
        inputs=tokens,
        one_by_one=one_by_one,
        head_dim=head_dim,
        bias=bias,
        causal=causal,
        **kind,
        plan=plan,
        keep=checkpoint,
        timeout=timeout,
        max_seconds=max_seconds,
        progress=True,
    )
    if out is not None:
        found.layer.save(out)
    if report is not None:
        mha.write_report(found, report)
    _tell(found, out, report, time.monotonic() - began, as_json)
    recovered = (mha.Outcome.RECOVERED, mha.Outcome.RECOVERED_ON_SPAN)
    return Exit.DONE if found.outcome in recovered else Exit.NOT_RECOVERED


def _extract(*what: Any, **options: Any) -> Extraction:
    """`mhalearn.extract`, whose remedy for what was broken off is an option of the command here."""
    import mhalearn as mha
    from mhalearn.data.box import BoxFailed

    try:
        return mha.extract(*what, **options)
    except BoxFailed as error:
        said = str(error).replace("pass keep=FILE", "add --checkpoint FILE")
        raise BoxFailed(said.replace("run again with it", "--resume")) from error.__cause__
    except KeyboardInterrupt as error:
        keep = options["keep"]
        error.add_note(
            "add --checkpoint FILE, and no answer will be lost"
            if keep is None
            else f"its answers are in {keep}: --resume to go on from there"
        )
        raise


def load_box(name: str) -> Callable[[Any], Any]:
    """The function that MODULE:FUNCTION names, looked for beside the caller too, or a layer."""
    import mhalearn as mha

    if name.endswith(".safetensors"):
        layer: Callable[[Any], Any] = mha.load_layer(Path(name))
        return layer
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise ValueError(f"{name!r}: name a box as module:function, such as boxes:attention")
    from importlib import import_module

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{name!r}: {error}; run where the module is, or put its folder on PYTHONPATH"
        ) from None
    box = getattr(module, attribute, None)
    if not callable(box):
        raise ValueError(f"{name!r}: module {module_name} has no function {attribute!r}")
    found: Callable[[Any], Any] = box
    return found


def _read_inputs(text: str) -> Any:
    if text in ("any", "cube"):
        return text
    if text.endswith(".npy"):
        import numpy as np

        try:
            return np.load(text, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"--inputs {text}: {error}") from None
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"--inputs {text}: give any, cube, the radius of a ball, or a .npy file of tokens"
        ) from None


def _tell(
    found: Extraction, out: Path | None, report: Path | None, seconds: float, as_json: bool
) -> None:
    certificate = found.certificate
    if as_json:
        print_json(
            {
                "outcome": found.outcome.name,
                "reason": found.reason,
                "recovered": found.outcome.name == "RECOVERED",
                "recovered_on_span": found.outcome.name == "RECOVERED_ON_SPAN",
                "n_heads": found.layer.n_heads,
                "calls": found.calls,
                "tokens": found.tokens,
                "scalars": found.scalars,
                "plan": [vars(step) for step in found.plan],
                "random_starts": found.random_starts,
                "certificate": None if certificate is None else certificate.to_dict(),
                "layer": out,
                "report": report,
                "seconds": seconds,
            }
        )
        return
    facts = {
        "layer": f"{say_heads(found.layer.n_heads)}, d = {found.layer.d}: "
        + (str(out) if out else "not saved (add --out layer.safetensors)"),
        "asked": f"{found.calls} calls, {found.tokens} tokens, {found.scalars} scalars",
    }
    for purpose in dict.fromkeys(step.purpose for step in found.plan):
        calls = sum(step.calls for step in found.plan if step.purpose == purpose)
        before = facts.get(f"  {calls} for")  # names of facts are distinct
        facts[f"  {calls} for"] = f"{before}; {calls} more for {purpose}" if before else purpose
    if certificate is not None:
        facts["held-out error"] = f"{certificate.relative_mse:.1e} relative squared"
        facts["certificate"] = certificate.statement
    if report is not None:
        facts["report"] = str(report)
    print_verdict(found.outcome.name, found.reason, facts | {"seconds": f"{seconds:.1f}"})
