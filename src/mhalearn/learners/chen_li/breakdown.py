"""When the phases cannot work: said by name and number, before an hour is spent."""

from typing import Any

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.learners.options import Constants


class Breakdown(Exception):
    """A phase that cannot work, with its numbers; ends the run with an outcome."""

    def __init__(self, phase: str, reason: str, **numbers: Any) -> None:
        super().__init__(reason)
        self.phase, self.numbers = phase, numbers


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


def check_rank(total: Float64, k: int, constants: Constants) -> None:
    """Attention vectors show in labels only as far as the sum tells tokens apart."""
    values, flat = np.linalg.svd(total, compute_uv=False), constants.flat
    rank, needed = int(np.sum(values > flat * values[0])), min(k, *total.shape)
    if rank < needed:
        raise Breakdown(
            "phase 3: refined sum",
            f"the sum of projections is degenerate: {rank} of its singular values are above "
            f"{flat:g} of the largest, {needed} are needed to tell {k} tokens apart",
            rank=rank,
            needed=needed,
        )


def check_strength(phase: str, strength: float, constants: Constants) -> None:
    """A sum of projections that explains next to nothing of the labels certifies nothing."""
    if strength < constants.least_strength:
        raise Breakdown(
            phase,
            f"it explains {strength:.2g} of the labels: the projections cancel, or the labels are "
            "not an attention layer's",
            strength=strength,
        )


def check_rows(count: int, what: str, d: int, round_: int, constants: Constants) -> None:
    needed = constants.trusted_rows * d**2
    if count < needed:
        raise Breakdown(
            "phase 4: certification" if round_ else "phase 2: certification",
            f"{count} rows {what}, {needed} are needed: more examples, fewer heads, or a better "
            "sum of projections",
            round=round_,
            rows=count,
            needed=needed,
        )
