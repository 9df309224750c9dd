"""Mirrored heads: where token sets are symmetric, opposite attention makes the same labels.

If the tokens of every row lie symmetrically about their mean t, then mean(Theta) + mean(-Theta) is
2 t, and (-Theta, -W) does what (Theta, W) does but for 2 t W. That vanishes where t does, and where
it cancels among the heads that are mirrored. Two tokens are always symmetric.
"""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.judge.residuals import Residuals, measure_residuals
from mhalearn.layer.layer import AttentionLayer

# Of so many heads all sets are tried; of more only single heads, pairs, and all of them.
_ALL_SETS = 10
# Examples that sets of heads are chosen with, and how many sets are then tried on all of them.
_FIRST, _TRIED = 64, 8
# Times the floor of exact residuals at which a mirrored layer explains the labels, too.
_AS_GOOD = 2.0


def find_sign_symmetry(
    layer: AttentionLayer, examples: Examples, residuals: Residuals
) -> tuple[int, ...] | None:
    """Heads that can be mirrored together, and the labels are still met; None if there are none.

    Cost: a forward pass of every head over a few examples, and of the layer over all of them where
    those are met.
    """
    part = examples.subset(slice(0, _FIRST))
    x, _, lengths = part.arrays()
    changes = np.stack([_change(layer, i, x, lengths) for i in range(layer.n_heads)])
    size = float(np.linalg.norm(layer(x, lengths))) or 1.0
    bar = _AS_GOOD * residuals.floor
    sets = _sets(layer.n_heads)
    # Products lose half of the digits, so they only say which sets to look at.
    squares = np.einsum("si,ij,sj->s", sets, changes @ changes.T, sets)
    for chosen in sets[np.argsort(squares)[:_TRIED]].astype(bool):
        if np.linalg.norm(changes[chosen].sum(axis=0)) > 10 * bar * size:
            continue
        flipped = measure_residuals(flip_signs(layer, chosen), examples, residuals.labels)
        if flipped.root_relative <= bar:
            return tuple(np.flatnonzero(chosen).tolist())
    return None


def flip_signs(layer: AttentionLayer, chosen: NDArray[np.bool_]) -> AttentionLayer:
    """The layer with the chosen heads of opposite sign, Theta and W."""
    signs = np.where(chosen, -1.0, 1.0)
    vectors = layer.key_vector
    return layer.replace(
        theta=signs[:, None, None] * layer.theta,
        w=signs[:, None, None] * layer.w,
        key_vector=None if vectors is None else signs[:, None] * vectors,
    )


def _change(
    layer: AttentionLayer, head: int, x: NDArray[Any], lengths: NDArray[np.int64]
) -> Float64:
    """What mirroring one head does to the outputs."""
    vectors = layer.key_vector
    alone = AttentionLayer(
        layer.theta[head : head + 1],
        layer.w[head : head + 1],
        None if vectors is None else vectors[head : head + 1],
        causal=layer.causal,
    )
    return (flip_signs(alone, np.array([True]))(x, lengths) - alone(x, lengths)).ravel()


def _sets(heads: int) -> Float64:
    """Sets of heads as rows of zeros and ones."""
    if heads <= _ALL_SETS:
        return np.array(list(itertools.product((0.0, 1.0), repeat=heads))[1:])
    pairs = list(itertools.combinations(range(heads), 2))
    of_two = np.zeros((len(pairs), heads))
    for row, pair in zip(of_two, pairs, strict=True):
        row[list(pair)] = 1.0
    return np.concatenate([np.eye(heads), of_two, np.ones((1, heads))])
