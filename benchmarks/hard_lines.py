"""Layers and inputs that trouble a solver, one line each: what `hard_cases.py` runs through.

A line draws a teacher and its examples from a seed. Heads are 2 to 4 and features 8 to 16, tokens
6 and examples 8 times the counting limit, unless the line says otherwise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mhalearn as mha
from mhalearn.data.inputs import Sampler

RATIO = 8.0
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class HardCase:
    """A teacher, examples of it, and what the learner is told besides the head count."""

    truth: mha.AttentionLayer
    examples: mha.Examples
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def by_function(self) -> bool:
        """With two tokens other layers are the same function."""
        return self.examples.k == 2


@dataclass
class Draw:
    """The random choices of one seed, all from one stream."""

    seed: int

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, 0x4A2D])
        self.m = int(self.rng.integers(2, 5))
        self.d = int(self.rng.choice([8, 12, 16]))

    def layer(self, **changes: Any) -> mha.AttentionLayer:
        settings = {"n_heads": self.m, "d": self.d, "scale": 2.0, "seed": self.seed} | changes
        return mha.random_layer(**settings)

    def gaussian(self, *shape: int) -> Float64:
        return self.rng.standard_normal(shape)

    def case(
        self,
        truth: mha.AttentionLayer,
        inputs: str | Sampler = "boolean",
        k: int = 6,
        lengths: tuple[int, int] | None = None,
        **settings: Any,
    ) -> HardCase:
        """Examples of a teacher, `RATIO` times as many as the learner's unknowns ask for."""
        bias = bool(settings.get("bias", False))
        probe = mha.Examples(np.ones((1, k, truth.d)), np.ones((1, k, truth.out_dim)))
        limit = probe.counting_limit(
            probe.architecture(truth.n_heads, bias=bias, head_dim=settings.get("head_dim"))
        )
        if lengths is not None:
            # Rows say less where there are fewer tokens: counted for the mean length below.
            mean = (lengths[0] + lengths[1]) / 2
            limit *= k / mean
        n = math.ceil(RATIO * limit)
        x = mha.sample_inputs(inputs, n, k, truth.d, seed=self.seed)
        if lengths is None:
            return HardCase(truth, mha.Examples(x, truth(x)), settings)
        each = self.rng.integers(lengths[0], lengths[1] + 1, size=n)
        return HardCase(truth, mha.Examples(x, truth(x, each), each), settings)


def with_theta(layer: mha.AttentionLayer, theta: Float64) -> mha.AttentionLayer:
    """The same layer with other attention matrices, each brought to its old norm."""
    norms = np.linalg.norm(layer.theta, axis=(1, 2), keepdims=True)
    theta = theta * (norms / np.linalg.norm(theta, axis=(1, 2), keepdims=True))
    return mha.AttentionLayer(theta, layer.w)


def near_equal(draw: Draw, distance: float) -> HardCase:
    layer = draw.layer()
    theta = layer.theta.copy()
    step = draw.gaussian(draw.d, draw.d)
    theta[1] = theta[0] + distance * 2.0 * step / np.linalg.norm(step)
    return draw.case(mha.AttentionLayer(theta, layer.w))


def graded(draw: Draw, of_theta: tuple[float, float], of_w: tuple[float, float]) -> HardCase:
    """Norms of heads spread geometrically between the given factors."""
    layer = draw.layer(scale=1.0)
    sizes = [np.geomspace(*ends, draw.m)[:, None, None] for ends in (of_theta, of_w)]
    return draw.case(mha.AttentionLayer(layer.theta * sizes[0], layer.w * sizes[1]))


def low_rank(draw: Draw, rank: int, told: bool) -> HardCase:
    truth = draw.layer(d=16, rank=rank)
    return draw.case(truth, **({"head_dim": rank} if told else {}))


def sparse(draw: Draw) -> HardCase:
    layer = draw.layer()
    kept = draw.rng.random(layer.theta.shape) < 0.2
    kept[:, 0, 0] = True
    return draw.case(with_theta(layer, layer.theta * kept))


def diagonal(draw: Draw) -> HardCase:
    layer = draw.layer()
    return draw.case(with_theta(layer, layer.theta * np.eye(draw.d)))


def symmetric(draw: Draw, sign: float) -> HardCase:
    layer = draw.layer()
    return draw.case(with_theta(layer, layer.theta + sign * layer.theta.transpose(0, 2, 1)))


