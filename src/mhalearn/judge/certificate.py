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
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta, norm

from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import read_count
from mhalearn.data import Examples, Survey, as_examples, check_sizes
from mhalearn.data.input_information import (
    ENOUGH_EQUATIONS,
    Information,
    measure_information,
)
from mhalearn.data.label_precision import label_precision
from mhalearn.data.span import find_coordinates
from mhalearn.judge.identifiability import Identifiability, assess_identifiability
from mhalearn.judge.open_parameters import OpenParameters, describe_open
from mhalearn.judge.residuals import Residuals, measure_residuals
from mhalearn.judge.rounding_test import run_rounding_test
from mhalearn.judge.sign_symmetry import find_sign_symmetry
from mhalearn.judge.spectrum import Parameters
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.layer import AttentionLayer

# Relative error of an example that the distribution-free statement speaks about. Fixed here, before
# any data are seen, as that statement needs.
THRESHOLD = 1e-6
# Error of a parameter, relative to the size of a head, that the residual may leave room for.
RESOLVED = 1e-2


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
    # Where tokens do not span the features: whether all that they can show is certified, as
    # `recovered` is elsewhere, and what they leave open. Eigenvalues, open directions and the bound
    # on parameters are then those in whitened coordinates of the span.
    recovered_on_span: bool = False
    span: OpenParameters | None = None

    def __repr__(self) -> str:
        """Short: the arrays would fill the screen."""
        return (
            f"Certificate(recovered={self.recovered}, relative_mse={self.relative_mse:.2g}, "
            f"n_examples={self.n_examples}, reason={self.reason!r}, statement={self.statement!r})"
        )

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
            if name not in ("spectrum", "intervals", "parameter_bound", "span")
        }
        plain["span"] = None if self.span is None else self.span.to_dict()
        bound = self.parameter_bound
        plain["parameter_bound"] = bound if bound is not None and math.isfinite(bound) else None
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


