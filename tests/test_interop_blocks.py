"""Blocks of Hugging Face models, read from their weights, against their own modules."""

import json

import numpy as np
import pytest
from test_block import HEADS, KINDS

import mhalearn as mha

torch = pytest.importorskip("torch", reason="reads PyTorch's modules")
transformers = pytest.importorskip("transformers", reason="compares with Hugging Face's modules")

K = 7
SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
GROUPED = SIZES | {"num_key_value_heads": 2}
GPT2 = {"vocab_size": 50, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Model type, configuration, and the activation the block must have.
MODELS = {
    "BERT": ("bert", SIZES, "gelu"),
    "BERT, ReLU": ("bert", SIZES | {"hidden_act": "relu"}, "relu"),
    "RoBERTa, tanh": ("roberta", SIZES | {"hidden_act": "gelu_new"}, "gelu_tanh"),
    "BERT, tanh to ten digits": ("bert", SIZES | {"hidden_act": "gelu_fast"}, "gelu_tanh"),
    "GPT-2": ("gpt2", GPT2, "gelu_tanh"),
    "GPT-2, SiLU": ("gpt2", GPT2 | {"activation_function": "silu"}, "silu"),
    "Llama": ("llama", GROUPED, "swiglu"),
    "Llama 3.1, biases": (
        "llama",
        GROUPED | {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
        "swiglu",
    ),
    "Mistral, window, ReLU": (
        "mistral",
        GROUPED | {"sliding_window": 3, "hidden_act": "relu"},
        "reglu",
    ),
    "Llama, sigmoid": ("llama", GROUPED | {"hidden_act": "sigmoid"}, "glu"),
    "Qwen2": ("qwen2", GROUPED, "swiglu"),
    "Qwen3": ("qwen3", GROUPED | {"head_dim": 8, "hidden_act": "gelu"}, "geglu"),
    "Gemma": ("gemma", GROUPED | {"head_dim": 8, "hidden_act": "gelu_pytorch_tanh"}, "geglu_tanh"),
}


def make_model(kind: str, settings: dict) -> tuple:
    """A random model in float32, with every weight and bias away from its first value."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model, json.loads(config.to_json_string())


def streams(model, tokens) -> list[np.ndarray]:
    """The residual stream before each block, and after all but the last."""
    with torch.no_grad():
        found = model(tokens, output_hidden_states=True).hidden_states
    return [one.numpy().astype(np.float64) for one in found]


# The others are another activation, or have what those have.
DAILY = ("BERT", "GPT-2", "Llama 3.1, biases", "Qwen3", "Gemma")
NAMED = [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", NAMED)
def test_blocks_equal_the_models_own(name: str) -> None:
    kind, settings, activation = MODELS[name]
    model, config = make_model(kind, settings)
    found = streams(model, torch.randint(1, 50, (3, K)))
    block = mha.block_from_huggingface(model.state_dict(), 0, config=config)
    assert block.design.activation == activation
    size = np.abs(found[1]).max()
    assert np.abs(block(found[0]) - found[1]).max() < 1e-6 * max(size, 1.0)
    module = mha.to_torch(block)
    outputs = module(torch.tensor(found[0])).detach().numpy()
    assert np.abs(outputs - block(found[0])).max() < 1e-12 * max(size, 1.0)
    assert set(module.state_dict()) == set(block.params)


def test_files_of_models_are_read_with_the_config_beside_them(tmp_path) -> None:
    model, config = make_model("bert", SIZES)
    model.save_pretrained(tmp_path)
    read = mha.block_from_huggingface(tmp_path / "model.safetensors", 1)
    given = mha.block_from_huggingface(model.state_dict(), 1, config=config)
    assert all(np.array_equal(read.params[name], leaf) for name, leaf in given.params.items())
    read.save(tmp_path / "block.safetensors")
    assert mha.compare(mha.load_layer(tmp_path / "block.safetensors"), given).max_error < 1e-12


def test_heads_of_any_rank_become_a_module() -> None:
    for norm in (None, "post"):
        block = mha.random_block(2, 5, 4, "glu", norm, causal=True)
        x = np.random.default_rng(0).standard_normal((3, 4, 5))
        outputs = mha.to_torch(block)(torch.tensor(x)).detach().numpy()
        assert np.abs(outputs - block(x)).max() < 1e-12
    assert mha.to_torch(block, dtype=torch.float32)(torch.zeros(1, 2, 5)).dtype == torch.float32


@pytest.mark.parametrize("name", KINDS)
def test_heads_of_every_kind_become_a_module(name: str) -> None:
    """At given positions, too, one row of them or one for each sequence."""
    block = mha.random_block(2, 4, 3, norm="pre", seed=2, **HEADS[name])
    x = np.random.default_rng(0).standard_normal((2, 6, 4))
    module = mha.to_torch(block)
    rows = np.array([[0, 2, 3, 7, 8, 9], [1, 2, 3, 4, 5, 90]])
    for positions in (None, rows[0], rows):
        given = None if positions is None else torch.tensor(positions)
        outputs = module(torch.tensor(x), given).detach().numpy()
        assert np.abs(outputs - block(x, positions=positions)).max() < 1e-12


def test_what_is_no_such_block_is_refused() -> None:
    model, config = make_model("llama", GROUPED)
    state = model.state_dict()
    cases = [
        (state, {}, "model_type=None"),
        (state, config | {"model_type": "olmo2"}, "model_type='olmo2'"),
        (state, config | {"hidden_act": "mish"}, "hidden_act='mish'"),
        (state, config | {"rms_norm_eps": None}, "rms_norm_eps=None"),
        (state | {"layers.0.extra.weight": torch.zeros(2)}, config, "extra"),
        ({name: x for name, x in state.items() if "down" not in name}, config, "cut"),
        ({"weight": torch.zeros(2)}, config, "no block 0"),
    ]
    for tensors, said, match in cases:
        with pytest.raises(ValueError, match=match):
            mha.block_from_huggingface(tensors, 0, config=said)
