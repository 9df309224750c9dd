"""Recorded activations: hooks, padding, precision, shards, and what is refused."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch
from encoders import Attention, TinyBert
from torch import nn

import mhalearn as mha

NAME = "encoder.layer.1.attention"


def sentences(n, k, *, left, seed, least=3):
    """Ids and a mask, padded on one side."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(least, k + 1, n)
    lengths[0] = k
    place = np.arange(k)[::-1] if left else np.arange(k)
    mask = torch.from_numpy((place < lengths[:, None]).astype(np.int64))
    ids = torch.from_numpy(rng.integers(0, 50, (n, k)))
    return {"input_ids": ids, "attention_mask": mask}


def hooked(model, name, batch):
    """What the module gets and gives, example by example, without padding."""
    kept = []
    module = model.get_submodule(name)
    hook = module.register_forward_hook(
        lambda module, args, kwargs, output: kept.append((args[0].clone(), output[0].clone())),
        with_kwargs=True,
    )
    with torch.no_grad():
        model.eval()(**batch)
    hook.remove()
    return [
        (x[row].numpy(), y[row].numpy())
        for x, y in kept
        for x, y, row in zip(x, y, batch["attention_mask"].bool(), strict=True)
    ]


@pytest.mark.parametrize("left", [False, True], ids=["right padding", "left padding"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_recording_is_what_the_module_sees_without_padding(left, causal):
    model = TinyBert(causal=causal).double()
    batches = [sentences(4, 6, left=left, seed=0), sentences(3, 9, left=left, seed=1)]
    examples = mha.record(model, NAME, batches)
    x, y, lengths = examples.arrays()
    expected = [pair for batch in batches for pair in hooked(model, NAME, batch)]
    assert x.shape == (7, 9, 8)
    assert examples.has_lengths
    for row, (tokens, labels) in enumerate(expected):
        assert lengths[row] == len(tokens)
        np.testing.assert_array_equal(x[row, : len(tokens)], tokens)
        np.testing.assert_array_equal(y[row, : len(tokens)], labels)
        assert not x[row, len(tokens) :].any()
        assert not y[row, len(tokens) :].any()
    layer = model.get_submodule(NAME).layer()
    inside = np.arange(9) < lengths[:, None]
    np.testing.assert_allclose(layer(x, lengths)[inside], y[inside], rtol=1e-9, atol=1e-12)


def test_shards_of_different_lengths_hold_the_same(tmp_path, monkeypatch):
    """A shard is as long as its longest sequence, and is padded when it is read."""
    monkeypatch.setattr("mhalearn.data.recordings._SHARD", 4000)
    model, told = TinyBert().double(), []
    batches = [sentences(6, k, left=True, seed=k) for k in (4, 9, 5, 5, 3)]
    in_memory = mha.record(model, NAME, iter(batches))
    examples = mha.record(model, NAME, batches, out=tmp_path / "shards", progress=told.append)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    for found, expected in zip(examples.arrays(), in_memory.arrays(), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert [event.step for event in told] == [1, 2, 3, 4, 5]
    assert told[-1].data["of"] == 5
    assert "30 examples" in told[-1].detail
    assert examples.metadata == {"model": "TinyBert", "module": NAME, "causal": False}
    again = mha.load_examples(tmp_path / "shards")
    np.testing.assert_array_equal(again.hashes(), in_memory.hashes())
    np.testing.assert_array_equal(again.subset([29, 0]).arrays().x, in_memory.arrays().x[[29, 0]])


def test_without_padding_there_are_no_lengths(tmp_path):
    model = TinyBert()
    ids = torch.arange(20).reshape(4, 5)
    for out in (None, tmp_path / "shards"):
        examples = mha.record(model, NAME, [ids, (ids + 1,)], out=out)
        assert (examples.n, examples.k, examples.has_lengths) == (8, 5, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_models_precision_is_kept(dtype, tmp_path):
    model = TinyBert().to(dtype)
    examples = mha.record(model, NAME, sentences(4, 6, left=True, seed=0), out=tmp_path / "shards")
    x, y, _ = examples.arrays()
    expected = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}
    assert x.dtype == y.dtype == expected.get(dtype, np.float32)
    batch = sentences(4, 6, left=True, seed=0)
    wide = mha.record(model.double(), NAME, batch).arrays()
    np.testing.assert_allclose(y[0].astype(float), wide.y[0], atol=0.1)


def test_the_model_is_left_as_it_was():
    model = TinyBert().train()
    model.encoder.layer[0].eval()
    modes = [part.training for part in model.modules()]
    first, second = (mha.record(model, NAME, sentences(4, 6, left=True, seed=0)) for _ in range(2))
    np.testing.assert_array_equal(first.hashes(), second.hashes())  # no dropout
    with pytest.raises(ValueError, match="batch 2"):
        mha.record(model, NAME, [sentences(4, 6, left=True, seed=0), {"ids": KEEP}])
    assert [part.training for part in model.modules()] == modes
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_a_layer_is_learned_from_a_recording():
    torch.manual_seed(0)
    model = Around(Attention(4, 1)).double()
    batches = [torch.randn(40, k, 4, dtype=torch.float64) for k in (5, 3, 5)]
    examples = mha.record(model, "inner", batches)
    learned = mha.AttentionRegressor(1, bias=True, random_state=0).fit(examples)
    assert learned.outcome_ is mha.Outcome.RECOVERED
    assert mha.compare(learned.layer_, model.inner.layer()).max_error < 1e-8


class Around(nn.Module):
    """A model around one module, which gets what a test wants."""

    def __init__(self, inner, call=None):
        super().__init__()
        self.inner, self._call = inner, call or (lambda inner, x: inner(x))

    def forward(self, x, keep=None, position_ids=None):
        return self._call(self.inner, x)


class Plain(nn.Module):
    """Returns what a test wants."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, hidden_states=None, attention_mask=None, **others):
        return self.make(hidden_states)


X = torch.linspace(-1, 1, 60).reshape(3, 5, 4)
KEEP = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_module(batch_first, causal):
    torch.manual_seed(0)
    inner = nn.MultiheadAttention(4, 2, batch_first=batch_first, dtype=torch.float64)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1) if causal else None

    def call(inner, x):
        tokens = x if batch_first else x.transpose(0, 1)
        return inner(tokens, tokens, tokens, key_padding_mask=KEEP == 0, attn_mask=mask)

    examples = mha.record(Around(inner, call), "inner", [X.double()])
    assert examples.metadata.get("causal", False) is causal
    x, y, lengths = examples.arrays()
    np.testing.assert_array_equal(lengths, [3, 5, 2])
    np.testing.assert_array_equal(x[0, :3], X.double()[0, 2:])
    layer = mha.from_torch(inner, causal=causal)
    inside = np.arange(5) < lengths[:, None]
    np.testing.assert_allclose(layer(x, lengths)[inside], y[inside], atol=1e-12)


def test_an_encoder_of_torch():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    batch = {"src": X.double(), "src_key_padding_mask": KEEP == 0}
    examples = mha.record(model, "layers.1.self_attn", [batch])
    x, y, lengths = examples.arrays()
    layer = mha.from_torch(model.eval().layers[1].self_attn)
    inside = np.arange(5) < lengths[:, None]
    np.testing.assert_array_equal(lengths, [3, 5, 2])
    np.testing.assert_allclose(layer(x, lengths)[inside], y[inside], atol=1e-12)


def pairs(kind, causal):
    """The mask of KEEP as libraries extend it to (n, 1, k, k)."""
    allowed = KEEP.bool()[:, None, None] & torch.ones(5, 5, dtype=torch.bool)
    if causal:
        allowed = allowed & torch.ones(5, 5, dtype=torch.bool).tril()
    if kind == "bool":
        return allowed
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_pairs_tell_padding_and_order(kind, causal):
    model = Around(Plain(lambda x: x), lambda inner, x: inner(x, pairs(kind, causal)))
    examples = mha.record(model, "inner", [X])
    np.testing.assert_array_equal(examples.lengths, [3, 5, 2])
    assert examples.metadata["causal"] is causal


def test_a_mask_of_another_name():
    examples = mha.record(Around(Plain(lambda x: x)), "inner", [(X, KEEP)], mask="keep")
    np.testing.assert_array_equal(examples.lengths, [3, 5, 2])
    with pytest.raises(ValueError, match="mask='kept': the batch has no such entry; it has 'x'"):
        mha.record(Around(Plain(lambda x: x)), "inner", [X], mask="kept")


def test_tokens_may_come_by_name_and_padding_may_be_nan():
    spoilt = torch.where(KEEP[..., None] == 1, X, torch.nan)
    model = Around(Plain(lambda x: (x, None)), lambda inner, x: inner(hidden_states=x))
    examples = mha.record(model, "inner", [(spoilt, KEEP)], mask="keep")
    np.testing.assert_array_equal(examples.arrays().x[0, :3], X[0, 2:])
    with pytest.raises(ValueError, match=r"batch 1: X has \d+ NaN"):
        mha.record(model, "inner", [spoilt])


BERT = {
    "no such name": ("encoder.layer.1.atention", "near are 'encoder.layer.1.attention'"),
    "nothing near": ("zzz", "its attention: 'encoder.layer.0.attention'"),
    "the whole model": ("", "the whole model (TinyBert) holds 3 attention layers"),
    "the encoder": ("encoder", "holds 3 attention layers"),
    "a block": (
        "encoder.layer.1",
        "whole block and not one attention layer: it holds 'norm' too; "
        "record 'encoder.layer.1.attention'",
    ),
    "a projection": ("encoder.layer.1.attention.query", "is no attention layer: name the module"),
}


@pytest.mark.parametrize("case", BERT)
def test_modules_that_are_not_one_attention_layer_are_refused(case):
    name, words = BERT[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        mha.record(TinyBert(), name, [torch.arange(6).reshape(2, 3)])


class BertAttention(nn.Module):
    """BERT's own division: `self`, and an `output` with residual path and norm."""

    def __init__(self):
        super().__init__()
        self.self = Plain(lambda x: (x,))
        self.output = nn.ModuleDict({"dense": nn.Linear(4, 4), "LayerNorm": nn.LayerNorm(4)})

    def forward(self, x):
        return self.output["LayerNorm"](self.output["dense"](self.self(x)[0]) + x)


def test_berts_attention_is_recorded_up_to_its_dense_layer():
    model = Around(BertAttention())
    with pytest.raises(ValueError, match=r"'inner\.self' with output='inner\.output\.dense'"):
        mha.record(model, "inner", [X])
    found = mha.record(model, "inner.self", [X], output="inner.output.dense").arrays().y
    np.testing.assert_array_equal(found, model.inner.output["dense"](X).detach())


CALLS = {
    "called twice": (lambda x: x, lambda inner, x: inner(inner(x)), "called 2 times"),
    "not called": (lambda x: x, lambda inner, x: x, "was not called"),
    "ids": (lambda x: X, lambda inner, x: inner(x.long()), "gets int64 of shape (3, 5, 4)"),
    "two axes": (lambda x: x, lambda inner, x: inner(x[0]), "gets float32 of shape (5, 4)"),
    "no tokens": (lambda x: X, lambda inner, x: inner(), "gets no tensor"),
    "a number": (lambda x: x.sum(), lambda inner, x: inner(x), "returns float32 of shape ()"),
    "fewer rows": (lambda x: x[:, :2], lambda inner, x: inner(x), "returns float32 of shape (3, 2"),
    "a dict": (lambda x: {"y": x}, lambda inner, x: inner(x), "returns a dict"),
    "all layers": (lambda x: (x, (x, x, x)), lambda inner, x: inner(x), "hidden states of several"),
    "a list of layers": (lambda x: (x, x, x), lambda inner, x: inner(x), "hidden states of sev"),
    "another sequence": (
        lambda x: x,
        lambda inner, x: inner(x, encoder_hidden_states=x + 1),
        "is cross-attention",
    ),
    "a window": (
        lambda x: x,
        lambda inner, x: inner(x, torch.ones(1, 1, 5, 5).tril().triu(-1).bool()),
        "neither all tokens nor all earlier",
    ),
    "a mask of other tokens": (
        lambda x: x,
        lambda inner, x: inner(x, torch.ones(3, 7)),
        "attention_mask has shape (3, 7), the module's tokens (3, 5)",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_are_no_examples_are_refused(case):
    make, call, words = CALLS[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        mha.record(Around(Plain(make), call), "inner", [X])


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "batches is empty"),
        ([{"y": X}], "batch 1: it does not fit the arguments of Around.forward"),
        ([X, X[:, :, :3]], "batch 2: its inputs have 3 features of float32, those before it 4"),
        ([X, X.double()], "batch 2: its inputs have 4 features of float64"),
        ([X[:, :1]], "one token"),
        ([(X, KEEP * 0)], "batch 1: the mask: row 0 has no token at all"),
        ([(X, torch.tensor([[1, 0, 1, 0, 1]] * 3))], "row 0 has padding between its tokens"),
        ([(X, None, torch.tensor([[0, 1, 0, 1, 2]] * 3))], "position_ids of row 0 do not go up"),
    ],
)
def test_batches_that_are_no_examples_are_refused(batches, words, tmp_path):
    named = "keep" if batches and isinstance(batches[0], tuple) and len(batches[0]) == 2 else None
    model = Around(Plain(lambda x: x))
    with pytest.raises(ValueError, match=re.escape(words)):
        mha.record(model, "inner", batches, mask=named, out=tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


def test_positions_under_left_padding_are_no_several_sequences():
    places = torch.clamp(KEEP.cumsum(1) - 1, min=0)
    batch = {"x": X, "keep": KEEP, "position_ids": places}
    examples = mha.record(Around(Plain(lambda x: x)), "inner", batch, mask="keep")
    assert examples.n == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": np.sum}, "pass a torch.nn.Module"),
        ({"out": "recording.npz"}, "name a folder"),
    ],
)
def test_what_cannot_be_recorded_is_refused_at_once(changes, words):
    settings = {"model": TinyBert(), "module": NAME, "batches": [X]} | changes
    with pytest.raises(ValueError, match=words):
        mha.record(**settings)
