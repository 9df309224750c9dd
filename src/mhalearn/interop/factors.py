"""The weights every library stores of an attention layer, and the way to a layer and back.

With row vectors, head i of a module has queries x A_i^T + a_i, keys x B_i^T + b_i and values
x C_i^T + c_i of h entries, logits (query . key) / sqrt(h), and sends its mean value through D_i:

    Theta_i = A_i^T B_i / sqrt(h)      v_i = B_i^T a_i / sqrt(h)
    W_i     = C_i^T D_i                c   = sum_i c_i D_i + bias of the output

A key bias b_i adds the same to the logits of all keys, and cancels. Theta and W do not know in
which basis the h entries are written; the factors do, which is why a layer made of them keeps them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.validation import check_array
from mhalearn.layer.layer import AttentionLayer

Floats = NDArray[Any]

# Carried factors are believed if they make the layer's parameters up to rounding, whose order
# another machine may choose differently.
_ROUNDING = 1e-9
_WITHOUT = "layer.replace(factors=None) leaves them out"


@dataclass(frozen=True)
class WeightFactors:
    """Weights head by head, in the dtype they came in; h, the head dimension, is an axis."""

    query: Floats  # (m, h, d)
    key: Floats  # (m, h, d)
    value: Floats  # (m, h, d)
    out: Floats  # (m, h, e)
    query_bias: Floats | None = None  # (m, h)
    key_bias: Floats | None = None  # (m, h)
    value_bias: Floats | None = None  # (m, h)
    out_bias: Floats | None = None  # (e,)

    def __post_init__(self) -> None:
        for name, array in self.arrays().items():
            ndim = {"query_bias": 2, "key_bias": 2, "value_bias": 2, "out_bias": 1}.get(name, 3)
            checked = check_array(f"the {name} weight", array, ndim)
            if not np.issubdtype(checked.dtype, np.floating):
                raise ValueError(
                    f"the {name} weight has dtype {checked.dtype}: dequantise it first"
                )
            object.__setattr__(self, name, checked)
        m, h, d = self.query.shape
        e = self.out.shape[2]
        per_head = {"query_bias": (m, h), "key_bias": (m, h), "value_bias": (m, h)}
        expected = {"key": (m, h, d), "value": (m, h, d), "out": (m, h, e), "out_bias": (e,)}
        expected |= {"query": (m, h, d)} | per_head
        for name, array in self.arrays().items():
            if array.shape != expected[name]:
                raise ValueError(
                    f"the {name} weight has shape {array.shape} head by head: "
                    f"expected {expected[name]} beside queries of shape {(m, h, d)}"
                )
        if 0 in (m, h, d, e):
            raise ValueError(f"queries of shape {(m, h, d)} and outputs of {e}: nothing is there")

    @property
    def n_heads(self) -> int:
        return self.query.shape[0]

    @property
    def head_dim(self) -> int:
        return self.query.shape[1]

    @property
    def has_bias(self) -> bool:
        biases = (self.query_bias, self.key_bias, self.value_bias, self.out_bias)
        return any(bias is not None for bias in biases)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest dtype that holds all of them unchanged."""
        return np.result_type(*self.arrays().values())

    def arrays(self) -> dict[str, Floats]:
        """The weights that are there, by name."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: array for name, array in named if array is not None}

    def to_layer(
        self, causal: bool = False, metadata: dict[str, str] | None = None
    ) -> AttentionLayer:
        """The layer of these weights, multiplied out in float64; it carries them."""
        query, key, value, out = (
            part.astype(np.float64) for part in (self.query, self.key, self.value, self.out)
        )
        root = math.sqrt(self.head_dim)
        key_vector = out_bias = None
        if self.query_bias is not None:
            key_vector = np.einsum("mh,mhd->md", self.query_bias.astype(np.float64), key) / root
        if self.value_bias is not None:
            out_bias = np.einsum("mh,mhe->e", self.value_bias.astype(np.float64), out)
        if self.out_bias is not None:
            out_bias = self.out_bias + (0.0 if out_bias is None else out_bias)
        return AttentionLayer(
            np.swapaxes(query, 1, 2) @ key / root,
            np.swapaxes(value, 1, 2) @ out,
            key_vector,
            out_bias,
            causal,
            metadata=metadata,
            factors=self.arrays(),
        )


def carried_factors(layer: AttentionLayer) -> WeightFactors | None:
    """The factors a layer was made of, if it carries them; refused if they make another layer."""
    if layer.factors is None:
        return None
    try:
        factors = WeightFactors(**layer.factors)
        made = factors.to_layer()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the layer's factors are damaged: {error}; {_WITHOUT}") from None
    for name in ("theta", "w", "key_vector", "out_bias"):
        ours, theirs = getattr(layer, name), getattr(made, name)
        agree = (ours is None) == (theirs is None) and np.shape(ours) == np.shape(theirs)
        if agree and ours is not None:
            agree = np.abs(ours - theirs).max() <= _ROUNDING * max(np.abs(ours).max(), 1e-300)
        if not agree:
            raise ValueError(f"the layer's factors make another {name} than it has; {_WITHOUT}")
    return factors


def factorise(
    layer: AttentionLayer,
    head_dim: int | None = None,
    n_heads: int | None = None,
    *,
    tolerance: float = 1e-8,
) -> WeightFactors:
    """Factors of a layer at a head dimension, by singular values, in float64.

    head_dim: as small as the heads allow, unless given. n_heads: heads of zeros fill up to it.
    Singular values of at most `tolerance` times a head's largest count as zero: a layer learned
    exactly has them near 1e-12, one learned from noisy labels needs a tolerance of its own. The
    query bias is one more row of Theta, as everywhere, so a key-side vector must share its rank.
    Refused: heads of a rank that head_dim cannot hold.
    """
    m, d = layer.n_heads, layer.d
    attention = np.linalg.svd(layer.query_theta, full_matrices=False)
    projection = np.linalg.svd(layer.w, full_matrices=False)
    ranks = {
        what: np.array([int(np.sum(s > tolerance * s[0])) for s in parts.S])
        for what, parts in (("Theta", attention), ("W", projection))
    }
    if layer.key_vector is not None:
        ranks = {"Theta with its key vector": ranks.pop("Theta"), **ranks}
    h = max(1, *(int(of.max()) for of in ranks.values())) if head_dim is None else head_dim
    for what, of in ranks.items():
        if of.max() > h:
            worst = int(of.argmax())
            raise ValueError(
                f"head {worst}: {what} has rank {of[worst]} (singular values above {tolerance:g} "
                f"of the largest), a head dimension of {h} holds rank {h}: a full-rank head fits "
                "no narrow module; learn with head_dim, or raise the tolerance"
            )
    heads = m if n_heads is None else n_heads
    if heads < m:
        raise ValueError(f"n_heads={heads}: the layer has {m}; give at least as many")

    # The square root of a singular value on either side keeps both factors of one size.
    theta_root, w_root = np.sqrt(attention.S), np.sqrt(projection.S)
    grown = math.sqrt(math.sqrt(h))  # undoes the division by sqrt(h), half on either side
    queries = grown * _first(np.swapaxes(attention.U * theta_root[:, None, :], 1, 2), heads, h)
    keys = grown * _first(attention.Vh * theta_root[..., None], heads, h)
    values = _first(np.swapaxes(projection.U * w_root[:, None, :], 1, 2), heads, h)
    outs = _first(projection.Vh * w_root[..., None], heads, h)
    return WeightFactors(
        query=queries[..., :d],
        key=keys,
        value=values,
        out=outs,
        query_bias=queries[..., d] if layer.key_vector is not None else None,
        out_bias=layer.out_bias,
    )


def _first(parts: Floats, heads: int, h: int) -> Floats:
    """The first h rows of each head, with zeros where there are fewer rows or heads."""
    padded = np.zeros((heads, h, parts.shape[2]))
    rows = min(h, parts.shape[1])
    padded[: len(parts), :rows] = parts[:, :rows]
    return padded
