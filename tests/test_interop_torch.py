"""torch.nn.MultiheadAttention in and out: its outputs are the oracle, its bits come back."""

import pickle
import subprocess
import sys

import numpy as np
import oracles
import pytest
import torch

import mhalearn as mha
from mhalearn import interop

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def make_module(d, heads, *, bias=True, packed=True, batch_first=True, dtype=torch.float64, seed=0):
    """A module with random weights and, unlike torch's start, random biases."""
    torch.manual_seed(seed)
    module = torch.nn.MultiheadAttention(
        d,
        heads,
        bias=bias,
        kdim=None if packed else d + 1,
        batch_first=batch_first,
        dtype=dtype,
    )
    if not packed:
        module.kdim = d
        module.k_proj_weight = torch.nn.Parameter(torch.randn(d, d, dtype=dtype))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scale = 0.5 if "bias" in name else d**-0.5
            parameter.copy_(scale * torch.randn(parameter.shape, dtype=dtype))
    assert (module.in_proj_weight is not None) == packed
    return module.eval()  # torch rounds differently in training mode, even without dropout


def call(module, x, *, causal=False):
    tokens = torch.as_tensor(x).to(next(module.parameters()).dtype)
    tokens = tokens if module.batch_first else tokens.transpose(0, 1)
    mask = interop.causal_mask(x.shape[1]) if causal else None
    with torch.no_grad():
        output = module(tokens, tokens, tokens, attn_mask=mask)[0]
    return (output if module.batch_first else output.transpose(0, 1)).numpy()


def same_bits(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("d", "heads", "k"), [(6, 3, 4), (8, 1, 2), (12, 2, 7)])
def test_the_layer_is_the_module(d, heads, k, bias, packed, batch_first, causal, dtype):
    module = make_module(
        d, heads, bias=bias, packed=packed, batch_first=batch_first, dtype=dtype, seed=d
    )
    layer = mha.from_torch(module, causal=causal)
    assert (layer.key_vector is not None) == (layer.out_bias is not None) == bias
    # What the module sees in float32 is what the layer must see.
    x = mha.sample_inputs("gaussian", 5, k, d, seed=1).astype(str(dtype).removeprefix("torch."))
    expected = call(module, x, causal=causal)
    np.testing.assert_allclose(layer(x), expected, rtol=0, atol=TOLERANCE[dtype])

    back = mha.to_torch(layer, batch_first=batch_first, packed=packed)
    assert same_bits(back, module)
    assert back.batch_first == batch_first
    np.testing.assert_array_equal(call(back, x, causal=causal), expected)


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(seed):
    rng = np.random.default_rng(seed)
    heads, h, k, n = (int(size) for size in rng.integers((1, 1, 2, 1), (6, 7, 9, 5)))
    bias, packed, batch_first, causal = (bool(bit) for bit in rng.integers(0, 2, 4))
    d = heads * h
    module = make_module(d, heads, bias=bias, packed=packed, batch_first=batch_first, seed=seed)
    layer = mha.from_torch(module, causal=causal)
    x = mha.sample_inputs("gaussian", n, k, d, seed=seed)
    np.testing.assert_allclose(layer(x), call(module, x, causal=causal), rtol=0, atol=1e-12)
    refactored = mha.to_torch(layer.replace(factors=None), batch_first=batch_first, packed=packed)
    np.testing.assert_allclose(layer(x), call(refactored, x, causal=causal), rtol=0, atol=1e-12)
    assert same_bits(mha.to_torch(layer, batch_first=batch_first, packed=packed), module)


