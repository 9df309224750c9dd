"""learn: from examples to a layer, its certificate and its report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mhalearn.cli.block import BlockAsked, learn_block
from mhalearn.cli.cache import use_compilation_cache
from mhalearn.cli.distributed import join
from mhalearn.cli.exit_codes import Exit, Stopped, guarded
from mhalearn.cli.fit import fit
from mhalearn.cli.options import (
    Bias,
    Causal,
    Inputs,
    Json,
    KvHeads,
    LayerOut,
    Mask,
    Outputs,
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
from mhalearn.cli.output import print_json, print_verdict, say_certificate, say_heads, times
from mhalearn.learners.options import PLANS
from mhalearn.learners.registry import AUTO, BUILTIN, list_learners

if TYPE_CHECKING:
    from mhalearn.data import Examples
    from mhalearn.estimator import AttentionRegressor

commands = typer.Typer()


def _check_method(name: str) -> str:
    """A name of the registry, which other modules may have added to."""
    try:
        known = _list_methods()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if name not in known:
        said = ", ".join(repr(choice) for choice in known)
        raise typer.BadParameter(f"{name!r} is not one of {said}.")
    return name


def _complete_method(typed: str) -> list[str]:
    return [name for name in _list_methods() if name.startswith(typed)]


def _list_methods() -> list[str]:
    return [AUTO, *(learner.name for learner in list_learners())]


@commands.command(
    "learn",
    epilog="Examples:\n\n"
    "  mhalearn learn data/examples.safetensors --heads 3 --out layer.safetensors\n\n"
    "  mhalearn learn data.npz --report report.html --json > result.json\n\n"
    "  mhalearn learn X.npy Y.npy --heads 3\n\n"
    "  mhalearn learn stream.npz --block --activation gelu --norm pre --out block.safetensors\n\n"
    "  mhalearn learn recorded.pt --inputs x --outputs y --mask keep --residual\n\n"
    "  mhalearn learn shards/ --heads auto --checkpoint run.safetensors --resume\n\n"
    "  srun mhalearn learn shards/ --distributed --out layer.safetensors\n\n"
    "Exit code 0: recovered, be it on the span of the tokens; 3: finished, not recovered; "
    "2: bad input; 4: broken from outside; "
    "130: Ctrl-C, with the best layer so far in --out.",
)
@guarded
def learn_command(
    examples: Annotated[
        Path,
        typer.Argument(
            metavar="EXAMPLES",
            help="A .safetensors, .npz or .pt file with X and Y, a folder of shards, one of a "
            "Hugging Face dataset, or X as an .npy file.",
        ),
    ],
    labels: Annotated[
        Path | None, typer.Argument(metavar="[Y.npy]", help="Y, where X is an .npy file.")
    ] = None,
    heads: Annotated[str, typer.Option(metavar="N|auto", help="Heads of the layer.")] = "auto",
    method: Annotated[
        str,
        typer.Option(
            metavar=f"[{'|'.join((AUTO, *(learner.name for learner in BUILTIN)))}]",
            help="Which learner.",
            callback=_check_method,
            autocompletion=_complete_method,
        ),
    ] = AUTO,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar=f"[{'|'.join(PLANS)}]", help="Of method sculpt: which form of the phases."
        ),
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option(min=1, metavar="H", help="Learn heads of this rank (of many heads, W too)."),
    ] = None,
    bias: Bias = False,
    causal: Causal = False,
    rope_base: RopeBase = None,
    kv_heads: KvHeads = None,
    window: Window = None,
    sinks: Sinks = False,
    softcap: Softcap = None,
    residual: Annotated[
        bool, typer.Option("--residual", help="Labels are y = x + F(x): learn F.")
    ] = False,
    block: Annotated[
        bool, typer.Option("--block", help="Learn a whole transformer block, with all biases.")
    ] = False,
    hidden: Annotated[str, typer.Option(metavar="N|auto", help="Of a block: neurons.")] = "auto",
    activation: Annotated[
        str, typer.Option(metavar="NAME|auto", help="Of a block: relu, gelu, silu, swiglu ...")
    ] = "gelu",
    norm: Annotated[
        str, typer.Option(metavar="[none|pre|post|auto]", help="Of a block: where LayerNorms are.")
    ] = "none",
    inputs: Inputs = None,
    outputs: Outputs = None,
    mask: Mask = None,
    no_polish: Annotated[
        bool, typer.Option("--no-polish", help="Leave the last descent to machine precision out.")
    ] = False,
    seed: Seed = 0,
    max_seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Stop after this many seconds (and a tenth to judge)."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the state of the run here (.safetensors)."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint, if there is one yet.")
    ] = False,
    out: LayerOut = None,
    report: ReportOut = None,
    distributed: Annotated[
        bool,
        typer.Option("--distributed", help="One of many processes of a run: docs/many_hosts.md."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Learn a layer from examples and certify it."""
    n_heads = read_count("--heads", heads)
    kind = read_kind(rope_base, kv_heads, window, sinks, softcap)
    check_run(max_seconds, checkpoint, resume=resume)
    if plan is not None and (method != "sculpt" or plan not in PLANS):
        raise ValueError(f"--plan {plan}: with --method sculpt, give one of {', '.join(PLANS)}")
    if block:
        beside = (bias, residual, no_polish, checkpoint, distributed, plan, method != AUTO)
        _check_block_alone(*beside, rope_base, kv_heads, window, sinks, softcap)
    elif (hidden, activation, norm) != ("auto", "gelu", "none"):
        raise ValueError("--hidden, --activation and --norm are of a block: add --block")
    speaking = join() if distributed else True
    sources = (examples,) if labels is None else (examples, labels)
    check_outputs(*sources, out=out, report=report, checkpoint=checkpoint)
    began = time.monotonic()
    data = _load(sources, inputs=inputs, outputs=outputs, mask=mask)
    use_compilation_cache()
    if block:
        asked = BlockAsked(n_heads, hidden, head_dim, activation, norm, causal, seed, max_seconds)
        return learn_block(data, asked, out, report, as_json)

    import mhalearn as mha

    estimator = mha.AttentionRegressor(
        n_heads=n_heads,
        method=method,
        plan=plan,
        head_dim=head_dim,
        bias=bias,
        causal=causal,
        **kind,
        residual=residual,
        polish=not no_polish,
        random_state=seed,
        max_seconds=max_seconds,
        checkpoint=None if checkpoint is None else str(checkpoint),
        resume=resume,
    )
    try:
        fit(estimator, data, out)
    except Stopped as stopped:
        if as_json and speaking:
            print_json(
                {"interrupted": True, "outcome": None, "recovered": False, "layer": stopped.saved}
            )
        raise
    if speaking:
        failures = _write(estimator, sources, out, report)
        _tell(Learned(estimator, data, out, report, failures, time.monotonic() - began), as_json)
    recovered = (mha.Outcome.RECOVERED, mha.Outcome.RECOVERED_ON_SPAN)
    return Exit.DONE if estimator.outcome_ in recovered else Exit.NOT_RECOVERED


