"""How much inputs can tell about a layer, before any label is looked at.

Labels are met exactly by chance where there are no more independent equations than unknowns, and
many examples may hold few equations: (-X, -Y) says what (X, Y) says where there is no bias, a copy
that differs in its last digits says nothing new, and a row that sees one token, however often, says
nothing of attention. So rows are counted by how layers respond to them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import block_array, coo_array
from scipy.sparse.csgraph import connected_components

from mhalearn._runtime.seeds import Stream
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer

# How much more equations than unknowns there must be before an exact fit means something.
ENOUGH_EQUATIONS = 1.1
# Responses that differ by less are equal, whatever the precision of the labels.
_EQUAL = 1e-7
# The same in units of the labels' last place: four times what an exact fit may be off by.
_ROUNDED = 64
# Cells up to this size may be joined to those they overlap with; larger ones would form chains.
_JOINED = 1e-4
# Features of a response that are compared, at most.
_LOOKED_AT = 64


@dataclass(frozen=True)
class Information:
    """What the inputs of some examples can tell.

    group_of: a number for each example; all layers give those of one group the same outputs, up to
        the order of their rows and, without bias, their sign.
    rows: how many rows ask something new. row_length: rows of an example, on average.
    others: for each of them that attention matters to, the distinct tokens it sees but one.
    centrally_symmetric: whether the tokens of all rows are symmetric about their mean, as two
        tokens are. Then opposite attention mirrors the mean token, mean(Theta) + mean(-Theta) = 2
        mean(0), and other heads can make the same function.
    """

    group_of: NDArray[np.int64]
    rows: int
    row_length: float
    others: NDArray[np.int64]
    centrally_symmetric: bool

    @property
    def examples(self) -> float:
        """How many examples without repetition would ask as much."""
        return self.rows / self.row_length

    def about_attention(self, architecture: Architecture) -> float:
        """Equations that speak about attention over its unknowns."""
        scalars = architecture.attention_scalars(self.others + 1)
        return float(np.sum(scalars)) / architecture.count_by_kind().attention

    def equations(self, architecture: Architecture, counting_limit: float) -> float:
        """Independent equations over unknowns, of the scarcest kind.

        counting_limit: of examples as long as these.
        """
        of_all = self.examples / counting_limit
        if architecture.attention is not None:  # of its unknowns no kinds are known
            return of_all
        return min(of_all, self.about_attention(architecture))


def measure_information(
    examples: Examples, architecture: Architecture, precision: float
) -> Information:
    """Count what the inputs ask, by the mean tokens that random attention makes of them.

    precision: the last place of the labels; coarse ones cannot tell inputs apart that doubles can.
    Cost: a forward pass of a layer with four heads.
    Trust: rows that differ share a response with probability zero; those closer than the precision
    are nearly always found equal.
    """
    bias, causal = architecture.bias, architecture.causal
    window = min(architecture.window or examples.k, examples.k)
    probe = _probe(examples, bias, causal, window)
    rng = np.random.default_rng(int(Stream.INFORMATION))
    width = probe.out_dim // 4
    side, along = rng.normal(size=width), rng.normal(size=examples.columns.width)
    odd = rng.integers(2**63, size=width, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    cell, told = max(_EQUAL, _ROUNDED * precision), max(1e-9, precision)
    keys, groups, others = [], [], []
    scale, uneven, moved, count = 0.0, 0.0, 0.0, 0
    for x, _, lengths in examples.chunks(1024):
        inside = np.arange(examples.k) < lengths[:, None]
        one, opposite, none, other = np.split(probe(x, lengths), 4, axis=-1)
        scale = scale or _typical(one[inside])
        sign = np.where(one @ side < 0, -1.0, 1.0)[..., None] if not bias else 1.0
        at = np.clip(sign * one / (cell * scale), -(2.0**62), 2.0**62)
        grids = np.stack([np.round(at), np.floor(at)]).astype(np.int64).view(np.uint64)
        key = np.where(inside, (grids * odd).sum(axis=-1), 0)
        tells = inside & (np.abs(one - other).max(axis=-1) > told * scale)
        seen = _distinct_tokens(x.astype(np.float64) @ along, inside, causal, told, window)
        keys.append(key[:, inside])
        groups.append(key.sum(axis=2))
        others.append(np.where(tells, seen - 1, 0)[inside])
        uneven += float(np.sum((one + opposite - 2 * none)[inside] ** 2))
        moved += float(np.sum((one - none)[inside] ** 2))
        count += int(inside.sum())
    join = cell <= _JOINED
    row_of = number_groups(np.concatenate(keys, axis=1), join=join)
    _, first = np.unique(row_of, return_index=True)
    told_by = np.concatenate(others)[first]
    return Information(
        group_of=number_groups(np.concatenate(groups, axis=1), join=join),
        rows=len(first),
        row_length=count / examples.n,
        others=told_by[told_by > 0],
        centrally_symmetric=bool(np.sqrt(uneven) <= told * np.sqrt(moved)),
    )


def number_groups(keys: NDArray[np.uint64], *, join: bool) -> NDArray[np.int64]:
    """Equal keys get equal numbers, in the order in which they first appear, whatever they are.

    keys (2, n): on two grids half a cell apart. With `join` those are equal that share one of the
    two, so that an edge between two cells parts no copies; without, those that share the first.
    """
    numbers = [np.unique(grid, return_inverse=True)[1] for grid in keys]
    if join:
        n, count = keys.shape[1], int(numbers[0].max()) + 1
        links = coo_array((np.ones(n), tuple(numbers)), shape=(count, int(numbers[1].max()) + 1))
        both = block_array([[None, links], [links.T, None]])
        numbers[0] = connected_components(both, directed=False)[1][numbers[0]]
    _, first, inverse = np.unique(numbers[0], return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


def _probe(
    examples: Examples, bias: bool, causal: bool, window: int
) -> AttentionLayer | ProjectedLayer:
    """Mean tokens of random attention, of its opposite, of none, and of another, side by side.

    Of many features, random combinations are looked at: they tell as much.
    """
    x, _, lengths = next(examples.chunks(1024))
    d, size = x.shape[2], _typical(x[np.arange(examples.k) < lengths[:, None]].astype(np.float64))
    rng = np.random.default_rng(int(Stream.PROBE_LAYER))
    one, other = rng.normal(size=(2, d, d)) / size**2
    vector, another = rng.normal(size=(2, d)) / size
    seen = np.eye(d) if d <= _LOOKED_AT else rng.normal(size=(d, _LOOKED_AT)) / _LOOKED_AT**0.5
    theta = np.stack([one, -one, 0 * one, other])
    w = np.kron(np.eye(4), seen).reshape(4, d, -1)
    vectors = np.stack([vector, -vector, 0 * vector, another])
    if window >= examples.k:
        return AttentionLayer(theta, w, vectors if bias else None, causal=causal)
    eye = np.tile(np.eye(d), (4, 1, 1))
    windowed = Architecture(d, 4, d, w.shape[2], bias, causal, window=window, logit_scale=1.0)
    params = {"query": theta, "key": eye, "value": eye, "out": w}
    return ProjectedLayer(windowed, params | ({"query_bias": vectors} if bias else {}))


def _typical(rows: Float64) -> float:
    """The median norm, which a few huge rows do not move."""
    norms = np.linalg.norm(rows, axis=-1)
    return float(np.median(norms[norms > 0])) if norms.any() else 1.0


def _distinct_tokens(
    along: Float64, inside: NDArray[np.bool_], causal: bool, tolerance: float, window: int
) -> NDArray[np.int64]:
    """How many distinct tokens each row (n, k) sees, told apart by one coordinate of them."""
    size = _typical(along[inside][:, None])
    k = along.shape[1]
    equal = np.abs(along[:, :, None] - along[:, None, :]) <= tolerance * size
    # The last token before that is equal, -1 where there is none.
    last = np.max(np.where(np.tril(equal, -1), np.arange(k), -1), axis=2)
    row, key = np.arange(k)[:, None], np.arange(k)
    near = (np.abs(row - key) < window) & ((key <= row) | (not causal))
    begin = np.maximum(row - window + 1, 0)
    counts = np.zeros(along.shape, np.int64)
    for r in range(k):  # a token counts where it first stands among those that are seen
        counts[:, r] = np.sum(inside & near[r] & (last < begin[r]), axis=1)
    return counts
