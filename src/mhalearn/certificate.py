"""What can be promised about a layer, from examples it has not seen.

Three statements, never mixed. (1) Distribution-free: with confidence 1 - delta, at least a fraction
1 - eps of inputs has relative error at most t (Clopper & Pearson, from the count of exceedances).
(2) Exactness: the residual, recomputed from scratch, is at the precision of the labels, the inputs
leave no direction in parameter space open, and the residual leaves no parameter room to be another
one; all together are `recovered`. (3) Under Gaussian label noise: the covariance of the estimate,
sigma^2 (J^T J)^-1, hence intervals, to first order: near the counting limit they are too narrow.
"""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import beta, norm

from mhalearn._types import Array, Float
from mhalearn.attention import Chunk, attend, compiled, forward, stacked_heads, tangent
from mhalearn.examples import Examples, Survey
from mhalearn.layer import AttentionLayer, Float64
from mhalearn.narrow import is_narrow
from mhalearn.openness import CLOSED, measure_openness
from mhalearn.precision import label_precision
from mhalearn.spectrum import Parameters, Spectrum, measure_spectrum

# Relative error of an example that the distribution-free statement speaks about. Fixed here, before
# any data are seen, as that statement needs.
THRESHOLD = 1e-6
# Error of a parameter, relative to the size of a head, that the residual may leave room for.
RESOLVED = 1e-2
# How much further from exact a single output column and the median example may be.
_PARTS = 10
# The same for the worst example, relative to the terms its labels are sums of. Boxes that compute
# in their labels' precision were seen at 1.2, with logits of some hundred.
_WORST = 2
_DOUBLE = float(np.finfo(np.float64).eps)
# A singular value this far below the largest does not count for the rank.
_RANK = 1e-9
# Attention below this size, against that of logits of order one, is rounding of no attention.
_NO_ATTENTION = 1e-10
# Sizes of tokens and labels whose squares and quotients stay far from overflow.
_SMALLEST, _LARGEST = 1e-60, 1e60


@dataclass(frozen=True)
class Certificate:
    """What fresh examples say about a layer; `statement` and `reason` put it in words."""

    recovered: bool
    reason: str
    relative_mse: float
    floor: float  # root relative squared error at which labels of this precision are met exactly
    label_precision: str
    noise_level: float  # root mean square residual; of a fit to all examples, the noise estimated
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

    def to_dict(self) -> dict[str, Any]:
        """Numbers and words ready for JSON; arrays are summarised."""
        plain = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("spectrum", "intervals", "parameter_bound")
        }
        bound = self.parameter_bound
        plain["parameter_bound"] = bound if bound is not None and math.isfinite(bound) else None
        if self.spectrum is not None:
            plain["smallest_eigenvalue"] = float(self.spectrum[0])
            plain["largest_eigenvalue"] = float(self.spectrum[-1])
        if self.intervals is not None:
            widest = float(np.max(self.intervals.theta)), float(np.max(self.intervals.w))
            names = ("widest_theta_interval", "widest_w_interval")
            plain |= {
                name: value if np.isfinite(value) else None
                for name, value in zip(names, widest, strict=True)
            }
        return plain

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


