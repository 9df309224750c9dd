"""Compare two layers head by head, up to the order of heads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

from mhalearn._runtime import html
from mhalearn._runtime.types import Float64
from mhalearn.layer.base import Layer
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_comparison import compare_determined, explain_difference
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.layer.span_coordinates import centred_coordinates
from mhalearn.layer.token_span import TokenSource, measure_span, read_tokens

if TYPE_CHECKING:
    from mhalearn.layer.block.block import Block
    from mhalearn.layer.block.comparison import BlockComparison

# Heads whose errors a notebook lists.
_MOST_LISTED = 64


@dataclass(frozen=True)
class Comparison:
    """Errors of matched heads, relative to max(norm of the true head, rms norm over heads).

    order[i] is the learned head matched with true head i. Layers that cannot be matched (other head
    count, width, or mask) have no errors a head and max_error = inf, and `why` is a sentence.
    """

    order: NDArray[np.int64]
    theta_errors: Float64
    w_errors: Float64
    key_vector_errors: Float64
    out_bias_error: float
    max_error: float
    why: str = ""  # the layers cannot be matched; empty where they are

    @property
    def comparable(self) -> bool:
        return bool(np.isfinite(self.max_error))

    def _repr_html_(self) -> str:
        """What a notebook shows: the errors of every head, or why there are none."""
        if self.why:
            return html.card(html.title("Comparison"), [html.paragraph(self.why)])
        columns = {
            "learned head": [str(head + 1) for head in self.order],
            "error of \N{GREEK CAPITAL LETTER THETA}": _short(self.theta_errors),
            "error of W": _short(self.w_errors),
            "error of v": _short(self.key_vector_errors),
        }
        rows = zip(map(str, range(1, len(self.order) + 1)), *columns.values(), strict=True)
        said = f"largest relative error {self.max_error:.2g}"
        listed = html.table(itertools.islice(rows, _MOST_LISTED), ["true head", *columns])
        bias = html.paragraph(f"error of the output bias c: {self.out_bias_error:.2g}")
        return html.card(html.title("Comparison", said), [listed, bias])


@overload
def compare(
    learned: AttentionLayer | ProjectedLayer,
    truth: AttentionLayer | ProjectedLayer,
    inputs: ArrayLike | TokenSource | None = None,
    lengths: ArrayLike | None = None,
) -> Comparison: ...
@overload
def compare(learned: Block, truth: Block) -> BlockComparison: ...
def compare(
    learned: AttentionLayer | ProjectedLayer | Block,
    truth: AttentionLayer | ProjectedLayer | Block,
    inputs: ArrayLike | TokenSource | None = None,
    lengths: ArrayLike | None = None,
) -> Comparison | BlockComparison:
    """Match heads optimally (Hungarian algorithm) and report relative errors.

    inputs: X (n, k, d), or an Examples, to compare in the metric of these data: both layers are
    restricted to the affine span of the tokens, in coordinates in which those have mean 0 and
    covariance I, with what is constant in biases. Layers that are equal there then are, whatever
    they do elsewhere, and a parameter counts by what it does.

    The cost of a pair is the sum of its squared relative errors in Theta, W and the key vector. An
    absent key vector or output bias counts as zero; where the true ones vanish, their errors are
    relative to a row of Theta and of W. Canonical forms are not taken here: ask for them first.

    Layers of projected heads are compared by what their function determines of them
    (`layer.projected_comparison`): theta_errors are those of all products of queries with keys,
    biases included, key_vector_errors those of sinks and biases by distance.

    Blocks are compared by their canonical forms (`layer.block.comparison`).
    """
    from mhalearn.layer.block.block import Block
    from mhalearn.layer.block.comparison import compare_blocks

    if isinstance(learned, Block) or isinstance(truth, Block):
        if not (isinstance(learned, Block) and isinstance(truth, Block)):
            raise ValueError("a block is compared with a block: its layer is block.attention")
        if inputs is not None:
            raise ValueError("blocks are compared by themselves: leave inputs out")
        return compare_blocks(learned, truth)
    learned, truth = (_by_matrices(one) for one in (learned, truth))
    why = _explain_mismatch(learned, truth)
    if why:
        none = np.zeros(0)
        return Comparison(np.zeros(0, np.int64), none, none, none, np.inf, np.inf, why)
    if isinstance(learned, ProjectedLayer) and isinstance(truth, ProjectedLayer):
        if inputs is not None:
            extras = ", ".join(truth.architecture.extras())
            raise ValueError(f"heads with {extras} are compared by themselves: leave inputs out")
        return Comparison(*compare_determined(learned, truth))
    assert isinstance(learned, AttentionLayer)
    assert isinstance(truth, AttentionLayer)
    if inputs is not None:
        learned, truth = _in_metric_of(inputs, lengths, learned, truth)
    order, theta_errors, w_errors, key_errors = match_heads(learned, truth)
    true_bias = _out_bias(truth)
    bias_scale = max(float(np.linalg.norm(true_bias)), float(_scales(truth.w).max()) / truth.d**0.5)
    bias_error = float(np.linalg.norm(_out_bias(learned) - true_bias)) / bias_scale
    worst = max(theta_errors.max(), w_errors.max(), key_errors.max(), bias_error)
    return Comparison(order, theta_errors, w_errors, key_errors, bias_error, float(worst))


def match_heads(
    learned: AttentionLayer, truth: AttentionLayer
) -> tuple[NDArray[np.int64], Float64, Float64, Float64]:
    """For each true head the learned one that it is matched with, and the errors then, of Theta, W
    and the key vector. Learned heads may be more than the true ones, and not fewer."""
    theta_scale = _scales(truth.theta)
    theta_table = _distances(learned.theta, truth.theta) / theta_scale[:, None]
    w_table = _distances(learned.w, truth.w) / _scales(truth.w)[:, None]
    key_table = _distances(_key_vectors(learned), _key_vectors(truth))
    least = theta_scale.max() / np.sqrt(truth.d)
    key_table /= _scales(_key_vectors(truth), least=least)[:, None]
    rows, order = linear_sum_assignment(theta_table**2 + w_table**2 + key_table**2)
    theta_errors, w_errors, key_errors = (
        table[rows, order] for table in (theta_table, w_table, key_table)
    )
    return order, theta_errors, w_errors, key_errors


def _short(errors: Float64) -> list[str]:
    return [f"{error:.2g}" for error in errors]


def _by_matrices(layer: AttentionLayer | ProjectedLayer) -> AttentionLayer | ProjectedLayer:
    """By Theta and W, where heads have one each."""
    if isinstance(layer, ProjectedLayer) and layer.architecture.shares_only:
        return layer.to_attention_layer()
    return layer


def _in_metric_of(
    inputs: ArrayLike | TokenSource, lengths: ArrayLike | None, *layers: AttentionLayer
) -> list[AttentionLayer]:
    """The layers on the span of tokens, in whitened coordinates."""
    span = measure_span(read_tokens(inputs, lengths))
    if span.d != layers[0].d:
        raise ValueError(f"inputs have {span.d} features a token, the layers d = {layers[0].d}")
    if span.rank == 0:
        raise ValueError("inputs hold one token over and over: pass some that differ")
    return [centred_coordinates(span, one.architecture).restrict(one) for one in layers]


def _explain_mismatch(learned: Layer, truth: Layer) -> str:
    """Why no head of one can be matched with one of the other; empty where all can."""
    reasons = []
    if other := explain_difference(learned.architecture, truth.architecture):
        reasons.append(other)
    if learned.d != truth.d:
        reasons.append(f"tokens of {learned.d} features beside {truth.d}")
    if learned.out_dim != truth.out_dim:
        reasons.append(f"outputs of {learned.out_dim} features beside {truth.out_dim}")
    if learned.causal != truth.causal:
        reasons.append(
            "one layer is causal, the other is not: from_torch(module, causal=True) or import "
            "--causal reads the mask that a module does not store"
        )
    if learned.n_heads != truth.n_heads:
        heads = "1 head" if learned.n_heads == 1 else f"{learned.n_heads} heads"
        reasons.append(
            f"{heads} beside {truth.n_heads}: layer.canonical() merges heads of "
            "equal attention and drops those of zero W"
        )
    return "; ".join(reasons)


def _scales(true: Float64, least: float = 0.0) -> Float64:
    norms = np.linalg.norm(true.reshape(len(true), -1), axis=1)
    common = max(float(np.sqrt(np.mean(norms**2))), least)
    return np.maximum(norms, common) if common > 0 else np.ones(len(true))


def _distances(learned: Float64, true: Float64) -> Float64:
    """|true_i - learned_j| as a table with a row for each true head. Memory: one head at a time."""
    flat = learned.reshape(len(learned), -1)
    return np.stack([np.linalg.norm(flat - head.ravel(), axis=1) for head in true])


def _key_vectors(layer: AttentionLayer) -> Float64:
    return np.zeros((layer.n_heads, layer.d)) if layer.key_vector is None else layer.key_vector


def _out_bias(layer: AttentionLayer) -> Float64:
    return np.zeros(layer.out_dim) if layer.out_bias is None else layer.out_bias
