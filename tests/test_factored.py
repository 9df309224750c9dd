"""Many narrow heads, by their factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import narrow_layer

from mhalearn import AttentionRegressor, compare, sample_inputs
from mhalearn._runtime.programs import float64, in_float64
from mhalearn.data import Examples
from mhalearn.layer import architecture as architectures
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk
from mhalearn.layer.factored import Factored, Factors, merge_heads
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.newton import factored as many
from mhalearn.learners.newton.factored import eliminate_writers, learn_once
from mhalearn.run.outcome import Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.factor_preconditioner import FactorPreconditioner, Half
from mhalearn.solvers.gauss_newton import JOINT, JOINT_SINGLE, NO_RIDGE, State, _step
from mhalearn.solvers.polish import minimise
from mhalearn.solvers.scaled_problem import make_problem

D, H = 64, 8


def examples_of(layer, n, k=8, seed=3, lengths=None):
    x = sample_inputs("boolean", n, k, layer.d, seed=seed)
    return Examples(x, layer(x, lengths), lengths)


def problem_of(examples, n_heads, head_dim, **options):
    architecture = examples.architecture(n_heads, head_dim=head_dim, **options)
    return make_problem(examples, Factored(architecture))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@in_float64
def test_factors_make_the_layer_they_were_made_of(bias, causal):
    layer = narrow_layer(3, 12, 2, bias=bias, causal=causal, out_dim=5)
    lengths = np.array([1, 4, 3, 4, 2, 4])
    examples = examples_of(layer, 6, 4, lengths=lengths)
    problem = problem_of(examples, 3, 2, bias=bias, causal=causal)
    kind = problem.parametrisation
    heads = kind.from_layer(layer, problem.units)
    assert compare(problem.to_layer(heads), layer).max_error < 1e-13
    assert kind.has_full_rank(heads, layer, problem.units)
    chunk = jax.tree.map(lambda leaf: leaf[0], problem.data)
    np.testing.assert_allclose(kind.outputs(heads, chunk), chunk.labels, atol=1e-13)
    np.testing.assert_allclose(
        np.asarray(kind.forward(heads, chunk))[np.asarray(chunk.weight) > 0],
        np.asarray(chunk.labels)[np.asarray(chunk.weight) > 0],
        atol=1e-13,
    )


@pytest.mark.parametrize("bias", [False, True])
@in_float64
def test_products_are_those_of_the_jacobian_by_automatic_differentiation(bias):
    layer = narrow_layer(3, 12, 2, bias=bias, out_dim=5)
    problem = problem_of(
        examples_of(layer, 6, 4, lengths=np.array([1, 4, 3, 4, 2, 4])), 3, 2, bias=bias
    )
    kind, rng = problem.parametrisation, np.random.default_rng(0)
    chunk = jax.tree.map(lambda leaf: leaf[0], problem.data)
    at, step = kind.init(rng), kind.init(rng)
    shared = kind.linearise(at, chunk)
    expected = jax.jvp(lambda heads: kind.outputs(heads, chunk), (at,), (step,))[1]
    assert np.abs(expected).max() > 0.1
    change = kind.jvp(at, shared, chunk, step)
    np.testing.assert_allclose(change, expected, rtol=0, atol=1e-13)
    probe = jnp.asarray(rng.standard_normal(expected.shape))
    pulled = kind.vjp(at, shared, chunk, probe)
    inner = sum(jnp.vdot(one, other) for one, other in zip(step, pulled, strict=True))
    assert float(inner) == pytest.approx(float(jnp.vdot(change, probe)), rel=1e-12)


def test_polish_ends_at_rounding_and_keeps_the_rank():
    layer = narrow_layer(3, 16, 2, bias=True)
    examples = examples_of(layer, 60)
    problem = problem_of(examples, 3, 2, bias=True)
    rng = np.random.default_rng(0)
    near = layer.replace(theta=layer.theta * (1 + 0.02 * rng.standard_normal(layer.theta.shape)))
    start = problem.parametrisation.from_layer(near, problem.units)
    heads, loss, converged = minimise(start, problem, Run(), stage="polish")
    assert converged
    assert loss < 1e-27
    learned = problem.to_layer(heads)
    assert compare(learned, layer).max_error < 1e-11
    for matrices in (learned.theta, learned.w):
        assert all(np.linalg.matrix_rank(matrix, tol=1e-9) == 2 for matrix in matrices)


def test_the_narrow_way_is_for_many_narrow_heads():
    assert Architecture(384, 12, 32).prefers_factors
    assert not Architecture(384, 12, None).prefers_factors
    assert not Architecture(384, 12, 200).prefers_factors
    assert not Architecture(16, 4, 2).prefers_factors
    assert Architecture(384, head_dim=32).usual_heads() == 12


def test_surplus_heads_vanish_and_the_count_is_found():
    layer = narrow_layer(5, 32, 4)
    examples = examples_of(layer, 700)
    problem = problem_of(examples, 8, 4)
    trace = Run()
    learned = learn_once(problem, problem, examples, trace, most=None, attempt=0)
    assert learned.n_heads == 5
    assert compare(learned, layer).max_error < 1e-10
    assert any("5 of 10 heads are distinct" in event.detail for event in trace.events)


def test_narrow_heads_are_learned_without_their_number(monkeypatch):
    monkeypatch.setattr(architectures, "_LARGE", 100)
    monkeypatch.setattr(many, "_STEPS", 400)
    layer = narrow_layer(3, 8, 2, bias=True)
    learner = AttentionRegressor(head_dim=2, bias=True).fit(examples_of(layer, 400))
    assert any(event.stage.startswith("attempt") for event in learner.trace_)
    assert learner.n_heads_ == 3
    assert compare(learner.layer_, layer).max_error < 1e-10
    assert learner.outcome_ is Outcome.RECOVERED
    assert "rank 2" in learner.solution_.reason


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_many_narrow_heads_are_learned_without_their_number(bias):
    layer = narrow_layer(8, bias=bias)
    learner = AttentionRegressor(head_dim=H, bias=bias).fit(examples_of(layer, 800))
    assert learner.n_heads_ == 8
    assert compare(learner.layer_, layer).max_error < 1e-10
    assert learner.outcome_ is Outcome.RECOVERED
    assert learner.certificate_.spectrum is None  # too large: a random direction was asked
    assert "rank 8" in learner.solution_.reason


def test_labels_that_no_such_layer_makes_are_not_called_exact():
    rng = np.random.default_rng(0)
    x = sample_inputs("boolean", 300, 8, D, seed=1)
    learner = AttentionRegressor(8, head_dim=H, max_seconds=3.0)
    learner.fit(x, rng.standard_normal((300, 8, D)))
    assert learner.outcome_ is not Outcome.RECOVERED
    assert learner.certificate_.relative_mse > 0.5


@in_float64
@pytest.mark.parametrize("single", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_holds_the_attention_of_all_examples_and_copies_of_one_chunk(single):
    m, d, h, k, size = 12, 96, 8, 8, 32

    def of(*shape, dtype=np.float64):
        return jax.ShapeDtypeStruct(shape, dtype)

    def temporary(chunks):
        rows = chunks, size, k
        data = Chunk(
            of(*rows, d),
            of(*rows, d),
            of(*rows, d),
            of(*rows, 0),
            of(*rows),
            of(*rows, k, dtype=bool),
        )
        heads = Factors(of(1, m, d, h), of(1, m, d, h), of(1, m, d, h), of(1, m, h, d), of(1, 0, d))
        state = State(heads, of(1), of(1), of(1), of(1, dtype=bool))
        kind, options = Factored(Architecture(d, m, h)), JOINT_SINGLE if single else JOINT

        def half(*shape):
            return Half(of(1, *shape, shape[-1], dtype=np.float32))

        by_head = half(m, d), half(m, h)
        static = kind, options, True, 1
        metric = FactorPreconditioner((half(d), half(m * h)), by_head, by_head, half(m * h))
        lowered = _step.lower(state, data, 1.0, NO_RIDGE, None, metric, None, *static)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = temporary(2), temporary(64)
    # Kept for every example: its attention, and in single precision its tokens and queries.
    item, kept = (4, 2 * d) if single else (8, 0)
    assert many - few < 1.1 * item * 62 * size * k * (m * (4 * h + k) + kept) + 1e5
    row = m * (4 * h + 2 * k) + 2 * d
    assert few < 8 * (8 * size * k * row + 12 * 4 * m * d * h)
    assert few < 8 * m * d**2 * 20  # a handful of attention matrices, let alone their products


@pytest.mark.parametrize("n", [1, 3])
def test_too_few_examples_are_called_that(n):
    learner = AttentionRegressor(8, head_dim=H, max_seconds=3.0).fit(
        examples_of(narrow_layer(8), n)
    )
    assert learner.outcome_ is Outcome.TOO_FEW_EXAMPLES


def test_a_student_that_diverges_is_a_numerical_outcome(monkeypatch):
    def diverge(heads, *_, **__):
        return Factors(*(np.full(part.shape, np.nan) for part in heads)), np.nan

    monkeypatch.setattr(many, "anneal_factors", diverge)
    learner = AttentionRegressor(8, head_dim=H).fit(examples_of(narrow_layer(8), 300))
    assert learner.outcome_ is Outcome.NONFINITE


def test_surplus_heads_beyond_those_asked_for_are_dropped_with_their_vectors():
    """The largest stay, each with its own key vector, and the bias, which is no head's."""
    layer = narrow_layer(3, 32, 4, bias=True)
    examples = examples_of(layer, 300)
    problem = problem_of(examples, 2, 4, bias=True)
    learned = learn_once(problem, problem, examples, Run(), most=2, attempt=0, steps=400)
    assert learned.n_heads == 2
    x, y, _ = examples.arrays()
    assert 0 < np.sum((learned(x) - y) ** 2) < 0.3 * np.sum(y**2)
    with float64():
        heads = Factored(problem.architecture.with_heads(3)).from_layer(layer, problem.units)
        kept = problem.to_layer(merge_heads(heads, 0.0, 0.01, most=2))
    largest = np.argsort(-np.linalg.norm(layer.w, axis=(1, 2)))[:2]
    expected = AttentionLayer(
        layer.theta[largest], layer.w[largest], layer.key_vector[largest], layer.out_bias
    )
    assert compare(kept, expected).max_error < 1e-12