def _check_block_alone(*beside: object) -> None:
    """Refuse settings that the learner of blocks does not have."""
    if any(beside):
        raise ValueError(
            "--block goes with --heads, --head-dim, --hidden, --activation, --norm, --causal, "
            "--seed, --max-seconds, --out, --report and --json: leave the others out"
        )


def _load(sources: tuple[Path, ...], **names: str | None) -> Examples:
    """Examples of one file or folder, whose arrays may be named, or of a pair of .npy files."""
    import mhalearn as mha
    from mhalearn.data.loading import load_pair

    if len(sources) == 1:
        return mha.load_examples(sources[0], **names)
    if any(name is not None for name in names.values()):
        raise ValueError("--inputs, --outputs, --mask name arrays of one file: leave them out")
    return load_pair(*sources)


def _tell(learned: Learned, as_json: bool) -> None:
    """Say how the run went; then raise what kept a file from being written."""
    solution = learned.estimator.solution_
    if as_json:
        print_json(learned.to_json())
    else:
        print_verdict(solution.outcome.name, solution.reason, learned.in_words())
    for failure in learned.failures.values():
        raise failure


def _write(
    estimator: AttentionRegressor, sources: tuple[Path, ...], out: Path | None, report: Path | None
) -> dict[Path, Exception]:
    """Write layer and report; what went wrong, by file, so that the verdict can be told before."""
    import mhalearn as mha
    from mhalearn.report.terminal import Progress

    def write_report(path: Path) -> None:
        # The report names the file, so that its command can be run again.
        settings = estimator.solution_.settings | {"examples": " ".join(map(str, sources))}
        with Progress().during("writing the report"):
            mha.write_report(dataclasses.replace(estimator.solution_, settings=settings), path)

    failures: dict[Path, Exception] = {}
    for path, write in ((out, estimator.layer_.save), (report, write_report)):
        if path is not None:
            try:
                write(path)
            except (OSError, ValueError) as error:
                failures[path] = error
    return failures


class Learned(NamedTuple):
    """What is told of a run that has ended."""

    estimator: AttentionRegressor
    examples: Examples
    out: Path | None
    report: Path | None
    failures: Mapping[Path, Exception]  # to write one of them
    seconds: float

    def to_json(self) -> dict[str, Any]:
        solution, certificate = self.estimator.solution_, self.estimator.certificate_
        shape = {name: getattr(self.examples, name) for name in ("n", "k", "d", "out_dim")}
        return {
            "outcome": solution.outcome.name,
            "reason": solution.reason,
            "recovered": solution.outcome.name == "RECOVERED",
            "recovered_on_span": solution.outcome.name == "RECOVERED_ON_SPAN",
            "span_dimension": None if certificate is None else certificate.span_dimension,
            "interrupted": False,
            "n_heads": self.estimator.n_heads_,
            "examples": shape,
            "relative_mse": None if certificate is None else certificate.relative_mse,
            "certificate": None if certificate is None else certificate.to_dict(),
            "findings": [finding.to_dict() for finding in solution.findings],
            "layer": None if self.out in self.failures else self.out,
            "report": None if self.report in self.failures else self.report,
            "seconds": self.seconds,
        }

    def in_words(self) -> dict[str, str]:
        estimator, certificate = self.estimator, self.estimator.certificate_
        n, d, heads = self.examples.n, self.examples.d, estimator.n_heads_
        limit = self.examples.counting_limit(estimator.layer_.architecture)
        # A run may end before it has a layer.
        found = any(leaf.any() for leaf in estimator.layer_.parameters().values())
        facts = {
            "layer": (f"{say_heads(heads)}, d = {d}: " if found else "zeros: ")
            + (self._place(self.out) if self.out else "not saved (add --out layer.safetensors)"),
            "examples": f"{n}: {times(n, limit)}",
        }
        if certificate is not None:
            facts["held-out error"] = f"{certificate.relative_mse:.1e} relative squared"
            facts["certificate"] = say_certificate(certificate)
            for i, words in enumerate(() if certificate.span is None else certificate.span.words):
                facts["open" if i == 0 else " " * i] = words
        if self.report is not None:
            facts["report"] = self._place(self.report)
        return facts | {"seconds": f"{self.seconds:.1f}"}

    def _place(self, path: Path) -> str:
        return "could not be written" if path in self.failures else str(path)
