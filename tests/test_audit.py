"""An audit names what a box computes otherwise, and says nothing against a right one.

Boxes are of `benchmarks.audited`, which shares no code with what audits them.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import numpy as np
import pytest

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.audited.calibration import fitted_shares
from benchmarks.audited.outside import OUTSIDE
from benchmarks.audited.planted import PLANTED, Planted
from benchmarks.audited.right import box_of
from mhalearn.auditing.catalogue import FAULTS, list_edits
from mhalearn.auditing.confidence import SHARES, confidence
from mhalearn.auditing.fault import Context
from mhalearn.auditing.forward import Forward
from mhalearn.auditing.reading import read_layer
from mhalearn.testing import assert_same_attention

SMALL = {"n": 16, "k": 12}
ROTARY = {"head_dim": 4, "rope": mha.Rope(), "causal": True}
BIASES = {"key_vector": True, "out_bias": True}


@cache
def layer(name: str) -> Any:
    made: dict[str, dict[str, Any]] = {
        "llama": ROTARY | {"kv_heads": 2},
        "gpt-oss": ROTARY | BIASES | {"kv_heads": 2, "sinks": True, "window": 5},
        "qwen": ROTARY
        | {"qk_norm": True, "softcap": 4.0, "rope": mha.Rope(layout="interleaved", fraction=1.0)},
        "bloom": {"head_dim": 4, "causal": True, "position_bias": "alibi"} | BIASES,
    }
    return mha.random_layer(n_heads=4, d=16, seed=1, **made[name])


def verdict(fault: Planted, name: str, precision: str) -> str | None:
    """None where an audit names the fault first, with its head, or among equals; else its words."""
    box = fault.make(box_of(layer(name), precision))
    assert box is not None
    found = mha.audit(layer(name), box, **SMALL)
    sure = max((one.confidence for one in found.findings), default=0.0)
    for one in found.findings:
        named = (one.name, one.heads, one.confidence) == (fault.name, fault.heads, sure)
        if named and fault.said in one.sentence:
            return None
    return str(found)


@pytest.mark.parametrize(
    "made",
    [
        {},
        BIASES,
        ROTARY | BIASES | {"kv_heads": 2},
        ROTARY | {"sinks": True, "window": 4, "softcap": 3.0, "qk_norm": True},
        {"head_dim": 4, "position_bias": "t5", "qk_norm": "l2"},
        {"head_dim": 4, "position_bias": "alibi", "causal": True},
        ROTARY
        | {"rope": mha.Rope(scaling={"rope_type": "linear", "factor": 4.0}), "logit_scale": 0.3},
        ROTARY | {"rope": mha.Rope(fraction=0.5), "latent": mha.Latent(8, query_rank=6)},
    ],
)
def test_the_reading_of_a_layer_computes_what_the_layer_does(made: dict[str, Any]) -> None:
    subject = mha.random_layer(n_heads=4, d=16, **made)
    x = np.random.default_rng(0).standard_normal((3, 9, 16))
    lengths = np.array([9, 4, 7])
    forward = Forward(x, lengths)
    apart = forward.outputs(read_layer(subject)) - subject(x, lengths=lengths)
    assert np.abs(apart[forward.rows]).max() < 1e-12


@pytest.mark.parametrize(
    ("name", "precision"),
    [("gpt-oss", "float64"), ("gpt-oss", "bfloat16"), ("qwen", "float32"), ("qwen", "bfloat16")],
)
def test_a_right_box_is_ok_at_its_precision(name: str, precision: str) -> None:
    found = mha.audit(layer(name), box_of(layer(name), precision), **SMALL)
    assert found.ok, str(found)
    assert found.precision == precision
    assert found.findings == ()


@pytest.mark.parametrize(
    ("place", "name", "precision"),
    [
        ("rotary-layout", "llama", "bfloat16"),
        ("groups-interleaved", "llama", "float32"),
        ("sink-wrong-head", "gpt-oss", "bfloat16"),
        ("window-off-by-one", "gpt-oss", "float32"),
        ("softcap-after-mask", "qwen", "float32"),
        ("norm-after-rotation", "qwen", "bfloat16"),
        ("alibi-slopes", "bloom", "float32"),
    ],
)
def test_a_planted_fault_is_named_first(place: str, name: str, precision: str) -> None:
    fault = next(one for one in PLANTED if one.name == place)
    assert verdict(fault, name, precision) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [("llama", "float32"), ("gpt-oss", "bfloat16"), ("qwen", "float32"), ("bloom", "bfloat16")],
)
def test_every_planted_fault_is_named_first(name: str, precision: str) -> None:
    box = box_of(layer(name), precision)
    there = [f for f in PLANTED if f.name != "padding-attended" and f.make(box) is not None]
    wrong = [said for fault in there if (said := verdict(fault, name, precision)) is not None]
    assert len(there) > 20
    assert len(wrong) <= 0.05 * len(there), wrong


def test_padding_that_is_attended_to_is_named() -> None:
    subject = mha.random_layer(n_heads=3, d=8, head_dim=4, kv_heads=1)
    x = np.random.default_rng(0).standard_normal((24, 10, 8))
    lengths = np.tile([10, 6, 3], 8)
    box = box_of(subject, "float32")
    right = mha.Examples(x, box(x, lengths), lengths)
    wrong = mha.Examples(x, box.with_(attends_padding=True)(x, lengths), lengths)
    assert mha.audit(subject, right).ok
    assert mha.audit(subject, wrong).findings[0].name == "padding-attended"


def test_cross_attention_is_audited_with_its_memory() -> None:
    subject = mha.random_layer(n_heads=3, d=8, head_dim=4, memory=6)
    rng = np.random.default_rng(0)
    x, memory, lengths = (
        rng.standard_normal((24, 7, 8)),
        rng.standard_normal((24, 5, 6)),
        [5, 3] * 12,
    )
    given = {"memory": memory, "memory_lengths": lengths}
    right = subject(x, **given)
    assert mha.audit(subject, mha.Examples(x, right, **given)).ok
    wrong = mha.Examples(x, subject(x, memory=memory), **given)
    assert mha.audit(subject, wrong).findings[0].name == "padding-attended"
    lost = {**subject.params, "out": subject.params["out"] * (np.arange(3) != 1)[:, None, None]}
    box = subject.replace(params=lost)
    found = mha.audit(subject, lambda x, memory: box(x, memory=memory), **SMALL)
    assert (found.findings[0].name, found.findings[0].head) == ("head-zeroed", 1)
    with pytest.raises(ValueError, match="a second sequence of 0 features, the claimed layer"):
        mha.audit(subject, mha.Examples(x, right))


def test_position_ids_are_taken_into_account() -> None:
    x = np.random.default_rng(0).standard_normal((16, 8, 16))
    places = np.cumsum(np.random.default_rng(1).integers(1, 4, (16, 8)), axis=1)
    y = layer("llama")(x, positions=places)
    assert mha.audit(layer("llama"), mha.Examples(x, y, positions=places)).ok
    assert not mha.audit(layer("llama"), mha.Examples(x, y), depth=1, max_seconds=4.0).ok


def test_two_faults_are_both_named_each_with_its_head() -> None:
    box = box_of(layer("gpt-oss"), "float32")
    sinks = box.sink.copy()
    sinks[3] = -np.inf
    found = mha.audit(layer("gpt-oss"), box.with_(sink=sinks, window=None), **SMALL)
    named = {one.name: one for one in found.findings}
    assert set(named) == {"sink-missing", "window-missing"}, str(found)
    assert named["sink-missing"].head == 3
    assert "head 4 of 4: the sink is missing (relative error falls from" in str(found)


def test_rotary_edits_can_be_made_one_after_another() -> None:
    """A search makes every one on what another leaves."""
    context = Context((0, 1, 2, 3), "float32", False, 4)
    forward = Forward(np.random.default_rng(0).standard_normal((1, 4, 16)), np.array([4]))
    made = ROTARY | {"head_dim": 8, "rope": mha.Rope(fraction=0.5), "kv_heads": 2, "qk_norm": True}
    claimed = read_layer(mha.random_layer(n_heads=4, d=16, **made))
    turned = [edit for edit in list_edits(claimed, context) if edit.fault.startswith("rotary")]
    for first in (edit for edit in turned if edit.dial is None):
        reading = first.change(claimed)
        for second in list_edits(reading, context):
            if second.fault.startswith("rotary"):
                assert forward.outputs(second.change(reading)).shape == (1, 4, 16)


def test_a_number_that_a_fault_leaves_open_is_fitted() -> None:
    box = box_of(layer("llama"), "float32")
    found = mha.audit(layer("llama"), box.with_(scale=box.scale * 1.37), **SMALL)
    first = found.findings[0]
    assert first.name == "scale-other"
    assert first.numbers["scale"] == pytest.approx(0.5 * 1.37, rel=1e-4)


def test_two_explanations_of_one_box_are_both_named_and_neither_is_sure() -> None:
    """Heads of 4 of 16 features: 1 / sqrt(16) is the scale twice, and that of the width."""
    box = box_of(layer("llama"), "float32")
    found = mha.audit(layer("llama"), box.with_(scale=box.scale**2), **SMALL)
    assert {one.name for one in found.findings} == {"scale-doubled", "scale-of-width"}
    assert all(one.confidence < 0.5 and one.also for one in found.findings)


@pytest.mark.parametrize("index", [0, 3])
def test_a_fault_outside_the_catalogue_is_unexplained_and_its_place_is_told(index: int) -> None:
    fault = OUTSIDE[index]
    found = mha.audit(
        layer("llama"),
        fault.make(box_of(layer("llama"), "float32")),
        n=32,
        k=20,
        depth=1,
        max_seconds=4.0,
    )
    assert not found.ok
    assert not found.explained
    assert found.locus is not None
    if fault.heads:
        assert found.locus.heads == fault.heads
    if fault.rows is not None:
        assert found.locus.rows == tuple(range(*fault.rows))
    assert all(one.confidence <= 0.5 for one in found.findings if one.name != "unexplained")
    assert found.findings[0].name == "unexplained"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("the first key is never attended to, by any later row", "in the weights of key 1"),
        (
            "keys three tokens back are not attended to",
            "in the weights of keys at distance 3 before a row",
        ),
        (
            "head 1 counts the token before a row twice",
            "in head 2, in rows 2 to 16 of 16, in the weights of keys at distance 1 before a row",
        ),
    ],
)
def test_keys_and_distances_that_differ_are_told(name: str, said: str) -> None:
    fault = next(one for one in OUTSIDE if one.name == name)
    box = fault.make(box_of(layer("llama"), "float32"))
    found = mha.audit(layer("llama"), box, n=24, k=16, depth=1, max_seconds=4.0)
    assert said in found.findings[0].sentence


def test_heads_that_outputs_cannot_tell_apart_are_not_named() -> None:
    """Every head writes to all outputs, so that any residual lies in any of them."""
    subject = mha.random_layer(n_heads=2, d=4)
    found = mha.audit(subject, lambda x: subject(x) ** 3, **SMALL, depth=1, max_seconds=4.0)
    assert found.locus is not None
    assert found.locus.heads == ()
    assert "in which heads cannot be told" in str(found)


def test_what_nothing_explains_is_learned_and_compared_head_by_head() -> None:
    claimed = mha.random_layer(n_heads=2, d=4, seed=3)
    theta = claimed.theta.copy()
    theta[1] += np.random.default_rng(0).standard_normal((4, 4))
    found = mha.audit(claimed, claimed.replace(theta=theta), n=200, k=6, depth=1)
    assert found.learned is not None, str(found)
    assert found.learned.heads == (1,)
    assert found.learned.theta_errors[0] < 1e-6 < 0.1 < found.learned.theta_errors[1]
    assert "it differs in head 2 (Theta by" in str(found)


@pytest.mark.slow
def test_grouped_rotary_heads_that_nothing_explains_are_learned_too() -> None:
    claimed = layer("llama")
    query = claimed.params["query"].copy()
    query[1] *= np.random.default_rng(0).random(query[1].shape) > 0.2
    wrong = claimed.replace(params={**claimed.params, "query": query})
    found = mha.audit(claimed, lambda x: wrong(x).astype(np.float32), n=96, k=12, depth=1)
    assert found.learned is not None, str(found)
    assert found.learned.heads == (1,)


def test_the_catalogue_names_each_fault_once_with_the_issues_it_was_seen_in() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) >= 25
    seen = [issue for fault in FAULTS for issue in fault.seen]
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", issue) for issue in seen)
    assert sum(bool(fault.seen) for fault in FAULTS) >= 25
    assert {fault.name for fault in PLANTED} == set(names)


def test_confidence_is_how_often_findings_of_a_kind_were_right() -> None:
    """Of the half of the benchmark's boxes that it was fitted to."""
    fitted = fitted_shares(json.loads((RESULTS / "audit.json").read_text())["runs"])
    for kind, (share, cases) in fitted.items():
        assert SHARES[kind] == pytest.approx(share, abs=0.01) or cases < 5
    assert max(SHARES.values()) < 1
    assert confidence("part") <= 0.5
    assert confidence("alone", rivals=1) == SHARES["alone"] / 2


