"""Queries and keys of heads of any kind from their patterns, and patterns that are mixed from them.

Logs of patterns are scores of the heads' own kind, up to a constant a row, and these are fitted
(`score_regression`). Free patterns p_i of heads that share values leave something open: with any
matrix A whose rows sum to one, p'_i = sum_j A_ij p_j and other outputs make the same rows. Beside a
sink, which takes what is left, rows of A have any sum, and what one head alone writes any size.
Attention tells: the regression has A - 1 as further unknowns, to first order, patterns are mixed
anew by what it finds, and so on until nothing is mixed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk
from mhalearn.layer.projected import Projected
from mhalearn.run.run import Run
from mhalearn.solvers.free_patterns import Decoded, Sequences, Writers, decode
from mhalearn.solvers.score_regression import (
    Measured,
    centre,
    label_noise,
    measure_logits,
    regress_logits,
)

# Times that patterns are mixed anew at most, and steps between two of these; by how much they are
# taken to be mixed at first, and how little is nothing.
_TIMES, _STEPS, MIXED, _UNMIXED, _FASTEST = 20, 6, 0.1, 1e-9, 0.03
# How many times what may be mixed into it an entry is that counts half.
_ABOVE = 10.0
# Standard deviations by which an entry is below zero for sure, and what rounding does to it.
_SURE, _ROUNDING = 10.0, 1e-14
# Of what is left of the logits: a step that gains less is idle.
_IDLE, _MOST_STEPS = 0.3, 40

# Parameters of one problem a group of heads, with a first axis of groups.
Readers = dict[str, Array]


@dataclass(frozen=True)
class GroupScores:
    """Logits of the heads of a group side by side, and of a sink before all tokens; less what "mix"
    adds to the logs of their patterns."""

    kind: Projected

    def __call__(self, params: Mapping[str, Array], part: Measured) -> Array:
        tokens = part.tokens
        b, k, _ = tokens.shape
        none, inside = tokens[..., :0], jnp.ones((b, k), tokens.dtype)
        chunk = Chunk(tokens, tokens, none, none, inside, jnp.ones((b, k, k), bool))
        logits = self.kind.logits(dict(params), chunk)
        if self.kind.architecture.sinks:
            sinks = jnp.broadcast_to(params["sink"][:, None], (*logits.shape[:3], 1))
            logits = jnp.concatenate([sinks, logits], axis=-1)
        return logits - self._mixed(params["mix"], part) if "mix" in params else logits

    def _mixed(self, mix: Float[Array, "n n"], part: Measured) -> Array:
        assert part.patterns is not None
        counts = part.worth > 0
        mixed = jnp.einsum("ni,brij->brnj", mix, part.patterns)
        whole = jnp.sum(mix, axis=1)
        if self.kind.architecture.sinks:
            mixed = mixed.at[..., 0].add(-whole)
        else:
            mixed = mixed - whole[:, None] * part.patterns
        return jnp.where(counts, mixed / jnp.where(counts, part.patterns, 1.0), 0.0)


class Attended(NamedTuple):
    """What decides attention, by group, what heads write beside the patterns it makes, and by how
    much patterns of a group were mixed last."""

    readers: Readers
    writers: Writers
    mixed: Float64


@in_float64
def regress_groups(
    start: Attended,
    data: Sequences,
    kind: Projected,
    a: Architecture,
    half: float,
    run: Run,
    *,
    stage: str,
) -> tuple[Attended, Float64]:
    """Logits, and patterns mixed by what they tell, until nothing is mixed; and what is left of the
    squares of each group's logits.

    kind: of the heads of one group. a: of all heads, groups of which share values.
    Cost: some tens of forward passes a step, some ten of these. Trust: as of `regress_logits`; A is
    found from near one.
    """
    each, scores = a.heads // a.groups, GroupScores(kind)
    readers, writers, mixed = start
    open_ = each > 1 or a.sinks
    for _ in range(_TIMES):
        decoded = decode(writers, data, only_patterns=True)
        measured, mixed = measure_groups(decoded, data, a, half, mixed)
        asked = dict(readers)
        if open_:
            asked["mix"] = jnp.zeros((a.groups, each, each))
        going = open_ and bool(np.any(mixed > _UNMIXED))
        readers, left = regress_logits(
            asked,
            measured,
            run,
            stage=stage,
            max_steps=_STEPS if going else _MOST_STEPS,
            idle_gain=_IDLE,
            scores=scores,
        )
        mix = readers.pop("mix", None)
        if mix is not None:
            writers = mix_writers(a, writers, mix)
            least = _FASTEST * mixed
            mixed = np.maximum(np.max(np.abs(np.asarray(mix)), axis=(1, 2)), least)
        if not going or run.is_over():
            break
    return Attended(readers, writers, mixed), left


def measure_groups(
    decoded: Decoded, data: Sequences, a: Architecture, half: float, mixed: Float64
) -> tuple[Measured, Float64]:
    """`measure_logits`, with heads of a group side by side, and of tokens without the sink; and by
    how much patterns of each group are mixed, at least.

    What other heads' entries add to one makes its log wrong by any amount, so that entries count
    less that may be no more than that. Where it takes away, entries are negative, and show how much
    it is.
    """
    found, first = measure_logits(decoded, data, False, half, by_sign=False), int(a.sinks)
    tokens = data.tokens[:, :, first:, : a.d]
    logits, worth, p, spread = (
        jnp.moveaxis(part.reshape(a.groups, -1, *part.shape[1:]), 1, 4)[:, :, :, first:]
        for part in (
            found.logits,
            found.worth,
            jnp.moveaxis(decoded.patterns, 3, 0),
            jnp.moveaxis(decoded.spread, 3, 0),
        )
    )
    added = jnp.sum(jnp.abs(p), axis=4, keepdims=True) - (0.0 if a.sinks else jnp.abs(p))
    least = _SURE * (jnp.sqrt(label_noise(decoded, data) * spread) + _ROUNDING)
    taken = jnp.where(p < -least, -p / jnp.maximum(added, -p), 0.0)
    mixed = np.maximum(mixed, np.asarray(jnp.max(taken, axis=(1, 2, 3, 4, 5))))
    share = (_ABOVE * jnp.asarray(mixed).reshape(-1, *(1,) * 5) * added) ** 2
    worth = jnp.where(worth > 0, worth * p**2 / (p**2 + worth * share), 0.0)
    return Measured(tokens, tokens, centre(logits, worth), worth, p), mixed


def mix_writers(a: Architecture, writers: Writers, mix: Float[Array, "g n n"]) -> Writers:
    """What heads write beside patterns that are mixed so, that rows stay as they are."""
    change = jnp.eye(mix.shape[-1]) + mix
    if not a.sinks:
        change = change - jax.vmap(jnp.diag)(jnp.sum(mix, axis=2))
    out = writers.out.reshape(a.groups, -1, *writers.out.shape[1:])
    found = jnp.einsum("gij,gihe->gjhe", jnp.linalg.inv(change), out)
    return writers._replace(out=found.reshape(writers.out.shape))
