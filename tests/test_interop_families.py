"""Attention of Hugging Face models, read from their weights, against their own modules."""

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from blocks import ROOT
from small_models import MODELS, make_model, record, torch, watch

import mhalearn as mha
from mhalearn.interop.families import FAMILIES, to_huggingface

# Those that the others are variants of; all are compared by the slow tests.
EVERY_DAY = {
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma 2",
    "Gemma 3",
    "Phi-3",
    "OLMo 2",
    "gpt-oss",
    "GPT-NeoX",
    "GPT-J",
    "BLOOM",
    "T5",
    "DeepSeek-V3, YaRN",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in EVERY_DAY else pytest.mark.slow) for n in MODELS]
)
def test_attention_is_that_of_the_models_own_module(name):
    kind, changes, index, extras = MODELS[name]
    model, config = make_model(kind, changes)
    x, y = record(model, kind, index)
    layer = mha.from_huggingface(model.state_dict(), index, config=config)
    assert set(layer.architecture.extras()) == extras
    assert layer.causal == (kind not in ("t5", "mt5"))
    found = layer(x)
    assert np.abs(found - y).max() < 1e-6 * np.abs(y).max()
    for key, weight in to_huggingface(layer).items():
        assert np.array_equal(model.state_dict()[key].numpy(), weight), key
    # What the variant is made of matters: without it the outputs are others.
    for extra in extras - {"kv_heads", "qk_norm", "sinks", "latent", "value_dim"}:
        if (extra == "position_bias" and "t5" in kind) or extras == {"logit_scale"}:
            continue
        if extra == "rope" and "latent" in extras:  # whose rotary key would be without a place
            continue
        scale = {
            "logit_scale": layer.architecture.logit_scale or layer.params["query"].shape[2] ** -0.5
        }
        changed = replace(layer.architecture, **(scale | {extra: None}))
        without = layer.replace(architecture=changed)
        assert np.abs(without(x) - y).max() > 1e-4 * np.abs(y).max(), extra


def run(model, kind):
    """A model with an encoder, or of sounds, on inputs at random."""
    ids = torch.randint(1, 50, (2, 7))
    with torch.no_grad():
        if kind == "whisper":
            model(input_features=torch.randn(2, 8, 20), decoder_input_ids=ids)
        elif kind == "t5":
            model(input_ids=torch.randint(1, 50, (2, 9)), decoder_input_ids=ids)
        else:
            model(torch.randn(2, 200))


# Model type, class, block, first and last projection, and how the layer is asked for.
PLACES = {
    "Whisper's cross-attention": (
        "whisper",
        "WhisperModel",
        (r"decoder\.layers\.{}\.encoder_attn", "q_proj", "out_proj"),
        {"cross": True},
    ),
    "Whisper's decoder": (
        "whisper",
        "WhisperModel",
        (r"decoder\.layers\.{}\.self_attn", "q_proj", "out_proj"),
        {"prefix": "decoder."},
    ),
    "Whisper's encoder": (
        "whisper",
        "WhisperModel",
        (r"encoder\.layers\.{}\.self_attn", "q_proj", "out_proj"),
        {"prefix": "encoder."},
    ),
    "T5's cross-attention": (
        "t5",
        "T5Model",
        (r"decoder\.block\.{}\.layer\.1\.EncDecAttention", "q", "o"),
        {"cross": True},
    ),
    "T5's decoder": (
        "t5",
        "T5Model",
        (r"decoder\.block\.{}\.layer\.0\.SelfAttention", "q", "o"),
        {"prefix": "decoder."},
    ),
    "HuBERT": ("hubert", "HubertModel", (r"layers\.{}\.attention", "q_proj", "out_proj"), {}),
    "wav2vec 2.0": (
        "wav2vec2",
        "Wav2Vec2Model",
        (r"layers\.{}\.attention", "q_proj", "out_proj"),
        {},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if "cross" in n else pytest.mark.slow) for n in PLACES]
)
def test_layers_of_encoders_and_of_those_who_look_at_them(name):
    kind, make, block, asked = PLACES[name]
    changes = MODELS["T5"][1] if kind == "t5" else {}
    model, config = make_model(kind, changes, make)
    seen = watch(model, *block, 1)
    run(model, kind)
    layer = mha.from_huggingface(model.state_dict(), 1, config=config, **asked)
    x, y, keys = (seen[name].numpy() for name in ("x", "y", "memory"))
    beside = {"memory": keys} if "cross" in asked else {}
    assert (layer.architecture.memory is not None) == ("cross" in asked)
    assert layer.causal == ("decoder" in name)
    assert np.abs(layer(x, **beside) - y).max() < 1e-6 * np.abs(y).max()
    weights = to_huggingface(layer)
    assert len(weights) >= 4
    for key, weight in weights.items():
        assert np.array_equal(model.state_dict()[key].numpy(), weight), key


