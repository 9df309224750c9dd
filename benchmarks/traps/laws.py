"""Laws that inputs are drawn from: a generator and a shape (n, k, d) to tokens."""

from collections.abc import Callable

import numpy as np

from benchmarks.traps.boxes import Array

Rng = np.random.Generator
Law = Callable[[Rng, tuple[int, int, int]], Array]


def correlated(rng: Rng, shape: tuple[int, int, int]) -> Array:
    """Each token remembers the one before it: AR(1) with coefficient 0.8."""
    x = rng.standard_normal(shape)
    for r in range(1, shape[1]):
        x[:, r] = 0.8 * x[:, r - 1] + 0.6 * x[:, r]
    return x


def common_token(rng: Rng, shape: tuple[int, int, int]) -> Array:
    """The first token is the same in all examples, as a token that begins a text is."""
    x = rng.standard_normal(shape)
    x[:, 0] = np.linspace(-1.0, 1.0, shape[2])
    return x


# The laws that most traps draw from.
USUAL: dict[str, Law] = {
    "boolean": lambda rng, shape: rng.choice([-1.0, 1.0], shape),
    "gaussian": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.uniform(-1.5, 1.5, shape),
    "shifted": lambda rng, shape: rng.standard_normal(shape) + 0.7,
    "heavy tails": lambda rng, shape: np.clip(rng.standard_t(4, shape), -6, 6),
    "ternary": lambda rng, shape: rng.integers(-1, 2, shape).astype(float),
}
UNUSUAL: dict[str, Law] = {
    "cauchy": lambda rng, shape: rng.standard_cauchy(shape),
    "t2": lambda rng, shape: rng.standard_t(2, shape),
    "few values": lambda rng, shape: rng.choice([-1.3, -0.2, 0.5, 1.1], shape),
    "correlated tokens": correlated,
    "a common token": common_token,
}
LAWS = USUAL | UNUSUAL
