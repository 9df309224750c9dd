"""Where a residual lies that no fault explains: which heads, rows, sequences, distances."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn.auditing.attended import find_attended
from mhalearn.auditing.forward import Forward
from mhalearn.auditing.reading import Reading

# Heads hold a residual if this share of it lies in their output projections, and these span no
# more than so much of the outputs.
_SHARE, _SPANNED = 0.97, 0.8
# A row or sequence differs if its residual is so many times what rounding leaves, squared, not a
# thousandth of the largest, and so many times that of any which does not.
_CLEAR, _FAINT = 4.0, 1e-3


@dataclass(frozen=True)
class Locus:
    """Where a box differs. Empty: everywhere alike.

    heads, rows, sequences, keys: counted from 0. keys, distances: where attention weights differ,
    if few of them explain most of it; distances are from a row back to a key, negative ahead.
    heads_told: whether output projections tell heads apart; if not, `heads` is empty.
    """

    heads: tuple[int, ...]
    rows: tuple[int, ...]
    sequences: tuple[int, ...]
    n_heads: int
    n_rows: int
    n_sequences: int
    largest_row: int
    padded: bool
    keys: tuple[int, ...] = ()
    distances: tuple[int, ...] = ()
    heads_told: bool = True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        """A clause to follow 'it lies'."""
        parts = []
        if self.heads:
            parts.append("in " + _list("head", self.heads))
        if self.rows:
            parts.append("in " + _list("row", self.rows) + f" of {self.n_rows}")
        if self.sequences:
            parts.append(
                f"in {len(self.sequences)} of {self.n_sequences} sequences "
                f"({_list('sequence', self.sequences)})"
            )
        if self.keys:
            parts.append("in the weights of " + _list("key", self.keys))
        if self.distances:
            parts.append("in the weights of " + _say_distances(self.distances))
        if self.padded:
            parts.append("in sequences with padding alone")
        if not self.heads_told:
            parts = parts or ["in all rows and sequences"]
            parts.append("in which heads cannot be told from their output projections")
        return ", ".join(parts) or "in all heads, rows and sequences"


def find_locus(
    forward: Forward, reading: Reading, residual: Float64, labels: Float64, floor: float
) -> Locus:
    """Where a residual (n, k, e) lies.

    Cost: a least-squares problem with the output projections, for each set of heads that is tried.
    Trust: rows and sequences are measured. Heads are told apart by their output projections, which
    is exact where these have independent rows, and else the smallest set that holds the residual.
    """
    rows = forward.rows
    n, k, _ = residual.shape
    squares = np.where(rows, (residual**2).sum(-1), 0.0)
    sizes = np.where(rows, (labels**2).sum(-1), 0.0)
    by_row = _ratio(squares.sum(0), sizes.sum(0))
    by_sequence = _ratio(squares.sum(1), sizes.sum(1))
    shorter = forward.lengths < k
    padded = False
    if shorter.any() and not shorter.all():
        padded = bool(by_sequence[~shorter].max() <= _CLEAR * floor**2 < by_sequence[shorter].max())
    differing = _differing(by_sequence, floor)
    heads, told = _heads(reading, residual[rows], floor * float(np.sqrt(sizes.sum())))
    there = _differing(by_row, floor)
    given = np.where(rows[..., None], residual, 0.0)
    attended = find_attended(forward, reading, given, heads, there)
    return Locus(
        heads=heads,
        rows=there,
        sequences=() if padded else differing,
        n_heads=reading.n_heads,
        n_rows=k,
        n_sequences=n,
        largest_row=int(np.argmax(by_row)),
        padded=padded,
        keys=attended.keys,
        distances=attended.distances,
        heads_told=told,
    )


def _ratio(squares: Float64, sizes: Float64) -> Float64:
    return np.asarray(squares / np.where(sizes > 0, sizes, 1.0))


def _differing(ratios: Float64, floor: float) -> tuple[int, ...]:
    """Which differ, where others do not; empty where all do, or there is no gap between them."""
    least = max(_CLEAR * floor**2, _FAINT * float(ratios.max(initial=0.0)))
    there: NDArray[np.bool_] = ratios > least
    if there.all() or not there.any() or ratios[there].min() < _CLEAR * ratios[~there].max():
        return ()
    return tuple(np.flatnonzero(there).tolist())


def _heads(reading: Reading, residual: Float64, rounding: float) -> tuple[tuple[int, ...], bool]:
    """The smallest set of heads whose output projections hold the residual, empty for most of them;
    and whether heads can be told: not where projections span nearly all outputs, and would hold any
    residual, or where another set holds it as well.
    """
    out = reading.params["out"]
    m = len(out)
    if m == 1:
        return (), True
    step = max(1, len(residual) // 512)
    sample = residual[::step]
    whole = float(np.sum(sample**2))
    noise = min(0.5 * whole, rounding**2 * len(sample) / max(1, len(residual)))
    if whole == 0:
        return (), True
    chosen: list[int] = []
    while len(chosen) < max(1, m // 2):
        left = []
        for head in range(m):
            if head in chosen:
                left.append(np.inf)
                continue
            basis = _span(out[[*chosen, head]])
            if basis.shape[1] > _SPANNED * out.shape[2]:
                return (), bool(chosen)
            left.append(whole - float(np.sum((sample @ basis) ** 2)))
        best = int(np.argmin(left))
        chosen.append(best)
        held = np.array(left) <= (1 - _SHARE) * whole + noise
        if held.any():
            alone = held.sum() == 1
            return (tuple(sorted(chosen)) if alone else ()), bool(alone)
    return (), True


def _span(out: Float64) -> Float64:
    """An orthonormal basis of what output projections (m, v, e) reach: (e, rank)."""
    left, sizes, _ = np.linalg.svd(out.reshape(-1, out.shape[2]).T, full_matrices=False)
    return np.asarray(left[:, sizes > 1e-9 * sizes.max(initial=1e-300)])


def _say_distances(distances: tuple[int, ...]) -> str:
    """Keys before a row and after it."""
    before = [f"{one}" for one in distances if one > 0]
    ahead = [f"{-one}" for one in distances[::-1] if one < 0]
    parts = [f"{', '.join(before)} before a row"] if before else []
    parts += ["of the row itself"] if 0 in distances else []
    parts += [f"{', '.join(ahead)} after it"] if ahead else []
    return "keys at distance " + " and ".join(parts)


def _list(word: str, numbers: tuple[int, ...]) -> str:
    """Counted from 1, ranges joined."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    said = [f"{a + 1}" if a == b else f"{a + 1} to {b + 1}" for a, b in ranges]
    shown = ", ".join(said[:6]) + (f" and {len(said) - 6} more" if len(said) > 6 else "")
    return f"{word}{'s' if len(numbers) > 1 else ''} {shown}"
