"""Faults of rotary positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from mhalearn.auditing.fault import Context, Edit, Fault, dialled, tell_apart
from mhalearn.auditing.reading import Reading
from mhalearn.layer.rope import LAYOUTS, Rope
from mhalearn.layer.rope_scaling import LinearScaling, Scaling, geometric_frequencies

_BASES = (100.0, 500.0, 1e3, 3e3, 1e4, 3e4, 1e5, 5e5, 1e6, 5e6, 1e7, 1e8)
_FACTORS = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def _missing(r: Reading, _: Context) -> Iterable[Edit]:
    if r.rope is not None:
        said = "queries and keys are not rotated"
        yield Edit("rotary-missing", said, lambda q: q.with_(rope=None))


def _added(r: Reading, _: Context) -> Iterable[Edit]:
    if r.rope is not None or not r.factored or r.head_dim % 2:
        return
    for layout in LAYOUTS:
        said = f"queries and keys are rotated ({layout} layout), where nothing of it was claimed"
        rope = Rope(layout=layout)
        yield Edit("rotary-added", said, lambda q, rope=rope: q.with_(rope=rope))  # type: ignore[misc]


def _layout(r: Reading, _: Context) -> Iterable[Edit]:
    if r.rope is None or r.rope.rotated(r.head_dim) == 2:
        return
    claimed, found = r.rope.layout, "interleaved" if r.rope.layout == "half" else "half"
    words = {"half": "half-split", "interleaved": "interleaved"}
    said = f"the rotary layout is {words[found]} where {words[claimed]} was claimed"
    rope = replace(r.rope, layout=found)
    yield Edit("rotary-layout", said, lambda q: q.with_(rope=rope))


def _base(r: Reading, _: Context) -> Iterable[Edit]:
    if r.rope is None or r.rope.rotated(r.head_dim) == 2:
        return ()
    rope = r.rope
    return dialled(
        "rotary-base",
        "base",
        (*_BASES, float(rope.base)),
        lambda value: "the rotary base is {} where {} was claimed".format(
            *tell_apart(value, float(rope.base))
        ),
        lambda q, value: q.with_(rope=replace(q.rope or rope, base=value)),
        claimed=float(rope.base),
    )


def _fraction(r: Reading, _: Context) -> Iterable[Edit]:
    if r.rope is None:
        return
    h, rope = r.head_dim, r.rope
    step = 2 if h <= 16 else max(2, h // 16 * 2)
    for size in range(step, h + 1, step):
        if size == rope.rotated(h):
            continue
        said = f"{size} of {h} dimensions are rotated where {rope.rotated(h)} were claimed"
        other = replace(rope, fraction=size / h)
        yield Edit(
            "rotary-fraction",
            said,
            lambda q, other=other: q.with_(rope=other, frequencies=None),  # type: ignore[misc]
        )


def _whole_width(r: Reading, _: Context) -> Iterable[Edit]:
    if r.rope is None or r.rope.scaling is not None or r.rope.rotated(r.head_dim) == r.head_dim:
        return
    said = "rotary frequencies are those of the whole head, where a part of it is rotated"
    pairs = r.rope.rotated(r.head_dim) // 2
    frequencies = geometric_frequencies(float(r.rope.base), r.head_dim)[:pairs]
    yield Edit("rotary-width", said, lambda q: q.with_(frequencies=frequencies))


def _positions(r: Reading, _: Context) -> Iterable[Edit]:
    if r.rope is None:
        return
    for shift in (1.0, -1.0):
        said = f"queries stand one position too {'late' if shift > 0 else 'early'} beside keys"
        yield Edit("rotary-positions", said, lambda q, shift=shift: q.with_(query_shift=shift))  # type: ignore[misc]


def _sign(r: Reading, _: Context) -> Iterable[Edit]:
    if r.rope is not None:
        said = "rotary angles have the wrong sign"
        yield Edit("rotary-sign", said, lambda q: q.with_(sign=-1))


def _one_side(r: Reading, _: Context) -> Iterable[Edit]:
    if r.rope is None:
        return
    for kept, other in (("query", "keys"), ("key", "queries")):
        said = f"{other} are not rotated"
        yield Edit("rotary-one-side", said, lambda q, kept=kept: q.with_(rotated=(kept,)))  # type: ignore[misc]


def _scaling(r: Reading, _: Context) -> Iterable[Edit]:
    """Frequencies as they are without the scaling, or with another factor."""
    if r.rope is None:
        return
    rope, scaling = r.rope, r.rope.scaling
    if isinstance(scaling, Scaling):
        plain = replace(rope, scaling=None)
        said = f"the {scaling.name} scaling of rotary frequencies is missing"
        yield Edit("rotary-scaling", said, lambda q: q.with_(rope=plain))

    def scaled(value: float) -> Rope:
        kept = scaling if isinstance(scaling, Scaling) else LinearScaling(1.0)
        return replace(rope, scaling=replace(kept, factor=value))

    claimed = float(scaling.factor) if isinstance(scaling, Scaling) else None
    was = "none was claimed" if claimed is None else f"{claimed:g} was claimed"
    yield from dialled(
        "rotary-scaling",
        "factor",
        (*_FACTORS, *(() if claimed is None else (claimed,))),
        lambda value: f"rotary frequencies are scaled by a factor of {value:.4g} where {was}",
        lambda q, value: q.with_(rope=scaled(value)),
        claimed=claimed,
    )


def _magnitude(r: Reading, _: Context) -> Iterable[Edit]:
    if r.rope is None or np.isclose(r.rope.magnitude, 1.0):
        return
    claimed = r.rope.magnitude
    for value, said in ((1.0, "missing"), (claimed**2, "applied twice")):
        words = f"the factor {claimed:.4g} of scaled rotary positions is {said}"
        yield Edit("rotary-magnitude", words, lambda q, value=value: q.with_(magnitude=value))  # type: ignore[misc]


FAULTS = (
    Fault("rotary-missing", "rotary", ("sqliteai/warp#27",), _missing, "no rotation"),
    Fault(
        "rotary-added",
        "rotary",
        ("vllm-project/vllm#30413", "vllm-project/vllm-metal#644"),
        _added,
        "a rotation not claimed",
    ),
    Fault(
        "rotary-layout",
        "rotary",
        ("huggingface/nanotron#427", "huggingface/transformers#47403"),
        _layout,
        "half-split for interleaved, or the reverse",
    ),
    Fault(
        "rotary-base",
        "rotary",
        ("sgl-project/sglang#30050", "deepspeedai/Megatron-DeepSpeed#351"),
        _base,
        "another base, which is fitted",
    ),
    Fault(
        "rotary-fraction",
        "rotary",
        (
            "huggingface/transformers#48652",
            "AI-Hypercomputer/maxtext#4616",
            "ml-explore/mlx-lm#1698",
        ),
        _fraction,
        "another share of the dimensions is rotated",
    ),
    Fault(
        "rotary-width",
        "rotary",
        ("pie-project/pie#603",),
        _whole_width,
        "frequencies of the head's width where a part is rotated",
    ),
    Fault(
        "rotary-positions",
        "rotary",
        ("pytorch/executorch#2010", "skyzh/tiny-llm#46", "warpfront/hipfire#391"),
        _positions,
        "queries and keys are one position apart",
    ),
    Fault(
        "rotary-scaling",
        "rotary",
        ("swiss-ai/Megatron-LM#80", "ollama/ollama#5924"),
        _scaling,
        "scaling missing, or of another factor",
    ),
    Fault(
        "rotary-magnitude",
        "rotary",
        ("vllm-project/vllm#46280", "sgl-project/sglang#33558"),
        _magnitude,
        "the scaled rotation's magnitude missing or squared",
    ),
    Fault("rotary-sign", "rotary", ("karpathy/nanochat#489",), _sign, "angles of the wrong sign"),
    Fault(
        "rotary-one-side",
        "rotary",
        ("kvcache-ai/sglang#66", "vllm-project/vllm-omni#3828"),
        _one_side,
        "queries or keys are not rotated",
    ),
)
