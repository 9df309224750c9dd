"""What heads write, found without their attention; and their attention, found from patterns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import narrow_layer

from mhalearn import compare, sample_inputs
from mhalearn._runtime.programs import in_float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.factored import Factored, Factors
from mhalearn.learners.newton.decoding import decode_heads, is_decodable
from mhalearn.run.run import Run
from mhalearn.solvers import free_patterns
from mhalearn.solvers.free_patterns import (
    UNKNOWN,
    Writers,
    decode,
    longest,
    make_sequences,
    outside,
    project_patterns,
)
from mhalearn.solvers.scaled_problem import make_problem
from mhalearn.solvers.score_regression import (
    HALVES,
    measure_logits,
    regress_logits,
    spectral_start,
)

M, D, H, K, N = 2, 24, 6, 4, 90
LENGTHS = np.random.default_rng(0).integers(2, K + 1, N)


def case(*, causal=False, bias=True, lengths=None, seed=1, k=K):
    """A layer, examples of it, and its heads in their units, and sequences to decode."""
    layer = narrow_layer(M, D, H, bias=bias, causal=causal, seed=seed)
    x = sample_inputs("gaussian", N, k, D, seed=seed)
    examples = Examples(x, layer(x, lengths), lengths)
    kind = Factored(Architecture(D, M, H, bias=bias, causal=causal))
    problem = make_problem(examples, kind)
    return layer, examples, problem, kind.from_layer(layer, problem.units)


def sequences_of(examples, problem, heads=M):
    x, y, lengths = examples.arrays()
    causal = problem.architecture.causal
    units = problem.units
    x, y = x / units.x_scale, y / units.y_scale
    return make_sequences(x, y, lengths, heads=heads, rank=H, causal=causal, only_patterns=True)


def writers_of(heads):
    return Writers(heads.value, heads.out, heads.bias)


def rough(tree, share=0.3, seed=0):
    rng = np.random.default_rng(seed)

    def move(leaf):
        return leaf + share * jnp.std(leaf) * jnp.asarray(rng.standard_normal(leaf.shape))

    return jax.tree.map(move, tree)


@pytest.mark.parametrize(("causal", "lengths"), [(False, None), (True, None), (False, LENGTHS)])
@in_float64
def test_what_heads_write_and_their_patterns_are_found_from_rough_writers(causal, lengths):
    layer, examples, problem, heads = case(causal=causal, lengths=lengths)
    data = sequences_of(examples, problem)
    found = project_patterns(rough(writers_of(heads)), data, Run(), stage="")
    assert found.loss < 1e-24
    w, true = (np.einsum("mdh,mhe->mde", one.value, one.out) for one in (found.writers, heads))
    np.testing.assert_allclose(w, true, atol=1e-10)
    np.testing.assert_allclose(found.writers.bias, heads.bias, atol=1e-10)
    visible = np.concatenate(np.asarray(data.visible))[:N]
    exact = layer.patterns(examples.arrays().x, lengths).swapaxes(1, 2)[: len(visible)]
    decoded, inside = np.concatenate(np.asarray(found.decoded.patterns))[:N], visible > 0
    np.testing.assert_allclose(decoded[inside], exact[inside], atol=1e-9)


@in_float64
def test_patterns_are_refined_until_the_ridge_does_not_show():
    layer, examples, problem, heads = case()
    found = decode(writers_of(heads), sequences_of(examples, problem))
    exact = layer.patterns(examples.arrays().x).swapaxes(1, 2)
    np.testing.assert_allclose(np.concatenate(found.patterns)[:N], exact, atol=1e-13)
    assert found.squared < 1e-25


@in_float64
def test_sequences_are_as_many_as_is_needed_short_enough_and_within_memory(monkeypatch):
    _, examples, _, _ = case()
    assert longest(M, D, H) == 1 + int(0.8 * H)
    assert longest(12, D, H) == 1 + int(0.8 * D / 12)
    x, y, lengths = examples.arrays()

    def count(x, y, lengths, heads=M, rank=H, only_patterns=True):
        sizes = {"heads": heads, "rank": rank, "only_patterns": only_patterns}
        found = make_sequences(x, y, lengths, **sizes, causal=False)
        return 0 if found is None else int(np.sum(np.any(np.asarray(found.visible) > 0, axis=2)))

    assert count(x, y, lengths) == N
    assert count(x, y, lengths, heads=8) == 0  # rows of five tokens have too few outputs for these
    assert count(x[:2], y[:2], lengths[:2]) == 0  # too few equations
    assert count(x, y, np.ones(N, np.int64)) == 0  # one token says nothing of W and c apart
    assert count(x, y, lengths, only_patterns=False) == 48
    monkeypatch.setattr(free_patterns, "_HELD", 20 * M * (K - 1) * D)
    assert count(x, y, lengths, only_patterns=False) == 20
    monkeypatch.setattr(free_patterns, "_EQUATIONS", 1.0)
    assert (
        count(x, y, lengths, only_patterns=False) == 8
    )  # 18 outputs of each of 4 rows are free of patterns


@in_float64
def test_a_change_is_seen_outside_of_the_spaces_of_patterns_only():
    """A change of W that a change of the patterns undoes, of a token by itself, is not seen."""
    _, examples, problem, heads = case()
    data, writers = sequences_of(examples, problem), writers_of(heads)
    patterns = decode(writers, data).patterns
    step = rough(jax.tree.map(jnp.zeros_like, writers))
    step = jax.tree.map(lambda leaf, of: leaf + 1e-6 * jnp.ones_like(of), step, writers)
    seen = outside(writers, data, patterns, step)
    moved = jax.tree.map(jnp.add, writers, step)
    np.testing.assert_allclose(decode(moved, data).left, -seen, atol=1e-9)
    gauge = Writers(writers.value, -writers.out, jnp.zeros_like(writers.bias))
    np.testing.assert_allclose(outside(writers, data, patterns, gauge), 0.0, atol=1e-12)


@in_float64
def test_how_far_an_entry_may_move_is_a_row_of_the_inverse_and_unknown_where_there_is_none():
    _, examples, problem, heads = case()
    data, writers = sequences_of(examples, problem), writers_of(heads)
    found = np.concatenate(decode(writers, data, only_patterns=True).spread)
    w = np.einsum("mdh,mhe->mde", writers.value, writers.out)
    for example in (0, 7):
        tokens = np.concatenate(np.asarray(data.tokens))[example]
        # Of all patterns of the sum one: those that differ from the first token's.
        apart = np.einsum("jd,mde->mje", tokens[1:] - tokens[0], w).reshape(-1, D)
        inverse = np.linalg.pinv(apart).T.reshape(M, K - 1, D)
        inverse = np.concatenate([-inverse.sum(axis=1, keepdims=True), inverse], axis=1)
        expected = np.broadcast_to(np.sum(inverse**2, axis=2), (K, M, K))
        np.testing.assert_allclose(found[example], expected, rtol=1e-9)
    alike = writers._replace(
        value=jnp.stack([writers.value[0]] * 2), out=jnp.stack([writers.out[0]] * 2)
    )
    decoded = decode(alike, data)
    assert np.min(decoded.spread) > UNKNOWN
    assert float(jnp.max(measure_logits(decoded, data, True, 1e3).worth)) == 0.0


@pytest.mark.parametrize("scale", [1.0, 6.0])
@in_float64
def test_theta_is_found_from_log_odds_however_sharp_attention_is(scale):
    layer, *_ = case()
    sharp = layer.replace(theta=scale * layer.theta, key_vector=scale * layer.key_vector)
    x = sample_inputs("gaussian", N, K, D, seed=1)
    examples = Examples(x, sharp(x))
    kind = Factored(Architecture(D, M, H, bias=True))
    problem = make_problem(examples, kind)
    heads = kind.from_layer(sharp, problem.units)
    data = sequences_of(examples, problem)
    found = decode(writers_of(heads), data)
    measured = measure_logits(found, data, True, HALVES[0])
    at, left = regress_logits(spectral_start(measured, H), measured, Run(), stage="")
    assert np.all(left < 1e-6)
    for half in HALVES[1:]:
        measured = measure_logits(found, data, True, half)
        at, _ = regress_logits(at, measured, Run(), stage="")
    theta, true = (np.einsum("mqh,mdh->mqd", one.query, one.key) for one in (at, heads))
    np.testing.assert_allclose(theta, true, atol=1e-8 * np.abs(true).max())


@in_float64
def test_heads_are_decoded_from_rough_writers_whatever_their_attention():
    layer, examples, problem, heads = case()
    start = rough(heads)._replace(query=0.1 * heads.key[:, :1] * jnp.ones((1, D + 1, 1)))
    found, loss = decode_heads(start, examples, problem, Run(), stage="")
    assert loss < 1e-24
    assert compare(problem.to_layer(found), layer).max_error < 1e-10


@in_float64
def test_parts_of_a_head_are_merged_once_their_patterns_are_known():
    layer, examples, problem, heads = case(k=3)
    two, rest = (heads.value[0][:, :3], heads.value[0][:, 3:])
    zeros = jnp.zeros_like
    value = jnp.stack(
        [
            jnp.concatenate([two, zeros(rest)], 1),
            jnp.concatenate([zeros(two), rest], 1),
            heads.value[1],
        ]
    )
    parts = [0, 0, 1]
    start = Factors(
        heads.query[jnp.array(parts)] * jnp.array([1.0, 0.3, 1.0])[:, None, None],
        heads.key[jnp.array(parts)],
        value,
        heads.out[jnp.array(parts)],
        heads.bias,
    )
    found, loss = decode_heads(rough(start, 0.02), examples, problem, Run(), stage="")
    assert len(found.value) == M
    assert loss < 1e-24
    assert compare(problem.to_layer(found), layer).max_error < 1e-10


@in_float64
def test_heads_that_cannot_be_decoded_come_back_as_they_were():
    layer = narrow_layer(4, 8, 2, bias=True)
    x = sample_inputs("gaussian", 50, 6, 8, seed=1)
    examples, architecture = Examples(x, layer(x)), Architecture(8, 4, 2, bias=True)
    assert not is_decodable(examples, architecture)
    kind = Factored(architecture)
    problem = make_problem(examples, kind)
    start = rough(kind.from_layer(layer, problem.units))
    found, _ = decode_heads(start, examples, problem, Run(), stage="")
    assert found is start
