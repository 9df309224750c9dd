"""Where a residual lies that no fault explains: which heads, rows, sequences, distances."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn.auditing.forward import Forward
from mhalearn.auditing.reading import Reading

# Heads hold a residual if this share of it lies in their output projections.
_SHARE = 0.97
# A row or sequence differs if its residual is so many times what rounding leaves, squared, and not
# a thousandth of the largest.
_CLEAR, _FAINT = 4.0, 1e-3


@dataclass(frozen=True)
class Locus:
    """Where a box differs. Empty: everywhere alike.

    heads, rows, sequences, distances: counted from 0; lost_distances: those whose tokens are given
    weights that differ from the claim's by more than half, of those that are.
    """

    heads: tuple[int, ...]
    rows: tuple[int, ...]
    sequences: tuple[int, ...]
    n_heads: int
    n_rows: int
    n_sequences: int
    largest_row: int
    padded: bool

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
        if self.padded:
            parts.append("in sequences with padding alone")
        if not parts:
            return "in all heads, rows and sequences"
        return ", ".join(parts)


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
    return Locus(
        heads=_heads(reading, residual[rows], floor * float(np.sqrt(sizes.sum()))),
        rows=_differing(by_row, floor),
        sequences=() if padded else differing,
        n_heads=reading.n_heads,
        n_rows=k,
        n_sequences=n,
        largest_row=int(np.argmax(by_row)),
        padded=padded,
    )


def _ratio(squares: Float64, sizes: Float64) -> Float64:
    return np.asarray(squares / np.where(sizes > 0, sizes, 1.0))


def _differing(ratios: Float64, floor: float) -> tuple[int, ...]:
    """Which differ, where others do not; empty where all do."""
    least = max(_CLEAR * floor**2, _FAINT * float(ratios.max(initial=0.0)))
    there: NDArray[np.bool_] = ratios > least
    return () if there.all() or not there.any() else tuple(np.flatnonzero(there).tolist())


def _heads(reading: Reading, residual: Float64, rounding: float) -> tuple[int, ...]:
    """The smallest set of heads whose output projections hold the residual; empty for all."""
    out = reading.params["out"]
    m = len(out)
    if m == 1:
        return ()
    step = max(1, len(residual) // 512)
    sample = residual[::step]
    whole = float(np.sum(sample**2))
    noise = min(0.5 * whole, rounding**2 * len(sample) / max(1, len(residual)))
    if whole == 0:
        return ()
    chosen: list[int] = []
    while len(chosen) < max(1, m // 2):
        left = []
        for head in range(m):
            if head in chosen:
                left.append(np.inf)
                continue
            basis = np.linalg.qr(out[[*chosen, head]].reshape(-1, out.shape[2]).T)[0]
            left.append(whole - float(np.sum((sample @ basis) ** 2)))
        best = int(np.argmin(left))
        chosen.append(best)
        if left[best] <= (1 - _SHARE) * whole + noise:
            return tuple(sorted(chosen))
    return ()


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