def commuting(draw: Draw) -> HardCase:
    """All Theta_i and all W_i diagonal in one orthonormal basis."""
    layer = draw.layer()
    basis = np.linalg.qr(draw.gaussian(draw.d, draw.d))[0]
    values = draw.gaussian(2, draw.m, draw.d)
    theta, w = ((basis * each[:, None, :]) @ basis.T for each in values)
    return draw.case(mha.AttentionLayer(with_theta(layer, theta).theta, w))


def one_thin_projection(draw: Draw) -> HardCase:
    layer = draw.layer()
    w = layer.w.copy()
    w[0] = np.outer(draw.gaussian(draw.d), draw.gaussian(draw.d)) / math.sqrt(draw.d)
    return draw.case(mha.AttentionLayer(layer.theta, w))


def uniform(n: int, k: int, d: int, rng: np.random.Generator) -> Float64:
    return rng.uniform(-math.sqrt(3), math.sqrt(3), (n, k, d))


def one_hot_and_noise(n: int, k: int, d: int, rng: np.random.Generator) -> Float64:
    """Unit mean square a feature, as with the other inputs: a spike of sqrt(d) and noise of 0.1."""
    hot = np.eye(d)[rng.integers(0, d, (n, k))] * math.sqrt(d)
    return hot + 0.1 * rng.standard_normal((n, k, d))


def shifted_and_correlated(draw: Draw) -> HardCase:
    """Tokens with mean one in every feature and a covariance of condition number 100."""
    basis = np.linalg.qr(draw.gaussian(draw.d, draw.d))[0]
    root = basis * np.geomspace(0.2, 2.0, draw.d)

    def sampler(n: int, k: int, d: int, rng: np.random.Generator) -> Float64:
        return 1.0 + rng.standard_normal((n, k, d)) @ root.T

    return draw.case(draw.layer(), inputs=sampler)


LINES: dict[str, Callable[[Draw], HardCase]] = {
    "Theta_2 = Theta_1 + .1 G": lambda draw: near_equal(draw, 0.1),
    "Theta_2 = Theta_1 + .01 G": lambda draw: near_equal(draw, 0.01),
    "|W| from 1 to 1e-3": lambda draw: graded(draw, (2.0, 2.0), (1.0, 1e-3)),
    "|Theta| from .3 to 10": lambda draw: graded(draw, (0.3, 10.0), (1.0, 1.0)),
    "scale 30": lambda draw: draw.case(draw.layer(scale=30.0)),
    "scale .2": lambda draw: draw.case(draw.layer(scale=0.2)),
    "rank 1": lambda draw: low_rank(draw, 1, told=False),
    "rank 2": lambda draw: low_rank(draw, 2, told=False),
    "rank 4": lambda draw: low_rank(draw, 4, told=False),
    "rank 1, head_dim=1": lambda draw: low_rank(draw, 1, told=True),
    "rank 2, head_dim=2": lambda draw: low_rank(draw, 2, told=True),
    "rank 4, head_dim=4": lambda draw: low_rank(draw, 4, told=True),
    "k = 2": lambda draw: draw.case(draw.layer(), k=2),
    "k = 32 > d": lambda draw: draw.case(draw.layer(), k=32),
    "output width 1": lambda draw: draw.case(draw.layer(out_dim=1)),
    "output width 3": lambda draw: draw.case(draw.layer(out_dim=3)),
    "output width 2d": lambda draw: draw.case(draw.layer(out_dim=2 * draw.d)),
    "causal": lambda draw: draw.case(draw.layer(causal=True), causal=True),
    "biases": lambda draw: draw.case(draw.layer(key_vector=True, out_bias=True), bias=True),
    "sparse Theta": sparse,
    "diagonal Theta": diagonal,
    "symmetric Theta": lambda draw: symmetric(draw, 1.0),
    "antisymmetric Theta": lambda draw: symmetric(draw, -1.0),
    "commuting heads": commuting,
    "one W of rank one": one_thin_projection,
    "Gaussian inputs": lambda draw: draw.case(draw.layer(), inputs="gaussian"),
    "uniform inputs": lambda draw: draw.case(draw.layer(), inputs=uniform),
    "one-hot plus noise": lambda draw: draw.case(draw.layer(), inputs=one_hot_and_noise),
    "shifted, correlated inputs": shifted_and_correlated,
    "differing lengths": lambda draw: draw.case(draw.layer(), lengths=(2, 6)),
}
