"""Faults of what a row sees: causal masks, windows, padding, sinks, and what the softmax counts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mhalearn.auditing.fault import Context, Edit, Fault, dialled
from mhalearn.auditing.reading import Reading

# Heads up to which the sink of each is tried for all others.
_MOST_SINKS = 16


def _causal_missing(r: Reading, _: Context) -> Iterable[Edit]:
    if r.causal:
        said = "the causal mask is missing: rows see tokens after them"
        yield Edit("causal-missing", said, lambda q: q.with_(causal=False))


def _causal_added(r: Reading, _: Context) -> Iterable[Edit]:
    if not r.causal:
        said = "rows see no token after them, where no causal mask was claimed"
        yield Edit("causal-added", said, lambda q: q.with_(causal=True))


def _sees_next(r: Reading, _: Context) -> Iterable[Edit]:
    if r.causal:
        said = "the causal mask is off by one: rows see the token after them"
        yield Edit("causal-sees-next", said, lambda q: q.with_(ahead=1))


def _misses_self(r: Reading, _: Context) -> Iterable[Edit]:
    if not r.causal:
        return
    said = "the causal mask is off by one: rows do not see their own token"
    yield Edit("causal-misses-self", said, lambda q: q.with_(ahead=-1))
    yield Edit("causal-misses-self", said, lambda q: q.with_(ahead=-1, empty="uniform"))


def _inverted(r: Reading, _: Context) -> Iterable[Edit]:
    if r.causal:
        said = "the causal mask is inverted: rows see their own token and those after it"
        yield Edit("causal-inverted", said, lambda q: q.with_(inverted=True))


def _window_missing(r: Reading, _: Context) -> Iterable[Edit]:
    if r.window is not None:
        said = f"the window of {r.window} tokens is ignored"
        yield Edit("window-missing", said, lambda q: q.with_(window=None))


def _window_off_by_one(r: Reading, _: Context) -> Iterable[Edit]:
    if r.window is None:
        return
    for size in (r.window - 1, r.window + 1):
        if size >= 1:
            said = f"the window is off by one: {size} tokens where {r.window} were claimed"
            yield Edit("window-off-by-one", said, lambda q, size=size: q.with_(window=size))  # type: ignore[misc]


def _window_wrong_end(r: Reading, _: Context) -> Iterable[Edit]:
    if r.window is None:
        return
    first = f"the window is counted from the wrong end: rows see the first {r.window} tokens"
    yield Edit("window-wrong-end", first, lambda q: q.with_(window_kind="first", empty="zero"))
    yield Edit("window-wrong-end", first, lambda q: q.with_(window_kind="first", empty="uniform"))
    far = f"the window is inverted: rows see what is {r.window} tokens or more away"
    yield Edit("window-wrong-end", far, lambda q: q.with_(window_kind="far"))


def _window_other(r: Reading, context: Context) -> Iterable[Edit]:
    return () if r.window is None else _windows("window-other", r, context)


def _window_added(r: Reading, context: Context) -> Iterable[Edit]:
    return _windows("window-added", r, context) if r.window is None else ()


def _windows(name: str, r: Reading, context: Context) -> Iterable[Edit]:
    claimed = "no window was claimed" if r.window is None else f"{r.window} were claimed"
    grid = [float(size) for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)]
    return dialled(
        name,
        "window",
        [size for size in grid if size < context.tokens],
        lambda value: f"rows see the last {value:g} tokens where {claimed}",
        lambda q, value: q.with_(window=int(value)),
        claimed=None if r.window is None else float(r.window),
        whole=True,
    )


def _sink_missing(r: Reading, _: Context) -> Iterable[Edit]:
    if "sink" in r.params:
        none = np.full(r.n_heads, -np.inf)
        yield Edit("sink-missing", "the sink is missing", lambda q: q.with_params(sink=none))


def _sink_wrong_head(r: Reading, _: Context) -> Iterable[Edit]:
    if "sink" not in r.params or r.n_heads < 2:
        return
    sinks = r.params["sink"]
    for j in range(min(r.n_heads, _MOST_SINKS)):
        said = f"the sink is that of head {j + 1}"
        other = np.full(r.n_heads, sinks[j])
        yield Edit("sink-wrong-head", said, lambda q, other=other: q.with_params(sink=other))  # type: ignore[misc]
    for step, said in ((1, "the head before"), (-1, "the head after")):
        other = np.roll(sinks, step)
        yield Edit(
            "sink-wrong-head",
            f"the sink is that of {said}",
            lambda q, other=other: q.with_params(sink=other),  # type: ignore[misc]
        )


def _sink_scaled(r: Reading, _: Context) -> Iterable[Edit]:
    if "sink" in r.params:
        said = "the sink's logit is scaled as those of tokens are"
        sinks = r.params["sink"] * r.scale
        yield Edit("sink-scaled", said, lambda q: q.with_params(sink=sinks))


def _padding(_: Reading, context: Context) -> Iterable[Edit]:
    if context.padded:
        said = "padding is attended to"
        yield Edit("padding-attended", said, lambda q: q.with_(attends_padding=True))


def _idle_keys(_: Reading, context: Context) -> Iterable[Edit]:
    return dialled(
        "softmax-too-long",
        "keys",
        [2.0**power for power in range(11)],
        lambda value: f"the softmax counts {value:g} keys more than there are, with logit zero",
        lambda q, value: q.with_(idle_keys=int(value)),
        claimed=None,
        whole=True,
    )


def _over_queries(_: Reading, __: Context) -> Iterable[Edit]:
    said = "the softmax sums over queries instead of keys"
    yield Edit("softmax-over-queries", said, lambda q: q.with_(over_queries=True))


FAULTS = (
    Fault(
        "causal-missing",
        "mask",
        (
            "keras-team/keras#23038",
            "huggingface/transformers#48745",
            "facebookresearch/xformers#103",
        ),
        _causal_missing,
        "rows see tokens after them",
    ),
    Fault(
        "causal-added",
        "mask",
        ("huggingface/transformers#46077",),
        _causal_added,
        "a causal mask where none was claimed",
    ),
    Fault("causal-sees-next", "mask", ("octo-models/octo#75",), _sees_next, "one token too many"),
    Fault(
        "causal-misses-self",
        "mask",
        ("pbloem/former#10",),
        _misses_self,
        "rows do not see themselves",
    ),
    Fault(
        "causal-inverted",
        "mask",
        ("rasbt/LLMs-from-scratch#1062",),
        _inverted,
        "rows see themselves and what follows",
    ),
    Fault(
        "window-missing",
        "window",
        ("sgl-project/sglang#30050", "unslothai/unsloth#8253"),
        _window_missing,
        "full attention where a window was claimed",
    ),
    Fault(
        "window-off-by-one",
        "window",
        ("huggingface/transformers#39408", "NVIDIA-NeMo/Megatron-Bridge#2656", "zml/zml#763"),
        _window_off_by_one,
        "a window of one token more or less",
    ),
    Fault(
        "window-wrong-end",
        "window",
        ("huggingface/transformers#41228",),
        _window_wrong_end,
        "counted from the wrong end",
    ),
    Fault("window-other", "window", (), _window_other, "another window, which is fitted"),
    Fault(
        "window-added",
        "window",
        ("huggingface/transformers#38002", "cactus-compute/cactus#320"),
        _window_added,
        "a window where none was claimed",
    ),
    Fault(
        "sink-missing",
        "sink",
        ("modular/modular#6198", "sgl-project/sglang#30050", "vllm-project/vllm-metal#550"),
        _sink_missing,
        "the sink is dropped",
    ),
    Fault(
        "sink-wrong-head",
        "sink",
        ("modular/modular#6198",),
        _sink_wrong_head,
        "the sink of another head",
    ),
    Fault("sink-scaled", "sink", (), _sink_scaled, "the sink's logit is scaled"),
    Fault(
        "padding-attended",
        "mask",
        ("tloen/alpaca-lora#107", "huggingface/transformers#278"),
        _padding,
        "tokens past the length are seen",
    ),
    Fault(
        "softmax-too-long",
        "softmax",
        ("ilivans/tf-rnn-attention#11",),
        _idle_keys,
        "the softmax counts keys that are not there",
    ),
    Fault(
        "softmax-over-queries",
        "softmax",
        ("nerminnuraydogan/vision-transformer#1", "PetrochukM/PyTorch-NLP#2"),
        _over_queries,
        "the softmax sums over the wrong axis",
    ),
)
