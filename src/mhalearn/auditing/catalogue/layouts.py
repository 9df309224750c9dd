"""Faults of how weights lie in memory: transposes, fused projections, interleaved heads."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.auditing.fault import Context, Edit, Fault
from mhalearn.auditing.reading import Reading


def _flat(weight: Float64) -> Float64:
    """(g, d, h) -> (d, g h)."""
    g, d, h = weight.shape
    return weight.transpose(1, 0, 2).reshape(d, g * h)


def _heads(flat: Float64, heads: int) -> Float64:
    return np.ascontiguousarray(flat.reshape(len(flat), heads, -1).transpose(1, 0, 2))


def _out_transposed(r: Reading, _: Context) -> Iterable[Edit]:
    m, v, e = r.params["out"].shape
    said = "the output projection is transposed"
    if not r.factored and v == e:
        turned = np.ascontiguousarray(r.params["out"].swapaxes(1, 2))
    elif r.factored and m * v == e:
        turned = r.params["out"].reshape(m * v, e).T.reshape(m, v, e)
    else:
        return
    yield Edit("out-transposed", said, lambda q: q.with_params(out=turned), by_head=False)


def _transposed(r: Reading, _: Context) -> Iterable[Edit]:
    """Weights of a Conv1D layout, which are stored as (in, out), read as (out, in)."""
    if not r.factored:
        return
    turned = {}
    for side in ("query", "key", "value"):
        flat = _flat(r.params[side])
        if flat.shape[0] == flat.shape[1]:
            turned[side] = _heads(flat.T, len(r.params[side]))
    choices = [(side,) for side in turned] + ([tuple(turned)] if len(turned) > 1 else [])
    for sides in choices:
        said = f"the {', '.join(sides)} weights are transposed, as Conv1D stores them"
        changes = {side: turned[side] for side in sides}
        yield Edit(
            "weights-transposed",
            said,
            lambda q, c=changes: q.with_params(**c),  # type: ignore[misc]
            by_head=False,
        )


def _features_interleaved(r: Reading, _: Context) -> Iterable[Edit]:
    """Heads take every m-th feature instead of h in a row."""
    if not r.factored:
        return

    def dealt(name: str) -> Float64:
        leaf = r.params[name]
        if leaf.ndim == 2:  # a bias, which lies in the features as their weights do
            return np.ascontiguousarray(leaf.reshape(leaf.shape[1], leaf.shape[0]).T)
        g, d, h = leaf.shape
        flat = _flat(leaf).reshape(d, h, g)
        return np.ascontiguousarray(flat.transpose(2, 0, 1))

    if r.head_dim == 1 or r.n_heads == 1:
        return
    names = [f"{side}{end}" for side in ("query", "key", "value") for end in ("", "_bias")]
    sides = {name: dealt(name) for name in names if name in r.params}
    said = "heads take every so-many-th feature of their projections instead of those in a row"
    yield Edit("features-interleaved", said, lambda q: q.with_params(**sides), by_head=False)
    m, v, e = r.params["out"].shape
    out = np.ascontiguousarray(r.params["out"].reshape(v, m, e).transpose(1, 0, 2))
    said = "the heads' outputs are interleaved before the output projection"
    yield Edit("features-interleaved", said, lambda q: q.with_params(out=out), by_head=False)


def _untransposed(r: Reading, _: Context) -> Iterable[Edit]:
    """Reshapes of (tokens, heads, features) into (heads, tokens, features), and nothing more."""
    if r.n_heads == 1:
        return
    said = {"joined": "heads' outputs are joined without a transpose, which mixes tokens"}
    if r.groups == r.n_heads:
        said["split"] = "projections are split into heads without a transpose, which mixes tokens"
    for kind, words in said.items():
        yield Edit(
            "heads-not-transposed",
            words,
            lambda q, kind=kind: q.with_(untransposed=kind),  # type: ignore[misc]
            by_head=False,
        )


def _fused(r: Reading, _: Context) -> Iterable[Edit]:
    """A fused projection that holds q, k, v of each head in turn, read as three blocks, or so."""
    shapes = {r.params[side].shape for side in ("query", "key", "value")}
    if not r.factored or len(shapes) > 1 or r.n_heads == 1:
        return
    m = r.n_heads
    ends = [""] + (
        ["_bias"] if all(f"{s}_bias" in r.params for s in ("query", "key", "value")) else []
    )
    for blocks in (True, False):
        changes = {}
        for end in ends:
            parts = [r.params[f"{side}{end}"] for side in ("query", "key", "value")]
            if blocks:
                rows = np.stack(parts, axis=1).reshape(3 * m, *parts[0].shape[1:])
                found = [rows[i * m : (i + 1) * m] for i in range(3)]
            else:
                rows = np.concatenate(parts)
                found = [rows[i::3] for i in range(3)]
            for side, leaf in zip(("query", "key", "value"), found, strict=True):
                changes[f"{side}{end}"] = np.ascontiguousarray(leaf)
        read, stored = (
            ("in three blocks", "head by head") if blocks else ("head by head", "in blocks")
        )
        said = f"the fused projection is read {read} where it is stored {stored}"
        yield Edit(
            "fused-misread",
            said,
            lambda q, c=changes: q.with_params(**c),  # type: ignore[misc]
            by_head=False,
        )


FAULTS = (
    Fault("out-transposed", "layout", ("skyzh/tiny-llm#60",), _out_transposed, "W_O transposed"),
    Fault(
        "weights-transposed",
        "layout",
        ("AutoGPTQ/AutoGPTQ#139", "nntile/nntile#402"),
        _transposed,
        "query, key or value weights of a Conv1D layout",
    ),
    Fault("features-interleaved", "layout", (), _features_interleaved, "heads dealt like cards"),
    Fault(
        "heads-not-transposed",
        "layout",
        (
            "jsbaan/transformer-from-scratch#6",
            "hackiey/QAnet-pytorch#2",
            "reczoo/FuxiCTR#30",
            "649453932/Chinese-Text-Classification-Pytorch#10",
        ),
        _untransposed,
        "heads and tokens reshaped into each other",
    ),
    Fault(
        "fused-misread",
        "layout",
        ("lablup/mlxcel#928", "awslabs/slapo#46", "JieShibo/MoLE#9"),
        _fused,
        "fused q, k, v read in another order",
    ),
)
