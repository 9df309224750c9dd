"""Compare two blocks: heads as layers are compared, neurons up to their order and gauge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from mhalearn._runtime import html
from mhalearn._runtime.types import Float64
from mhalearn.layer.block.block import Block
from mhalearn.layer.block.feed_forward import FeedForward
from mhalearn.layer.comparison import Comparison, compare


@dataclass(frozen=True)
class BlockComparison:
    """Errors of the canonical forms of two blocks.

    attention: of matched heads. neuron_order[j] is the learned neuron matched with true neuron j;
    input_errors (gates included) and output_errors are those of matched neurons, relative to
    max(norm of the true neuron's, rms norm over neurons). feed_forward_bias_error,
    linear_error, norm_error: of the output bias, of a linear map beside the neurons, of norms' own
    gains and biases. Blocks that cannot be matched have max_error = inf, and `why` is a sentence.
    """

    attention: Comparison | None
    neuron_order: NDArray[np.int64]
    input_errors: Float64
    output_errors: Float64
    feed_forward_bias_error: float
    linear_error: float
    norm_error: float
    max_error: float
    why: str = ""

    @property
    def comparable(self) -> bool:
        return bool(np.isfinite(self.max_error))

    def _repr_html_(self) -> str:
        """What a notebook shows: the largest error of each part, or why there is none."""
        if self.attention is None:
            return html.card(html.title("Comparison of blocks"), [html.paragraph(self.why)])
        parts = {
            f"{len(self.attention.order)} heads": self.attention.max_error,
            f"{len(self.neuron_order)} neurons, in": self.input_errors.max(initial=0.0),
            "neurons, out": self.output_errors.max(initial=0.0),
            "output bias": self.feed_forward_bias_error,
            "linear map beside the neurons": self.linear_error,
            "norms": self.norm_error,
        }
        rows = ((name, f"{error:.2g}") for name, error in parts.items())
        said = f"largest relative error {self.max_error:.2g}"
        listed = html.table(rows, ["part", "largest error"])
        return html.card(html.title("Comparison of blocks", said), [listed])


def compare_blocks(learned: Block, truth: Block, *, tolerance: float = 1e-8) -> BlockComparison:
    """Match heads and neurons of the canonical forms, each optimally, and report errors.

    Cost: O(hidden^2 d + hidden^3).
    """
    learned, truth = (one.canonical(tolerance=tolerance) for one in (learned, truth))
    why = _explain(learned, truth)
    heads = None if why else compare(learned.attention, truth.attention)
    if heads is None or heads.why:
        return _incomparable(why or (heads.why if heads else ""))
    ours, true = learned.feed_forward, truth.feed_forward
    order, inputs, outputs = match_neurons(ours, true)
    size = _mean_size(true.down) if true.hidden else 1.0
    bias = np.linalg.norm(_of(ours, "down_bias") - _of(true, "down_bias"))
    bias_error = float(bias) / max(float(np.linalg.norm(_of(true, "down_bias"))), size)
    linear = np.linalg.norm(_of(ours, "linear") - _of(true, "linear"))
    linear_error = float(linear) / max(float(np.linalg.norm(_of(true, "linear"))), size)
    norm_error = _norm_error(learned, truth)
    worst = max(
        heads.max_error,
        float(inputs.max(initial=0.0)),
        float(outputs.max(initial=0.0)),
        bias_error,
        linear_error,
        norm_error,
    )
    return BlockComparison(
        heads, order, inputs, outputs, bias_error, linear_error, norm_error, worst
    )


def _explain(learned: Block, truth: Block) -> str:
    """Why neurons of one cannot be matched with those of the other; empty where they can."""
    ours, true = learned.design, truth.design
    reasons = []
    if learned.d != truth.d:
        reasons.append(f"tokens of {learned.d} features beside {truth.d}")
    for name in ("activation", "norm"):
        mine, theirs = getattr(ours, name), getattr(true, name)
        if mine != theirs:
            reasons.append(f"{name}={mine!r} beside {theirs!r}")
    if ours.norm is not None and ours.norm == true.norm and ours.norm_kind != true.norm_kind:
        reasons.append(f"norm_kind={ours.norm_kind!r} beside {true.norm_kind!r}")
    if ours.hidden != true.hidden:
        reasons.append(f"{ours.hidden} neurons beside {true.hidden}, in their canonical forms")
    return "; ".join(reasons)


def _incomparable(why: str) -> BlockComparison:
    none, infinite = np.zeros(0), np.inf
    return BlockComparison(
        None, np.zeros(0, np.int64), none, none, infinite, infinite, infinite, infinite, why
    )


def match_neurons(
    ours: FeedForward, true: FeedForward
) -> tuple[NDArray[np.int64], Float64, Float64]:
    """For each true neuron the one of ours that it is matched with, and the errors then, of inputs
    and of outputs. Ours may be more than the true ones, and not fewer."""
    mine, theirs = _inputs(ours), _inputs(true)
    if not true.hidden:
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    tables = [_errors(mine, theirs), _errors(ours.down, true.down)]
    if true.gate is not None:  # whose up and down may both have the other sign
        turned = _errors(_inputs(ours.replace(up=-ours.up, up_bias=-_of(ours, "up_bias"))), theirs)
        other = [turned, _errors(-ours.down, true.down)]
        nearer = other[0] ** 2 + other[1] ** 2 < tables[0] ** 2 + tables[1] ** 2
        tables = [np.where(nearer, b, a) for a, b in zip(tables, other, strict=True)]
    rows, order = linear_sum_assignment(tables[0] ** 2 + tables[1] ** 2)
    return order, tables[0][rows, order], tables[1][rows, order]


def _inputs(ff: FeedForward) -> Float64:
    parts = [ff.up, _of(ff, "up_bias")[None]]
    if ff.gate is not None:
        parts += [ff.gate, _of(ff, "gate_bias")[None]]
    return np.concatenate(parts).T


def _errors(ours: Float64, true: Float64) -> Float64:
    """A table with a row for each true neuron."""
    sizes = np.maximum(np.linalg.norm(true, axis=1), _mean_size(true))
    apart = np.stack([np.linalg.norm(ours - one, axis=1) for one in true])
    return apart / np.where(sizes > 0, sizes, 1.0)[:, None]


def _mean_size(rows: Float64) -> float:
    return float(np.sqrt(np.mean(np.sum(rows**2, axis=1)))) or 1.0


def _of(ff: FeedForward, name: str) -> Float64:
    found = getattr(ff, name)
    if found is not None:
        return np.asarray(found)
    shapes = {"down_bias": (ff.d,), "linear": (ff.d, ff.d)}
    return np.zeros(shapes.get(name, (ff.hidden,)))


def _norm_error(learned: Block, truth: Block) -> float:
    """Of gains and biases, which in canonical pre-norms are one and zero."""
    if learned.norms is None or truth.norms is None:
        return 0.0
    worst = abs(learned.design.epsilon - truth.design.epsilon)
    for ours, true in zip(learned.norms, truth.norms, strict=True):
        size = float(np.linalg.norm(true.gain)) or 1.0
        worst = max(worst, float(np.linalg.norm(ours.gain - true.gain)) / size)
        biases = [np.zeros_like(one.gain) if one.bias is None else one.bias for one in (ours, true)]
        worst = max(worst, float(np.linalg.norm(biases[0] - biases[1])) / size)
    return worst
