"""How well layers are learned from noisy labels: errors against the Cramer-Rao bound, intervals.

    python benchmarks/studies/noise.py  everything, appended to the JSON run by run
        --shape 2,8,4 --level 0.1 --seeds 9000:9050 --out part.json
        --merge part.json ...           take such files over into the default one
        --table                         print what the JSON holds

Ten times the counting limit of examples; a draw is a fresh teacher with fresh inputs and Gaussian
noise of deviation sigma = level x the labels' root mean square. `AttentionRegressor` and its peers
are given all of them.

The bound is that of an unbiased estimate: sigma^2 times the diagonal of (J^T J)^-1 at the truth. An
efficient estimate has a ratio of one in every draw, so the mean over draws is a fair statistic.
"error / bound" is |error|^2 over the bound's sum, all parameters together; "each" first divides
every squared error by its own bound. A draw without a comparable layer counts as an infinite ratio.

Peers start anew until two starts end at the same training
loss, to 1e-4 of it, or the time limit: with noise no loss is known to be the lowest. Their starts
end after their steps, or when the loss no longer falls. Their best setting is the one with the
least error, then time, on the draws it is reported for. Their seconds leave compilation out; the
solver's are those of the whole estimator, certificate and verdict included, and its first fit
compiles.
"""

import argparse
import math
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg
from scipy.special import softmax
from threadpoolctl import threadpool_limits

import mhalearn as mha
from benchmarks.cases import Case, Descend, End, Start, Starts, case_at, ended
from benchmarks.ledger import Ledger, Record, finite, opened, say_bar, study
from benchmarks.peers.dense_peers import optimistix_descent, scipy_descent
from benchmarks.peers.peers import ADAM_STEPS, Walk, annealed_adam, annealed_block, optax_lbfgs
from mhalearn._runtime.programs import float64
from mhalearn.solvers.gauss_newton import NO_RIDGE

SHAPES = [(2, 8, 4), (4, 12, 6)]
LEVELS = [1e-6, 1e-3, 0.01, 0.1]
RATIO = 10.0
PEER_SEEDS = range(9000, 9020)
LIMIT = 60.0  # seconds a peer
_STREAM = 0x4015E  # the noise's own


class Draw(NamedTuple):
    """Noisy examples of a known layer."""

    truth: mha.AttentionLayer
    examples: mha.Examples
    sigma: float


def noisy(case: Case, level: float, seed: int) -> Draw:
    truth, x, y = case.draw(seed)
    sigma = level * float(np.sqrt(np.mean(y**2)))
    rng = np.random.default_rng([seed, _STREAM, LEVELS.index(level)])
    return Draw(truth, mha.Examples(x, y + sigma * rng.standard_normal(y.shape)), sigma)


# The bound