@in_float64
def test_copies_on_their_way_to_one_head_are_merged_into_their_mean():
    layer = narrow_layer(3, 32, 4)
    problem = problem_of(examples_of(layer, 50), 3, 4)
    heads = problem.parametrisation.from_layer(layer, problem.units)
    rng = np.random.default_rng(0)
    off = 0.1 * rng.normal(size=heads.query[:1].shape) * np.std(heads.query[0])
    # One head is there twice, off to either side by shares that cancel; one is nothing.
    split = Factors(
        *(
            jnp.concatenate(parts)
            for parts in (
                (heads.query[:1] + off, heads.query[:1] - off / 3, heads.query[1:], off),
                (heads.key[:1], heads.key, heads.key[:1]),
                (heads.value[:1], heads.value, heads.value[:1]),
                (heads.out[:1] / 4, heads.out[:1] * 0.75, heads.out[1:], 0 * heads.out[:1]),
            )
        ),
        heads.bias,
    )
    assert len(merge_heads(split, 0.0, 0.01).query) == 4
    merged = merge_heads(split, 0.4, 0.01)
    assert compare(problem.to_layer(merged), layer).max_error < 1e-12


def test_a_checkpoint_is_polished_before_anything_else(tmp_path):
    layer, path = narrow_layer(8), tmp_path / "near.safetensors"
    layer.replace(w=1.001 * layer.w).save(path)
    stages = []
    learner = AttentionRegressor(
        8, head_dim=H, checkpoint=path, resume=True, on_event=lambda e: stages.append(e.stage)
    )
    learner.fit(examples_of(layer, 700))
    assert compare(learner.layer_, layer).max_error < 1e-10
    assert "resumed" in stages
    assert not any(stage.startswith("attempt") for stage in stages)


