"""One change of a reading, tried on sequences: what residual it leaves, and for which heads.

Outputs are a sum over heads. With D_i what the change adds to the contribution of head i and R the
residual, a set S of heads leaves |R - sum_S D_i|^2 = |R|^2 - 2 sum_S g_i + sum_SS G_ij, so that one
Gram matrix tells which heads have the change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn.auditing.fault import Edit
from mhalearn.auditing.forward import Forward
from mhalearn.auditing.reading import Reading

# Output dimensions that a search looks at: random ones, which keep lengths to some ten percent.
_SKETCH = 64
# All heads are said to have a change unless some of them fit better by so much, squared.
_BETTER = 1.05
# Rounding that is made again comes out otherwise here and there, which leaves this share.
_FLIPS = 0.1


@dataclass(frozen=True)
class Step:
    """An edit, and the heads that have it; None where all have."""

    edit: Edit
    heads: tuple[int, ...] | None


@dataclass(frozen=True)
class Hypothesis:
    """What the box does instead of what was claimed: edits, in the order they are made."""

    steps: tuple[Step, ...] = ()

    def with_step(self, step: Step) -> Hypothesis:
        """One more; a number that is set anew for the same heads takes the place of the old one."""
        kept = [one for one in self.steps if not _is_same_number(one, step)]
        return Hypothesis((*kept, step))

    def classes(self, claimed: Reading) -> list[tuple[Reading, tuple[int, ...]]]:
        """Readings, and the heads that are computed so; the largest class first."""
        kinds: dict[tuple[bool, ...], list[int]] = {}
        for head in range(claimed.n_heads):
            has = tuple(step.heads is None or head in step.heads for step in self.steps)
            kinds.setdefault(has, []).append(head)
        found = []
        for has, heads in kinds.items():
            reading = claimed
            for step, there in zip(self.steps, has, strict=True):
                if there:
                    reading = step.edit.change(reading)
            found.append((reading, tuple(heads)))
        return sorted(found, key=lambda one: -len(one[1]))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(step.edit.fault for step in self.steps)

    @property
    def flips(self) -> bool:
        return any(step.edit.flips for step in self.steps)

    def without_flips(self) -> Hypothesis:
        """Its other steps."""
        return Hypothesis(tuple(step for step in self.steps if not step.edit.flips))

    def allowed(self, floor: float, before: float) -> float:
        """The relative error up to which it explains a box; before: without what it rounds."""
        return max(floor, _FLIPS * before) if self.flips else floor

    @property
    def plainness(self) -> tuple[int, int, int]:
        """Less is plainer: fewer steps, fewer numbers fitted, fewer heads singled out."""
        fitted = sum(step.edit.dial is not None for step in self.steps)
        return len(self.steps), fitted, sum(step.heads is not None for step in self.steps)


@dataclass(frozen=True)
class State:
    """A hypothesis computed on a trial's sequences."""

    hypothesis: Hypothesis
    classes: list[tuple[Reading, tuple[int, ...]]]
    parts: Float64  # (m, rows, s)
    residual: Float64  # (rows, s)
    square: float  # |residual|^2 / |labels|^2

    @property
    def reading(self) -> Reading:
        return self.classes[0][0]


@dataclass(frozen=True)
class Attempt:
    """One edit tried on a state.

    square: the relative squared residual it leaves. slope: that of the residual along the change it
    makes: near one where the edit is right, near zero where it has nothing to do with the residual.
    along: the share of the squared residual that a part of the change, or more of it, takes off at
    most: of all heads, or of one. reach: how much of the change that is.
    """

    base: Hypothesis
    step: Step
    square: float
    slope: float
    along: float = 1.0
    reach: float = 1.0

    @property
    def hypothesis(self) -> Hypothesis:
        return self.base.with_step(self.step)

    @property
    def error(self) -> float:
        return float(np.sqrt(self.square))


