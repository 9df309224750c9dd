"""Input distributions: uniform +-1, standard Gaussian, or any sampler.

Inputs come in blocks, each with a random stream of its own, so that block i can be drawn again
without the blocks before it: `sample_inputs` and examples drawn on demand see the same inputs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.validation import check_array, check_shape

Sampler = Callable[[int, int, int, np.random.Generator], ArrayLike]

# Entries of a block of inputs (32 MiB of doubles), and the most examples in one.
_BLOCK_ENTRIES = 2**22
_BLOCK_EXAMPLES = 4096


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
