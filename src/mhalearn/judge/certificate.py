"""What can be promised about a layer, from examples it has not seen.

Three statements, never mixed. (1) Distribution-free: with confidence 1 - delta, at least a fraction
1 - eps of inputs has relative error at most t (Clopper & Pearson, from the count of exceedances).
(2) Exactness: the residual, recomputed from scratch, is at the precision of the labels, the inputs
leave no direction in parameter space open, the residual leaves no parameter room to be another one,
and no mirrored heads explain the labels; all together are `recovered`. (3) Under Gaussian label
noise: the covariance of the estimate, sigma^2 (J^T J)^-1, hence intervals, to first order: near the
counting limit they are too narrow.
"""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.judge.identifiability import RESOLVED, Identifiability, assess_identifiability
from mhalearn.judge.open_parameters import OpenParameters
from mhalearn.judge.randomised_rank_test import NULL_TOLERANCE
from mhalearn.judge.residuals import Residuals
from mhalearn.judge.sign_symmetry import find_sign_symmetry
from mhalearn.judge.spectrum import Parameters
from mhalearn.judge.tail_bound import bound_tail, keep_errors, say_share
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.block.design import BlockDesign
from mhalearn.layer.layer import AttentionLayer
from mhalearn.run.run import Run
from mhalearn.run.watch import Watch

# Relative error of an example that the distribution-free statement speaks about. Fixed here, before
# any data are seen, as that statement needs.
THRESHOLD = 1e-6


@dataclass(frozen=True)
class Certificate:
    """What fresh examples say about a layer; `statement` and `reason` put it in words."""

    recovered: bool
    reason: str
    relative_mse: float
    floor: float  # root relative squared error at which labels of this precision are met exactly
    label_precision: str
    # Root mean square residual; where noise was fitted, as `noise` estimates it; None where what is
    # left is not known to be noise.
    noise_level: float | None
    n_examples: int
    n_seen: int  # examples left out because the layer was learned from them
    delta: float
    threshold: float
    n_exceeding: int
    tail_bound: float  # eps
    spectrum: Float64 | None  # None where the layer is too large
    null_dimension: int | None
    parameter_bound: float | None  # error of the worst parameter that the residual leaves room for
    intervals: Parameters | None  # half-widths at confidence 1 - delta, each on its own
    statement: str
    refitted: bool = False  # fitted to all examples after it was certified
    n_groups: int | None = None  # examples that ask something new; None where all were taken to
    # The largest smooth deviation from a layer, relative to the labels, that would not be seen.
    undetected: float | None = None
    is_unfinished: bool = False  # the residual is exact, but time was up before the rank was known
    # Where tokens do not span the features: whether all that they can show is certified, as
    # `recovered` is elsewhere, and what they leave open. Eigenvalues, open directions and the bound
    # on parameters are then those in whitened coordinates of the span.
    recovered_on_span: bool = False
    span: OpenParameters | None = None
    # Relative errors of the fresh examples, ascending; of many, quantiles at even distances.
    errors: Float64 | None = None

    def __repr__(self) -> str:
        """Short: the arrays would fill the screen."""
        return (
            f"Certificate(recovered={self.recovered}, relative_mse={self.relative_mse:.2g}, "
            f"n_examples={self.n_examples}, reason={self.reason!r}, statement={self.statement!r})"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: the sentences, and the numbers folded."""
        from mhalearn.judge.notebook import describe_certificate  # which knows certificates

        return describe_certificate(self)

    @property
    def claims(self) -> bool:
        """Whether it certifies exactness: of all parameters, or on the span."""
        return self.recovered or self.recovered_on_span

    @property
    def span_dimension(self) -> int | None:
        """Dimensions that tokens span; None where it is all of them."""
        return None if self.span is None else self.span.dimension

    def withdrawn(self, reason: str) -> "Certificate":
        """Of a layer that other examples speak against: not recovered, whatever these say."""
        if not self.claims:
            return self
        return replace(self, recovered=False, recovered_on_span=False, reason=reason)

    def on_span(self, opened: OpenParameters | None) -> "Certificate":
        """A certificate made in coordinates of the span: what it certifies, it does there. None:
        the user's."""
        if opened is None:
            return self
        said = opened.say_recovered if self.recovered else opened.say_considered
        return replace(
            self,
            recovered=False,
            recovered_on_span=self.recovered,
            reason=said(self.reason),
            intervals=None,
            span=opened,
        )

    def without_noise(self) -> "Certificate":
        """Of a layer that leaves more than noise: no noise level, and no intervals."""
        return replace(self, noise_level=None, intervals=None)

    def to_dict(self) -> dict[str, Any]:
        """Numbers and words ready for JSON; arrays are summarised."""
        plain = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("spectrum", "intervals", "parameter_bound", "span", "errors")
        }
        plain["span"] = None if self.span is None else self.span.to_dict()
        bound = self.parameter_bound
        plain["parameter_bound"] = bound if bound is not None and math.isfinite(bound) else None
        if self.errors is not None:
            plain["median_error"] = float(np.median(self.errors))
            plain["largest_error"] = float(self.errors[-1])
        if self.spectrum is not None:
            plain["smallest_eigenvalue"] = float(self.spectrum[0])
            plain["largest_eigenvalue"] = float(self.spectrum[-1])
        if self.intervals is not None:
            for name, array in self.intervals.arrays.items():
                widest = float(np.max(array))
                plain[f"widest_{name}_interval"] = widest if math.isfinite(widest) else None
        return plain

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