class Trial:
    """Sequences with their labels, on which readings are compared; padding is left out."""

    def __init__(self, forward: Forward, y: Float64, seed: int = 0) -> None:
        self.forward = forward
        self.rows = self.forward.rows.ravel()
        e = y.shape[2]
        if e > _SKETCH:
            drawn = np.random.default_rng(seed).standard_normal((e, _SKETCH))
            self.onto = np.linalg.qr(drawn)[0]
        else:
            self.onto = np.eye(e)
        self.labels = (np.asarray(y, np.float64).reshape(-1, e) @ self.onto)[self.rows]
        self.size = float(np.sum(self.labels**2)) or 1.0
        self.used = 0

    def state(self, hypothesis: Hypothesis, claimed: Reading) -> State:
        classes = hypothesis.classes(claimed)
        parts = self._parts(classes)
        residual = self.labels - parts.sum(0) - self._beside(classes[0][0])
        square = float(np.sum(residual**2)) / self.size
        return State(hypothesis, classes, parts, residual, square)

    def attempt(self, state: State, edit: Edit) -> Attempt:
        """The edit for the heads that it fits best. Cost: one forward pass."""
        self.used += 1
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            classes = [(edit.change(reading), heads) for reading, heads in state.classes]
            parts = self._parts(classes)
            if edit.by_head and len(parts) > 1:
                return self._by_head(state, edit, parts)
            total = parts.sum(0) + self._beside(classes[0][0])
            change = total - (self.labels - state.residual)
            square = float(np.sum((state.residual - change) ** 2)) / self.size
            product = float(np.sum(state.residual * change))
            slope = _slope(product, float(np.sum(change**2)))
        along = max(slope, 0.0) * product / max(state.square * self.size, 1e-300)
        return Attempt(state.hypothesis, Step(edit, None), _finite(square), slope, along, slope)

    def _by_head(self, state: State, edit: Edit, parts: Float64) -> Attempt:
        changes = (parts - state.parts).reshape(len(parts), -1)
        residual = state.residual.ravel()
        gram, along = changes @ changes.T, changes @ residual
        whole = float(residual @ residual)
        if not np.isfinite(gram).all():
            return Attempt(state.hypothesis, Step(edit, None), np.inf, 0.0)

        def left(chosen: NDArray[np.bool_]) -> float:
            return (
                whole - 2 * float(along[chosen].sum()) + float(gram[np.ix_(chosen, chosen)].sum())
            )

        every = np.ones(len(parts), bool)
        some = _best_heads(gram, along)
        if left(every) <= _BETTER * left(some) + 1e-14 * whole:
            some = every
        heads = None if some.all() else tuple(np.flatnonzero(some).tolist())
        slope = _slope(float(along[some].sum()), float(gram[np.ix_(some, some)].sum()))
        # Exactly, where differences of large numbers would say little.
        rest = residual - changes[some].sum(0)
        square = float(rest @ rest) / self.size
        ahead = np.maximum(np.append(along, along.sum()), 0.0)
        sizes = np.append(np.diag(gram), gram.sum())
        shares = ahead**2 / np.where(sizes > 0, sizes, np.inf) / max(whole, 1e-300)
        best = int(np.argmax(shares))
        reach = _slope(float(ahead[best]), float(sizes[best]))
        step = Step(edit, heads)
        return Attempt(state.hypothesis, step, square, slope, float(shares[best]), reach)

    def _parts(self, classes: list[tuple[Reading, tuple[int, ...]]]) -> Float64:
        found = [self.forward.contributions(reading, self.onto) for reading, _ in classes]
        if len(classes) > 1:
            joined = np.empty_like(found[0])
            for part, (_, heads) in zip(found, classes, strict=True):
                joined[list(heads)] = part[list(heads)]
            return joined[:, self.rows]
        return found[0][:, self.rows]

    def _beside(self, reading: Reading) -> Float64:
        """What is added to the heads' outputs."""
        nothing = np.zeros((*self.forward.x.shape[:2], len(self.onto)))
        found = self.forward.with_beside(reading, nothing).reshape(len(self.rows), -1)
        return np.asarray(found[self.rows] @ self.onto)

    def suspects(self, state: State) -> tuple[int, ...]:
        """Heads by how much of the residual their output projections explain, the most first."""
        out = state.reading.params["out"]
        m, v, _ = out.shape
        seen = (out @ self.onto).reshape(m * v, -1)
        found = np.linalg.lstsq(seen.T, state.residual.T, rcond=1e-6)[0]
        each = np.einsum("mvr,mvs->mrs", found.reshape(m, v, -1), seen.reshape(m, v, -1))
        energy = (each**2).sum((1, 2))
        return tuple(np.argsort(-energy).tolist())


def _is_same_number(one: Step, other: Step) -> bool:
    same = one.edit.fault == other.edit.fault and one.heads == other.heads
    return same and one.edit.dial is not None and other.edit.dial is not None


def _best_heads(gram: Float64, along: Float64) -> NDArray[np.bool_]:
    """The set of heads that leaves least: from none and from all, one head at a time."""
    best, least = np.zeros(len(gram), bool), 0.0
    for start in (np.zeros(len(gram), bool), np.ones(len(gram), bool)):
        chosen = start.copy()
        while True:
            inside = gram[:, chosen].sum(1)
            # What flipping a head in or out would change.
            into = np.diag(gram) + 2 * inside - 2 * along
            out_of = np.diag(gram) - 2 * inside + 2 * along
            gain = np.where(chosen, out_of, into)
            flip = int(np.argmin(gain))
            if gain[flip] >= -1e-15 * max(1e-300, float(np.diag(gram).sum())):
                break
            chosen[flip] = not chosen[flip]
        value = float(gram[np.ix_(chosen, chosen)].sum() - 2 * along[chosen].sum())
        if value < least:
            best, least = chosen, value
    return best


def _slope(product: float, square: float) -> float:
    return product / square if square > 0 and np.isfinite(square) else 0.0


def _finite(square: float) -> float:
    return square if np.isfinite(square) else np.inf
