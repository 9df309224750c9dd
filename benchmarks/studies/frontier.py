"""How close to the counting limit layers are recovered: the solver beside its peers.

    python benchmarks/studies/frontier.py --shape 2,8,4 --scale 6 --ratio 1.25 [--seeds 7000:7020]
    python benchmarks/studies/frontier.py --methods "newton,Adam,Adam + ridge,L-BFGS,..."
    python benchmarks/studies/frontier.py --scalar [--scalars 600] [--tokens 8]
                                                                six heads, one output a token
    python benchmarks/studies/frontier.py --merge PART.json ... take over runs made elsewhere
    python benchmarks/studies/frontier.py --table               print what the JSON holds

A teacher counts as recovered when every parameter is right: to 1e-6 before and 1e-10 after polish,
for every method. Nothing is told about it but the number of heads. The solver has at most 16 starts
and five minutes; peers start anew for thirty seconds, and the layer with the lowest training error
counts. The ratio is that of the examples after rounding up. Each record says on what it was made.
"""

import argparse
import math
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks.cases import Case, Method, case_at, with_restarts
from benchmarks.ledger import Ledger, Record, finite, opened, study
from benchmarks.peers.dense_peers import optimistix_descent, scipy_descent, unless_too_large
from benchmarks.peers.peers import annealed_adam, optax_lbfgs, tuned_adam
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn.layer.dense import Dense
from mhalearn.learners.newton import learn_newton
from mhalearn.run.run import Run
from mhalearn.solvers.polish import polish
from mhalearn.solvers.scaled_problem import make_problem

SHAPES = [(2, 8, 4), (4, 8, 4), (4, 16, 8), (8, 16, 8)]
SCALES = (2.0, 6.0)
RATIOS = (1.25, 1.1, 1.05)
LIMIT = 300.0  # seconds a run
PEER_LIMIT = 30.0
# d = 8, 6 heads: the queries of the best chosen-query algorithm, 4 H d^2 - 2 H + 1.
SCALARS = 1525
SCALAR_LIMIT = 60.0


def judge(layer: mha.AttentionLayer, truth: mha.AttentionLayer, x: np.ndarray) -> Record:
    """Parameter errors of what a method found, as it is and polished."""
    examples = mha.Examples(x, truth(x))
    with one_lapack_thread():
        problem = make_problem(examples, Dense(truth.architecture))
        polished, loss = polish(layer, problem, Run())[:2]
    before, after = (mha.compare(one, truth).max_error for one in (layer, polished))
    return {
        "error": finite(before),
        "polished_error": finite(after),
        "training_loss": finite(loss),
    }


def recover(truth: mha.AttentionLayer, x: np.ndarray, seed: int, limit: float) -> Record:
    examples, trace = mha.Examples(x, truth(x)), Run(limit, seed=seed)
    with one_lapack_thread():
        found = learn_newton(examples, examples.architecture(truth.n_heads), trace).layer
    stages = [event.stage for event in trace.events if event.stage.startswith("round")]
    return {"seconds": trace.seconds, "last_stage": stages[-1]} | judge(found, truth, x)


def run_newton(case: Case, seed: int, limit: float = LIMIT) -> Record:
    truth, x, _ = case.draw(seed)
    return recover(truth, x, seed, limit)


def run_scalar(k: int, scalars: int, seed: int) -> Record:
    truth = mha.random_layer(n_heads=6, d=8, scale=2.0, out_dim=1, seed=seed)
    x = mha.sample_inputs("boolean", scalars // k, k, 8, seed=seed)
    return recover(truth, x, seed, SCALAR_LIMIT) | {"scalars": k * (scalars // k)}


PEERS: dict[str, Method] = {
    "Adam": tuned_adam(0.03, 5000),
    "Adam + ridge": with_restarts(partial(annealed_adam, 0.03)),
    "L-BFGS": with_restarts(optax_lbfgs),
    "scipy least_squares": partial(unless_too_large, partial(scipy_descent, "lm"), 1),
    "optimistix LM": partial(unless_too_large, partial(optimistix_descent, "QR"), 1),
}


def run_peer(name: str, case: Case, seed: int, limit: float = PEER_LIMIT) -> Record:
    truth, x, _ = case.draw(seed)
    arrival = PEERS[name](case, seed, limit)
    found = arrival.record() | {"seconds": arrival.total}
    return found if arrival.layer is None else found | judge(arrival.layer, truth, x)


def good(row: Record) -> bool:
    errors = row.get("error"), row.get("polished_error")
    return None not in errors and errors[0] <= 1e-6 and errors[1] <= 1e-10


def table(rows: list[Record]) -> None:
    found = defaultdict(list)
    for row in rows:
        found[row["case"], row["ratio"], row["method"]].append(row)
    print(f"{'case':32} {'ratio':>6} {'method':>20} | recovered | worst polished | median s")
    for (case, ratio, method), mine in found.items():
        errors = [row["polished_error"] for row in mine if row.get("polished_error") and good(row)]
        seconds = [row.get("seconds", math.nan) for row in mine]
        print(
            f"{case:32} {ratio:6.3f} {method:>20} | {sum(map(good, mine)):4}/{len(mine):<4} | "
            f"{max(errors, default=math.nan):14.1e} | {np.median(seconds):.1f}"
        )


def main() -> None:
    parser = study(__doc__, "frontier", "7000:7020", "newton")
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--scale", type=float)
    parser.add_argument("--ratio", type=float)
    parser.add_argument("--scalar", action="store_true")
    parser.add_argument("--scalars", type=int, default=SCALARS)
    parser.add_argument("--tokens", type=int)
    options = parser.parse_args()
    ledger, running = opened(options)
    if running and options.scalar:
        for k in [options.tokens] if options.tokens else (4, 6, 8):
            run_scalars(k, options.scalars, options.seeds, ledger)
    elif running:
        for shape in [options.shape] if options.shape else SHAPES:
            run_shape(shape, options, ledger)
    table(ledger.records)


def run_scalars(k: int, scalars: int, seeds: range, ledger: Ledger) -> None:
    name = f"6 heads, d=8, e=1, k={k}"
    if scalars != SCALARS:
        name += f", {scalars} scalars"
    for seed in seeds:
        key = {"case": name, "ratio": 0.0, "method": "newton", "seed": seed}
        ledger.run(key, partial(run_scalar, k, scalars, seed))


def run_shape(shape: tuple, options: argparse.Namespace, ledger: Ledger) -> None:
    for scale in [options.scale] if options.scale else SCALES:
        for ratio in [options.ratio] if options.ratio else RATIOS:
            case = case_at(ratio, shape, scale)
            for seed in options.seeds:
                for name in options.methods:
                    ratio = case.n / case.counting_limit
                    key = {"case": str(case), "ratio": ratio, "method": name, "seed": seed}
                    measure = run_newton if name == "newton" else partial(run_peer, name)
                    ledger.run(key, partial(measure, case, seed))


if __name__ == "__main__":
    main()
