"""How well a plane separates heads, against their number, beside the poles of repeated tokens.

    python benchmarks/query_conditioning.py [--seeds 0:10]

For teachers with d = 8 and all outputs: the condition number of the heads' feature vectors in the
four calls of a plane, whether the heads and their number were found, and the largest error of
u Theta_i v; beside it the condition number of 1 / (1 + n t_i), n = 0 .. 2 m + 1, t_i =
exp(u Theta_i v) for the same u and v, which counting repeated tokens has to invert.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.ledger import Ledger, Record, finite, seed_range
from mhalearn.learners.queries.plane import PlaneCalls, design_plane, find_heads_in_plane

HEADS = (1, 2, 3, 4, 5, 6, 7, 8)
D, TOKENS = 8, 8


def draw(m: int, seed: int) -> tuple[mha.AttentionLayer, PlaneCalls]:
    layer = mha.random_layer(n_heads=m, d=D, scale=2.0, seed=seed)
    u, v = np.random.default_rng([seed, m]).standard_normal((2, D))
    u, v = (np.sqrt(D) * x / np.linalg.norm(x) for x in (u, v))
    return layer, design_plane(u, v, TOKENS, 4)


def measure(m: int, seed: int) -> Record:
    layer, calls = draw(m, seed)
    p, s = (np.einsum("d,mde,e->m", x, layer.theta, calls.v) for x in (calls.u, calls.v))
    counts = np.arange(2 * m + 2)[:, None]
    poles = 1 / (1 + counts * np.exp(p))
    found = find_heads_in_plane(calls, layer(calls.tokens), 1e-16)
    record = {
        "condition": float(np.linalg.cond(calls.features(p, s))),
        "condition_of_poles": float(np.linalg.cond(poles)),
        "heads": None if found is None else found.n_heads,
    }
    if found is None or found.n_heads != m:
        return record | {"error": None}
    error = np.max(np.abs(np.sort(found.p) - np.sort(p))) / np.sqrt(np.mean(p**2))
    return record | {"error": finite(float(error))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seed_range, default=range(10))
    parser.add_argument("--out", type=Path, default=RESULTS / "query_conditioning.json")
    asked = parser.parse_args()
    ledger = Ledger(asked.out)
    for m in HEADS:
        for seed in asked.seeds:
            row = ledger.run({"m": m, "seed": seed}, lambda m=m, s=seed: measure(m, s))
        print(m, row)


if __name__ == "__main__":
    main()
