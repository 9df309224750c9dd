"""demo: the whole way through, on a layer of our own."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import typer

from mhalearn.cli.cache import use_compilation_cache
from mhalearn.cli.exit_codes import Exit, guarded
from mhalearn.cli.fit import fit
from mhalearn.cli.generate import draw_examples
from mhalearn.cli.options import Folder, Json, make_folder
from mhalearn.cli.output import print_json, print_verdict, times

commands = typer.Typer()
_HEADS, _DIM, _TOKENS = 3, 16, 8
_EXAMPLES, _FRESH = 200, 1000


@commands.command(
    epilog="Example:\n\n  mhalearn demo --out demo     [dim]# then open demo/report.html[/dim]"
)
@guarded
def demo(out: Folder = Path("demo"), as_json: Json = False) -> int:
    """Draw a random layer, learn it back from 200 examples, certify and report.

    Writes examples.safetensors, truth.safetensors, layer.safetensors and report.html.
    """
    import mhalearn as mha
    from mhalearn.report.terminal import Progress

    began = time.monotonic()
    use_compilation_cache()
    truth = mha.random_layer(n_heads=_HEADS, d=_DIM, seed=0)
    examples = draw_examples(truth, "boolean", _EXAMPLES, _TOKENS, seed=0)
    names = ("examples.safetensors", "truth.safetensors", "layer.safetensors", "report.html")
    with make_folder(out, *names) as paths:
        examples.save(paths["examples"])
        truth.save(paths["truth"])
    estimator = mha.AttentionRegressor(n_heads=_HEADS, random_state=0)
    solution = fit(estimator, examples, paths["layer"]).solution_
    solution.layer.save(paths["layer"])
    fresh = draw_examples(truth, "boolean", _FRESH, _TOKENS, seed=1)
    with Progress() as progress:
        certificate = mha.certify(
            solution.layer, fresh, learned_from=examples, on_event=progress.on_event
        )
    comparison = mha.compare(solution.layer, truth)
    changes: dict[str, Any] = {"settings": solution.settings | {"command": "mhalearn demo"}}
    if solution.outcome is mha.Outcome.RECOVERED:  # the certificate below is on fresh ones
        changes["reason"] = f"on held-out examples {solution.reason}"
    solution = dataclasses.replace(solution, certificate=certificate, **changes)
    with Progress().during("writing the report"):
        mha.write_report(solution, paths["report"], truth=truth)
    recovered = (
        solution.outcome is mha.Outcome.RECOVERED
        and certificate.recovered
        and comparison.max_error <= 1e-10
    )
    limit = examples.counting_limit(examples.architecture(_HEADS))
    seconds = time.monotonic() - began
    if as_json:
        print_json(
            {
                "outcome": solution.outcome.name,
                "reason": solution.reason,
                "recovered": recovered,
                "examples": _EXAMPLES,
                "ratio": _EXAMPLES / limit,
                "fresh_examples": _FRESH,
                "relative_mse": certificate.relative_mse,
                "max_error": comparison.max_error,
                "certificate": certificate.to_dict(),
                "files": paths,
                "seconds": seconds,
            }
        )
    else:
        print_verdict(
            solution.outcome.name,
            solution.reason,
            {
                "teacher": f"{_HEADS} heads, d = {_DIM}, k = {_TOKENS} tokens, random",
                "examples": f"{_EXAMPLES}, uniform +-1: {times(_EXAMPLES, limit)}",
                "fresh error": f"{certificate.relative_mse:.1e} relative squared, "
                f"{_FRESH} new examples",
                "largest parameter error": f"{comparison.max_error:.1e} against the truth",
                "certificate": certificate.statement,
                "files": ", ".join(str(path) for path in paths.values()),
                "seconds": f"{seconds:.1f}",
            },
        )
    return Exit.DONE if recovered else Exit.NOT_RECOVERED
