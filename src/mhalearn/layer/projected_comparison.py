"""Compare layers of projected heads by what their function determines, not by their projections.

Queries and keys meet in products that no gauge moves: a complex rank-one matrix a rotary frequency,
M_f = alpha_f conj(beta_f)^T, and one matrix Theta of the dimensions that are not rotated. Biases
are one more feature, a constant. Under a norm the products are those of the normalised projections,
and the quadratic forms that norms are made of stand beside them. Products are never formed: they
are compared by their factors. So are projections through latents, beside the quadratic forms of
those that are normalised.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from mhalearn._runtime.types import Float64
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.latent import unfold
from mhalearn.layer.position_bias import Alibi, T5Bias
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.layer.rope import Rope

Factor = NDArray[Any]

# Caps and frequencies up to this apart, relative, are compared; the difference is an error.
_NEARLY = 1e-3


class Product(NamedTuple):
    """Matrices left right^H, one or several, by their factors (f, rows, columns)."""

    left: Factor
    right: Factor

    def norm(self) -> float:
        ours, theirs = (np.linalg.qr(side).R for side in self)
        return float(np.linalg.norm(ours @ theirs.conj().swapaxes(1, 2)))

    def distance(self, other: Product) -> float:
        """Accurate to rounding of the norms: nothing is squared before it is subtracted."""
        left = np.concatenate([self.left, other.left], axis=2)
        right = np.concatenate([self.right, -other.right], axis=2)
        return Product(left, right).norm()


class Determined(NamedTuple):
    """What a layer's function determines."""

    attention: list[list[Product]]  # of each head
    projections: list[Product]
    beside: Float64  # (m, x): sinks and biases by distance
    common: list[Product]  # of all heads together
    out_bias: Float64


def determined(layer: ProjectedLayer) -> Determined:
    """The invariants of a layer. Cost: that of a copy of its projections."""
    a, params = layer.architecture, layer.params
    common = []
    if a.latent is not None:
        params = unfold(params, a.latent, a.heads)
        names = [name for name in ("latent", "query_latent") if name in params]
        common = [_square(params[name] / _sizes(params[name], None)) for name in names]
        common = common if a.latent.norm else []
    each = a.heads // a.groups
    query, key, value = (_with_bias(params, side) for side in ("query", "key", "value"))
    norm = a.norm
    if norm is not None:
        axes = None if norm.across_heads else (1, 2)
        query, key = (part / _sizes(part, axes) for part in (query, key))
    plain_query, plain_key = query, np.repeat(key, each, axis=0)
    if norm is not None and norm.across_heads:
        common = [_square(np.concatenate(part, axis=1)) for part in (query, key)]
    if norm is not None and norm.has_gains:
        gains = (params[f"{side}_gain"] for side in ("query", "key"))
        query, key = (
            part * _of_heads(gain) for part, gain in zip((query, key), gains, strict=True)
        )
    key = np.repeat(key, each, axis=0)
    attention = []
    for i in range(a.heads):
        products = _meet(a, query[i], key[i])
        if norm is not None and not norm.across_heads:
            products += [_square(plain_query[i]), _square(plain_key[i])]
        attention.append(products)
    shared = np.repeat(value, each, axis=0)
    out_bias = params.get("out_bias", np.zeros(a.outputs))
    if not a.sinks:  # weights sum to one
        out_bias = out_bias + np.einsum("mh,mhe->e", shared[:, -1], params["out"])
        shared = shared[:, :-1]
    outs = params["out"].swapaxes(1, 2)
    projections = [Product(v[None], o[None]) for v, o in zip(shared, outs, strict=True)]
    return Determined(attention, projections, _beside(layer), common, out_bias)


def _meet(a: Architecture, query: Float64, key: Float64) -> list[Product]:
    """The products of one head: (d + 1, h) projections, the bias as a last row."""
    scale = a.qk_rank**-0.5 if a.logit_scale is None else a.logit_scale
    products, still = [], np.arange(a.qk_rank)
    if a.rope is not None:
        real, imaginary = a.rope.pairs(a.qk_rank)
        left, right = (side[:, real].T + 1j * side[:, imaginary].T for side in (query, key))
        size = scale * a.rope.magnitude**2
        products.append(Product(size * left[..., None], right[..., None]))
        still = still[a.rope.rotated(a.qk_rank) :]
    if still.size:
        shows = a.sinks or a.softcap is not None or a.norm is not None
        keys = key if shows else key[:-1]  # the same on all logits of a row cancels
        products.append(Product(scale * query[None][..., still], keys[None][..., still]))
    return products


def _beside(layer: ProjectedLayer) -> Float64:
    """Sinks, and what distances add: slopes, or numbers up to a constant, which beside a sink is
    its logit."""
    a, params = layer.architecture, layer.params
    sinks = params["sink"][:, None] if a.sinks else np.zeros((a.heads, 0))
    if isinstance(a.distance_bias, Alibi):
        return np.concatenate([sinks, a.distance_bias.slopes(a.heads)[:, None]], axis=1)
    if not isinstance(a.distance_bias, T5Bias):
        return sinks
    table = params["position_table"].T[:, a.distance_bias.used(a.causal)]
    return table - (sinks if a.sinks else table.mean(axis=1, keepdims=True))