def certify(
    layer: AttentionLayer,
    X_fresh: ArrayLike | Examples,
    Y_fresh: ArrayLike | None = None,
    delta: float = 0.05,
    *,
    lengths: ArrayLike | None = None,
    learned_from: Examples | None = None,
    head_dim: int | None = None,
) -> Certificate:
    """Certify a layer on examples it was not learned from.

    X_fresh may be an Examples, and Y_fresh is then left out. `learned_from`: the inputs that
    determined the layer, for the spectrum and the intervals; without them the fresh inputs stand
    in, and the intervals are scaled to the number of examples the layer says it was learned from.
    head_dim: the rank all Theta are known to have, where it is less than d (and all W, if heads are
    many: see `narrow.is_narrow`); without it, as the layer says it was learned.
    Examples the layer was learned from are refused; if they are a minority, they are left out.
    """
    if not isinstance(layer, AttentionLayer):
        raise ValueError(f"layer is a {type(layer).__name__}: pass an AttentionLayer")
    if not isinstance(delta, float | int | np.number) or not 0 < delta < 1:
        raise ValueError(f"delta={delta!r}: pass a probability between 0 and 1")
    if not isinstance(learned_from, Examples | None):
        raise ValueError(f"learned_from is a {type(learned_from).__name__}: pass an Examples")
    if head_dim is not None:
        whole = isinstance(head_dim, int | np.integer) and not isinstance(head_dim, bool)
        if not (whole and 1 <= head_dim <= layer.d):
            raise ValueError(f"head_dim={head_dim!r}: pass a rank from 1 to d = {layer.d}")
        if not has_rank(layer, head_dim):
            raise ValueError(
                f"head_dim={head_dim}: the layer has heads of larger rank; leave it out"
            )
    head_dim = _head_dim(layer) if head_dim is None else int(head_dim)
    examples = as_examples(X_fresh, Y_fresh, lengths)
    for given in (examples, learned_from):
        if given is not None:
            _check_fits(layer, given)
    survey = examples.survey()
    check_sizes(survey)
    examples, n_seen = _unseen(layer, examples, survey)
    residuals = measure_residuals(layer, examples)
    delta, n = float(delta), examples.n
    exceeding = int(np.sum(residuals.relative > THRESHOLD))
    tail = 1.0 if exceeding == n else float(beta.ppf(1 - delta, exceeding + 1, n - exceeding))
    enough = examples.plenty(layer.n_heads, layer.out_bias is not None, head_dim)
    inputs = learned_from if learned_from is not None else examples.sample(enough, seed=0)
    spectrum = measure_spectrum(layer, inputs, head_dim)
    learned = learned_from.n if learned_from is not None else _learned_count(layer, n)
    intervals = bound = null = None
    # Labels that happen to be met to the last bit say no more than their rounding allows.
    error = residuals.label_norm * max(residuals.root_relative, residuals.unit / 4)
    if spectrum is None and residuals.exact:
        openness = measure_openness(layer, inputs, head_dim)
        null = 0 if openness.unseen < CLOSED else None
        bound = openness.room * error * math.sqrt(openness.n_examples / n)
    elif spectrum is not None:
        null = spectrum.null_dimension
        bound = _parameter_bound(layer, spectrum, error * math.sqrt(inputs.n / n))
        width = norm.ppf(1 - delta / 2) * residuals.noise_level * np.sqrt(inputs.n / learned)
        intervals = _scaled(spectrum.deviations, width)
    return Certificate(
        recovered=residuals.exact and null == 0 and bound is not None and bound <= RESOLVED,
        reason=_reason(residuals, null, bound, layer, head_dim),
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
        spectrum=None if spectrum is None else spectrum.theta,
        null_dimension=null,
        parameter_bound=bound,
        intervals=intervals,
        statement=(
            f"With confidence {1 - delta:.10g}, at least {math.floor(1e6 * (1 - tail)) / 1e6:.4%} "
            f"of inputs have relative error at most {THRESHOLD:g} ({exceeding} of {n} fresh "
            "examples exceeded it)."
        ),
    )


def refitted(
    certificate: Certificate,
    layer: AttentionLayer,
    examples: Examples,
    head_dim: int | None,
    part: Examples | None = None,
) -> Certificate:
    """The certificate of a layer that was fitted to all examples after it was certified.

    part: random ones of them, in memory, whose inputs stand for all.

    The noise, sqrt(|residual|^2 / (scalars - unknowns)), and the intervals, both to first order,
    are those of that fit. No example is left to vouch for fresh inputs, so the tail is given up.
    """
    part = examples if part is None else part
    spectrum = measure_spectrum(layer, part, head_dim)
    null = 0 if spectrum is None else spectrum.null_dimension
    scalars = examples.rows * layer.out_dim
    share = 1 - (_count_unknowns(layer, head_dim) - null) / scalars
    noise = measure_residuals(layer, examples).noise_level / math.sqrt(share)
    intervals = None
    if spectrum is not None:
        width = norm.ppf(1 - certificate.delta / 2) * noise * math.sqrt(part.rows / examples.rows)
        intervals = _scaled(spectrum.deviations, width)
    return replace(
        certificate,
        noise_level=noise,
        tail_bound=1.0,
        spectrum=None if spectrum is None else spectrum.theta,
        null_dimension=None if spectrum is None else spectrum.null_dimension,
        intervals=intervals,
        statement=(
            f"Noise of level {noise:.3g} is estimated from the residual, and with it, to first "
            f"order, an interval of confidence {1 - certificate.delta:.10g} for each parameter. "
            "The layer was fitted to all examples: nothing is promised about fresh inputs."
        ),
        refitted=True,
    )


