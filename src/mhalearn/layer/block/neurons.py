"""The canonical form of neurons: what a feed-forward part determines of them.

Scales that no function shows are one; neurons that do not depend on their input are a bias, or a
linear map; copies are added up, and neurons that share a gate are as many as their map has rank; a
neuron and its mirror image, act(z) and act(-z) = act(z) - z, are one neuron and a linear map (so
are those of sigmoid gates, act(-z) = 1 - act(z)); dead ones are left out; where turning some over
makes the linear map vanish, they are; the rest comes in the order of its size.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.programs import float64
from mhalearn._runtime.types import Float64
from mhalearn.layer.block.activations import Activation
from mhalearn.layer.block.feed_forward import FeedForward
from mhalearn.layer.layer import group_heads

# Numbers that all neurons' matrices of rank one may have, where regression on them is direct.
_FEW = 2**22


class _Neurons:
    """Neurons as rows, while they are put in order."""

    def __init__(self, ff: FeedForward) -> None:
        self.activation = Activation(ff.activation)
        self.up = _rows(ff.up, ff.up_bias).copy()  # (hidden, d + 1), the bias last
        self.gate = None if ff.gate is None else _rows(ff.gate, ff.gate_bias).copy()
        self.down = ff.down.copy()
        self.linear = np.zeros((ff.d + 1, ff.d))  # the bias as its last row
        if ff.linear is not None:
            self.linear[:-1] = ff.linear
        if ff.down_bias is not None:
            self.linear[-1] = ff.down_bias
        self.terms = float(np.abs(self.linear).max(initial=0.0))  # largest that was added

    def keep(self, which: Any) -> None:
        self.up, self.down = self.up[which], self.down[which]
        self.gate = None if self.gate is None else self.gate[which]

    @property
    def inputs(self) -> Float64:
        """All that a neuron's value depends on."""
        return self.up if self.gate is None else np.concatenate([self.gate, self.up], axis=1)

    def add_linear(self, rows: Float64, outputs: Float64) -> None:
        """Affine functions of the input, (j, d + 1) and (j, d)."""
        change = rows.T @ outputs
        self.linear += change
        self.terms = max(self.terms, float(np.abs(change).max(initial=0.0)))


def canonical_neurons(ff: FeedForward, tolerance: float = 1e-8) -> FeedForward:
    """The same function; what is below `tolerance` of the largest counts as zero or equal."""
    found = _Neurons(ff)
    if ff.hidden:
        _fold_constant(found, tolerance)
        _fix_scales(found)
        _drop_dead(found, tolerance)
        _merge(found, tolerance) if found.gate is None else _merge_gated(found, tolerance)
        _drop_dead(found, tolerance)
        _turn_over(found, tolerance)
        sizes = np.linalg.norm(found.down, axis=1) * np.linalg.norm(found.inputs, axis=1)
        found.keep(np.argsort(-sizes, kind="stable"))
    return _feed_forward(found, ff, tolerance)


def _fold_constant(found: _Neurons, tolerance: float) -> None:
    """Neurons, or gates, whose input has no weights."""
    looked = found.up if found.gate is None else found.gate
    sizes = np.linalg.norm(looked[:, :-1], axis=1)
    still = sizes <= tolerance * sizes.max(initial=0.0)
    if not still.any():
        return
    with float64():
        values = np.asarray(found.activation(jnp.asarray(looked[still, -1])), np.float64)
    rows = np.zeros_like(found.up[still]) if found.gate is None else found.up[still]
    if found.gate is None:
        rows[:, -1] = 1.0
    found.add_linear(rows * values[:, None], found.down[still])
    found.keep(~still)


def _fix_scales(found: _Neurons) -> None:
    """Inputs of length one where the output can take up their size, and the sign."""
    activation = found.activation
    if activation.is_gated:
        sizes = np.linalg.norm(found.up, axis=1)
        largest = np.take_along_axis(found.up, np.abs(found.up).argmax(1)[:, None], axis=1)[:, 0]
        _rescale(found, "up", np.where(sizes > 0, np.copysign(sizes, largest), 1.0))
    if activation.scales:
        side = "gate" if activation.is_gated else "up"
        _rescale(found, side, np.linalg.norm(getattr(found, side)[:, :-1], axis=1))


