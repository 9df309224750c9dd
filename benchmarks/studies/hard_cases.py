"""Layers and inputs that trouble a solver: is every head exact, and is the head count found?

    python benchmarks/studies/hard_cases.py
        [--lines TEXT] [--seeds 9000:9020] [--methods newton,auto,...]
        --counts               the head count of generic layers, m = 1..8
        --merge PART.json ...  take over runs made elsewhere
        --table                print what the JSON holds

The lines are in hard_lines.py; --lines picks one, or those whose name holds the text. "newton" is
told the number of heads, "auto" is not; both are the estimator with its defaults. They are exact
when every parameter of the canonical form is right to 1e-10 (relative: `mha.compare`), or with
two tokens, where other layers are the same function, the function on fresh inputs. Peers are
told the number of heads, know nothing of ranks, start anew for ten seconds, and count as exact at
1e-6.
"""

import math
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks.cases import Descend, descend_again
from benchmarks.hard_lines import LINES, Draw, HardCase
from benchmarks.ledger import Record, finite, opened, study
from benchmarks.peers.dense_peers import optimistix_descent, scipy_descent
from benchmarks.peers.peers import annealed_adam, optax_lbfgs

LIMIT = 120.0  # seconds a fit
PEER_LIMIT = 10.0
EXACT, PEER_EXACT = 1e-10, 1e-6
PEERS: dict[str, Descend] = {
    "Adam + ridge": partial(annealed_adam, 0.03),
    "L-BFGS": optax_lbfgs,
    "scipy least_squares": partial(scipy_descent, "lm"),
    "optimistix LM": partial(optimistix_descent, "QR"),
}
# Generic layers for the head count.
COUNTS, COUNT_D, COUNT_K, COUNT_RATIO = range(1, 9), 12, 6, 4.0


def error_of(layer: mha.AttentionLayer, case: HardCase, seed: int) -> float:
    """The largest error of a parameter or, where layers have twins, that of the function."""
    truth = case.truth.canonical()
    if not case.by_function:
        return mha.compare(layer.canonical(), truth).max_error
    x = mha.sample_inputs("boolean", 500, case.examples.k, truth.d, seed=seed + 10**6)
    return float(np.linalg.norm(layer(x) - truth(x)) / np.linalg.norm(truth(x)))


def fit(case: HardCase, method: str, seed: int) -> Record:
    """The estimator as a user would call it; "auto" leaves the head count open."""
    heads = "auto" if method == "auto" else case.truth.n_heads
    baseline = method == "Adam"
    learner = mha.AttentionRegressor(
        heads,
        "adam" if baseline else "newton",
        polish=not baseline,
        random_state=seed,
        max_seconds=PEER_LIMIT if baseline else LIMIT,
        **case.settings,
    )
    began = time.perf_counter()
    learner.fit(case.examples)
    return {
        "error": finite(error_of(learner.layer_, case, seed)),
        "outcome": learner.outcome_.name,
        "heads": learner.n_heads_,
        "true_heads": case.truth.canonical().n_heads,
        "seconds": time.perf_counter() - began,
    }


def fit_by_peer(case: HardCase, descend: Descend, seed: int) -> Record:
    """One random start after the other until the goal or the time limit."""
    if case.settings.get("bias"):
        return {"left_out": "these peers are written for layers without biases"}
    m, causal = case.truth.n_heads, bool(case.settings.get("causal", False))
    found = descend_again(descend, case.examples, m, seed, PEER_LIMIT, causal=causal)
    error = math.inf if found.layer is None else error_of(found.layer, case, seed)
    record = {"error": finite(error), "loss": finite(found.best)}
    return record | {"starts": found.starts, "seconds": found.total}


def run_line(name: str, method: str, seed: int) -> Record:
    case = LINES[name](Draw(seed))
    if method in PEERS:
        return fit_by_peer(case, PEERS[method], seed)
    return fit(case, method, seed)


def run_count(m: int, seed: int) -> Record:
    truth = mha.random_layer(n_heads=m, d=COUNT_D, seed=seed)
    probe = np.ones((1, COUNT_K, COUNT_D))
    n = math.ceil(COUNT_RATIO * mha.Architecture(probe.shape[2], m).counting_limit(probe.shape[1]))
    x = mha.sample_inputs("boolean", n, COUNT_K, COUNT_D, seed=seed)
    return fit(HardCase(truth, mha.Examples(x, truth(x))), "auto", seed)


def is_exact(row: Record) -> bool:
    error = row.get("error")
    bar = EXACT if row["method"] in ("newton", "auto") else PEER_EXACT
    return error is not None and error <= bar


def table(rows: list[Record]) -> None:
    """Exact over runs, and for "auto" how often the count was right and never too large."""
    found = defaultdict(list)
    for row in rows:
        if "left_out" not in row:
            found[row["line"], row["method"]].append(row)
    print(f"{'line':30} {'method':>20} | exact   | worst exact | RECOVERED | median s | heads")
    for (line, method), mine in found.items():
        errors = [row["error"] for row in mine if is_exact(row)]
        recovered = sum(row.get("outcome") == "RECOVERED" for row in mine)
        seconds = [row["seconds"] for row in mine if "seconds" in row]
        heads = ""
        if method == "auto":
            right = sum(row.get("heads") == row.get("true_heads", -1) for row in mine)
            many = sum(row.get("heads", 0) > row.get("true_heads", math.inf) for row in mine)
            heads = f"{right}/{len(mine)} right, {many} too many"
        print(
            f"{line:30} {method:>20} | {len(errors):3}/{len(mine):<3} | "
            f"{max(errors, default=math.nan):11.1e} | {recovered:9} | "
            f"{np.median(seconds) if seconds else math.nan:8.1f} | {heads}"
        )
    false = [row for row in rows if row.get("outcome") == "RECOVERED" and not row["error"] <= 1e-6]
    print(f"RECOVERED with a parameter wrong by more than 1e-6: {len(false)} of {len(rows)} runs")


def main() -> None:
    parser = study(__doc__, "hard_cases", "9000:9020", "newton,auto")
    parser.add_argument("--lines", default="")
    parser.add_argument("--counts", action="store_true")
    options = parser.parse_args()
    chosen = [name for name in LINES if options.lines in name]
    lines = [options.lines] if options.lines in LINES else chosen
    ledger, running = opened(options)
    for seed in options.seeds if running else ():
        if options.counts:
            for m in COUNTS:
                key = {"line": f"generic, m = {m}", "method": "auto", "seed": seed}
                ledger.run(key, partial(run_count, m, seed))
            continue
        for line in lines:
            for method in options.methods:
                key = {"line": line, "method": method, "seed": seed}
                ledger.run(key, partial(run_line, line, method, seed))
    table(ledger.records)


if __name__ == "__main__":
    main()
