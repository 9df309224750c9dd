"""When the phases cannot work: said by name and number, before an hour is spent."""

from typing import Any

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.learners.chen_li.events import certification_stage
from mhalearn.learners.chen_li.input_distribution import recognise_inputs
from mhalearn.run.run import Run

# Rows a body needs, in units of d^2, the unknowns of one head; they are trusted in full.
TRUSTED = 2
_LEAST_STRENGTH = 0.05
_FLAT = 0.05
_LARGEST = 64


class Breakdown(Exception):
    """A phase that cannot work, with its numbers; ends the run with an outcome."""

    def __init__(self, phase: str, reason: str, **numbers: Any) -> None:
        super().__init__(reason)
        self.phase, self.numbers = phase, numbers


def check_feasible(examples: Examples, n_heads: int | None, run: Run) -> None:
    """Say what cannot work before an hour is spent on it."""
    if examples.d > _LARGEST:
        raise Breakdown(
            "phase 2: body",
            f"d = {examples.d}: the body's matrix would have d^4 entries; the phases are for d up "
            f"to {_LARGEST}, newton for more",
            d=examples.d,
        )
    kind, why = recognise_inputs(examples)
    if kind == "other":
        raise Breakdown("inputs", f"neither uniform +-1 nor standard Gaussian: {why}")
    run.emit("inputs", detail=kind)
    check_label_dimension(n_heads or 1, examples.k, examples.out_dim)


def check_label_dimension(n_heads: int, k: int, width: int) -> None:
    """Above the width of the labels the images of m (k - 1) free weights fill their space."""
    crowd = n_heads * (k - 1)
    if crowd > width:
        raise Breakdown(
            "phase 2: certification",
            f"m (k - 1) = {crowd} is above the {width} directions of the labels: every row would "
            "certify; use newton",
            crowd=crowd,
            width=width,
        )


def check_rank(total: Float64, k: int) -> None:
    """Attention vectors show in labels only as far as the sum tells tokens apart."""
    values = np.linalg.svd(total, compute_uv=False)
    rank, needed = int(np.sum(values > _FLAT * values[0])), min(k, *total.shape)
    if rank < needed:
        raise Breakdown(
            "phase 3: refined sum",
            f"the sum of projections is degenerate: {rank} of its singular values are above "
            f"{_FLAT:g} of the largest, {needed} are needed to tell {k} tokens apart",
            rank=rank,
            needed=needed,
        )


def check_strength(phase: str, strength: float) -> None:
    """A sum of projections that explains next to nothing of the labels certifies nothing."""
    if strength < _LEAST_STRENGTH:
        raise Breakdown(
            phase,
            f"it explains {strength:.2g} of the labels: the projections cancel, or the labels are "
            "not an attention layer's",
            strength=strength,
        )


def check_rows(count: int, what: str, d: int, round_: int) -> None:
    needed = TRUSTED * d**2
    if count < needed:
        raise Breakdown(
            certification_stage(round_),
            f"{count} rows {what}, {needed} are needed: more examples, fewer heads, or a better "
            "sum of projections",
            round=round_,
            rows=count,
            needed=needed,
        )
