"""Faults of precision inside the box: coarser than its outputs say."""

from __future__ import annotations

from collections.abc import Iterable

from mhalearn.auditing.fault import Context, Edit, Fault
from mhalearn.auditing.reading import Reading

# What is no fault of a box that computes in it.
_COARSER = {
    "float64": ("bfloat16", "float16"),
    "float32": ("bfloat16", "float16"),
    "float16": ("bfloat16",),
    "bfloat16": (),
}
# Steps that depend on other sequences of a call, or were measured before, cannot be made again.
_STEPS = {
    "int8 token": "one step a token and head",
    "int8 head": "one step a sequence and head",
    "int8 sequence": "one step a sequence",
}


def _values(_: Reading, context: Context) -> Iterable[Edit]:
    for name in _COARSER[context.precision]:
        rounding = {"values": name}
        said = f"values are rounded to {name} before they are summed"
        yield Edit("values-rounded", said, lambda q, r=rounding: q.with_(rounding=r), flips=True)  # type: ignore[misc]
    for name, step in _STEPS.items():
        # Which of two steps a value goes to depends on how it was rounded before.
        rounding = {"values": name, "made in": context.precision}
        said = f"values are rounded to int8, {step}, before they are summed"
        made = {"made in": context.precision}
        yield Edit(
            "values-rounded",
            said,
            lambda q, r=rounding: q.with_(rounding=r),  # type: ignore[misc]
            flips=True,
            control=lambda q, r=made: q.with_(rounding=r),  # type: ignore[misc]
        )


def _weights(_: Reading, context: Context) -> Iterable[Edit]:
    for name in _COARSER[context.precision]:
        rounding = {"weights": name}
        said = f"attention weights are rounded to {name}"
        yield Edit("softmax-rounded", said, lambda q, r=rounding: q.with_(rounding=r), flips=True)  # type: ignore[misc]


def _sum(_: Reading, context: Context) -> Iterable[Edit]:
    for name in _COARSER[context.precision]:
        rounding = {"sum": name}
        said = f"values are summed up in {name}"
        yield Edit("sum-rounded", said, lambda q, r=rounding: q.with_(rounding=r), flips=True)  # type: ignore[misc]


FAULTS = (
    Fault(
        "values-rounded",
        "precision",
        ("InfiniTensor/InfiniLM#553", "FlashML-org/FreeToken#309"),
        _values,
        "values in bfloat16, float16 or int8 before the sum",
    ),
    Fault(
        "softmax-rounded",
        "precision",
        ("tinygrad/tinygrad#12280", "apple/axlearn#18"),
        _weights,
        "weights in a coarser format",
    ),
    Fault(
        "sum-rounded",
        "precision",
        ("pytorch/executorch#20089",),
        _sum,
        "accumulated in low precision",
    ),
)
