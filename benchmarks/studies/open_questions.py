"""Two small measurements about open questions: Fourier decay, and moments that see the projections.

    python benchmarks/studies/open_questions.py         benchmarks/results/open_questions.json
    python benchmarks/pages/write_open_questions.py     docs/open_questions.md

Fourier: the labels of the first token of random one-head layers on two +-1 tokens, expanded over
all products of the 2d bits, exactly; the share of their variance at each degree.
Moments: of M = E[(x_a (x) F_r)(x_b (x) F_r)^T] over three different tokens r, a, b, symmetrised,
the eigenvectors of the largest eigenvalue and of the m - 1 least ones are taken, which are negative
since a sharp head cannot look at two tokens at once. How far the W_i are outside their span, as the
largest sine, is measured beside that of random directions.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks import RESULTS
from mhalearn.hardness.dimension import walsh

FILE = RESULTS / "open_questions.json"
SEEDS = 5
FOURIER_D = 6
MOMENT_D, MOMENT_N, MOMENT_SCALE = 16, 200_000, 4.0


def fourier(scale: float, seed: int) -> list[float]:
    """The share of the labels' variance at each degree from 1 on."""
    layer = mha.random_layer(1, FOURIER_D, scale=scale, seed=seed)
    bits = (np.arange(4**FOURIER_D)[:, None] >> np.arange(2 * FOURIER_D)) & 1
    x = (1 - 2 * bits).reshape(-1, 2, FOURIER_D)
    weights = np.sum(walsh(layer(x)[:, 0]) ** 2, axis=1)
    degree = np.array([int(index).bit_count() for index in range(len(weights))])
    by_degree = np.array([weights[degree == r].sum() for r in range(2 * FOURIER_D + 1)])
    return (by_degree[1:] / by_degree[1:].sum()).tolist()


def moments(m: int, seed: int) -> dict:
    layer = mha.random_layer(m, MOMENT_D, scale=MOMENT_SCALE, seed=seed)
    total = np.zeros((MOMENT_D**2, MOMENT_D**2))
    for part in range(10):
        x = mha.sample_inputs("boolean", MOMENT_N // 10, 3, MOMENT_D, seed=100 * seed + part)
        label = layer(x)[:, 0]
        first, second = (
            np.einsum("nd,ne->nde", x[:, token].astype(float), label).reshape(len(x), -1)
            for token in (1, 2)
        )
        total += first.T @ second / MOMENT_N
    values, vectors = np.linalg.eigh((total + total.T) / 2)
    chosen = np.concatenate([vectors[:, : m - 1], vectors[:, -1:]], axis=1)
    random = np.linalg.qr(np.random.default_rng(seed).standard_normal(chosen.shape))[0]
    return {
        "sine": largest_sine(layer.w, chosen),
        "sine_of_random": largest_sine(layer.w, random),
        "eigenvalues": [*values[:m].tolist(), *values[-2:].tolist()],
    }


def largest_sine(w: np.ndarray, basis: np.ndarray) -> float:
    flat = w.reshape(len(w), -1)
    outside = flat - flat @ basis @ basis.T
    return float(np.max(np.linalg.norm(outside, axis=1) / np.linalg.norm(flat, axis=1)))


def main() -> None:
    runs: list[dict] = [
        {"part": "fourier", "d": FOURIER_D, "scale": scale, "seed": seed}
        | {"by_degree": fourier(scale, seed)}
        for scale in (0.5, 1.0, 2.0, 4.0, 8.0)
        for seed in range(SEEDS)
    ]
    for m in (2, 3, 4):
        for seed in range(SEEDS):
            key = {"part": "moments", "m": m, "d": MOMENT_D, "n": MOMENT_N, "seed": seed}
            runs.append(key | moments(m, seed))
            print(json.dumps(runs[-1]), flush=True)
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")


if __name__ == "__main__":
    main()
