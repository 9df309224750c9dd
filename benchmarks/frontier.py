"""How close to the counting limit layers are recovered: the solver beside its peers.

    python benchmarks/frontier.py                       everything, appended to the JSON run by run
    python benchmarks/frontier.py --shape 2,8,4 --teachers 20 --methods newton
    python benchmarks/frontier.py --scalar              six heads, one output a token
    python benchmarks/frontier.py --table               print what the JSON holds

A teacher counts as recovered when every parameter is right: to 1e-6 before and 1e-10 after polish.
Nothing is told about it but the number of heads; the solver has at most 16 starts. Peers count as
successful when they reach a relative squared training error of 1e-20 from as many starts as the
time limit allows, which is generous: near the limit that can be another layer.
"""

import argparse
import math
from collections import defaultdict
from functools import partial

import numpy as np
from first import RESULTS, Case, Ledger, Method, by_learner, finite, methods

import mhalearn as mha
from mhalearn.baselines import adam
from mhalearn.newton import learn
from mhalearn.outcome import Trace
from mhalearn.polish import polish
from mhalearn.problem import make_problem
from mhalearn.threads import one_lapack_thread

SHAPES = [(2, 8, 4), (4, 8, 4), (4, 16, 8), (8, 16, 8)]
SCALES = (2.0, 6.0)
RATIOS = (1.25, 1.1, 1.05)
LIMIT = 300.0  # seconds a run
PEER_LIMIT = 30.0
# d = 8, 6 heads: the queries of the best chosen-query algorithm, 4 H d^2 - 2 H + 1.
SCALARS = 1525


def frontier_case(shape: tuple[int, int, int], scale: float, ratio: float) -> tuple[Case, float]:
    """The case with the examples rounded up, and the ratio they make."""
    m, d, k = shape
    limit = mha.Examples(np.ones((1, k, d)), np.ones((1, k, d))).counting_limit(m)
    n = math.ceil(ratio * limit - 1e-9)
    return Case(m, d, k, n, scale), n / limit


def recover(truth: mha.AttentionLayer, x: np.ndarray, seed: int) -> dict[str, object]:
    examples, trace = mha.Examples(x, truth(x)), Trace(LIMIT)
    shared = {"bias": False, "causal": False, "head_dim": None}
    m = truth.n_heads
    with one_lapack_thread():
        found = learn(examples, n_heads=m, seed=seed, trace=trace, **shared).layer
        seconds = trace.seconds
        problem = make_problem(examples, m, bias=False, causal=False)
        polished, loss = polish(found, problem, Trace())
    before, after = (mha.compare(layer, truth).max_error for layer in (found, polished))
    return {
        "error": finite(before),
        "polished_error": finite(after),
        "training_loss": finite(loss),
        "seconds": seconds,
        "stages": list(dict.fromkeys(e.stage for e in trace.events)),
    }


def run_newton(case: Case, seed: int) -> dict[str, object]:
    truth, x, _ = case.draw(seed)
    return recover(truth, x, seed)


def run_scalar(k: int, seed: int) -> dict[str, object]:
    truth = mha.random_layer(n_heads=6, d=8, scale=2.0, out_dim=1, seed=seed)
    x = mha.sample_inputs("boolean", SCALARS // k, k, 8, seed=seed)
    return recover(truth, x, seed) | {"scalars": k * (SCALARS // k)}


def peers() -> dict[str, Method]:
    """One setting of each peer, started anew until the time is up."""
    known = methods(quick=True)
    return {
        "Adam": partial(by_learner, adam.learn, learning_rate=0.03, steps=5000, starts=1),
        "L-BFGS": known["L-BFGS"]["optax.lbfgs"],
        "scipy least_squares": known["scipy least_squares"]["lm, 1 BLAS thread"],
        "optimistix LM": next(iter(known["optimistix LM"].values())),
    }


def run_peer(name: str, case: Case, seed: int) -> dict[str, object]:
    return peers()[name](case, seed, PEER_LIMIT).record()


def good(row: dict) -> bool:
    if row["method"] != "newton":
        return row.get("reached") is not None
    errors = row.get("error"), row.get("polished_error")
    return None not in errors and errors[0] <= 1e-6 and errors[1] <= 1e-10


def table(rows: list[dict]) -> None:
    found = defaultdict(list)
    for row in rows:
        found[row["case"], row["ratio"], row["method"]].append(row)
    print(f"{'case':32} {'ratio':>6} {'method':>20} | recovered | worst polished | median s")
    for (case, ratio, method), mine in found.items():
        errors = [row["polished_error"] for row in mine if row.get("polished_error") and good(row)]
        seconds = [row.get("seconds", row.get("total", math.nan)) for row in mine]
        print(
            f"{case:32} {ratio:6.3f} {method:>20} | {sum(map(good, mine)):4}/{len(mine):<4} | "
            f"{max(errors, default=math.nan):14.1e} | {np.median(seconds):.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--scale", type=float)
    parser.add_argument("--ratio", type=float)
    parser.add_argument("--teachers", type=int, default=20)
    parser.add_argument("--methods", default="newton,Adam,L-BFGS,scipy least_squares,optimistix LM")
    parser.add_argument("--scalar", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    ledger = Ledger(RESULTS / "frontier.json", fresh=False)
    seeds = range(7000, 7000 + options.teachers)
    if options.scalar:
        for k in (4, 6, 8):
            key = {"case": f"6 heads, d=8, e=1, k={k}", "ratio": 0.0, "method": "newton"}
            for seed in seeds:
                ledger.run(key | {"seed": seed}, partial(run_scalar, k, seed))
    elif not options.table:
        for shape in [options.shape] if options.shape else SHAPES:
            run_shape(shape, options, ledger, seeds)
    table(ledger.records)


def run_shape(shape: tuple, options: argparse.Namespace, ledger: Ledger, seeds: range) -> None:
    for scale in [options.scale] if options.scale else SCALES:
        for ratio in [options.ratio] if options.ratio else RATIOS:
            case, effective = frontier_case(shape, scale, ratio)
            for seed in seeds:
                for name in options.methods.split(","):
                    key = {"case": str(case), "ratio": effective, "method": name, "seed": seed}
                    measure = run_newton if name == "newton" else partial(run_peer, name)
                    ledger.run(key, partial(measure, case, seed))


if __name__ == "__main__":
    main()
