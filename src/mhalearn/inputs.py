"""Input distributions: uniform +-1, standard Gaussian, or any sampler.

Inputs come in blocks, each with a random stream of its own, so that block i can be drawn again
without the blocks before it: `sample_inputs` and examples drawn on demand see the same inputs.
"""

import enum
import numbers
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn.layer import check_array

Sampler = Callable[[int, int, int, np.random.Generator], ArrayLike]

# Entries of a block of inputs (32 MiB of doubles), and the most examples in one.
_BLOCK_ENTRIES = 2**22
_BLOCK_EXAMPLES = 4096


class Stream(enum.IntEnum):
    """What random numbers are for. Streams of one seed are independent of each other."""

    INPUTS = 1
    TEACHER = 2
    NOISE = 3
    SECRET = 4


def generator(seed: int, stream: Stream, *place: int) -> np.random.Generator:
    """The random generator of a seed for one purpose, and one place in it (a block, say)."""
    seed = check_count("seed", seed, least=0)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(stream), *place)))


def sample_inputs(kind: str | Sampler, n: int, k: int, d: int, seed: int = 0) -> NDArray[Any]:
    """Draw n examples of k tokens with d features.

    kind: "boolean" (uniform +-1, int8), "gaussian" (standard normal, float64), or a sampler called
    as `sampler(n, k, d, rng)`, once a block, that returns an array (n, k, d).
    """
    check_kind(kind)
    n, k, d = check_shape(n, k, d)
    size = block_size(k, d)
    blocks = [
        draw_block(kind, index, min(size, n - start), k, d, seed)
        for index, start in enumerate(range(0, n, size))
    ]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def block_size(k: int, d: int) -> int:
    """Examples in a block: a function of the example's shape only, so that blocks never shift."""
    return max(1, min(_BLOCK_EXAMPLES, _BLOCK_ENTRIES // (k * d)))


def draw_block(kind: str | Sampler, index: int, n: int, k: int, d: int, seed: int) -> NDArray[Any]:
    """The first n examples of block `index`."""
    return draw(kind, n, k, d, generator(seed, Stream.INPUTS, index))


def draw(kind: str | Sampler, n: int, k: int, d: int, rng: np.random.Generator) -> NDArray[Any]:
    if not callable(kind):
        return _KINDS[kind](n, k, d, rng)
    drawn = check_array("the sampler's X", kind(n, k, d, rng), 3)
    if drawn.shape != (n, k, d):
        raise ValueError(f"the sampler returned shape {drawn.shape}: expected {(n, k, d)}")
    return drawn


def _boolean(n: int, k: int, d: int, rng: np.random.Generator) -> NDArray[np.int8]:
    return 2 * rng.integers(0, 2, (n, k, d), dtype=np.int8) - np.int8(1)


def _gaussian(n: int, k: int, d: int, rng: np.random.Generator) -> NDArray[np.float64]:
    return rng.standard_normal((n, k, d))


_KINDS: dict[str, Callable[[int, int, int, np.random.Generator], NDArray[Any]]] = {
    "boolean": _boolean,
    "gaussian": _gaussian,
}


def check_kind(kind: str | Sampler) -> None:
    if not callable(kind) and kind not in _KINDS:
        known = ", ".join(map(repr, _KINDS))
        raise ValueError(f"inputs {kind!r} are unknown: choose {known}, or pass a sampler")


def check_shape(n: int, k: int, d: int) -> tuple[int, int, int]:
    n, k, d = check_count("n", n), check_count("k", k), check_count("d", d)
    if k < 2:
        raise ValueError(f"k={k}: attention over one token is constant; take k >= 2")
    return n, k, d


def is_number(value: Any) -> bool:
    """Whether a value can be compared with numbers: no text, no array, not True or False."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_count(name: str, value: int, *, least: int = 1) -> int:
    """An int of at least `least`, or a ValueError that says so."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: pass an integer of at least {least}")
    if count < least:
        raise ValueError(f"{name}={count}: pass an integer of at least {least}")
    return count