def _with_bias(params: dict[str, Float64], side: str) -> Float64:
    """Projections with their bias, or zeros, as a last row."""
    weight = params[side]
    bias = params.get(f"{side}_bias")
    row = np.zeros((len(weight), weight.shape[2])) if bias is None else bias
    return np.concatenate([weight, row[:, None]], axis=1)


def _sizes(part: Float64, axes: Any) -> Any:
    sizes = np.linalg.norm(part, axis=axes, keepdims=True) if axes else np.linalg.norm(part)
    return np.where(sizes > 0, sizes, 1.0)


def _of_heads(gain: Float64) -> Float64:
    return gain[:, None] if gain.ndim == 2 else gain


def _square(side: Float64) -> Product:
    return Product(side[None], side[None])


class Errors(NamedTuple):
    """Of matched heads, as `Comparison` has them."""

    order: NDArray[np.int64]
    attention: Float64
    projections: Float64
    beside: Float64
    out_bias: float
    largest: float


def compare_determined(learned: ProjectedLayer, truth: ProjectedLayer) -> Errors:
    """Match heads optimally and report relative errors. Cost: O(m^2 d h^2)."""
    ours, true = determined(learned), determined(truth)
    heads = range(truth.n_heads)
    norms = _scales([_size(head) for head in true.attention])
    w_norms = _scales([head.norm() for head in true.projections])
    table = np.array([[_apart(true.attention[i], ours.attention[j]) for j in heads] for i in heads])
    w_table = np.array(
        [[true.projections[i].distance(ours.projections[j]) for j in heads] for i in heads]
    )
    beside = np.linalg.norm(true.beside[:, None] - ours.beside[None], axis=2)
    beside /= max(1.0, float(np.sqrt(np.mean(np.sum(true.beside**2, axis=1)))))
    table, w_table = table / norms[:, None], w_table / w_norms[:, None]
    rows, order = linear_sum_assignment(table**2 + w_table**2 + beside**2)
    found = [part[rows, order] for part in (table, w_table, beside)]
    least = float(w_norms.max()) / np.sqrt(truth.d)
    bias_size = max(float(np.linalg.norm(true.out_bias)), least)
    bias_error = float(np.linalg.norm(ours.out_bias - true.out_bias)) / bias_size
    common = [one.distance(other) / one.norm() for one, other in _pairs(true.common, ours.common)]
    apart = _number_error(learned.architecture, truth.architecture)
    worst = max(*(float(part.max()) for part in found), bias_error, apart, *common)
    return Errors(order, found[0], found[1], found[2], bias_error, worst)


def explain_difference(learned: Architecture, truth: Architecture) -> str:
    """What heads of one have and those of the other do not, in words; empty where all is alike."""
    alike = {"kv_heads": None, "bias": False, "n_heads": None, "d": 1, "out_dim": 1, "head_dim": 1}
    alike |= {"causal": False}
    ours, true = (_with_layout(one) for one in (learned, truth))
    for one in fields(Architecture):
        mine, theirs = getattr(ours, one.name), getattr(true, one.name)
        if one.name in alike or mine == theirs:
            continue
        if _apart_as_numbers(mine, theirs, ours.head_dim) <= _NEARLY:
            continue
        return f"{one.name}={mine} beside {theirs}: their logits are other functions"
    if ours.rope is not None and ours.head_dim != true.head_dim:
        return f"head_dim={ours.head_dim} beside {true.head_dim}: they rotate by other frequencies"
    return ""


def _apart_as_numbers(mine: object, theirs: object, head_dim: int | None) -> float:
    """Relative difference of two caps or scales, or of the frequencies of two rotary positions;
    inf where they are no such numbers."""
    if isinstance(mine, float) and isinstance(theirs, float):
        return abs(mine / theirs - 1)
    if not (isinstance(mine, Rope) and isinstance(theirs, Rope)) or head_dim is None:
        return math.inf
    if mine.scaling != theirs.scaling or mine.rotated(head_dim) != theirs.rotated(head_dim):
        return math.inf
    ratio = mine.frequencies(head_dim) / theirs.frequencies(head_dim)
    return float(np.abs(ratio - 1).max())


def _number_error(learned: Architecture, truth: Architecture) -> float:
    """How far numbers of two classes are apart, which a learner may have found."""
    ours, true = (_with_layout(one) for one in (learned, truth))
    pairs = [(getattr(ours, name), getattr(true, name)) for name in ("rope", "softcap")]
    apart = [_apart_as_numbers(*pair, truth.head_dim) for pair in pairs if pair[0] != pair[1]]
    return max(apart, default=0.0)


def _with_layout(a: Architecture) -> Architecture:
    """Which dimensions are pairs is a matter of their order."""
    return a if a.rope is None else replace(a, rope=replace(a.rope, layout="half"))


def _pairs(one: list[Product], other: list[Product]) -> list[tuple[Product, Product]]:
    return list(zip(one, other, strict=True))


def _apart(one: list[Product], other: list[Product]) -> float:
    return float(np.linalg.norm([mine.distance(theirs) for mine, theirs in _pairs(one, other)]))


def _size(products: list[Product]) -> float:
    return float(np.linalg.norm([product.norm() for product in products]))


def _scales(norms: list[float]) -> Float64:
    """Of each head its own size, or that of all heads on average where it is less."""
    common = float(np.sqrt(np.mean(np.square(norms))))
    return np.maximum(norms, common) if common > 0 else np.ones(len(norms))