def as_examples(
    x: ArrayLike | Examples, y: ArrayLike | None, lengths: ArrayLike | None = None
) -> Examples:
    """X and Y, or an Examples in place of both."""
    if isinstance(x, Examples):
        if y is not None or lengths is not None:
            raise ValueError("pass either an Examples or X and Y, not both")
        examples = x
    elif y is None:
        raise ValueError("Y is missing: pass X and Y, or an Examples")
    else:
        examples = Examples(x, y, lengths)
    return examples


def check_sizes(survey: Survey) -> None:
    """Refuse entries that double precision cannot square."""
    for name, size in (("X", survey.largest_x), ("Y", survey.largest_y)):
        if size > 0 and not _SMALLEST < size < _LARGEST:
            raise ValueError(f"the largest entry of {name} is {size:.2g}: rescale it to near one")


@dataclass(frozen=True)
class Residuals:
    """The difference between a layer and labels, recomputed from scratch in float64."""

    squared: Float64  # of each example: |F - Y|^2
    relative: Float64  # of each example: |F - Y| / |Y|
    root_relative: float  # of all: |F - Y| / |Y|
    label_norm: float  # |Y|, or one where all labels vanish
    noise_level: float
    precision: str
    unit: float
    floor: float
    exact: bool  # at the floor: as a whole, in every output column, and in every example


def measure_residuals(layer: AttentionLayer, examples: Examples) -> Residuals:
    """Walk over the examples in chunks; memory of one chunk."""
    wrong: list[Float64] = []
    energy: list[Float64] = []
    own: list[Float64] = []
    rows, columns = 0, np.zeros((3, examples.out_dim))
    for x, y, lengths in examples.chunks(1024):
        for part, (each, of_columns) in layer.over_chunks(_residual_sums, x, lengths, y):
            count = part.stop - part.start
            for sums, found in zip((wrong, energy, own), each, strict=True):
                sums.append(found[:count])
            columns += of_columns
        rows += int(lengths.sum())
    squared, labels, terms_of = np.concatenate(wrong), np.concatenate(energy), np.concatenate(own)
    precision = label_precision(examples)
    # Where labels vanish, the error stands for itself.
    relative = np.sqrt(squared / np.where(labels > 0, labels, 1.0))
    whole = float(labels.sum()) or 1.0
    root_relative = float(np.sqrt(squared.sum() / whole))
    # A few huge labels must not hide what is wrong with all others, nor many good ones a few bad. A
    # column in which heads cancel holds nothing but their rounding, and where they were merged, so
    # did the sum of doubles.
    of_parts = _PARTS * precision.floor
    allowed = of_parts**2 * columns[1] + precision.unit**2 * columns[2] + _DOUBLE**2 * whole
    of_terms = np.sqrt(squared / np.where(terms_of > 0, terms_of, 1.0))
    exact = (
        root_relative <= precision.floor
        and bool(np.all(columns[0] <= allowed))
        and float(np.median(relative)) <= of_parts
        and float(np.max(of_terms)) <= _WORST * precision.floor
    )
    return Residuals(
        squared=squared,
        relative=relative,
        root_relative=root_relative,
        label_norm=math.sqrt(whole),
        noise_level=float(np.sqrt(squared.sum() / (rows * examples.out_dim))),
        precision=precision.name,
        unit=precision.unit,
        floor=precision.floor,
        exact=exact,
    )


@compiled
def _residual_sums(
    theta: Float[Array, "m q d"], w: Float[Array, "p e"], chunk: Chunk
) -> tuple[Float[Array, "3 b"], Float[Array, "3 e"]]:
    """Squared residuals, labels, and sizes of the terms that labels are sums of: summed over each
    example, and over each output column."""
    m, _, d = theta.shape
    at = tangent(attend(theta, chunk).p, stacked_heads(w, m, d), chunk)
    sizes = jnp.einsum("brmj,bmje->bre", at.p, jnp.abs(at.values))
    sizes += jnp.abs(chunk.constant * chunk.weight[..., None]) @ jnp.abs(w[m * d :])
    parts = jnp.stack([forward(theta, w, chunk) - chunk.labels, chunk.labels, sizes]) ** 2
    return jnp.sum(parts, axis=(2, 3)), jnp.sum(parts, axis=(1, 2))


