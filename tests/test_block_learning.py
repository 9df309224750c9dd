"""Blocks learned from random examples: small ones exactly, and traps that must not be recovered."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import transformer_block

import mhalearn as mha
from mhalearn import cli
from mhalearn._runtime.programs import float64
from mhalearn.judge.block_verdict import Asked, judge_block
from mhalearn.layer.batches import make_chunk
from mhalearn.learners.blocks.options import BlockOptions
from mhalearn.learners.blocks.pruning import prune
from mhalearn.run.outcome import Candidate
from mhalearn.run.run import Run
from mhalearn.solvers.dense_normal_equations import descend_densely
from mhalearn.solvers.scaled_problem import make_problem

SIZES = {"n_heads": 1, "d": 4, "hidden": 4}
QUICK = BlockOptions(steps=6000, strengths=(1e-4, 3e-4))


def data(block: mha.Block, n: int = 400, k: int = 3, seed: int = 0) -> mha.Examples:
    x = mha.sample_inputs("gaussian", n, k, block.d, seed=seed)
    return mha.Examples(x, block(x))


def with_surplus(block: mha.Block, change: float = 0.0) -> mha.Block:
    """The same function by two more neurons and a copied head, then moved a little."""
    ff, heads = block.feed_forward, block.attention
    order = [*range(ff.hidden), 0, 1]
    shares = np.ones((ff.hidden + 2, 1))
    shares[[0, 1]], shares[-2:] = 0.4, 0.6
    rng = np.random.default_rng(3)
    up = ff.up[:, order]
    more = ff.replace(
        up=up + change * rng.standard_normal(up.shape),
        up_bias=ff.up_bias[order],
        down=ff.down[order] * shares,
    )
    twice = heads.replace(
        theta=heads.theta[[0, 0]],
        w=heads.w[[0, 0]] * [[[0.3]], [[0.7]]],
        key_vector=heads.key_vector[[0, 0]],
    )
    return block.replace(attention=twice, feed_forward=more)


def test_pruning_finds_the_sizes_of_a_block_with_surplus() -> None:
    block = mha.random_block(**SIZES, norm=None)
    found = prune(with_surplus(block, 1e-4), data(block), 1e-5)
    assert (found.n_heads, found.hidden) == (1, 4)
    assert mha.compare(found, block).max_error < 0.01
    fewer = prune(with_surplus(block), data(block), 1e-5, 1, 3)
    assert fewer.hidden == 3


@pytest.mark.parametrize("norm", [None, "post"])
def test_gauss_newton_ends_at_rounding(norm: str | None) -> None:
    block = mha.random_block(**SIZES, norm=norm, epsilon=1e-12)
    kind = block.parametrisation
    problem = make_problem(data(block, 200), kind)
    rng = np.random.default_rng(0)
    near = {
        name: leaf + 0.02 * rng.standard_normal(leaf.shape) for name, leaf in block.params.items()
    }
    found = descend_densely(near, problem, Run(), stage="test")
    assert found.loss < 1e-28
    assert mha.compare(problem.to_layer(found.params), block).max_error < 1e-9


@pytest.mark.slow
def test_a_small_block_is_recovered() -> None:
    block = mha.random_block(**SIZES, norm=None, seed=2)
    examples = data(block)
    model = mha.BlockRegressor(n_heads=1, hidden=4, options=QUICK).fit(examples)
    assert model.outcome_ is mha.Outcome.RECOVERED, model.solution_.reason
    assert mha.compare(model.block_, block).max_error < 1e-10
    assert model.score(examples.arrays()[0], examples.arrays()[1]) == pytest.approx(1.0)
    assert model.certificate_.recovered
    assert model.certificate_.null_dimension == 0


@pytest.mark.slow
def test_labels_in_single_precision_are_met_to_their_rounding_without_a_linear_map() -> None:
    block = mha.random_block(**SIZES, norm=None, seed=2)
    x, y = data(block).arrays()[:2]
    model = mha.BlockRegressor(1, hidden=4, options=QUICK).fit(x, y.astype(np.float32))
    assert model.outcome_ is mha.Outcome.FITTED, model.solution_.reason
    assert "float32" in model.solution_.reason
    assert model.block_.feed_forward.linear is None
    assert mha.compare(model.block_, block).max_error < 1e-4
    assert sum(event.stage == "student" for event in model.trace_) == 1


@pytest.mark.slow
def test_activation_and_norm_are_found_among_candidates() -> None:
    block = mha.random_block(**SIZES, activation="relu", norm="pre", seed=2)
    model = mha.BlockRegressor(1, hidden=4, activation="auto", norm="auto", options=QUICK)
    model.fit(data(block))
    assert model.outcome_ is mha.Outcome.RECOVERED, model.solution_.reason
    assert (model.block_.design.activation, model.block_.norm) == ("relu", "pre")
    assert mha.compare(model.block_, block).max_error < 1e-10
    tried = [event for event in model.trace_ if event.stage == "candidate"]
    assert len(tried) == 8 * 3


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "kind"), [("pre", "layer"), ("post", "rms")])
def test_small_blocks_with_norms_are_recovered(norm: str, kind: str) -> None:
    block = mha.random_block(**SIZES, norm=norm, norm_kind=kind, seed=2)
    model = mha.BlockRegressor(1, hidden=4, norm=norm, norm_kind=kind, options=QUICK)
    model.fit(data(block))
    assert model.outcome_ is mha.Outcome.RECOVERED, model.solution_.reason
    assert mha.compare(model.block_, block).max_error < 1e-8


@pytest.mark.slow
def test_sizes_that_are_told_are_kept_where_nothing_fits() -> None:
    x = mha.sample_inputs("gaussian", 200, 3, 4, seed=0)
    y = np.random.default_rng(1).standard_normal(x.shape)
    hasty = BlockOptions(steps=500, strengths=(1e-4,))
    model = mha.BlockRegressor(n_heads=1, hidden=2, options=hasty).fit(x, y)
    assert model.outcome_ is mha.Outcome.STUCK
    assert model.block_.n_heads == 1
    assert model.block_.hidden <= 2
    assert not model.certificate_.recovered


def judged(block: mha.Block, truth: mha.Block, asked: Asked, labels=None) -> mha.Outcome:
    examples = data(truth)
    if labels is not None:
        x, y, _ = examples.arrays()
        examples = mha.Examples(x, labels(y))
    train, certify = examples.subset(slice(0, 300)), examples.subset(slice(300, 400))
    return judge_block(Candidate(block), train, certify, asked, Run()).outcome


def test_the_judge_of_blocks_is_not_fooled() -> None:
    """By the truth itself where it is not determined, or told wrongly, or met by coarse labels."""
    block = mha.random_block(**SIZES, norm=None)
    found, told = Asked(None, None), Asked(1, 4)
    assert judged(block, block, found) is mha.Outcome.RECOVERED
    assert judged(block, block, told) is mha.Outcome.RECOVERED
    assert judged(block, block, Asked(1, 5)) is mha.Outcome.NOT_IDENTIFIED
    assert judged(with_surplus(block), block, found) is mha.Outcome.NOT_IDENTIFIED
    ff = block.feed_forward
    mapped = block.replace(feed_forward=ff.replace(linear=0.3 * np.eye(4)))
    assert judged(mapped, mapped, found) is mha.Outcome.NOT_IDENTIFIED
    coarse = judged(block, block, found, lambda y: y.astype(np.float32))
    assert coarse is not mha.Outcome.RECOVERED
    noisy = judged(
        block, block, found, lambda y: y + 1e-6 * np.random.default_rng(0).random(y.shape)
    )
    assert noisy is mha.Outcome.FITTED
    other = mha.random_block(**SIZES, norm=None, seed=9)
    assert judged(other, block, found) is mha.Outcome.STUCK
    few = data(block, 4)
    verdict = judge_block(Candidate(block), few, None, found, Run())
    assert verdict.outcome is mha.Outcome.TOO_FEW_EXAMPLES


def test_a_faint_neuron_is_no_rounding() -> None:
    """What doubles lose is far less than 1e-12, and other ways of computing lose about as much."""
    block = mha.random_block(**SIZES, norm=None, seed=2)
    ff = block.feed_forward
    faint = block.replace(feed_forward=ff.replace(down=ff.down * [[1.0], [1.0], [1.0], [1e-12]]))
    fewer = {"up": ff.up[:, :3], "up_bias": ff.up_bias[:3], "down": ff.down[:3]}
    without = block.replace(feed_forward=ff.replace(**fewer))
    assert judged(without, faint, Asked(None, None)) is mha.Outcome.FITTED
    naive = transformer_block(data(block).arrays()[0], block)
    assert np.any(naive != data(block).arrays()[1])
    assert judged(block, block, Asked(None, None), lambda _: naive) is mha.Outcome.RECOVERED


def test_neuron_values_are_what_outputs_are_made_of() -> None:
    block = mha.random_block(**SIZES, norm="pre", activation="swiglu")
    kind, ff, x = block.parametrisation, block.feed_forward, data(block, 5).arrays()[0]
    with float64():
        chunk = make_chunk(x, np.full(5, 3), key_vector=True, out_bias=True, causal=False)
        given = jax.tree.map(jnp.asarray, (block.params, chunk))
        values = np.asarray(kind.neuron_values(*given))
    added = values @ ff.down + ff.down_bias
    silent = block.replace(feed_forward=ff.replace(down=0 * ff.down, down_bias=0 * ff.down_bias))
    assert np.abs(block(x) - silent(x) - added).max() < 1e-12


def test_wrong_settings_of_a_block_are_refused() -> None:
    block = mha.random_block(**SIZES)
    x = data(block, 20).arrays()[0]
    for settings, match in (
        ({"hidden": "many"}, "hidden='many'"),
        ({"n_heads": 0}, "n_heads=0"),
        ({"norm": "both"}, "norm='both'"),
        ({"activation": "tanh"}, "activation='tanh'"),
    ):
        with pytest.raises(ValueError, match=match):
            mha.BlockRegressor(**settings).fit(x, x)
    with pytest.raises(ValueError, match="residual path"):
        mha.BlockRegressor().fit(x, x[..., :2])


@pytest.mark.slow
def test_a_block_is_at_hand_only_inside_an_event_and_a_pickled_copy_predicts_the_same() -> None:
    block, seen = mha.random_block(**SIZES, norm=None), []
    hasty = BlockOptions(steps=50, strengths=(1e-4,))
    model = mha.BlockRegressor(1, hidden=4, options=hasty, max_seconds=1.0)
    assert model.layer_at_hand() is None
    model.set_params(on_event=lambda event: seen.append(model.layer_at_hand()))
    examples = data(block, 60)
    model.fit(examples)
    assert any(isinstance(one, mha.Block) for one in seen)
    assert model.layer_at_hand() is None
    x = examples.arrays()[0]
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict(x), model.predict(x))


def test_near_neurons_are_made_one() -> None:
    """Also where one is the mirror image of the other."""
    block = mha.random_block(**SIZES, norm=None)
    ff = block.feed_forward
    more = ff.replace(
        up=np.concatenate([ff.up, -ff.up[:, :1] + 0.01], axis=1),
        up_bias=np.append(ff.up_bias, -ff.up_bias[0]),
        down=np.concatenate([ff.down, 0.3 * ff.down[:1]]),
        linear=np.zeros((4, 4)),
    )
    found = prune(block.replace(feed_forward=more), data(block), 1e-7, near=0.1)
    assert found.hidden == 4
    assert prune(block.replace(feed_forward=more), data(block), 1e-12).hidden == 5


@pytest.mark.slow
def test_the_command_learns_a_block(tmp_path, capsys) -> None:
    block = mha.random_block(**SIZES, norm=None, seed=2)
    data(block, 60).save(tmp_path / "stream.safetensors")
    said = ["learn", str(tmp_path / "stream.safetensors"), "--block", "--json", "--heads", "1"]
    out, page = tmp_path / "block.safetensors", tmp_path / "page.html"
    hasty = ["--hidden", "4", "--max-seconds", "1", "--report", str(page)]
    code = cli.run([*said, *hasty, "--out", str(out)])
    told = json.loads(capsys.readouterr().out)
    assert code == (0 if told["recovered"] else 3)
    assert told["outcome"] in ("TIME_LIMIT", "RECOVERED")
    assert isinstance(mha.load_layer(out), mha.Block)
    assert told["outcome"] in page.read_text()
    assert cli.run([*said, "--residual"]) == 2