def test_a_second_fit_of_one_shape_compiles_nothing(monkeypatch):
    monkeypatch.setattr(architectures, "_LARGE", 100)
    monkeypatch.setattr(many, "_STEPS", 400)
    compiled = []

    def note(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    for seed in (0, 1):
        if seed == 1:
            jax.monitoring.register_event_duration_secs_listener(note)
        layer = narrow_layer(2, 8, 2, seed=seed)
        learner = AttentionRegressor(2, head_dim=2, random_state=seed)
        learner.fit(examples_of(layer, 300, seed=seed))
        assert learner.n_heads_ == 2
        assert any(event.stage.startswith("attempt") for event in learner.trace_)
    jax.monitoring.unregister_event_duration_listener(note)
    assert compiled == []


@in_float64
def test_heads_on_long_sequences_are_found_with_w_of_any_rank_and_one_too_many_is_dropped():
    layer = narrow_layer(2, 12, 3, bias=True)
    problem = problem_of(examples_of(layer, 90, k=6), 3, 3, bias=True)
    kind, rng = problem.parametrisation, np.random.default_rng(0)
    near = kind.from_layer(layer, problem.units)
    start = jax.tree.map(lambda own, other: np.array(other), near, kind.init(rng))
    for own, leaf in zip(near[:4], start[:4], strict=True):  # W is not looked at
        leaf[:2] = own * (1 + 0.1 * rng.standard_normal(own.shape))
    start.out[:] = rng.standard_normal(start.out.shape)
    heads, loss = eliminate_writers(start, problem, Run(), most=None, stage="test")
    assert len(heads.query) == 2
    assert loss < 1e-24
    assert compare(problem.to_layer(heads), layer).max_error < 1e-10


@in_float64
def test_w_is_not_eliminated_from_too_few_rows():
    layer = narrow_layer(2, 12, 3)
    problem = problem_of(examples_of(layer, 10, k=6), 2, 3)
    heads = problem.parametrisation.init(np.random.default_rng(0))
    same, loss = eliminate_writers(heads, problem, Run(), most=None, stage="test")
    assert all(np.array_equal(a, b) for a, b in zip(same, heads, strict=True))
    assert loss > 0.1
