"""Labels that hold a residual path, y = x + F(x): told, and not told."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import mhalearn as mha
from mhalearn.cli import app
from mhalearn.judge.residual_path import hint_at_residual_path
from mhalearn.learners import NewtonOptions

LAYER = mha.random_layer(2, 4, seed=0)
X = mha.sample_inputs("gaussian", 120, 5, 4, seed=0)
Y = X + LAYER(X)
LENGTHS = np.tile([5, 3, 4], 40)
BRIEF = NewtonOptions(plenty=NewtonOptions().plenty[:2])
HINT = "the labels look as if they held a residual path y = x + F(x)"


def learn(x, y, **settings):
    return mha.AttentionRegressor(2, random_state=0, **settings).fit(x, y)


def test_the_layer_is_learned_without_it_and_predicts_with_it():
    model = learn(X, Y, residual=True)
    assert model.outcome_ is mha.Outcome.RECOVERED
    assert mha.compare(model.layer_, LAYER).max_error < 1e-8
    np.testing.assert_allclose(model.predict(X), Y, atol=1e-9)
    assert model.score(X, Y) > 1 - 1e-12
    assert mha.certify(model.layer_, *fresh()).recovered
    with pytest.raises(ValueError, match="learned from"):
        mha.certify(model.layer_, X, Y - X)
    assert model.layer_.metadata["residual"] == "y = x + F(x)"


def fresh():
    x = mha.sample_inputs("gaussian", 60, 5, 4, seed=9)
    return x, LAYER(x)


def test_rows_past_the_end_are_predicted_as_zero():
    labels = np.where((np.arange(5) < LENGTHS[:, None])[..., None], X + LAYER(X, LENGTHS), np.pi)
    model = mha.AttentionRegressor(2, residual=True).fit(mha.Examples(X, labels, LENGTHS))
    found = model.predict(X, LENGTHS)
    assert not found[1, 3:].any()
    np.testing.assert_allclose(found[1, :3], labels[1, :3], atol=1e-9)


def test_examples_from_anywhere_lose_it(tmp_path):
    whole = mha.Examples(X, Y, LENGTHS)
    whole.save(tmp_path / "shards", shard_size=50)
    for examples in (whole, mha.load_examples(tmp_path / "shards")):
        alone = examples.without_residual()
        np.testing.assert_array_equal(alone.arrays().y, Y - X)
        np.testing.assert_array_equal(alone.lengths, LENGTHS)
    box = mha.Examples.from_callable(lambda x: x + LAYER(x), "gaussian", n=20, k=5, d=4)
    alone = box.without_residual()
    np.testing.assert_allclose(alone.arrays().y, LAYER(alone.arrays().x), atol=1e-12)
    np.testing.assert_allclose(alone.box(X), LAYER(X), atol=1e-12)
    half = mha.Examples(X.astype(ml_dtypes.bfloat16), Y.astype(ml_dtypes.bfloat16))
    x, y, _ = half.without_residual().arrays()
    assert (x.dtype, y.dtype) == (ml_dtypes.bfloat16, np.float32)
    assert np.abs(y - LAYER(X)).max() < 0.1


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match=r"residual=True: .* e = 3 beside d = 4"):
        mha.AttentionRegressor(2, residual=True).fit(X, Y[..., :3])
    with pytest.raises(ValueError, match="d = 4 and e = 3"):
        mha.Examples(X, Y[..., :3]).without_residual()
    with pytest.raises(ValueError, match="residual=1: pass True or False"):
        mha.AttentionRegressor(2).set_params(residual=1).fit(X, Y)


@pytest.mark.parametrize("scale", [1.0, 0.3, 3.0])
def test_labels_that_hold_one_look_so(scale):
    """Whatever the outcome, where nothing was told the reason says how to say so."""
    model = learn(X, X + scale * LAYER(X), options=BRIEF)
    assert model.outcome_ is not mha.Outcome.RECOVERED
    assert "residual=True" in model.solution_.reason
    assert "residual path y = x + F(x)" in model.solution_.reason


def test_tokens_that_span_less_hide_none():
    """The judge sees other coordinates than the user's, and fewer; a residual path is the identity
    in his."""
    x = X.copy()
    x[..., 3] = x[..., 0] - x[..., 1]
    told, untold = (
        mha.AttentionRegressor(2, residual=residual, options=BRIEF).fit(x, x + LAYER(x))
        for residual in (True, False)
    )
    assert told.outcome_ is mha.Outcome.RECOVERED_ON_SPAN
    np.testing.assert_allclose(told.predict(x), x + LAYER(x), atol=1e-8)
    assert "residual path y = x + F(x)" in untold.solution_.reason
    assert "residual=True" in untold.solution_.reason


def test_a_box_beside_a_residual_path_is_asked_for_the_layer():
    box = mha.Examples.from_callable(lambda x: x + LAYER(x), "gaussian", n=120, k=5, d=4)
    model = mha.AttentionRegressor(2, residual=True).fit(box)
    assert mha.compare(model.layer_, LAYER).max_error < 1e-8


def test_labels_without_one_that_were_said_to_hold_one_look_so():
    model = learn(X, LAYER(X), residual=True, options=BRIEF)
    assert model.outcome_ is not mha.Outcome.RECOVERED
    assert "learn without residual" in model.solution_.reason
    assert "residual=True" not in model.solution_.reason


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("residual", [False, True])
def test_labels_of_a_layer_alone_give_no_hint(seed, residual):
    """Of any kind of tokens: independent ones, or such that go together as those of text do."""
    rng = np.random.default_rng(seed)
    layer = mha.random_layer(2, 4, scale=3.0, seed=seed)
    x = rng.standard_normal((200, 5, 4))
    alike = x + 2 * rng.standard_normal((200, 1, 4)) + 1.0
    for tokens in (x, alike):
        assert hint_at_residual_path(mha.Examples(tokens, layer(tokens)), residual=residual) == ""
        held = mha.Examples(tokens, tokens + 0.3 * layer(tokens))
        assert (HINT in hint_at_residual_path(held, residual=False)) is True
    assert hint_at_residual_path(mha.Examples(x[:2], x[:2]), residual=False) == ""  # too few rows
    assert hint_at_residual_path(mha.Examples(x, x[..., :3]), residual=False) == ""


def test_the_command_line_is_told_too(tmp_path):
    torch.save({"hidden": torch.tensor(X), "out": torch.tensor(Y)}, tmp_path / "recorded.pt")
    names = ["--inputs", "hidden", "--outputs", "out"]
    layer, report = str(tmp_path / "layer.safetensors"), tmp_path / "report.html"
    words = ["learn", str(tmp_path / "recorded.pt"), *names, "--heads", "2", "--residual"]
    words += ["--out", layer, "--report", str(report), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["recovered"]
    assert mha.compare(mha.load_layer(layer), LAYER).max_error < 1e-8
    assert "--residual" in report.read_text()
    x, y = fresh()
    torch.save({"hidden": torch.tensor(x), "out": torch.tensor(x + y)}, tmp_path / "fresh.pt")
    asked = ["certify", layer, str(tmp_path / "fresh.pt"), *names, "--residual", "--json"]
    assert CliRunner().invoke(app, asked).exit_code == 0