def test_by_hand():
    """The formulas of the factors, against loops that know nothing of torch."""
    module = make_module(4, 2)
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    query, key, value = np.split(state["in_proj_weight"], 3)
    bias, _, value_bias = np.split(state["in_proj_bias"], 3)
    theta, w, v, c = [], [], [], state["out_proj.bias"].copy()
    for i in range(2):
        rows = slice(2 * i, 2 * i + 2)
        theta.append(query[rows].T @ key[rows] / 2**0.5)
        v.append(key[rows].T @ bias[rows] / 2**0.5)
        w.append(value[rows].T @ state["out_proj.weight"][:, rows].T)
        c += state["out_proj.weight"][:, rows] @ value_bias[rows]
    x = mha.sample_inputs("gaussian", 3, 4, 4, seed=2)
    expected = oracles.attention_layer(x, np.array(theta), np.array(w), np.array(v), c)
    np.testing.assert_allclose(mha.from_torch(module)(x), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(call(module, x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_weights_come_back_unchanged_from_a_file(dtype, tmp_path):
    module = make_module(6, 2, dtype=dtype)
    mha.from_torch(module).save(tmp_path / "layer.safetensors")
    back = mha.to_torch(mha.load_layer(tmp_path / "layer.safetensors"), dtype=dtype)
    assert same_bits(back, module)


@pytest.mark.parametrize("extras", [{}, {"key_vector": True, "out_bias": True}, {"causal": True}])
def test_a_layer_without_factors_goes_out_by_singular_values(extras):
    truth = mha.random_layer(3, 12, rank=4, seed=1, **extras)
    module = mha.to_torch(truth)
    assert module.in_proj_weight.dtype == torch.float64
    assert not module.training
    x = mha.sample_inputs("gaussian", 4, 5, 12, seed=3)
    expected = truth(x)
    np.testing.assert_allclose(call(module, x, causal=truth.causal), expected, rtol=0, atol=1e-12)
    back = mha.from_torch(module, causal=truth.causal)
    np.testing.assert_allclose(back.theta, truth.theta, rtol=0, atol=1e-13)
    np.testing.assert_allclose(back.w, truth.w, rtol=0, atol=1e-13)
    single = mha.to_torch(truth, dtype=torch.float32)
    np.testing.assert_allclose(
        call(single, x.astype(np.float32), causal=truth.causal), expected, rtol=0, atol=2e-5
    )


def test_missing_heads_are_filled_with_zeros():
    truth = mha.random_layer(3, 12, rank=2, seed=1)
    module = mha.to_torch(truth, n_heads=6)
    assert module.num_heads == 6
    x = mha.sample_inputs("gaussian", 4, 5, 12, seed=3)
    np.testing.assert_allclose(call(module, x), truth(x), rtol=0, atol=1e-12)
    assert mha.compare(mha.from_torch(module).canonical(), truth).max_error < 1e-12


def test_a_learned_module_is_the_module():
    """The way of a user: a module as a black box, learned, and out again."""
    module = make_module(6, 2, bias=False)
    examples = mha.Examples.from_callable(module, "gaussian", n=150, k=4, d=6)
    model = mha.AttentionRegressor(2, head_dim=3, random_state=0).fit(examples)
    assert model.outcome_ is mha.Outcome.RECOVERED, model.solution_.reason
    back = mha.to_torch(model.layer_)
    x = mha.sample_inputs("gaussian", 4, 5, 6, seed=9)
    np.testing.assert_allclose(call(back, x), call(module, x), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("layer", "options", "words"),
    [
        (mha.random_layer(2, 8), {}, r"head 0: Theta has rank 8 .* dimension of 4 holds rank 4"),
        (mha.random_layer(3, 8, rank=2), {}, "n_heads=3 does not divide d=8"),
        (mha.random_layer(2, 8, rank=2, out_dim=6), {}, "out_dim=6 beside d=8"),
        (mha.random_layer(4, 8, rank=2), {"n_heads": 2}, "n_heads=2: the layer has 4"),
        (mha.random_layer(2, 8, rank=2), {"n_heads": 0}, "n_heads=0"),
        (
            mha.random_layer(2, 4, rank=2).replace(key_vector=np.eye(2, 4)),
            {},
            "head 0: Theta with its key vector has rank 3",
        ),
    ],
)
def test_layers_no_module_can_hold_are_refused(layer, options, words):
    with pytest.raises(ValueError, match=words):
        mha.to_torch(layer, **options)


class Rotating(torch.nn.MultiheadAttention):
    """A subclass that computes something else."""

    def forward(self, query, key, value):
        return super().forward(query.roll(1), key, value)


def trained(**options):
    return torch.nn.MultiheadAttention(8, 2, **options)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: trained(kdim=5), "kdim=5: self-attention"),
        (lambda: trained(vdim=5), "vdim=5: self-attention"),
        (lambda: trained(add_bias_kv=True), "add_bias_kv=True"),
        (lambda: trained(add_zero_attn=True), "add_zero_attn=True"),
        (lambda: trained(dropout=0.1), r"dropout=0.1 in training mode .* module.eval\(\)"),
        (lambda: trained(device="meta"), "meta device"),
        (lambda: torch.nn.Linear(4, 4), "Linear is not a torch.nn.MultiheadAttention: pass one"),
        (lambda: torch.nn.TransformerEncoderLayer(8, 2), "its self_attn is one"),
        (lambda: "module", "str is not"),
        (lambda: Rotating(8, 2), "Rotating has a forward of its own"),
    ],
)
def test_modules_that_are_no_such_layer_are_refused(module, words):
    with pytest.raises(ValueError, match=words) as refusal:
        mha.from_torch(module())
    assert "\n" not in str(refusal.value)