def _rescale(found: _Neurons, side: str, sizes: Float64) -> None:
    setattr(found, side, getattr(found, side) / sizes[:, None])
    found.down = found.down * sizes[:, None]


def _drop_dead(found: _Neurons, tolerance: float) -> None:
    sizes = np.linalg.norm(found.down, axis=1) * np.linalg.norm(found.up, axis=1)
    found.keep(sizes > tolerance * sizes.max(initial=0.0))


def _merge(found: _Neurons, tolerance: float, mean: bool = False) -> None:
    """Add copies up, and mirror images, which leave a linear map. Cost: O(hidden^2 d).

    mean: of what is only near, take the mean of inputs, by their shares in the sum of outputs,
    which to first order changes no output.
    """
    inputs = found.inputs
    if not len(inputs):
        return
    sizes = np.linalg.norm(inputs, axis=1)
    apart = np.stack([np.linalg.norm(inputs - one, axis=1) for one in inputs])
    if found.activation.reflects:
        mirrored = np.stack([np.linalg.norm(inputs + one, axis=1) for one in inputs])
        apart = np.minimum(apart, mirrored)
    weights = np.linalg.norm(found.down, axis=1) * sizes
    groups = group_heads(apart, weights, tolerance * float(sizes.max()))
    down = found.down.copy()
    for leader, *others in groups:
        for other in others:
            down[leader] += found.down[other]
            if inputs[leader] @ inputs[other] < 0:  # act(-z) = act(z) - z
                found.add_linear(-found.up[leader][None], found.down[other][None])
        if mean and others:
            found.up[leader] = _mean_input(inputs, found.down, leader, others)
    found.down = down
    found.keep([group[0] for group in groups])


def _mean_input(inputs: Float64, down: Float64, leader: int, others: list[int]) -> Float64:
    """That of the leader where outputs nearly cancel."""
    group = [leader, *others]
    whole = down[group].sum(axis=0)
    shares = down[group] @ whole / max(float(whole @ whole), 1e-300)
    if np.abs(shares).max() > 2.0:
        return inputs[leader]
    signs = np.where(inputs[group] @ inputs[leader] < 0, -1.0, 1.0)
    mean: Float64 = (shares * signs) @ inputs[group]
    return mean


def _merge_gated(found: _Neurons, tolerance: float) -> None:
    """Neurons that share a gate are act(gate) times a linear map: as many as its rank."""
    gate = found.gate
    assert gate is not None
    if not len(gate):
        return
    apart = np.stack([np.linalg.norm(gate - one, axis=1) for one in gate])
    if found.activation.mirrors:
        mirrored = np.stack([np.linalg.norm(gate + one, axis=1) for one in gate])
        apart = np.minimum(apart, mirrored)
    weights = np.linalg.norm(found.down, axis=1) * np.linalg.norm(found.up, axis=1)
    groups = group_heads(apart, weights, tolerance * float(np.linalg.norm(gate, axis=1).max()))
    kept = []
    for group in groups:
        if len(group) > 1:
            _turn(found, [one for one in group[1:] if gate[one] @ gate[group[0]] < 0])
            left, values, right = np.linalg.svd(found.up[group].T @ found.down[group])
            rank = min(len(group), int(np.sum(values > tolerance * values[0])))
            group = group[: max(rank, 1)]
            for j, neuron in enumerate(group):
                found.up[neuron], found.down[neuron] = left[:, j], values[j] * right[j]
            gate[group] = gate[group[0]]
        kept += group
    found.keep(kept)
    _fix_scales(found)


def _turn(found: _Neurons, which: Any) -> None:
    """Make neurons their mirror images, and add the affine maps that they then leave out."""
    found.add_linear(found.up[which], found.down[which])
    if found.gate is None:  # act(z) = act(-z) + z
        found.up[which] = -found.up[which]
    else:  # act(z) = 1 - act(-z), for which the output takes the sign
        found.gate[which], found.down[which] = -found.gate[which], -found.down[which]