def test_an_audit_is_shown_as_text_json_and_html() -> None:
    box = box_of(layer("llama"), "float32").with_(ahead=None)
    found = mha.audit(layer("llama"), box, **SMALL)
    said = json.loads(found.to_json())
    assert said["ok"] is False
    assert said["findings"][0]["name"] == "causal-missing"
    assert said["findings"][0]["numbers"]["after"] < 1e-5 < said["findings"][0]["numbers"]["before"]
    assert "causal-missing" in found._repr_html_()
    assert "keras-team/keras#23038" in found._repr_html_()


def test_the_assertion_for_tests_fails_with_the_finding() -> None:
    box = box_of(layer("llama"), "float32")
    assert assert_same_attention(layer("llama"), box, **SMALL).ok
    wrong = box.with_(pairs=(np.array([0, 2]), np.array([1, 3])))
    with pytest.raises(AssertionError, match="the rotary layout is interleaved where half-split"):
        assert_same_attention(layer("llama"), wrong, **SMALL)


def test_a_layer_without_factors_is_audited_by_its_matrices() -> None:
    subject = mha.random_layer(n_heads=3, d=8, causal=True, key_vector=True)
    assert mha.audit(subject, subject, **SMALL).ok
    lost = subject.w.copy()
    lost[1] = 0
    found = mha.audit(subject, subject.replace(w=lost), **SMALL)
    assert (found.findings[0].name, found.findings[0].head) == ("head-zeroed", 1)
    found = mha.audit(subject, subject.replace(key_vector=None), **SMALL)
    assert found.findings[0].name == "bias-missing"


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("precision='int4'", {"precision": "int4"}),
        ("depth=0", {"depth": 0}),
        ("max_seconds=0", {"max_seconds": 0.0}),
    ],
)
def test_a_callers_mistake_is_said(said: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        mha.audit(layer("llama"), layer("llama"), **SMALL, **options)


def test_examples_of_other_sizes_are_refused() -> None:
    x = np.zeros((2, 3, 5))
    with pytest.raises(ValueError, match="the claimed layer 16 and 16"):
        mha.audit(layer("llama"), mha.Examples(x, x))


def test_a_residual_path_is_named_also_beside_another_fault() -> None:
    claimed = layer("llama")
    box = box_of(claimed, "float32").with_(adds_tokens=True)
    found = mha.audit(claimed, box, **SMALL)
    assert [one.name for one in found.findings] == ["tokens-added"]
    assert "residual path" in found.findings[0].sentence
    both = mha.audit(claimed, box.with_(ahead=None), **SMALL)
    assert {one.name for one in both.findings} == {"tokens-added", "causal-missing"}
