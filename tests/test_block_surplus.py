"""What a block's student has too much of: padding, the quadratic model of neurons, distillation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import mhalearn as mha
from mhalearn._runtime.programs import float64
from mhalearn.layer.batches import in_one_chunk
from mhalearn.learners.blocks.distilling import distil
from mhalearn.learners.blocks.neuron_model import (
    Tokens,
    columns_of,
    count_parameters,
    measure,
    move,
    outputs_of,
    stack_outputs,
)
from mhalearn.learners.blocks.padding import first_neurons, pad_neurons
from mhalearn.learners.blocks.pruning import prune
from mhalearn.learners.blocks.subsets import split
from mhalearn.run.run import Run
from mhalearn.solvers import dense_normal_equations as dense
from mhalearn.solvers.scaled_problem import make_problem

SIZES = {"n_heads": 1, "d": 4, "hidden": 5}


def data(block: mha.Block, n: int = 200, k: int = 3) -> mha.Examples:
    x = mha.sample_inputs("gaussian", n, k, block.d, seed=0)
    return mha.Examples(x, block(x))


def with_twin(block: mha.Block, apart: float) -> mha.Block:
    """One neuron as two whose inputs lie on both sides of its own, and a linear map beside all."""
    ff = block.feed_forward
    way = apart * np.random.default_rng(0).standard_normal(ff.d)
    order = [*range(ff.hidden), 0]
    named = {name: part[..., order] for name, part in ff.parts().items() if "down" not in name}
    side = "up" if ff.gate is None else "gate"
    named[side] = named[side].copy()
    named[side][:, 0] -= way
    named[side][:, -1] += way
    down = ff.down[order]
    down[[0, -1]] *= 0.5
    named |= {"down": down, "linear": np.zeros((ff.d, ff.d))}
    return block.replace(feed_forward=ff.replace(**named))


@pytest.mark.parametrize("activation", ["gelu", "glu"])
def test_neurons_that_pad_change_nothing_and_no_derivative_moves_them(activation: str) -> None:
    block = mha.random_block(**SIZES, activation=activation, norm="pre")
    examples = data(block, 20)
    x, y, _ = examples.arrays()
    padded = pad_neurons(block)
    assert padded.hidden == 8
    assert np.abs(padded(x) - y).max() < 1e-14
    kind = padded.parametrisation
    with float64():
        problem = make_problem(examples, kind)
        slope = jax.jacobian(lambda p: kind.outputs(p, in_one_chunk(problem.data, 1)))(
            {name: jnp.asarray(leaf) for name, leaf in padded.params.items()}
        )
    for name in ("up", "up_bias"):
        assert not np.asarray(slope[f"feed_forward.{name}"])[..., 5:].any()
    assert not np.asarray(slope["feed_forward.down"])[..., 5:, :].any()
    again = first_neurons(padded, 5)
    assert all(np.array_equal(again.params[name], leaf) for name, leaf in block.params.items())


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_the_model_of_neurons_is_that_of_differences(activation: str) -> None:
    """J^T J and J^T r, by a small step of each parameter."""
    block = with_twin(mha.random_block(**SIZES, activation=activation, norm=None), 0.1)
    ff, rng = block.feed_forward, np.random.default_rng(1)
    z = rng.standard_normal((7, ff.d))
    tokens = Tokens(z, rng.standard_normal((7, ff.d)))

    def outputs(step: np.ndarray) -> np.ndarray:
        moved = move(ff, step)
        return (columns_of(moved, z, moving=False)[1] @ stack_outputs(moved)).ravel()

    size, small = count_parameters(ff), 1e-6
    jacobian = np.stack(
        [(outputs(row) - outputs(-row)) / (2 * small) for row in small * np.eye(size)], axis=1
    )
    model = measure(ff, tokens)
    residual = tokens.target.ravel() - outputs(np.zeros(size))
    assert np.abs(model.gram - jacobian.T @ jacobian).max() < 1e-6
    assert np.abs(model.slope - jacobian.T @ residual).max() < 1e-6
    assert model.squared == pytest.approx(residual @ residual)
    step = np.zeros(size)
    step[outputs_of(ff, 2)] = 1.0
    assert np.array_equal(move(ff, step).down[2], ff.down[2] + 1.0)


@pytest.mark.parametrize("activation", ["gelu", "glu"])
def test_a_neuron_that_is_held_as_two_is_found_where_output_weights_do_not_show_it(
    activation: str,
) -> None:
    block = mha.random_block(**SIZES, activation=activation, norm=None, seed=1)
    examples, student = data(block), with_twin(block, 0.03)
    loss = split(examples, 0).error(student)
    assert 1e-10 < loss < 1e-6
    assert prune(student, examples, 1e-7).hidden == 6
    found = distil(student, loss, examples, Run())
    assert found.hidden == 5
    assert split(examples, 0).error(found) < 10 * loss
    assert distil(with_twin(block, 0.0), 1e-22, examples, Run()).hidden == 5
    assert distil(block, 1e-8, examples, Run()).hidden == 5
    assert distil(student, 1e-4, examples, Run()) is student  # too far off to show how many


def test_examples_are_joined_by_those_that_a_block_fits_worst() -> None:
    block = mha.random_block(**SIZES, norm=None)
    x, y, _ = data(block, 100).arrays()
    y = y.copy()
    y[[3, 70]] += 1.0
    subsets = split(mha.Examples(x, y), 0)
    chosen = subsets.train.subset(slice(0, 2))
    joined = subsets.with_worst(chosen, block).arrays()[1]
    assert len(joined) == 4
    wrong = [row for row in y[[3, 70]] if (subsets.train.arrays()[1] == row).all((1, 2)).any()]
    assert wrong
    for row in wrong:
        assert (joined[2:] == row).all((1, 2)).any()


def test_the_bend_of_outputs_is_their_second_difference() -> None:
    block = mha.random_block(**SIZES, norm="pre")
    kind = block.parametrisation
    with float64():
        problem = make_problem(data(block, 10), kind)
        flat, unflatten = ravel_pytree({n: jnp.asarray(p) for n, p in block.params.items()})
        here, chunk = np.asarray(flat), in_one_chunk(problem.data, 1)
        step = np.random.default_rng(0).standard_normal(here.size)
        bend = dense._curvature(here, step, dense._cut(chunk, here.size), kind, block.params)

        def outputs(flat: jax.Array) -> jax.Array:
            return kind.outputs(unflatten(flat), chunk).ravel()

        small = 1e-4
        there, back = (outputs(flat + sign * small * step) for sign in (1, -1))
        second = (there + back - 2 * outputs(flat)) / small**2
        expected = jax.vjp(outputs, flat)[1](second)[0]
    apart = np.abs(np.asarray(bend) - np.asarray(expected)).max()
    assert apart < 1e-4 * np.abs(np.asarray(expected)).max()
