"""What it costs to learn hard layers, beside generic ones of the same shape.

A learner is given ever more examples and a budget of seconds for each fit. Two-token layers have
exact twins, so success is judged by the function on fresh inputs, and by whether it tells the
secret. Where a budget ran out, the cost is only known to be larger.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear

from mhalearn._runtime.threads import one_lapack_thread
from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.hardness.families import hard_layer
from mhalearn.hardness.secret import Secret
from mhalearn.layer.base import Layer
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.random_layers import random_layer
from mhalearn.learners.options import find_options
from mhalearn.learners.protocol import Learner
from mhalearn.learners.registry import find_learner, list_learners
from mhalearn.run.outcome import Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.polish import polish_on

# Relative squared error on fresh inputs that counts as learned; who ignores the secret makes 1/2.
LEARNED = 0.01
# Times the counting limit of examples that are tried, one after the other.
RATIOS = (16.0, 128.0)
_FRESH = 2000


@dataclass(frozen=True)
class Cell:
    """One row of the study: a family ("parity", "rounding" or "generic"), a shape, a learner."""

    family: str
    n_heads: int
    d: int
    method: str


@dataclass(frozen=True)
class Cost:
    """What one secret cost. examples: in the last fit; seconds: of all; censored: not learned."""

    seed: int
    learned: bool
    knows_secret: bool | None  # None for generic layers, which have none
    examples: int
    seconds: float
    relative_mse: float
    outcome: str


def list_curve_methods() -> tuple[str, ...]:
    """Names of the learners whose cost can be asked for: who never comes to the layer has none."""
    return tuple(learner.name for learner in list_learners() if learner.consistent)


def teacher(
    family: str, n_heads: int, d: int, seed: int, **options: Any
) -> tuple[AttentionLayer, Secret | None]:
    if family == "generic":
        return random_layer(n_heads, d, seed=seed), None
    return hard_layer(family, n_heads=n_heads, d=d, seed=seed, **options)


def measure_cost(
    cell: Cell, seed: int, budget: float, ratios: Iterable[float] = RATIOS, **options: Any
) -> Cost:
    """Give the learner ever more examples until it learns the layer of this seed."""
    if not (ratios := tuple(ratios)):
        raise ValueError("ratios=(): pass at least one, in times the counting limit")
    layer, secret = teacher(cell.family, cell.n_heads, cell.d, seed, **options)
    fresh = sample_inputs("boolean", _FRESH, 2, cell.d, seed=20_000 + seed)
    truth = layer(fresh)
    seconds = 0.0
    for ratio in ratios:
        limit = layer.architecture.counting_limit(2)
        n = math.ceil(ratio * limit)
        x = sample_inputs("boolean", n, 2, cell.d, seed=10_000 + seed)
        examples = Examples(x, layer(x))
        began = time.monotonic()
        learned, outcome = _learn(cell, examples, seed, budget)
        seconds += time.monotonic() - began
        error = float(np.sum((learned(fresh) - truth) ** 2) / np.sum(truth**2))
        told = None if secret is None else tells(learned, secret, seed)
        done = error <= LEARNED and told is not False
        if done:
            break
    return Cost(seed, done, told, n, seconds, error, outcome.name)


def _learn(cell: Cell, examples: Examples, seed: int, budget: float) -> tuple[Layer, Outcome]:
    """Learner and polish alone: nothing is certified, which would take longer than to learn."""
    run, architecture = Run(budget, seed=seed), examples.architecture(cell.n_heads)
    learner: Learner = find_learner(cell.method)
    with one_lapack_thread():
        found = learner.learn(examples, architecture, run, find_options(learner, None))
        if found.outcome is not Outcome.FITTED:
            return found.layer, found.outcome
        return polish_on(examples, found.layer, architecture, run).layer, found.outcome


def tells(layer: Layer, secret: Secret, seed: int = 0) -> bool:
    """Whether the layer's outputs change most with just the secret's coordinates."""
    return read_coordinates(layer, len(secret.coordinates), seed) == secret.coordinates


def read_coordinates(layer: Layer, count: int, seed: int = 0) -> tuple[int, ...]:
    """The coordinates, except 0, with the most influence on the outputs of both tokens."""
    x = sample_inputs("boolean", _FRESH, 2, layer.d, seed=30_000 + seed)
    before = layer(x)
    influence = np.zeros(layer.d)
    for a in range(1, layer.d):
        flipped = x.copy()
        flipped[:, 1, a] *= -1
        influence[a] = np.mean((layer(flipped) - before) ** 2)
    return tuple(sorted(np.argsort(-influence)[:count].tolist()))


def record_of(cell: Cell, budget: float, cost: Cost) -> dict[str, Any]:
    return asdict(cell) | {"budget": budget} | asdict(cost)


@dataclass(frozen=True)
class Line:
    """What the secrets of a cell cost together."""

    cell: Cell
    learned: int
    secrets: int
    seconds: float  # for each secret learned; with none learned, a lower bound
    examples: float | None  # the median of those learned

    @property
    def at_least(self) -> bool:
        """Whether the cost is only known to be larger, with 95 % confidence."""
        return self.learned == 0


def summarise(records: Iterable[dict[str, Any]]) -> list[Line]:
    """One line for each cell, in the order they come."""
    groups: dict[Cell, list[dict[str, Any]]] = {}
    for record in records:
        cell = Cell(record["family"], record["n_heads"], record["d"], record["method"])
        groups.setdefault(cell, []).append(record)
    lines = []
    for cell, rows in groups.items():
        done = [row for row in rows if row.get("learned")]
        spent = sum(row.get("seconds", 0.0) for row in rows)
        examples = float(np.median([row["examples"] for row in done])) if done else None
        # Where all of n fail, the chance of success is at most this, with 95 % confidence.
        at_most = 1 - 0.05 ** (1 / len(rows))
        cost = spent / len(done) if done else spent / len(rows) / at_most
        lines.append(Line(cell, len(done), len(rows), cost, examples))
    return lines


@dataclass(frozen=True)
class Growth:
    """How seconds a success grow with each head: by this factor, or by at least it."""

    family: str
    d: int
    method: str
    factor: float
    at_least: bool


def growth(lines: Iterable[Line]) -> list[Growth]:
    """Least squares in the logarithm of the known costs, which are estimates themselves.

    Lower bounds count only where that line would lie below one. Then the flattest line that fits as
    well is told, as the least that growth can be. Nothing is said where none but the most heads
    have a known cost: a larger one for fewer heads would make the slope smaller.
    """
    groups: dict[tuple[str, int, str], list[Line]] = {}
    for line in lines:
        key = line.cell.family, line.cell.d, line.cell.method
        groups.setdefault(key, []).append(line)
    found = []
    for (family, d, method), own in groups.items():
        own.sort(key=lambda line: line.cell.n_heads)
        bounds = [line.at_least for line in own]
        if len(own) < 2 or bounds != sorted(bounds) or all(bounds):
            continue
        slope, at_least = _slope(
            [line.cell.n_heads for line in own], [line.seconds for line in own], bounds
        )
        found.append(Growth(family, d, method, math.exp(slope), at_least))
    return found


def _slope(heads: list[int], seconds: list[float], bounds: list[bool]) -> tuple[float, bool]:
    """Of log seconds = a + b heads - s, with slacks s >= 0 for bounds and 0 for the others; and
    whether a bound decides it."""
    slacks = -np.eye(len(heads))[:, np.flatnonzero(bounds)]
    rows = np.column_stack([np.ones(len(heads)), heads, slacks])
    price = 1e-4 * np.eye(1, rows.shape[1], 1)  # draws b down a little: of equal fits the flattest
    free = np.array([-np.inf, -np.inf] + [0.0] * slacks.shape[1])
    fit = lsq_linear(np.vstack([rows, price]), [*np.log(seconds), -1e-3], (free, np.inf))
    return float(fit.x[1]), bool(np.any(fit.x[2:] < 1e-3))