def flat(theta: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.concatenate([theta.ravel(), w.ravel()])


def information(layer: mha.AttentionLayer, x: np.ndarray) -> np.ndarray:
    """J^T J, from the layer's definition and in a plain way, apart from the library's own."""
    x = x.astype(np.float64)
    theta, w = layer.theta, layer.w
    p = softmax(np.einsum("nra,mab,njb->nrmj", x, theta, x), axis=-1)
    mean = np.einsum("nrmj,njb->nrmb", p, x)
    moment = np.einsum("nrmj,nja,njb->nrmab", p, x, x, optimize=True)
    covariance = moment - mean[..., :, None] * mean[..., None, :]
    keys = np.einsum("nrmbc,mce->nremb", covariance, w, optimize=True)
    of_theta = np.einsum("nra,nremb->nremab", x, keys)
    of_w = np.einsum("nrmb,ef->nrembf", mean, np.eye(w.shape[2]))
    rows = math.prod(keys.shape[:3])
    jacobian = np.hstack([of_theta.reshape(rows, -1), of_w.reshape(rows, -1)])
    return jacobian.T @ jacobian


def variances(known: np.ndarray, sigma: float) -> np.ndarray:
    """The least variance of each parameter, from the information about them."""
    root = np.linalg.cholesky(known)
    inverse = scipy.linalg.solve_triangular(root, np.eye(len(root)), lower=True)
    return sigma**2 * np.sum(inverse**2, axis=0)


def against_bound(layer: mha.AttentionLayer, draw: Draw) -> Record:
    """The squared error of a layer over the bound; nothing where heads cannot be matched."""
    truth, order = draw.truth, mha.compare(layer, draw.truth).order
    if not len(order):
        return {"ratio": None, "each": None}
    squared = (flat(layer.theta[order], layer.w[order]) - flat(truth.theta, truth.w)) ** 2
    least = variances(information(truth, draw.examples.arrays().x), draw.sigma)
    ratio, each = squared.sum() / least.sum(), np.mean(squared / least)
    return {"ratio": finite(ratio), "each": finite(each)}


# The solver


def run_newton(case: Case, level: float, seed: int) -> Record:
    draw = noisy(case, level, seed)
    began = time.perf_counter()
    learned = mha.AttentionRegressor(n_heads=case.m, random_state=seed).fit(draw.examples)
    seconds = time.perf_counter() - began
    layer, certificate = learned.layer_, learned.certificate_
    found = against_bound(layer, draw)
    found |= {"outcome": learned.outcome_.name, "reason": learned.solution_.reason}
    found |= {"noise_level": certificate.noise_level / draw.sigma, "seconds": seconds}
    if found["ratio"] is not None and certificate.intervals is not None:
        order, widths = mha.compare(layer, draw.truth).order, certificate.intervals
        error = flat(layer.theta[order] - draw.truth.theta, layer.w[order] - draw.truth.w)
        covered = np.abs(error) <= flat(widths.theta[order], widths.w[order])
        found |= {"coverage": float(covered.mean()), "parameters": covered.size}
    return found


# Peers


def adam(rate: float, start: Start, deadline: float) -> End:
    """As `annealed_adam`, without the ridge."""
    at = jnp.asarray(start.flat)
    memory = optax.scale_by_adam().init(at)
    walk = Walk(at, memory, jnp.asarray(0), jnp.asarray(math.inf))
    for until in range(100, ADAM_STEPS + 1, 100):
        walk = annealed_block(walk, until, rate, NO_RIDGE, start.data, start.energy)
        if time.perf_counter() > deadline:
            break
    return ended(float(walk.loss), walk.flat)


# SciPy and optimistix with the quicker of their settings at the larger shape.
PEERS: dict[str, dict[str, Descend]] = {
    "Adam": {f"rate {rate:g}": partial(adam, rate) for rate in (0.01, 0.03, 0.1)},
    "Adam + ridge": {f"rate {rate:g}": partial(annealed_adam, rate) for rate in (0.03, 0.1)},
    "L-BFGS": {"optax.lbfgs": optax_lbfgs},
    "scipy least_squares": {"trf": partial(scipy_descent, "trf")},
    "optimistix LM": {"normal equations": partial(optimistix_descent, "normal equations")},
}
METHODS = ["newton", *PEERS]
_SAME = 1e-4  # of the loss
_WARM_UP = 10.0  # seconds at most for a descent that only compiles
_compiled: set[tuple[Case, Descend]] = set()


def run_peer(descend: Descend, case: Case, level: float, seed: int) -> Record:
    draw = noisy(case, level, seed)
    ends: list[End] = []
    with float64():
        starts = Starts(draw.examples, case.m, seed)
        if (case, descend) not in _compiled:
            descend(starts.draw(0), time.perf_counter() + _WARM_UP)
            _compiled.add((case, descend))
        began = time.perf_counter()
        while time.perf_counter() - began < LIMIT and not agreed(ends):
            ends.append(descend(starts.draw(len(ends)), began + LIMIT))
        seconds = time.perf_counter() - began
        best = min(ends, key=lambda end: end.loss)
        layer = starts.layer(best)
    found = {"loss": finite(best.loss), "starts": len(ends), "seconds": seconds}
    return against_bound(layer, draw) | found


def agreed(ends: list[End]) -> bool:
    """Whether the lowest loss was found twice."""
    low = sorted(end.loss for end in ends)[:2]
    return len(low) == 2 and low[1] <= (1 + _SAME) * low[0] < math.inf


# The table


def mean(rows: list[Record], name: str) -> tuple[float, float]:
    """Over draws, with its standard error; infinite if a draw has none."""
    values = [math.inf if row.get(name) is None else row[name] for row in rows]
    if len(values) < 2 or math.inf in values:
        return float(np.mean(values)), math.nan
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


def median_seconds(rows: list[Record]) -> float:
    return float(np.median([row.get("seconds", math.inf) for row in rows]))


def best_settings(records: list[Record]) -> dict[tuple[str, float, str], list[Record]]:
    """By shape, level and method: the runs of the setting with the least ratio, then time."""

    def cost(rows: list[Record]) -> tuple[float, float]:
        return round(mean(rows, "ratio")[0], 3), median_seconds(rows)

    settings = defaultdict(list)
    for row in records:
        settings[row["shape"], row["level"], row["method"], row["setting"]].append(row)
    best: dict[tuple[str, float, str], list[Record]] = {}
    for key in sorted(settings, key=lambda key: (key[0], key[1], METHODS.index(key[2]))):
        rows, line = settings[key], key[:3]
        if line not in best or cost(rows) < cost(best[line]):
            best[line] = rows
    return best


def print_table(records: list[Record]) -> None:
    names = {"ratio": "error / bound", "each": "each"}
    names |= {"coverage": "covered", "noise_level": "noise / sigma"}
    head = f"{'(m,d,k)':8} {'level':>6} {'method':>32} {'draws':>5} |"
    print(head + "".join(f" {title:15} |" for title in names.values()) + " median s | outcomes")
    best = best_settings(records)
    for (shape, level, method), rows in best.items():
        known = "newton" if method == "newton" else f"{method}, {rows[0]['setting']}"
        shown = ["{:.3f} +- {:.3f}".format(*mean(rows, name)) for name in names]
        if method != "newton":
            shown[2:] = "", ""
        ends = Counter("crashed" if "crashed" in row else row.get("outcome", "") for row in rows)
        outcomes = ", ".join(f"{count} {name}" for name, count in ends.items() if name)
        print(
            f"{shape:8} {level:6g} {known:>32} {len(rows):5} |"
            + "".join(f" {text:15} |" for text in shown)
            + f" {median_seconds(rows):8.2f} | {outcomes}"
        )
    for (shape, level, method), rows in best.items():
        if method == "newton":
            say_bars(f"({shape}) level {level:g}, {len(rows)} draws", rows)


def say_bars(line: str, rows: list[Record]) -> None:
    ratio, error = mean(rows, "ratio")
    say_bar(f"{line}: error / bound at most 1.05 + 2 x {error:.3f}", ratio <= 1.05 + 2 * error)
    say_bar(f"{line}: intervals cover 94-96 %", 0.94 <= mean(rows, "coverage")[0] <= 0.96)
    say_bar(f"{line}: all FITTED", all(row.get("outcome") == "FITTED" for row in rows))


def run(ledger: Ledger, options: argparse.Namespace, seed: int) -> None:
    """All chosen methods on one seed, line by line."""
    for shape in options.shape or SHAPES:
        case = case_at(RATIO, shape)
        for level in options.level or LEVELS:
            key = {"shape": ",".join(map(str, shape)), "level": level}
            if "newton" in options.methods:
                key |= {"method": "newton", "setting": "", "seed": seed}
                ledger.run(key, partial(run_newton, case, level, seed))
            for name in PEERS if seed in PEER_SEEDS else ():
                for setting, descend in PEERS[name].items() if name in options.methods else ():
                    key |= {"method": name, "setting": setting, "seed": seed}
                    ledger.run(key, partial(run_peer, descend, case, level, seed))


def main() -> None:
    parser = study(__doc__, "noise", "9000:9200", ",".join(METHODS))
    parser.add_argument("--shape", action="append", type=lambda s: tuple(map(int, s.split(","))))
    parser.add_argument("--level", action="append", type=float, choices=LEVELS)
    options = parser.parse_args()
    ledger, running = opened(options)
    with threadpool_limits(1, user_api="blas"):
        for seed in options.seeds if running else ():
            run(ledger, options, seed)
    print_table(ledger.records)


if __name__ == "__main__":
    main()