def certify(
    layer: Layer,
    X_fresh: ArrayLike | Examples,
    Y_fresh: ArrayLike | None = None,
    delta: float = 0.05,
    *,
    lengths: ArrayLike | None = None,
    learned_from: Examples | None = None,
    architecture: Architecture | None = None,
) -> Certificate:
    """Certify a layer on examples it was not learned from.

    X_fresh may be an Examples, and Y_fresh is then left out. `learned_from`: the inputs that
    determined the layer, for the spectrum and the intervals; without them the fresh inputs stand
    in, and the intervals are scaled to the number of examples the layer says it was learned from.
    architecture: the class of layers it is certified in; without it, as the layer says it was
    learned (`layer.architecture`).
    Examples the layer was learned from are refused; if they are a minority, they are left out. So
    are those that come back in other guises, however many: tokens in another order, signs turned,
    digits rounded. Fresh ones that repeat each other so count as one, and nothing is recovered
    where they, and `learned_from`, hold hardly more equations than there are unknowns.
    Cost: three passes over the examples, one with a layer of four heads; memory of sixteen bytes a
    token and, of examples that are not in memory, of a working set.
    Trust: see `near_hashes` and `measure_information`.
    """
    architecture = _check_asked(layer, delta, learned_from, architecture)
    examples = as_examples(X_fresh, Y_fresh, lengths)
    for given in (examples, learned_from):
        if given is not None:
            _check_fits(layer, given)
    survey = examples.survey()
    check_sizes(survey)
    fresh, n_seen = _unseen(layer, examples, survey)
    examples = examples if fresh is None else fresh
    precision = label_precision(examples)
    residuals = measure_residuals(layer, examples, precision)
    inputs = learned_from
    if inputs is None:
        inputs = examples.sample(examples.working_set_size(architecture), seed=0)
    others = examples if inputs is not examples else None
    coordinates = find_coordinates(inputs, architecture, precision, others=others, whiten=False)
    opened = None
    if coordinates is not None and isinstance(layer, AttentionLayer):
        opened = describe_open(coordinates, layer.n_heads)
        layer, architecture = coordinates.restrict(layer), coordinates.reduced
        examples, inputs = examples.in_span(coordinates), inputs.in_span(coordinates)
        learned_from = None if learned_from is None else inputs
    information = measure_information(examples, architecture, precision.unit)
    certificate = make_certificate(
        layer,
        residuals,
        inputs,
        architecture,
        float(delta),
        n_learned=_learned_count(layer, examples.n) if learned_from is None else None,
        n_seen=n_seen,
        group_of=information.group_of,
    )
    if fresh is None:
        return _without_fresh(certificate).on_span(opened)
    objection = _objection(examples, information, learned_from, architecture, precision.unit)
    if objection is None and certificate.recovered and precision.name != "float64":
        test = run_rounding_test(layer, examples, architecture, residuals)
        certificate = replace(certificate, undetected=test.undetected)
        objection = None if test.passed else test.describe(residuals)
    if objection is not None:
        certificate = certificate.withdrawn(objection)
    return certificate.on_span(opened)


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
) -> Certificate:
    """What residuals on fresh examples say about a layer, and inputs about its parameters.

    inputs: those that determined the layer or, where those were `n_learned` others, some that stand
    for them. n_seen: examples that were left out. group_of: a number for each fresh example, equal
    where one asks nothing that another has not asked; without, all are independent.
    """
    exceeds = residuals.relative > THRESHOLD
    n, exceeding = len(exceeds), int(np.sum(exceeds))
    tail = _tail_bound(exceeding, n, delta)
    n_groups = None
    if group_of is not None:
        n_groups = len(np.unique(group_of))
        # Copies are no more examples. But equal inputs that were drawn again and again are, and a
        # wrong one that is half of them must not count once: the worse of both counts stands.
        of_groups = len(np.unique(group_of[exceeds]))
        tail = max(tail, _tail_bound(of_groups, n_groups, delta))
    of_all = 1.0 if n_learned is None else inputs.n / n_learned
    width = norm.ppf(1 - delta / 2) * residuals.noise_level * math.sqrt(of_all)
    known = assess_identifiability(layer, inputs, architecture, residuals, width)
    closed = known.null_dimension == 0 and known.bound is not None and known.bound <= RESOLVED
    recovered = residuals.exact and closed
    mirrored = None
    if recovered and isinstance(layer, AttentionLayer):
        mirrored = find_sign_symmetry(layer, inputs, residuals)
    return Certificate(
        recovered=recovered and mirrored is None,
        reason=_reason(residuals, known, mirrored, architecture),
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
            f"With confidence {1 - delta:.10g}, at least {math.floor(1e6 * (1 - tail)) / 1e6:.4%} "
            f"of inputs have relative error at most {THRESHOLD:g} ({exceeding} of {n} fresh "
            f"examples{_of_groups(n, n_groups)} exceeded it)."
        ),
        n_groups=n_groups,
        undetected=max(residuals.root_relative, residuals.rounding),
    )


def _tail_bound(exceeding: int, n: int, delta: float) -> float:
    """Clopper & Pearson's upper limit for a share of which `exceeding` of n were seen."""
    return 1.0 if exceeding == n else float(beta.ppf(1 - delta, exceeding + 1, n - exceeding))


def _of_groups(n: int, n_groups: int | None) -> str:
    return "" if n_groups in (None, n) else f", of which {n_groups} ask something new,"


def _check_asked(
    layer: Layer,
    delta: float,
    learned_from: Examples | None,
    architecture: Architecture | None,
) -> Architecture:
    """Refuse what `certify` cannot take; the class of layers, as given or as the layer says."""
    if not isinstance(layer, Layer):
        raise ValueError(f"layer is a {type(layer).__name__}: pass an AttentionLayer")
    if not isinstance(delta, float | int | np.number) or not 0 < delta < 1:
        raise ValueError(f"delta={delta!r}: pass a probability between 0 and 1")
    if not isinstance(learned_from, Examples | None):
        raise ValueError(f"learned_from is a {type(learned_from).__name__}: pass an Examples")
    if architecture is None:
        return layer.architecture
    if not isinstance(architecture, Architecture):
        raise ValueError(
            f"architecture is a {type(architecture).__name__}: pass an Architecture or leave it out"
        )
    architecture = architecture.with_heads(layer.n_heads)
    if not architecture.contains(layer):
        raise ValueError(f"{architecture} does not contain the layer: leave it out")
    return architecture