def make_certificate(
    layer: Layer,
    residuals: Residuals,
    inputs: Examples,
    architecture: Architecture,
    delta: float = 0.05,
    *,
    n_learned: int | None = None,
    n_seen: int = 0,
    group_of: NDArray[np.int64] | None = None,
    run: Run | None = None,
) -> Certificate:
    """What residuals on fresh examples say about a layer, and inputs about its parameters.

    inputs: those that determined the layer or, where those were `n_learned` others, some that stand
    for them. n_seen: examples that were left out. group_of: a number for each fresh example, equal
    where one asks nothing that another has not asked; without, all are independent. run: whose
    listeners hear of progress, and whose clock ends what is not done in time.
    """
    exceeds = residuals.relative > THRESHOLD
    n, exceeding = len(exceeds), int(np.sum(exceeds))
    tail = bound_tail(exceeding, n, delta)
    n_groups = None
    if group_of is not None:
        n_groups = len(np.unique(group_of))
        # Copies are no more examples. But equal inputs that were drawn again and again are, and a
        # wrong one that is half of them must not count once: the worse of both counts stands.
        of_groups = len(np.unique(group_of[exceeds]))
        tail = max(tail, bound_tail(of_groups, n_groups, delta))
    of_all = 1.0 if n_learned is None else inputs.n / n_learned
    width = norm.ppf(1 - delta / 2) * residuals.noise_level * math.sqrt(of_all)
    watch = None if run is None else Watch(run, "identifiability")
    known = assess_identifiability(layer, inputs, architecture, residuals, width, watch)
    closed = known.null_dimension == 0 and known.bound is not None and known.bound <= RESOLVED
    recovered = residuals.exact and closed
    mirrored = None
    if recovered and isinstance(layer, AttentionLayer):
        mirrored = find_sign_symmetry(layer, inputs, residuals)
    return Certificate(
        recovered=recovered and mirrored is None,
        reason=give_reason(
            residuals, known, mirrored, architecture, isinstance(layer, AttentionLayer)
        ),
        relative_mse=residuals.root_relative**2,
        floor=residuals.floor,
        label_precision=residuals.precision,
        noise_level=residuals.noise_level,
        n_examples=n,
        n_seen=n_seen,
        delta=delta,
        threshold=THRESHOLD,
        n_exceeding=exceeding,
        tail_bound=tail,
        spectrum=known.spectrum,
        null_dimension=known.null_dimension,
        parameter_bound=known.bound,
        intervals=known.intervals,
        statement=(
            f"With confidence {1 - delta:.10g}, at least {say_share(tail)} of inputs have relative "
            f"error at most {THRESHOLD:g} ({exceeding} of {n} fresh "
            f"examples{_of_groups(n, n_groups)} exceeded it)."
        ),
        n_groups=n_groups,
        undetected=max(residuals.root_relative, residuals.rounding),
        is_unfinished=residuals.exact and known.is_unfinished,
        errors=keep_errors(residuals.relative),
    )


