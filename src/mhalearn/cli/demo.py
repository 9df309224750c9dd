"""demo: the whole way through, on a layer of our own."""

import dataclasses
import time
from pathlib import Path

import typer

from mhalearn.cli.cache import use_compilation_cache
from mhalearn.cli.ending import Exit, guarded
from mhalearn.cli.fit import fit
from mhalearn.cli.generate import draw
from mhalearn.cli.options import Folder, Json, make_folder
from mhalearn.cli.output import print_json, print_verdict, times

commands = typer.Typer()


@commands.command(
    epilog="Example:\n\n  mhalearn demo --out demo     [dim]# then open demo/report.html[/dim]"
)
@guarded
def demo(out: Folder = Path("demo"), as_json: Json = False) -> int:
    """Draw a random layer, learn it back from 200 examples, certify and report.

    Writes examples.safetensors, truth.safetensors, layer.safetensors and report.html.
    """
    import mhalearn as mha

    began = time.monotonic()
    heads, dim, tokens, n, fresh = 3, 16, 8, 200, 1000
    use_compilation_cache()
    truth = mha.random_layer(n_heads=heads, d=dim, seed=0)
    examples = draw(truth, "boolean", n, tokens, seed=0)
    paths = make_folder(
        out, "examples.safetensors", "truth.safetensors", "layer.safetensors", "report.html"
    )
    examples.save(paths["examples"])
    truth.save(paths["truth"])
    estimator = fit(mha.AttentionRegressor(n_heads=heads, random_state=0), examples, paths["layer"])
    layer = estimator.layer_
    layer.save(paths["layer"])
    new = draw(truth, "boolean", fresh, tokens, seed=1)
    certificate = mha.certify(layer, new, learned_from=examples)
    comparison = mha.compare(layer, truth)
    solution = estimator.solution_
    settings = solution.settings | {"command": "mhalearn demo"}
    solution = dataclasses.replace(solution, certificate=certificate, settings=settings)
    mha.write_report(solution, paths["report"], truth=truth)
    recovered = (
        solution.outcome is mha.Outcome.RECOVERED
        and certificate.recovered
        and comparison.max_error <= 1e-10
    )
    limit = examples.counting_limit(heads)
    seconds = time.monotonic() - began
    if as_json:
        print_json(
            {
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
                "seconds": seconds,
            }
        )
    else:
        print_verdict(
            solution.outcome.name,
            solution.reason,
            {
                "teacher": f"{heads} heads, d = {dim}, k = {tokens} tokens, random",
                "examples": f"{n}, uniform +-1: {times(n, limit)}",
                "fresh error": f"{certificate.relative_mse:.1e} relative squared, "
                f"{fresh} new examples",
                "largest parameter error": f"{comparison.max_error:.1e} against the truth",
                "certificate": certificate.statement,
                "files": ", ".join(str(path) for path in paths.values()),
                "seconds": f"{seconds:.1f}",
            },
        )
    return Exit.DONE if recovered else Exit.NOT_RECOVERED
