"""Faults of what logits are multiplied by, and of the soft cap on them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mhalearn.auditing.fault import Context, Edit, Fault, dialled, tell_apart
from mhalearn.auditing.reading import Reading


def _missing(r: Reading, _: Context) -> Iterable[Edit]:
    """Of matrices multiplied out, the scale is inside Theta: it is taken out by the rank."""
    scale = 1.0 if r.factored else math.sqrt(r.head_dim)
    if not math.isclose(scale, r.scale):
        yield Edit("scale-missing", "logits are not scaled", lambda q: q.with_(scale=scale))


def _doubled(r: Reading, _: Context) -> Iterable[Edit]:
    scale = r.scale**2 if r.factored else r.head_dim**-0.5
    if not math.isclose(scale, r.scale):
        said = "logits are scaled twice"
        yield Edit("scale-doubled", said, lambda q: q.with_(scale=scale))


def _width(r: Reading, _: Context) -> Iterable[Edit]:
    scale = r.d**-0.5 if r.factored else (r.head_dim / r.d) ** 0.5
    if not math.isclose(scale, r.scale):
        said = f"logits are divided by sqrt({r.d}), of the model's width, instead of the head's"
        yield Edit("scale-of-width", said, lambda q: q.with_(scale=scale))


def _of_head(r: Reading, _: Context) -> Iterable[Edit]:
    """Another scale was claimed, or none, as T5 has it."""
    usual = r.head_dim**-0.5
    if r.factored and not math.isclose(usual, r.scale):
        said = (
            f"logits are divided by sqrt({r.head_dim}) where a scale of {r.scale:.4g} was claimed"
        )
        yield Edit("scale-of-head", said, lambda q: q.with_(scale=usual))


def _inverted(r: Reading, _: Context) -> Iterable[Edit]:
    scale = 1 / r.scale if r.factored else float(r.head_dim)
    if not math.isclose(scale, r.scale) and not math.isclose(scale, 1.0):
        said = "logits are divided by the scale instead of multiplied"
        yield Edit("scale-inverted", said, lambda q: q.with_(scale=scale))


def _other(r: Reading, _: Context) -> Iterable[Edit]:
    grid = [r.scale * 2.0**power for power in (-3, -2, -1, -0.5, 0, 0.5, 1, 2, 3)]
    return dialled(
        "scale-other",
        "scale",
        grid,
        lambda value: "logits are multiplied by {} instead of {}".format(
            *tell_apart(value, r.scale)
        ),
        lambda q, value: q.with_(scale=value),
        claimed=r.scale,
    )


def _cap_missing(r: Reading, _: Context) -> Iterable[Edit]:
    if r.softcap is not None:
        said = f"the soft cap of {r.softcap:g} is missing"
        yield Edit("softcap-missing", said, lambda q: q.with_(softcap=None))


def _cap_after_mask(r: Reading, _: Context) -> Iterable[Edit]:
    if r.softcap is not None and (r.causal or r.window is not None):
        said = "the soft cap is applied after the mask, so that masked tokens are seen a little"
        yield Edit("softcap-after-mask", said, lambda q: q.with_(cap_after_mask=True))


def _cap_other(r: Reading, _: Context) -> Iterable[Edit]:
    return () if r.softcap is None else _caps("softcap-other", r)


def _cap_added(r: Reading, _: Context) -> Iterable[Edit]:
    return _caps("softcap-added", r) if r.softcap is None else ()


def _caps(name: str, r: Reading) -> Iterable[Edit]:
    claimed = "none was claimed" if r.softcap is None else f"{r.softcap:g} was claimed"
    centre = r.softcap or 20.0
    return dialled(
        name,
        "softcap",
        [centre * 2.0**power for power in (-4, -3, -2, -1, 0, 1, 2)],
        lambda value: f"logits are capped at {value:.4g} where {claimed}",
        lambda q, value: q.with_(softcap=value),
        claimed=r.softcap,
    )


FAULTS = (
    Fault(
        "scale-missing",
        "scale",
        ("mlc-ai/mlc-llm#3426", "delzac/cntkx#10", "microsoft/MInference#69"),
        _missing,
        "logits are not divided by sqrt(h)",
    ),
    Fault(
        "scale-doubled",
        "scale",
        ("huggingface/transformers#38290", "AI-Hypercomputer/maxtext#1349"),
        _doubled,
        "logits are divided by sqrt(h) twice",
    ),
    Fault(
        "scale-of-width",
        "scale",
        (
            "Graylab/DL4Proteins-notebooks#12",
            "FareedKhan-dev/train-llm-from-scratch#3",
            "lucidrains/vit-pytorch#65",
        ),
        _width,
        "logits are divided by sqrt(d) instead of sqrt(h)",
    ),
    Fault(
        "scale-of-head",
        "scale",
        ("zzhhjjj/gemma-triton-flash-attn#6",),
        _of_head,
        "logits are divided by sqrt(h) where another scale was claimed",
    ),
    Fault(
        "scale-inverted",
        "scale",
        ("esceptico/perceiver-io#9",),
        _inverted,
        "logits are divided by the scale",
    ),
    Fault(
        "scale-other",
        "scale",
        ("BobMcDear/attorch#14", "NVIDIA/Megatron-LM#848"),
        _other,
        "logits have another scale, which is fitted",
    ),
    Fault(
        "softcap-missing",
        "soft cap",
        ("vllm-project/vllm-metal#665", "EricLBuehler/mistral.rs#1930", "sgl-project/sglang#33915"),
        _cap_missing,
        "logits are not capped",
    ),
    Fault(
        "softcap-after-mask",
        "soft cap",
        ("onnx/onnx#7865", "emmtrix/emx-onnx-cgen#731"),
        _cap_after_mask,
        "the cap comes after the mask",
    ),
    Fault(
        "softcap-other",
        "soft cap",
        ("flashinfer-ai/flashinfer#339",),
        _cap_other,
        "another cap, which is fitted",
    ),
    Fault("softcap-added", "soft cap", (), _cap_added, "a cap where none was claimed"),
)