def test_the_language_model_of_a_larger_one_is_found():
    """Of a model that sees, whose vision tower has layers of its own."""
    model, config = make_model("llama", {})
    state = {f"model.language_model.{key}": value for key, value in model.state_dict().items()}
    tower = "model.vision_tower.encoder.layers.0.self_attn."
    parts = ("q_proj", "k_proj", "v_proj", "out_proj")
    state |= {f"{tower}{part}.weight": torch.zeros(4, 4) for part in parts}
    whole = {"model_type": "llava", "text_config": config}
    layer = mha.from_huggingface(state, 0, config=whole)
    x = np.random.default_rng(0).standard_normal((2, 5, 32))
    alone = mha.from_huggingface(model.state_dict(), 0, config=config)
    np.testing.assert_array_equal(layer(x), alone(x))
    assert set(to_huggingface(layer)) < set(state)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {}, "Llama has no cross-attention"),
        ("deepseek_v3", {"attention_bias": True}, "is no part of DeepSeek-V3's attention"),
        ("falcon", {"alibi": True}, "alibi=True in config.json"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True in config.json"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm=True in config.json"),
        ("olmo", {"clip_qkv": 5.0}, "clip_qkv=5.0 in config.json"),
        ("mpt", {"n_heads": 6, "d_model": 36}, "6 heads, no power of two"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(kind, changes, said):
    usual = {one[0]: one[1] for one in MODELS.values()}[kind]
    model, config = make_model(kind, usual | changes)
    with pytest.raises(ValueError, match=said):
        mha.from_huggingface(model.state_dict(), 0, config=config, cross=kind == "llama")


def test_the_table_of_the_docs_says_what_was_compared():
    page = (ROOT / "docs" / "interop.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+`) \| (`[^|]+`) \|$", page, flags=re.MULTILINE)
    told = {kind: (name, fields) for name, kinds, fields in rows for kind in kinds.split(", ")}
    assert {kind.strip("`") for kind in told} == set(FAMILIES)
    for kind, family in FAMILIES.items():
        name, fields = told[f"`{kind}`"]
        compared = [one for one in MODELS.values() if FAMILIES[one[0]].name == family.name]
        compared += [(one[0], {}, 1, {"logit_scale"}) for one in PLACES.values() if one[0] == kind]
        assert name == family.name
        assert compared, f"{name} is not compared with Hugging Face's module"
        assert set(re.findall(r"\w+", fields)) == set().union(*(one[3] for one in compared))


def test_the_share_of_transformer_lens_is_counted():
    """By the classes of its registry, and by a sample of those of its models."""
    kept = json.loads((ROOT / "benchmarks" / "results" / "transformer_lens.json").read_text())
    read_by = kept["classes"]["read_by"]
    read = {name for name, kind in read_by.items() if kind is not None}
    later = kept["classes"]["added"]["read_by"]  # which that list has not got yet
    every = read_by | later
    known = {name for name, kind in every.items() if kind is not None}
    assert all(every[name] in {*FAMILIES, "bert", "gpt2"} for name in known)
    passed = Counter()
    for stretch in kept["sample"]["passed"].values():
        passed.update(stretch)
    assert passed.keys() <= every.keys()
    ours = sum(count for name, count in passed.items() if name in known)
    page = " ".join((ROOT / "docs" / "interop.md").read_text().split())
    assert f"Of the {len(read_by)} classes of models" in page
    assert f"the attention of {len(read)} is read" in page
    assert f"of {passed.total()} records of its verification history" in page
    assert f"{ours} are of classes that are read" in page