def _unseen(layer: Layer, examples: Examples, survey: Survey) -> tuple[Examples | None, int]:
    """The examples that the layer was not learned from, None if there is none, and how many are
    left out."""
    same = np.isin(survey.hashes, layer.seen)
    if 2 * same.sum() > examples.n:
        raise ValueError(
            f"{same.sum()} of {examples.n} examples are those the layer was learned from: "
            "certify on fresh ones"
        )
    seen = same | np.isin(survey.near_hashes, layer.seen).any(axis=1)
    if seen.all():
        return None, examples.n
    return (examples.view(~seen) if seen.any() else examples), int(seen.sum())


def _without_fresh(certificate: Certificate) -> Certificate:
    """Of a layer that met nothing but what it was learned from, in other guises."""
    return replace(
        certificate,
        recovered=False,
        reason=(
            f"all {certificate.n_seen} examples are those the layer was learned from, but for the "
            "order of tokens, the sign, or rounding: certify on fresh ones"
        ),
        n_examples=0,
        n_groups=0,
        n_exceeding=0,
        tail_bound=1.0,
        statement="No example is fresh: nothing is certain about other inputs.",
    )


def _objection(
    examples: Examples,
    information: Information,
    learned_from: Examples | None,
    architecture: Architecture,
    unit: float,
) -> str | None:
    """What fresh inputs, and those learned from where they are known, are too few or too alike for;
    None where they are not."""
    sources = [(examples, information)]
    if learned_from is not None:
        sources.append((learned_from, measure_information(learned_from, architecture, unit)))
    equations = max(
        of.equations(architecture, given.counting_limit(architecture)) for given, of in sources
    )
    if equations < ENOUGH_EQUATIONS:
        return (
            f"the inputs hold {equations:.2f} times as many independent equations as unknowns "
            "(mirror images, near copies and repeated tokens ask nothing new): labels that no "
            "layer made could be met as well"
        )
    longest = max(int(given.lengths.max()) for given, _ in sources)
    if longest > 2 and all(of.centrally_symmetric for _, of in sources):
        return (
            "the tokens of every row are symmetric about their mean, as two tokens are, and "
            "opposite attention mirrors it: other heads make the same outputs here"
        )
    return None


def _check_fits(layer: Layer, examples: Examples) -> None:
    if (examples.d, examples.out_dim) != (layer.d, layer.out_dim):
        raise ValueError(
            f"the examples have d = {examples.d} and out_dim = {examples.out_dim}, "
            f"the layer d = {layer.d} and out_dim = {layer.out_dim}"
        )


def _learned_count(layer: Layer, otherwise: int) -> int:
    """How many examples the layer says it was learned from."""
    return read_count(layer.metadata.get("n_examples", "")) or otherwise


def _reason(
    residuals: Residuals,
    known: Identifiability,
    mirrored: tuple[int, ...] | None,
    architecture: Architecture,
) -> str:
    """Why a layer is certified as recovered, or the first thing that stands against it."""
    error, floor = residuals.root_relative, residuals.floor
    null, bound = known.null_dimension, known.bound
    if error > floor:
        return (
            f"the relative residual {error:.2g} is above {floor:.2g}, "
            f"where {residuals.precision} labels are met exactly"
        )
    if not residuals.exact:
        return (
            f"the relative residual {error:.2g} is not that of every part: in an output column or "
            f"in some examples it is above what is left where {residuals.precision} labels are met "
            "exactly"
        )
    if null is None or bound is None:
        return (
            "the residual is at the precision of the labels, but the inputs leave a random change "
            "of the parameters partly unseen: other layers may fit as well"
        )
    if null:
        return (
            f"the residual is at the precision of the labels, but the inputs leave {null} "
            "directions in parameter space open"
        )
    if bound > RESOLVED:
        return (
            f"the residual is at the precision of the {residuals.precision} labels, but leaves a "
            f"parameter room to be off by {bound:.2g} times the size of a head"
        )
    if mirrored is not None:
        return (
            "the residual is at the precision of the labels, but it still is with Theta and W of "
            f"opposite sign in {len(mirrored)} of {architecture.heads} heads: the inputs are too "
            "symmetric to tell"
        )
    among = ""
    if architecture.is_low_rank:
        among = f" with Theta and W of rank {architecture.head_dim}"
    every = "its one head" if architecture.heads == 1 else f"all {architecture.heads} heads"
    return (
        f"the relative residual {error:.2g} is at the precision of the {residuals.precision} "
        f"labels and no other layer nearby{among} meets them: the inputs determine {every}, but "
        "for distant layers, of which only mirrored heads were tried"
    )
