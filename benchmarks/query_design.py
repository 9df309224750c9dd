"""Calls chosen to raise the smallest singular value of the Jacobian, beside random ones.

    python benchmarks/query_design.py [--seeds 0:5]

Layers whose second head is nearly the first, |Theta_2 - Theta_1| = apart |Theta_1| about, and
layers of independent heads. 1.3 times the counting limit of random calls, then four more: random
ones (the median of five draws), the best of 200 random ones in each direction (pool), or designed
ones. All tokens are of one length. The design knows the layer, as after a first fit.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.ledger import Ledger, Record, seed_range
from mhalearn.learners.queries.design import design_calls, jacobian

CELLS = ((2, 6, 0.0), (4, 8, 0.0), (2, 6, 0.1), (3, 8, 0.1), (2, 6, 0.01))
TOKENS, RATIO, MORE, POOL = 8, 1.3, 4, 200


def measure(m: int, d: int, apart: float, seed: int) -> Record:
    layer = mha.random_layer(n_heads=m, d=d, scale=2.0, seed=seed)
    rng, theta, w = np.random.default_rng(seed + 7), layer.theta.copy(), layer.w
    if apart:
        theta[1] = theta[0] + apart * 2.0 / d * rng.standard_normal((d, d))
    length = 0.8 * math.sqrt(d)

    def draw(n: int) -> np.ndarray:
        x = rng.standard_normal((n, TOKENS, d))
        return length * x / np.linalg.norm(x, axis=-1, keepdims=True)

    def smallest(*calls: np.ndarray) -> float:
        rows = jacobian(theta, w, np.concatenate(calls))
        return float(np.linalg.svd(rows, compute_uv=False)[-1])

    first = draw(math.ceil(RATIO * layer.architecture.counting_limit(TOKENS)))
    return {
        "first": smallest(first),
        "random": float(np.median([smallest(first, draw(MORE)) for _ in range(5)])),
        "pool": smallest(first, from_pool(theta, w, first, draw(POOL))),
        "designed": smallest(first, design_calls(theta, w, first, MORE, length, rng)),
    }


def from_pool(theta: np.ndarray, w: np.ndarray, first: np.ndarray, pool: np.ndarray) -> np.ndarray:
    calls, told = first, jacobian(theta, w, pool).reshape(len(pool), -1, theta.size + w.size)
    for _ in range(MORE):
        weak = np.linalg.svd(jacobian(theta, w, calls))[2][-1]
        best = int(np.argmax(np.sum((told @ weak) ** 2, axis=1)))
        calls = np.concatenate([calls, pool[best : best + 1]])
    return calls[len(first) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seed_range, default=range(5))
    parser.add_argument("--out", type=Path, default=RESULTS / "query_design.json")
    asked = parser.parse_args()
    ledger = Ledger(asked.out)
    for m, d, apart in CELLS:
        for seed in asked.seeds:
            key = {"m": m, "d": d, "apart": apart, "seed": seed}
            row = ledger.run(key, lambda k=key: measure(*k.values()))
            print(*key.values(), row.get("designed", 0) / row.get("random", 1), row.get("crashed"))


if __name__ == "__main__":
    main()
