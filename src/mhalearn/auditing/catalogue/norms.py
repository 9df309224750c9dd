"""Faults of norms on queries and keys, and of biases by distance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.auditing.fault import Context, Edit, Fault, dialled
from mhalearn.auditing.reading import Reading
from mhalearn.layer.position_bias import Alibi, T5Bias

_SIDES = {"query": "queries", "key": "keys"}
_EPSILONS = (0.0, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1)


def _missing(r: Reading, _: Context) -> Iterable[Edit]:
    if r.norm is None:
        return
    yield Edit("norm-missing", "queries and keys are not normalised", lambda q: q.with_(norm=None))
    for side, other in (("query", "keys"), ("key", "queries")):
        said = f"{other} are not normalised"
        yield Edit("norm-missing", said, lambda q, side=side: q.with_(normed=(side,)))  # type: ignore[misc]


def _after_rotation(r: Reading, _: Context) -> Iterable[Edit]:
    if r.norm is not None and r.rope is not None:
        said = "queries and keys are normalised after the rotation instead of before"
        yield Edit("norm-after-rotation", said, lambda q: q.with_(norm_last=True))


def _epsilon(r: Reading, _: Context) -> Iterable[Edit]:
    if r.norm is None:
        return ()
    norm = r.norm
    return dialled(
        "norm-epsilon",
        "epsilon",
        (*_EPSILONS, float(norm.epsilon)),
        lambda value: f"the norm's epsilon is {value:.3g} where {norm.epsilon:g} was claimed",
        lambda q, value: q.with_(norm=replace(q.norm or norm, epsilon=value)),
        claimed=float(norm.epsilon),
    )


def _offset(r: Reading, _: Context) -> Iterable[Edit]:
    if "query_gain" not in r.params:
        return
    for step, said in ((-1.0, "lacks its +1"), (1.0, "has a +1 too much")):
        for sides in (("query", "key"), ("query",), ("key",)):
            which = "the norm's gain" if len(sides) == 2 else f"the gain of {_SIDES[sides[0]]}"
            changes = {f"{side}_gain": r.params[f"{side}_gain"] + step for side in sides}
            yield Edit(
                "norm-gain-offset",
                f"{which} {said}",
                lambda q, changes=changes: q.with_params(**changes),  # type: ignore[misc]
            )


def _gain_missing(r: Reading, _: Context) -> Iterable[Edit]:
    if "query_gain" not in r.params:
        return
    ones = {f"{side}_gain": np.ones_like(r.params[f"{side}_gain"]) for side in _SIDES}
    yield Edit("norm-gain-missing", "the norm has no gains", lambda q: q.with_params(**ones))


def _across(r: Reading, _: Context) -> Iterable[Edit]:
    if r.norm is None or r.n_heads == 1:
        return
    said = "one norm for all heads together where each was claimed its own"
    if r.norm.across_heads:
        said = "each head has a norm of its own where one for all together was claimed"
    other = replace(r.norm, across_heads=not r.norm.across_heads)
    yield Edit("norm-across-heads", said, lambda q: q.with_(norm=other), by_head=False)


def _latent_norm(r: Reading, _: Context) -> Iterable[Edit]:
    if r.latent is None or not r.latent.norm:
        return
    for name, words in (("latent", "keys and values"), ("query_latent", "queries")):
        if name in r.params:
            said = f"the latent that {words} are read from is not normalised"
            kept = tuple(other for other in r.latents_normed if other != name)
            yield Edit(
                "latent-norm-missing",
                said,
                lambda q, kept=kept: q.with_(latents_normed=kept),  # type: ignore[misc]
                by_head=False,
            )


def _alibi_missing(r: Reading, _: Context) -> Iterable[Edit]:
    if r.position_bias is not None:
        said = f"the {r.position_bias.name} bias by distance is missing"
        yield Edit("position-bias-missing", said, lambda q: q.with_(position_bias=None))


def _alibi_slopes(r: Reading, _: Context) -> Iterable[Edit]:
    if not isinstance(r.position_bias, Alibi):
        return
    m = r.n_heads
    lower, upper = 2 ** int(np.log2(m)), 2 ** int(np.ceil(np.log2(m)))
    counts = {m // 2, 2 * m, 4 * m, 8 * m, m // 4, m + 1, m - 1, lower, upper, 2 * upper} - {m, 0}
    for count in sorted(counts):
        slopes: Float64 = np.resize(Alibi().slopes(count), m)
        said = f"ALiBi slopes are those of {count} heads where there are {m}"
        yield Edit("alibi-slopes", said, lambda q, slopes=slopes: q.with_(slopes=slopes))  # type: ignore[misc]
    powers = np.arange(m, dtype=np.float64) * (-8.0 / m)
    others: dict[str, Float64] = {
        "run from 1": np.exp2(powers),
        "are one geometric series, which holds for powers of two alone": np.exp2(powers - 8.0 / m),
        "are turned around": Alibi().slopes(m)[::-1],
        "have the wrong sign": -Alibi().slopes(m),
    }
    for words, slopes in others.items():
        if not np.allclose(slopes, Alibi().slopes(m)):
            said = f"ALiBi slopes {words}"
            yield Edit("alibi-slopes", said, lambda q, slopes=slopes: q.with_(slopes=slopes))  # type: ignore[misc]


def _t5_sides(r: Reading, _: Context) -> Iterable[Edit]:
    kind = r.position_bias
    if not isinstance(kind, T5Bias) or kind.buckets % 4:
        return
    other = replace(kind, bidirectional=not kind.bidirectional)
    said = f"buckets of distance are {'' if other.bidirectional else 'not '}for both directions"
    yield Edit("t5-buckets", said, lambda q: q.with_(position_bias=other))


FAULTS = (
    Fault(
        "norm-missing",
        "norm",
        ("kyegomez/MegaVIT#17",),
        _missing,
        "queries, keys or both are not normalised",
    ),
    Fault(
        "norm-after-rotation",
        "norm",
        ("karpathy/nanochat#743",),
        _after_rotation,
        "the norm comes after the rotation",
    ),
    Fault(
        "norm-epsilon",
        "norm",
        ("apache/tvm#15856", "meta-llama/llama#771", "Wenyueh/MinivLLM#82"),
        _epsilon,
        "another epsilon, which is fitted",
    ),
    Fault(
        "norm-gain-offset",
        "norm",
        ("linkedin/Liger-Kernel#74", "Blaizzy/mlx-vlm#2114"),
        _offset,
        "gains without their +1, or with it twice",
    ),
    Fault(
        "norm-gain-missing", "norm", ("vllm-project/vllm#14828",), _gain_missing, "gains are ones"
    ),
    Fault(
        "norm-across-heads",
        "norm",
        ("Alpha-VLLM/Lumina-T2X#112",),
        _across,
        "one norm for all heads, or the reverse",
    ),
    Fault(
        "latent-norm-missing",
        "norm",
        ("AMD-AGI/Primus#94",),
        _latent_norm,
        "latents are not normalised",
    ),
    Fault(
        "position-bias-missing",
        "bias by distance",
        ("HabanaAI/vllm-fork#437",),
        _alibi_missing,
        "no bias by distance",
    ),
    Fault(
        "alibi-slopes",
        "bias by distance",
        (
            "bigscience-workshop/Megatron-DeepSpeed#227",
            "flashinfer-ai/flashinfer#1606",
            "ml-explore/mlx#3071",
            "paiml/aprender#2143",
        ),
        _alibi_slopes,
        "slopes for another number of heads",
    ),
    Fault("t5-buckets", "bias by distance", (), _t5_sides, "buckets for one direction or both"),
)
