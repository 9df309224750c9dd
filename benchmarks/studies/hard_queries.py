"""What averages tell of hard layers: exact correlations, and a learner that asks only for them.

For small d all 4^d inputs are listed. Beside each class of parities as many random layers of the
same shape; then the queries that find a secret, with answers off by up to the tolerance; then
those put to an adversary, and to VSTAT.
"""

import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from benchmarks.ledger import console, opened, study
from mhalearn.hardness import QueryOracle, hard_layer, learn_by_queries
from mhalearn.hardness.dimension import generic_dimension, parity_dimension
from mhalearn.hardness.queries import ANSWERS, cube

SHAPES = ((2, 5), (2, 6), (2, 7), (4, 6), (4, 7), (6, 8))
ASKED = ((2, 5), (2, 6), (2, 7), (2, 8), (4, 6), (4, 7), (4, 8))
TOLERANCES = (0.1, 0.3)
# Shapes, and oracles by their tolerance or by t of VSTAT(t).
OPPOSED = ((2, 6), (4, 7))
ORACLES = (("tolerance", 0.1), ("vstat", 50), ("vstat", 100), ("vstat", 1000))


def dimension_of(family: str, m: int, d: int) -> dict:
    found = parity_dimension(m, d)
    if family == "generic":
        found = generic_dimension(m, d, found.size)
    return asdict(found) | {"dimension": found.dimension}


def queries_of(m: int, d: int, tolerance: float, seed: int) -> dict:
    layer, secret = hard_layer("parity", n_heads=m, d=d, seed=seed)
    x = cube(d)
    oracle = QueryOracle(x, layer(x), tolerance)
    found = learn_by_queries(oracle, secret, max_queries=20_000)
    return {"asked": oracle.asked, "found": found == secret.coordinates}


def opposed(m: int, d: int, oracle: str, value: float, answers: str, seed: int) -> dict:
    """The labels are those of the closed form, for which the reference is exact."""
    _, secret = hard_layer("parity", n_heads=m, d=d, seed=seed)
    x = cube(d)
    reference = secret.reference_labels(x) if answers == "adversarial" else None
    asked = QueryOracle(
        x, secret.labels(x), answers=answers, reference=reference, **{oracle: value}
    )
    found = learn_by_queries(asked, secret, max_queries=20_000)
    counts = {"asked": asked.asked, "withheld": asked.withheld}
    return counts | {"found": found == secret.coordinates}


def main() -> None:
    options = study(__doc__ or "", "hard_queries", "0:5", "").parse_args()
    ledger, running = opened(options)
    if running:
        for m, d in SHAPES:
            for family in ("parity", "generic"):
                key = {"part": "dimension", "family": family, "n_heads": m, "d": d}
                console.print(ledger.run(key, lambda k=key: dimension_of(*list(k.values())[1:])))
        for m, d in ASKED:
            for tolerance in TOLERANCES:
                for seed in options.seeds:
                    key = {"part": "queries", "n_heads": m, "d": d, "tolerance": tolerance}
                    row = ledger.run(
                        key | {"seed": seed},
                        lambda k=key, s=seed: queries_of(*list(k.values())[1:], s),
                    )
                    console.print(key | {name: row.get(name) for name in ("asked", "found")})
        for (m, d), (oracle, value), answers in product(OPPOSED, ORACLES, ANSWERS):
            for seed in options.seeds:
                key = {"part": "oracles", "n_heads": m, "d": d, "oracle": oracle, "value": value}
                key |= {"answers": answers}
                row = ledger.run(
                    key | {"seed": seed}, lambda k=key, s=seed: opposed(*list(k.values())[1:], s)
                )
                console.print(key | {name: row.get(name) for name in ("asked", "found")})


if __name__ == "__main__":
    main()