def _unseen(layer: AttentionLayer, examples: Examples, survey: Survey) -> tuple[Examples, int]:
    seen = np.isin(survey.hashes, layer.seen)
    n_seen = int(seen.sum())
    if 2 * n_seen > examples.n:
        raise ValueError(
            f"{n_seen} of {examples.n} examples are those the layer was learned from: "
            "certify on fresh ones"
        )
    return (examples.view(~seen) if n_seen else examples), n_seen


def _check_fits(layer: AttentionLayer, examples: Examples) -> None:
    if (examples.d, examples.out_dim) != (layer.d, layer.out_dim):
        raise ValueError(
            f"the examples have d = {examples.d} and out_dim = {examples.out_dim}, "
            f"the layer d = {layer.d} and out_dim = {layer.out_dim}"
        )


def _count_unknowns(layer: AttentionLayer, head_dim: int | None) -> int:
    """Free parameters; a key vector of a head of rank h lies in that head's h dimensions."""
    h = layer.d if head_dim is None else head_dim
    of_vectors = 0 if layer.key_vector is None else layer.n_heads * h
    of_bias = 0 if layer.out_bias is None else layer.out_dim
    return layer.n_heads * h * (2 * layer.d - h) + of_vectors + layer.w.size + of_bias


def _learned_count(layer: AttentionLayer, otherwise: int) -> int:
    """How many examples the layer says it was learned from."""
    said = layer.metadata.get("n_examples", "")
    return int(said) if said.isdecimal() and int(said) > 0 else otherwise


def _head_dim(layer: AttentionLayer) -> int | None:
    """The rank of heads that the layer says it was learned with."""
    said = layer.metadata.get("head_dim", "")
    rank = int(said) if said.isdecimal() else 0
    return rank if 0 < rank <= layer.d and has_rank(layer, rank) else None


def has_rank(layer: AttentionLayer, head_dim: int) -> bool:
    """Whether all Theta, with their key vectors, have at most this rank, up to rounding."""
    values = np.linalg.svd(layer.query_theta, compute_uv=False)
    return bool(np.all(values[:, head_dim:] <= _RANK * values[:, :1]))


def _parameter_bound(layer: AttentionLayer, spectrum: Spectrum, residual: float) -> float:
    """How far the residual lets the worst parameter be from one that fits exactly.

    To first order |error of p| <= |residual| sqrt([(J^T J)^-1]_pp), by Cauchy and Schwarz. Relative
    to the root mean square norm of the heads' Theta (where there is none, that of logits of order
    one) or W.
    """
    deviations, token = spectrum.deviations, spectrum.token_size
    theta = float(np.sqrt(np.mean(np.sum(layer.theta**2, axis=(1, 2)))))
    if theta * token**2 <= _NO_ATTENTION:
        theta = token**-2
    w = float(np.sqrt(np.mean(np.sum(layer.w**2, axis=(1, 2))))) or 1.0
    pairs = [(deviations.theta, theta), (deviations.w, w)]
    if deviations.key_vector is not None:
        pairs.append((deviations.key_vector, theta * token))
    if deviations.out_bias is not None:
        pairs.append((deviations.out_bias, w * token))
    widest = max(float(np.max(deviation)) / size for deviation, size in pairs)
    return residual * widest if math.isfinite(widest) else math.inf


def _reason(
    residuals: Residuals,
    null: int | None,
    bound: float | None,
    layer: AttentionLayer,
    head_dim: int | None,
) -> str:
    error, floor = residuals.root_relative, residuals.floor
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
    among = "" if head_dim is None else f", among layers with Theta of rank {head_dim}"
    if is_narrow(layer.n_heads, layer.d, head_dim):
        among = f", among layers with Theta and W of rank {head_dim}"
    return (
        f"the relative residual {error:.2g} is at the precision of the {residuals.precision} "
        f"labels and the inputs determine all {layer.n_heads} heads{among}"
    )


def _scaled(deviations: Parameters, width: float) -> Parameters:
    """Half-widths; a parameter that is not determined has none, however small the noise."""

    def half_widths(deviation: Float64) -> Float64:
        known = np.isfinite(deviation)
        return np.where(known, np.where(known, deviation, 0.0) * width, np.inf)

    return Parameters(
        half_widths(deviations.theta),
        half_widths(deviations.w),
        None if deviations.key_vector is None else half_widths(deviations.key_vector),
        None if deviations.out_bias is None else half_widths(deviations.out_bias),
    )