def test_dropout_in_eval_mode_changes_nothing():
    quiet = trained(dropout=0.3).eval()
    assert mha.from_torch(quiet).n_heads == 2


def test_weights_that_are_not_finite_are_refused():
    module = make_module(4, 2)
    with torch.no_grad():
        module.in_proj_weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="the query weight has 1 NaN"):
        mha.from_torch(module)


def test_the_layer_keeps_its_own_copy():
    module = make_module(4, 2)
    layer = mha.from_torch(module)
    before = mha.to_torch(layer)
    with torch.no_grad():
        module.in_proj_weight.zero_()
    assert same_bits(mha.to_torch(layer), before)


# State dicts and their files


def test_a_layer_is_found_inside_a_model():
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64), 3
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    layer = interop.from_torch_state(model.state_dict(), 2, layer_index=1)
    x = mha.sample_inputs("gaussian", 3, 4, 8, seed=1)
    expected = call(model.layers[1].self_attn, x)
    np.testing.assert_allclose(layer(x), expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="layer_index=3: there are layers 0 to 2"):
        interop.from_torch_state(model.state_dict(), 2, layer_index=3)


def test_two_layers_of_one_number_are_told_apart_by_prefix():
    decoder = torch.nn.TransformerDecoderLayer(8, 2, 16).state_dict()
    with pytest.raises(ValueError, match="choose one by its prefix"):
        interop.from_torch_state(decoder, 2)
    chosen = interop.from_torch_state(decoder, 2, prefix="self_attn.")
    np.testing.assert_array_equal(
        chosen.factors["query"].reshape(8, 8), decoder["self_attn.in_proj_weight"][:8]
    )
    with pytest.raises(ValueError, match="prefix='other': no layer's names begin so"):
        interop.from_torch_state(decoder, 2, prefix="other")


@pytest.mark.parametrize("name", ["state.pt", "state.safetensors"])
@pytest.mark.parametrize("packed", [False, True])
def test_files_of_state_dicts(tmp_path, name, packed):
    module = make_module(6, 2, packed=packed, dtype=torch.float32)
    path = tmp_path / name
    state = {key: value.numpy() for key, value in module.state_dict().items()}
    interop.write_state_dict(path, state)
    with pytest.raises(ValueError, match="n_heads is missing"):
        interop.from_torch_state(path)
    assert same_bits(mha.to_torch(interop.from_torch_state(path, 2), packed=packed), module)


def test_checkpoints_may_wrap_a_state_dict(tmp_path):
    module = make_module(4, 2)
    torch.save({"epoch": 3, "state_dict": module.state_dict()}, tmp_path / "checkpoint.pt")
    layer = interop.from_torch_state(tmp_path / "checkpoint.pt", 2)
    assert same_bits(mha.to_torch(layer), module)


