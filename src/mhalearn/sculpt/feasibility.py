"""When the phases cannot work: said by name and number, before an hour is spent."""

from typing import Any

from mhalearn.examples import Examples
from mhalearn.outcome import Trace
from mhalearn.sculpt.inputs_kind import recognise_inputs
from mhalearn.sculpt.telling import certification_stage

# Rows a body needs, in units of d^2, the unknowns of one head; they are trusted in full.
TRUSTED = 2
_LEAST_STRENGTH = 0.05


class Breakdown(Exception):
    """A phase that cannot work, with its numbers; ends the run with an outcome."""

    def __init__(self, phase: str, reason: str, **numbers: Any) -> None:
        super().__init__(reason)
        self.phase, self.numbers = phase, numbers


def check_feasible(examples: Examples, n_heads: int | str, trace: Trace) -> None:
    """Say what cannot work before an hour is spent on it."""
    kind, why = recognise_inputs(examples)
    if kind == "other":
        raise Breakdown("inputs", f"neither uniform +-1 nor standard Gaussian: {why}")
    trace.emit("inputs", detail=kind)
    check_crowd(examples, n_heads if isinstance(n_heads, int) else 1)


def check_crowd(examples: Examples, n_heads: int) -> None:
    """Above the output width the images of m (k - 1) free weights fill the space of labels."""
    crowd = n_heads * (examples.k - 1)
    if crowd > examples.out_dim:
        raise Breakdown(
            "phase 2: certification",
            f"m (k - 1) = {crowd} is above the output width {examples.out_dim}: every row would "
            "certify; use newton",
            crowd=crowd,
            out_dim=examples.out_dim,
        )


def check_strength(phase: str, strength: float) -> None:
    """A sum of projections that explains next to nothing of the labels certifies nothing."""
    if strength < _LEAST_STRENGTH:
        raise Breakdown(
            phase,
            f"its squared norm is {strength:.2g} of the labels': the projections cancel",
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
