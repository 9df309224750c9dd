"""How many examples, of which label precision, for a wanted parameter error: Fisher information.

Labels off by independent errors of deviation sigma leave estimates with covariance
sigma^2 (J^T J)^-1. J depends on the layer, which is not known before it is paid for: a random one
of its class stands in, unless a guess is given. Labels in double precision are rounded less than a
fit that computes in doubles loses: what that loses is computed with more digits, and counted.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_count, is_integer, is_number
from mhalearn.data import Examples
from mhalearn.data.inputs import Sampler, sample_inputs
from mhalearn.judge.double_error import computing_deviation
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.judge.spectrum import Spectrum
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.random_layers import random_layer

# Digits of the mantissa, the leading one among them, of labels by their name.
MANTISSAS = {
    "float64": 53,
    "float32": 24,
    "float16": int(ml_dtypes.finfo(np.float16).nmant) + 1,
    "bfloat16": int(ml_dtypes.finfo(ml_dtypes.bfloat16).nmant) + 1,
}
# Examples over the counting limit that are tried, one after the other.
_RATIOS = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
# Parameters are rounded too.
_PARAMETER = 2.0**-54
# Unknowns up to which the spectrum is formed.
_MOST_UNKNOWNS = 4096


@dataclass(frozen=True)
class SamplePlan:
    """What to ask for, and what to expect of it.

    examples: whole sequences of `tokens` tokens, labelled at all rows. calls_of_last_row: of a box
    that answers for the last row alone. ratio: examples over the counting limit. predicted_error:
    the root mean square over heads of the relative errors of Theta and W. Beyond eight times the
    counting limit it is taken to fall as one over the root of their number.
    alternatives: examples that labels of each precision need for the same error.
    """

    examples: int
    tokens: int
    calls_of_last_row: int
    scalars: int
    ratio: float
    counting_limit: float
    labels: str
    wanted_error: float
    predicted_error: float
    alternatives: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(
    architecture: Architecture,
    precision: float,
    *,
    labels: str | int | float = "float64",
    tokens: int = 8,
    inputs: str | Sampler = "gaussian",
    scale: float = 2.0,
    layer: AttentionLayer | None = None,
    seed: int = 0,
) -> SamplePlan:
    """How many examples determine a layer of a class to a relative parameter error `precision`.

    labels: "float64", "float32", "float16", "bfloat16", a number of mantissa bits (an integer), or
    the deviation of noise relative to the labels' root mean square (a number below one). tokens,
    inputs: as of the examples to be drawn. layer: a guess of the layer; otherwise a random one with
    |Theta_i| = scale stands in.
    Cost: a spectrum for each of at most seven numbers of examples.
    Trust: first order in the error, and of the layer that stands in. A prediction of what a fit
    that finds the layer leaves, not that one will find it: that wants some 1.25 to 3 times the
    counting limit, and more where answers are coarse.
    """
    if not (is_number(precision) and precision > 0):
        raise ValueError(f"precision={precision!r}: pass the relative error you want, such as 1e-6")
    if architecture.n_heads is None:
        raise ValueError("architecture: give it n_heads, for what is unknown depends on them")
    if architecture.extras():
        raise ValueError(f"plan knows plain heads, not {', '.join(architecture.extras())}")
    if architecture.count() > _MOST_UNKNOWNS:
        raise ValueError(
            f"architecture has {architecture.count()} unknowns; a plan is made for at most "
            f"{_MOST_UNKNOWNS}: plan for a smaller layer of its kind, at the same ratio"
        )
    tokens = check_count("tokens", tokens, least=2)
    name, share = _read_labels(labels)
    guess = _draw_layer(architecture, scale, seed) if layer is None else layer
    curve = _Curve(guess, architecture, tokens, inputs, seed)
    examples, predicted = curve.least(precision, share)
    others = {
        other: curve.least(precision, _rounding(bits))[0] for other, bits in MANTISSAS.items()
    }
    return SamplePlan(
        examples=examples,
        tokens=tokens,
        calls_of_last_row=examples * tokens,
        scalars=examples * tokens * architecture.outputs,
        ratio=examples / curve.limit,
        counting_limit=curve.limit,
        labels=name,
        wanted_error=float(precision),
        predicted_error=predicted,
        alternatives=others | {name: examples},
    )


def predict_error(
    layer: AttentionLayer, x: Any, labels: str | int | float, architecture: Architecture
) -> float:
    """The root mean square over heads of the relative errors of Theta and W that labels of this
    precision leave an efficient fit to inputs x (n, k, d). Infinite where x leaves any open."""
    spectrum = measure_spectrum(layer, Examples(x, layer(x)), architecture)
    assert spectrum is not None
    sigma = _sigma(layer(x), _read_labels(labels)[1], computing_deviation(layer, x))
    return math.hypot(sigma * _head_error(layer, spectrum), _PARAMETER)


def head_error(found: AttentionLayer, truth: AttentionLayer, order: Any) -> float:
    """The same of a layer that was found, head order[i] being head i of the truth."""
    parts = [
        np.sum((getattr(found, name)[order] - getattr(truth, name)) ** 2)
        / np.sum(getattr(truth, name) ** 2)
        for name in ("theta", "w")
    ]
    return float(np.sqrt(np.mean(parts)))


def _read_labels(labels: str | int | float) -> tuple[str, float]:
    if isinstance(labels, str):
        if labels not in MANTISSAS:
            raise ValueError(
                f"labels={labels!r}: choose one of {', '.join(MANTISSAS)}, or a number"
            )
        return labels, _rounding(MANTISSAS[labels])
    if is_integer(labels):
        if not 1 <= labels <= 53:
            raise ValueError(f"labels={labels}: a mantissa has 1 to 53 bits")
        return f"{labels} bits", _rounding(int(labels))
    if not (is_number(labels) and 0 < labels < 1):
        raise ValueError(f"labels={labels!r}: noise relative to the labels lies between 0 and 1")
    return f"noise {labels:g}", float(labels)


def _rounding(bits: int) -> float:
    return -float(bits)


def _sigma(y: Float64, share: float, computing: float) -> float:
    """Root mean square error of labels, of noise or of rounding to the nearest of -share bits, and
    of computing them here together."""
    if share > 0:
        return math.hypot(share * float(np.sqrt(np.mean(y**2))), computing)
    spacing = 2.0 ** (np.frexp(y)[1] + share)  # of numbers with so many bits, at each label
    return math.hypot(float(np.sqrt(np.mean(spacing**2) / 12)), computing)


def _head_error(layer: AttentionLayer, spectrum: Spectrum) -> float:
    """For labels of deviation one."""
    if spectrum.null_dimension:
        return math.inf
    parts = [
        np.sum(spectrum.deviations.arrays[name] ** 2) / np.sum(getattr(layer, name) ** 2)
        for name in ("theta", "w")
    ]
    return float(np.sqrt(np.mean(parts)))


def _draw_layer(architecture: Architecture, scale: float, seed: int) -> AttentionLayer:
    made = random_layer(
        n_heads=architecture.heads,
        d=architecture.d,
        scale=scale,
        rank=architecture.head_dim,
        out_dim=architecture.out_dim,
        key_vector=architecture.bias,
        out_bias=architecture.bias,
        seed=int(generator(seed, Stream.PLANNING).integers(2**31)),
    )
    if not architecture.causal:
        return made
    return made.replace(causal=True)


class _Curve:
    """Error against examples, for labels of deviation one, measured where it is asked for."""

    def __init__(
        self,
        layer: AttentionLayer,
        architecture: Architecture,
        tokens: int,
        inputs: str | Sampler,
        seed: int,
    ) -> None:
        self._layer, self._architecture = layer, architecture
        self.limit = architecture.counting_limit(tokens)
        count = math.ceil(_RATIOS[-1] * self.limit)
        self._x = sample_inputs(inputs, count, tokens, architecture.d, seed=seed)
        self._y = layer(self._x)
        self._computing = computing_deviation(layer, self._x)
        self._known: dict[int, float] = {}

    def at(self, examples: int) -> float:
        if examples not in self._known:
            part = Examples(self._x[:examples], self._y[:examples])
            spectrum = measure_spectrum(self._layer, part, self._architecture)
            assert spectrum is not None
            self._known[examples] = _head_error(self._layer, spectrum)
        return self._known[examples]

    def least(self, wanted: float, share: float) -> tuple[int, float]:
        """The fewest examples that are enough, among those tried, and the error they leave."""
        sigma = _sigma(self._y, share, self._computing)
        for ratio in _RATIOS:
            examples = math.ceil(ratio * self.limit)
            error = math.hypot(sigma * self.at(examples), _PARAMETER)
            if error <= wanted:
                return examples, error
        if wanted <= _PARAMETER:
            raise ValueError(
                f"precision={wanted}: parameters in double precision are off by {_PARAMETER:.1g}"
            )
        free = math.sqrt(wanted**2 - _PARAMETER**2)
        more = math.ceil(examples * (sigma * self.at(examples) / free) ** 2)
        return more, wanted