@pytest.mark.parametrize(
    ("change", "n_heads", "words"),
    [
        ({}, 4, "does not divide into so many heads"),
        ({}, 0, "at least one head"),
        ({"in_proj_weight": None}, 2, "no attention layer named as in torch"),
        ({"out_proj.weight": None}, 2, "there is no 'out_proj.weight'"),
        ({"in_proj_weight": np.zeros((7, 6))}, 2, r"in_proj_weight has shape \(7, 6\)"),
        ({"in_proj_bias": np.zeros(7)}, 2, r"packed bias has shape \(7,\)"),
        ({"out_proj.bias": np.zeros(5)}, 2, "out_bias weight has shape"),
        ({"out_proj.weight": np.zeros(())}, 2, "expected 2 axes"),
        ({"in_proj_bias": np.zeros(0)}, 2, "a bias has shape"),
        ({"bias_k": np.zeros((1, 1, 6))}, 2, "add_bias_kv=True"),
        ({"in_proj_weight": np.zeros((18, 6), np.int8)}, 2, "dtype int8: dequantise"),
        ({"in_proj_weight": torch.eye(6).repeat(3, 1).to_sparse()}, 2, "sparse"),
    ],
)
def test_damaged_state_dicts_are_refused(change, n_heads, words):
    state = make_module(6, 2).state_dict() | change
    state = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(ValueError, match=words) as refusal:
        interop.from_torch_state(state, n_heads)
    assert "\n" not in str(refusal.value)


class Hostile:
    def __reduce__(self):
        return exec, ("raise SystemExit('code was run')",)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(pickle.dumps({"in_proj_weight": Hostile()})),
        lambda path: torch.save({"in_proj_weight": Hostile()}, path),
        lambda path: torch.save(make_module(4, 2), path),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"PK\x03\x04 and then nothing"),
        lambda path: torch.save([1, 2], path),
        lambda path: torch.save({"epoch": 1}, path),
        lambda path: path.mkdir(),
        lambda path: None,
    ],
)
def test_files_that_hold_no_state_dict_are_refused(tmp_path, write):
    path = tmp_path / "state.pt"
    write(path)
    with pytest.raises(ValueError, match="state") as refusal:
        interop.from_torch_state(path, 2)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["state.pt", "state.safetensors"])
def test_truncated_files_are_refused(tmp_path, name):
    path = tmp_path / name
    interop.write_state_dict(path, interop.to_torch_state(mha.from_torch(make_module(4, 2))))
    whole = path.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 12)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="not a readable"):
            interop.from_torch_state(path, 2)


# Without torch

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # what an import meets where torch is not installed
import numpy as np
import mhalearn as mha
from mhalearn import interop
layer = mha.random_layer(2, 4, rank=2)
interop.write_state_dict("state.safetensors", interop.to_torch_state(layer), {"n_heads": "2"})
back = interop.from_torch_state("state.safetensors")
assert mha.compare(back, layer).max_error < 1e-12
names = interop.to_transformer_lens(layer)
assert mha.compare(mha.from_huggingface(names), layer).max_error < 1e-12
assert len(mha.Examples.from_callable(layer, n=4, k=2, d=4).arrays().x) == 4
open("state.pt", "w").close()
for act in (mha.to_torch, mha.from_torch, lambda _: interop.from_torch_state("state.pt", 2)):
    try:
        act(layer)
    except ValueError as error:
        assert str(error) == 'PyTorch is not installed: pip install "mhalearn[torch]"', error
    else:
        raise AssertionError("torch was not missed")
"""


def run_python(code, folder):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )


def test_safetensors_files_need_no_torch_and_the_rest_says_what_to_install(tmp_path):
    done = run_python(WITHOUT_TORCH, tmp_path)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_does_not_import_torch(tmp_path):
    code = (
        "import sys, mhalearn as mha; mha.from_torch, mha.Examples; assert 'torch' not in "
        "sys.modules"
    )
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
