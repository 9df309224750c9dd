"""Predicted against achieved parameter errors: what `mhalearn.plan` promises, measured.

    python benchmarks/plan.py [--seeds 0:3]

Teachers of two shapes, Gaussian tokens, labels rounded to three precisions, three ratios. Achieved:
the error of the best fit, descended to from the truth: a plan says what a fit that finds the layer
leaves, not that one will find it.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is a package there

import ml_dtypes
import numpy as np

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.ledger import Ledger, Record, seed_range
from mhalearn.judge.sample_plan import head_error, predict_error
from mhalearn.run.run import Run
from mhalearn.solvers.polish import polish_on

LABELS = {"float64": np.float64, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
RATIOS = (2.0, 4.0, 8.0)
SHAPES = ((4, 8), (2, 6))


def measure(m: int, d: int, labels: str, ratio: float, seed: int) -> Record:
    truth = mha.random_layer(n_heads=m, d=d, scale=2.0, seed=seed)
    other = mha.random_layer(n_heads=m, d=d, scale=2.0, seed=seed + 1000)
    n = math.ceil(ratio * truth.architecture.counting_limit(8))
    x = mha.sample_inputs("gaussian", n, 8, d, seed=seed + 100)
    examples = mha.Examples(x, truth(x).astype(LABELS[labels]))
    found = polish_on(examples, truth, truth.architecture, Run()).layer
    achieved = head_error(found, truth, mha.compare(found, truth).order)
    return {
        "examples": n,
        "predicted": predict_error(truth, x, labels, truth.architecture),
        "predicted_by_stand_in": predict_error(other, x, labels, truth.architecture),
        "achieved": achieved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seed_range, default=range(3))
    parser.add_argument("--out", type=Path, default=RESULTS / "plan.json")
    asked = parser.parse_args()
    ledger = Ledger(asked.out)
    for m, d in SHAPES:
        for labels in LABELS:
            for ratio in RATIOS:
                for seed in asked.seeds:
                    key = {"heads": m, "d": d, "labels": labels, "ratio": ratio, "seed": seed}
                    row = ledger.run(key, lambda k=key: measure(k["heads"], *list(k.values())[1:]))
                    print(*key.values(), row.get("achieved", 0) / row.get("predicted", 1))


if __name__ == "__main__":
    main()
