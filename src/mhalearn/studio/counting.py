"""What counting knows of a run before it begins: whether its examples could ever do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mhalearn.learners.options import ChenLiOptions
from mhalearn.learners.registry import find_learner
from mhalearn.studio.request import Sizes, Wish, norm_of

_PHASES = "sculpt"


def count(wish: Wish, find: Callable[[int], Sizes | None]) -> dict[str, Any]:
    """The counting limit of a wish, how many times it is met, and what stands against the run.

    The line is None where nothing does. Cost: no example is looked at.
    """
    sizes = find(wish.data) if wish.data else None
    sizes = sizes or Sizes(wish.examples, wish.tokens, wish.dim, wish.dim)
    limit = _limit(wish, sizes)
    return {
        "limit": math.ceil(limit) if math.isfinite(limit) else None,
        "ratio": sizes.n / limit,
        "problem": _unsupported(wish, sizes)
        or _too_few(wish, sizes, limit)
        or _crowded(wish, sizes),
    }


def _architecture(wish: Wish, sizes: Sizes) -> Any:
    from mhalearn.layer.architecture import Architecture  # brings JAX, which the page does not need

    # Of own data with an open number of heads nothing is known but that there is one.
    heads = 1 if wish.data and wish.count_heads else wish.heads
    if wish.block:
        return block_architecture(wish)
    return Architecture(sizes.d, heads, out_dim=sizes.out_dim, bias=wish.bias, causal=wish.causal)


def block_architecture(wish: Wish) -> Any:
    """The class of the hidden block."""
    from mhalearn.layer.architecture import Architecture
    from mhalearn.layer.block.design import BlockDesign

    heads = Architecture(wish.dim, wish.heads, bias=True)
    design = BlockDesign(heads, wish.neurons, wish.activation, norm=norm_of(wish))
    return design.architecture


def _limit(wish: Wish, sizes: Sizes) -> float:
    lengths = np.array(sizes.lengths or (sizes.k,))
    return float(_architecture(wish, sizes).counting_limit(lengths))


def _unsupported(wish: Wish, sizes: Sizes) -> str | None:
    """What the method says to such layers."""
    if wish.block:
        return None
    learner = find_learner(wish.method)
    if sizes.lengths and wish.method == _PHASES:
        return "the examples differ in length: the paper's phases need one length; use newton"
    return learner.supports(_architecture(wish, sizes))


def _too_few(wish: Wish, sizes: Sizes, limit: float) -> str | None:
    """Fewer numbers than unknowns: no method could determine the layer."""
    if math.isinf(limit):
        return "no row sees two tokens, so that attention has no effect: give longer examples"
    if sizes.n >= limit:
        return None
    heads = "a layer" if wish.data and wish.count_heads else _plural(wish.heads, "head")
    if wish.block:
        heads = f"a block of {heads} and {_plural(wish.neurons, 'neuron')}"
    return (
        f"examples is {sizes.n}: by counting, {heads} of dimension {sizes.d} with {sizes.k} tokens "
        f"need at least {math.ceil(limit)}, whatever the method"
    )


def _crowded(wish: Wish, sizes: Sizes) -> str | None:
    """Conditions of the paper's phases that no data can mend."""
    if wish.method != _PHASES:
        return None
    heads = 1 if wish.data and wish.count_heads else wish.heads
    crowd, width = heads * (sizes.k - 1), sizes.out_dim
    if crowd > width:
        return (
            f"the paper's phases need m (k - 1) at most {width}, the width of the labels, and it "
            f"is {heads} x {sizes.k - 1} = {crowd}: choose fewer heads or tokens, or newton"
        )
    # Every row offers as many constraints as it has pairs of tokens.
    offered = sizes.n * sizes.k * (sizes.k * (sizes.k - 1) // 2)
    needed = ChenLiOptions().constants.trusted_rows * sizes.d**2
    if offered < needed:
        least = math.ceil(needed / (offered / sizes.n))
        return (
            f"examples is {sizes.n}: the paper's phases need {needed} rows that certify, so at "
            f"least {least} examples of {sizes.k} tokens, and many more in practice"
        )
    return None


def _plural(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"
