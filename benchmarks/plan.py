"""Predicted against achieved parameter errors: what `mhalearn.plan` promises, measured.

    python benchmarks/plan.py [--seeds 0:3]

Teachers of two shapes, Gaussian tokens, labels computed with more digits and rounded to three
precisions, three ratios. Achieved: the error of a least squares fit, descended to from near the
truth until it only rounds: a plan says what a fit that finds the layer leaves, not that one will
find it.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is a package there

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from scipy.linalg import lstsq

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.ledger import Ledger, Record, seed_range
from mhalearn.judge.double_error import outputs_in
from mhalearn.judge.sample_plan import head_error, predict_error

LABELS = {"float64": np.float64, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
RATIOS = (2.0, 4.0, 8.0)
SHAPES = ((4, 8), (2, 6))
# Draws of the inputs; how far a fit begins from the truth, and its steps.
DRAWS, OFF, STEPS = 4, 1e-4, 6


def measure(m: int, d: int, labels: str, ratio: float, seed: int) -> Record:
    """Root mean squares over draws of the inputs: a prediction is a standard deviation."""
    truth = mha.random_layer(n_heads=m, d=d, scale=2.0, seed=seed)
    n = math.ceil(ratio * truth.architecture.counting_limit(8))
    predicted, achieved = [], []
    for draw in range(DRAWS):
        x = mha.sample_inputs("gaussian", n, 8, d, seed=100 * (seed + 1) + draw)
        y = outputs_in(truth, x, np.longdouble).astype(LABELS[labels]).astype(np.float64)
        found = fit(truth, x, y, seed)
        achieved.append(head_error(found, truth, mha.compare(found, truth).order))
        predicted.append(predict_error(truth, x, labels, truth.architecture))
    return {
        "examples": n,
        "predicted": float(np.sqrt(np.mean(np.square(predicted)))),
        "achieved": float(np.sqrt(np.mean(np.square(achieved)))),
    }


def fit(truth: mha.AttentionLayer, x: np.ndarray, y: np.ndarray, seed: int) -> mha.AttentionLayer:
    """Gauss-Newton in double precision until it only rounds, from a start that is a little off."""
    rng = np.random.default_rng(seed)
    theta, w = (a * (1 + OFF * rng.standard_normal(a.shape)) for a in (truth.theta, truth.w))
    for _ in range(STEPS):
        slopes = np.concatenate(
            [np.asarray(part).reshape(y.size, -1) for part in _jacobian(theta, w, x)], axis=1
        )
        left = (y - mha.AttentionLayer(theta, w)(x)).ravel()
        step = lstsq(slopes, left, cond=1e-13, lapack_driver="gelsy")[0]
        theta = theta + step[: theta.size].reshape(theta.shape)
        w = w + step[theta.size :].reshape(w.shape)
    return mha.AttentionLayer(theta, w)


@jax.jit
def _jacobian(theta: Any, w: Any, x: Any) -> Any:
    def outputs(theta: Any, w: Any) -> Any:
        p = jax.nn.softmax(jnp.einsum("nrd,mde,nje->nmrj", x, theta, x), axis=-1)
        return jnp.einsum("nmrj,njd,mde->nre", p, x, w).ravel()

    return jax.jacfwd(outputs, argnums=(0, 1))(theta, w)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seed_range, default=range(3))
    parser.add_argument("--out", type=Path, default=RESULTS / "plan.json")
    asked = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
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