def _of_groups(n: int, n_groups: int | None) -> str:
    return "" if n_groups in (None, n) else f", of which {n_groups} ask something new,"


def give_reason(
    residuals: Residuals,
    known: Identifiability,
    mirrored: tuple[int, ...] | None,
    architecture: Architecture,
    mirrors: bool = True,
) -> str:
    """Why a layer is certified as recovered, or the first thing that stands against it.

    mirrored: heads whose signs can be turned together without a change of the labels, if any.
    mirrors: such heads were looked for, which is done of softmax heads alone.
    """
    error, floor, labels = residuals.root_relative, residuals.floor, residuals.precision
    null, bound = known.null_dimension, known.bound
    if error > floor:
        return (
            f"the relative residual {error:.2g} is above {floor:.2g}, the largest of an exact fit "
            f"to {labels} labels"
        )
    if not residuals.exact:
        return (
            f"the relative residual {error:.2g} is at the precision of the {labels} labels on the "
            "whole, but not in every part: an output column, an example or a row is off by more "
            "than rounding"
        )
    exact = f"the relative residual {error:.2g} is at the precision of the {labels} labels"
    if known.is_unfinished:
        return (
            f"{exact}, but the time limit came before the rank of the Jacobian was known: other "
            "layers may fit as well; raise max_seconds"
        )
    if null is None or bound is None:
        seen = ""
        if known.null_component is not None:
            seen = (
                " (solved for from the outputs it changes, a random change of the parameters comes "
                f"out off by {known.null_component:.1g} of its size; at full rank by less than "
                f"{NULL_TOLERANCE:.0e})"
            )
        return (
            f"{exact}, but a randomised test does not show the Jacobian to have full rank{seen}: "
            "other layers may fit as well; give more examples, or inputs that vary more"
        )
    if null:
        return (
            f"{exact}, but the Jacobian has a null space of dimension {null}: other layers fit as "
            "well; give more examples, or inputs that vary more"
        )
    if bound > RESOLVED:
        return (
            f"{exact}, which still leaves a parameter uncertain by {bound:.2g} times the norm of a "
            f"head (at most {RESOLVED:g} counts as determined): give more examples or finer labels"
        )
    if mirrored is not None:
        return (
            f"{exact}, and stays there with Theta and W of opposite sign in {len(mirrored)} of "
            f"{architecture.heads} heads: the inputs are too symmetric to tell the two layers apart"
        )
    among = ""
    if architecture.is_low_rank:
        among = f" with Theta and W of rank {architecture.head_dim}"
    tested = "only those with heads of opposite sign were" if mirrors else "none was"
    rank = "the Jacobian has full rank"
    if known.null_component is not None:
        rank += " by a randomised test"
    return (
        f"{exact} and {rank}: no other layer nearby{among} fits, so the examples determine "
        f"{_every_part(architecture)}; of distant layers {tested} tested"
    )


def _every_part(architecture: Architecture) -> str:
    """Heads and, of a block, neurons."""
    heads, design = architecture.heads, architecture.attention
    said = {1: "its one head", 2: "both heads"}.get(heads, f"all {heads} heads")
    if not isinstance(design, BlockDesign):
        return said
    return f"{said} and {design.hidden} neuron{'s' * (design.hidden != 1)}"
