"""Heads that write alike, by the angles where they turn: `sweep`, `pursuit`, `turns` in order."""

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.learners.queries.domain import Domain, draw_direction
from mhalearn.learners.queries.extension import AlgebraFound, Sketch
from mhalearn.learners.queries.plane import PlaneHeads
from mhalearn.learners.queries.pursuit import Pursuit, coordinates
from mhalearn.learners.queries.session import BudgetSpent, Session
from mhalearn.learners.queries.sweep import Sectors, Sweep, find_active
from mhalearn.learners.queries.turns import Moved, Turns

SWEEP, VALUES = "where heads turn", "what heads write"
KEYS, ROWS = "keys of heads", "queries of heads"
# Calls of a sweep at eight tokens, sweeps on all planes, and heads that are looked for.
_CALLS, _SWEEPS, _MOST_HEADS = 16, 12, 12
# Distances: of the first sweep, and at which logits have lost too many digits. What few points
# leave of answers, relative to them, where heads turn too close to each other.
_FIRST, _FARTHEST, _CLOSE = 1.5, 60.0, 1e-4
# What points may leave of exact answers: of double precision, and of logits, which are as large as
# the square of the distance and lose as many digits.
_EXACT, _ROUNDING = 1e-13, 1e-16

# Size of features beyond which heads that do not turn along v make tokens too large.
_LARGEST_TOKENS = 300.0
# Calls without which it is not begun.
LEAST_CALLS = 100


def find_by_turns(
    session: Session, domain: Domain, k: int, rng: np.random.Generator, n_heads: int | None
) -> AlgebraFound | None:
    """Sweep planes until one shows the heads, then ask where they turn; None where none does.

    Raises BudgetSpent. Cost: up to 200 calls of sweeps, then 1.4 m d^2 / (k r) and some more, where
    what heads write of one token has rank r. Trust: as of algebra, each step well posed where heads
    turn at different angles; a heuristic in how it chooses sectors.
    """
    if domain.radius is not None or session.affordable(k) < LEAST_CALLS:
        return None
    sweeps = planes = 0
    while sweeps < _SWEEPS:
        planes += 1
        plane = _Plane(draw_direction(rng, domain.d), draw_direction(rng, domain.d), k, rng)
        found = plane.search(session, _MOST_HEADS if n_heads is None else n_heads + 2)
        sweeps += len(plane.swept)
        turns = None if found is None else Turns(found, plane.u, plane.v, k, rng)
        if found is not None and turns is not None and turns.reach < _LARGEST_TOKENS:
            if session.affordable(k) < turns.count():
                raise BudgetSpent(VALUES)
            sketch = _follow(session, turns)
            size = float(np.linalg.norm(sketch.theta)) / np.sqrt(len(sketch.theta))
            return AlgebraFound(found, sketch, size, planes, by_turns=True)
    return None


def _follow(session: Session, turns: Turns) -> Sketch:
    def ask(calls: Moved, purpose: str) -> Float64:
        return session.ask(calls.tokens, purpose).astype(np.float64)

    values = turns.design_values()
    w = turns.read_values(values, ask(values, VALUES))
    at_turns = turns.design_keys()
    keys = turns.read_keys(at_turns, ask(at_turns, KEYS), w)
    moved = turns.design_rows(keys)
    return turns.read_rows(moved, ask(moved, ROWS), w, keys)


class _Plane:
    """Sweeps of one plane, each on the sectors where heads turned in the one before."""

    def __init__(self, u: Float64, v: Float64, k: int, rng: np.random.Generator) -> None:
        self.u, self.v = u, v
        n = int(np.ceil(_CALLS * 6 / (k - 2)))
        width = np.pi / n
        centres = np.asarray(width * (np.arange(n) + rng.random()), np.float64)
        self._sectors = Sectors(centres, width, _FIRST)
        self._calls = Sweep(u, v, np.zeros(0), np.zeros((0, k)))
        self._answers: Float64 | None = None
        self.swept: list[Sectors] = []

    def search(self, session: Session, most: int) -> PlaneHeads | None:
        """Sweep until points explain all answers; None where heads turn too close to each other."""
        while self._sectors.rho < _FARTHEST:
            sectors = self._sectors
            calls = sectors.calls(self.u, self.v, self._calls.t.shape[1])
            answers = session.ask(calls.tokens, SWEEP).astype(np.float64)
            self._calls = self._calls.and_also(calls)
            before = answers[:0] if self._answers is None else self._answers
            self._answers = np.concatenate([before, answers])
            self.swept.append(sectors)
            points, left, enough = self._explain(calls, answers, most)
            if left <= enough:
                return _read_off(self._calls, self._answers, points)
            if left < _CLOSE:
                break
            self._sectors = sectors.zoom(find_active(calls, answers))
        return None

    def _explain(self, calls: Sweep, answers: Float64, most: int) -> tuple[Float64, float, float]:
        """Points from the sharpest sweep, then from all; what they leave, and what they may."""
        assert self._answers is not None
        sectors = self.swept[-1]
        enough = _allow(sectors.rho, 1 / (sectors.rho * sectors.width) ** 2)
        points, _ = Pursuit(calls, answers, local=True).search([sectors], most, enough)
        if len(self.swept) > 1:
            together = Pursuit(self._calls, self._answers, local=True)
            points, _ = together.search(self.swept, most, enough, points)
        enough = _allow(sectors.rho, float(np.exp(np.median(points[1]))))
        every = Pursuit(self._calls, self._answers, local=False)
        points, left = every.refine(points, 60)
        points, left = every.mirror(points, left, enough)
        if left <= enough:
            points, left = every.prune(points, left, enough)
        return points, left, enough


def _allow(rho: float, size: float) -> float:
    """What rounding leaves of answers, relative to them."""
    return _EXACT + _ROUNDING * rho**2 * size


def _read_off(calls: Sweep, answers: Float64, points: Float64) -> PlaneHeads:
    p, s = coordinates(points)
    k = calls.t.shape[1]
    weight = np.repeat(1 / calls.spread, k)[:, None]
    features = calls.patterns(p, s)[0].reshape(len(p), -1).T
    design = np.column_stack([features, np.repeat(calls.alpha, k), calls.t.ravel()])
    labels = answers.reshape(len(design), -1)
    solved: Float64 = np.linalg.lstsq(weight * design, weight * labels, rcond=None)[0].astype(
        np.float64
    )
    values: Float64 = np.linalg.svd(weight * labels, compute_uv=False).astype(np.float64)
    left = weight * (labels - design @ solved)
    return PlaneHeads(
        p,
        s,
        solved[:-2],
        solved[-2],
        float(np.linalg.norm(left) / np.linalg.norm(weight * labels)),
        values / values[0],
        float(np.linalg.cond(weight * features)),
    )
