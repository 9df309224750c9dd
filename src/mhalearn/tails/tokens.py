"""Tokens of a law, in blocks, and the attention matrices a caller means."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_array, check_count
from mhalearn.data.inputs import Sampler, check_kind, draw
from mhalearn.layer.layer import AttentionLayer

# A law of tokens: "boolean", "gaussian", a vocabulary (v, d) drawn from uniformly, or a sampler.
Inputs = str | ArrayLike | Sampler
Heads = AttentionLayer | ArrayLike

# Numbers of a block of tokens: 16 MiB, whatever n is.
_BLOCK_NUMBERS = 2**21


def draw_tokens(inputs: Inputs, n: int, k: int, d: int, seed: int) -> Iterator[Float64]:
    """n independent draws of k tokens, as blocks (b, k, d)."""
    n, law = check_count("n", n), _find_law(inputs, d)
    size = max(1, _BLOCK_NUMBERS // (k * d))
    for index, start in enumerate(range(0, n, size)):
        rng = generator(seed, Stream.TAILS, index)
        yield draw(law, min(size, n - start), k, d, rng).astype(np.float64)


def name_inputs(inputs: Inputs) -> str:
    """ "boolean", "gaussian", "vocabulary" or "sampler"."""
    if isinstance(inputs, str):
        return inputs
    return "sampler" if callable(inputs) else "vocabulary"


def _find_law(inputs: Inputs, d: int) -> str | Sampler:
    if isinstance(inputs, str) or callable(inputs):
        check_kind(inputs)
        return inputs
    vocabulary = check_array("inputs", inputs, 2)
    if len(vocabulary) == 0 or vocabulary.shape[1] != d:
        raise ValueError(f"inputs has shape {vocabulary.shape}: expected tokens (v, {d})")

    def sample(n: int, k: int, _: int, rng: np.random.Generator) -> NDArray[np.float64]:
        return vocabulary[rng.integers(0, len(vocabulary), (n, k))].astype(np.float64)

    return sample


def find_thetas(heads: Heads) -> Float64:
    """(m, d, d): the attention matrices of a plain layer, or those given."""
    if isinstance(heads, AttentionLayer):
        if heads.causal or heads.key_vector is not None:
            raise ValueError(
                "the layer has a causal mask or key vectors: the lemmas are about "
                "softmax(X Theta X^T) alone; pass layer.theta"
            )
        return heads.theta
    theta = np.asarray(heads)
    theta = check_array("theta", theta[None] if theta.ndim == 2 else theta, 3)
    if theta.shape[0] == 0 or theta.shape[1] == 0 or theta.shape[1] != theta.shape[2]:
        raise ValueError(f"theta has shape {theta.shape[-2:]}: expected (d, d), or (m, d, d)")
    return theta.astype(np.float64)


def find_theta(heads: Heads, head: int) -> Float64:
    """(d, d): one attention matrix that is not zero."""
    thetas = find_thetas(heads)
    head = check_count("head", head, least=0)
    if head >= len(thetas):
        raise ValueError(f"head={head}: the layer has heads 0 to {len(thetas) - 1}")
    if not np.any(thetas[head]):
        raise ValueError(f"Theta of head {head} is zero: all its logits are, and have no tail")
    return thetas[head]