def _turn_over(found: _Neurons, tolerance: float) -> None:
    """Turn those neurons over whose affine maps sum to the linear map, where there are such."""
    linear = found.linear[:-1]
    if not found.activation.mirrors or not len(found.up):
        return
    if np.abs(linear).max(initial=0.0) <= tolerance * max(found.terms, 1e-300):
        return
    which, _ = choose_turned(found.up[:, :-1], found.down, linear, None, tolerance)
    if which is not None:
        _turn(found, which)


def choose_turned(
    inputs: Float64,
    outputs: Float64,
    linear: Float64,
    free: Float64 | None,
    tolerance: float,
) -> tuple[NDArray[np.int64] | None, Float64]:
    """Neurons (h, a) and (h, e) that, turned over, leave of a linear map (a, e) a combination of
    the matrices f f^T of vectors `free` (f, a), and its coefficients; None where there are none.

    Each neuron adds a matrix of rank one; which of them are in the sum is linear regression, whose
    coefficients are then zeros and ones. Of many neurons, by its normal equations.
    Cost: O(a e (h + f)^2) of few, O((a + e) (h + f)^2 + (h + f)^3) of many.
    """
    none = np.zeros((0, linear.shape[0]))
    others = none if free is None else free
    lefts, rights = np.vstack([-inputs, others]), np.vstack([outputs, others[:, : linear.shape[1]]])
    if linear.size * len(lefts) <= _FEW:
        maps = np.einsum("na,ne->nae", lefts, rights).reshape(-1, linear.size)
        shares = np.linalg.lstsq(maps.T, linear.ravel(), rcond=1e-10)[0]
    else:
        gram = (lefts @ lefts.T) * (rights @ rights.T)
        found = np.sum((lefts @ linear) * rights, axis=1)
        shares = np.linalg.lstsq(gram, found, rcond=1e-12)[0]
    which = np.flatnonzero(shares[: len(inputs)] > 0.5)
    target = linear + inputs[which].T @ outputs[which]
    rest = np.zeros(0)
    if len(others):
        gram, found = (others @ others.T) ** 2, np.sum((others @ target) * others, axis=1)
        rest = np.linalg.lstsq(gram, found, rcond=1e-12)[0]
        target = target - (others.T * rest) @ others
    left = np.linalg.norm(target)
    largest = np.max(
        np.abs(inputs).max(axis=1, initial=0.0) * np.abs(outputs).max(axis=1, initial=0.0),
        initial=0.0,
    )
    is_done = left <= tolerance * max(float(np.linalg.norm(linear)), float(largest))
    return (which if is_done else None), rest


def merge_neurons(ff: FeedForward, tolerance: float) -> FeedForward:
    """With neurons made one whose inputs are as near, up to their sign where that can be turned;
    of gated ones, the gates. Nearly the same function."""
    found = _Neurons(ff)
    if ff.hidden:
        _fix_scales(found)
        if found.gate is None:
            _merge(found, tolerance, mean=True)
        else:
            _merge_gated(found, tolerance)
    return _feed_forward(found, ff, 0.0)


def turn_neurons(ff: FeedForward, which: NDArray[np.int64]) -> FeedForward:
    """The same function by some neurons' mirror images, and what they leave out as a linear map."""
    found = _Neurons(ff)
    _turn(found, which)
    return _feed_forward(found, ff, 0.0)


def _feed_forward(found: _Neurons, given: FeedForward, tolerance: float) -> FeedForward:
    linear: Float64 | None = found.linear[:-1]
    assert linear is not None
    if np.abs(linear).max(initial=0.0) <= tolerance * max(found.terms, 1e-300):
        linear = None
    bias = given.has_bias or bool(found.linear[-1].any())
    gate = found.gate
    return FeedForward(
        up=found.up[:, :-1].T,
        down=found.down,
        up_bias=found.up[:, -1] if bias else None,
        down_bias=found.linear[-1] if bias else None,
        gate=None if gate is None else gate[:, :-1].T,
        gate_bias=None if gate is None or not bias else gate[:, -1],
        linear=linear,
        activation=given.activation,
    )


def _rows(weights: Float64, bias: Float64 | None) -> Float64:
    last = np.zeros(weights.shape[1]) if bias is None else bias
    return np.concatenate([weights, last[None]]).T
