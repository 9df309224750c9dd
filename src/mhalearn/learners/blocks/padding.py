"""Neurons that no derivative moves, so that blocks of nearly as many neurons share programs.

A program is compiled for each number of neurons, which takes seconds, and a search goes through
many.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mhalearn.layer.block.block import Block, block_of
from mhalearn.layer.block.feed_forward import FeedForward, choose_neurons

# Neurons are padded to a multiple of this.
_MULTIPLE = 8


def pad_neurons(block: Block) -> Block:
    """The same function by a multiple of eight neurons, of which the last have no weights.

    They put out zero whatever their outputs' weights are, and these are zero whatever they put out:
    all derivatives by them are zero, and Gauss-Newton leaves them as they are.
    """
    missing = -block.hidden % _MULTIPLE
    if not missing:
        return block
    ff = block.feed_forward
    named = {}
    for name, axis in (("up", 1), ("gate", 1), ("up_bias", 0), ("gate_bias", 0), ("down", 0)):
        if (part := getattr(ff, name)) is not None:
            widths = [(0, missing if i == axis else 0) for i in range(part.ndim)]
            named[name] = np.pad(part, widths)
    return with_neurons(block, ff.replace(**named))


def first_neurons(block: Block, hidden: int) -> Block:
    """Without those that it was padded by."""
    if block.hidden == hidden:
        return block
    return with_neurons(block, choose_neurons(block.feed_forward, range(hidden)))


def with_neurons(block: Block, ff: FeedForward) -> Block:
    """A block with other neurons, its heads bit by bit the same."""
    params = {name: leaf for name, leaf in block.params.items() if "feed_forward." not in name}
    params |= {f"feed_forward.{name}": leaf for name, leaf in ff.parts().items()}
    design = replace(block.design, hidden=ff.hidden, bias=ff.has_bias, linear=ff.linear is not None)
    return block_of(design, params, metadata=block.metadata, seen=block.seen)
