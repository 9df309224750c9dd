import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from mhalearn._runtime.programs import float64, in_float64
from mhalearn.data.inputs import sample_inputs
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.attention import fit_projections, forward
from mhalearn.layer.batches import ROOM, Chunk, make_chunk
from mhalearn.layer.dense import Dense, DenseHeads, truncate
from mhalearn.layer.random_layers import random_layer
from mhalearn.solvers.gauss_newton import DIRECT, ITERATIVE, NO_RIDGE, State, _step
from mhalearn.solvers.last_step import Memory
from mhalearn.solvers.variable_projection import (
    heads_first,
    query_first,
    reduced_normal_matrix,
    solve_reduced_normal_equations,
    tangent_projection,
)

N, K, D, E, HEADS = 7, 3, 3, 2, 2


@pytest.fixture(autouse=True, scope="module")
def one_lapack_thread():
    """As in the estimator: LAPACK's threads would fight XLA's for the same cores."""
    with threadpool_limits(1, user_api="blas"):
        yield


class Case:
    """A tiny problem and its Jacobian, formed row by row by automatic differentiation."""

    def __init__(self, *, bias=False, chunks=1, ridge=0.0, rank=None, inputs="gaussian"):
        layer = random_layer(HEADS, D, out_dim=E, key_vector=bias, out_bias=bias, seed=1)
        lengths = np.array([3, 2, 3, 3, 1, 3, 2])
        x = sample_inputs(inputs, N, K, D, seed=2)
        y = np.random.default_rng(3).normal(size=(N, K, E))

        def chunk(start, size):
            part = slice(start, start + size)
            options = {"key_vector": bias, "out_bias": bias, "causal": False, "size": size}
            return make_chunk(x[part], lengths[part], labels=y[part], **options)

        size = -(-N // chunks)
        parts = [chunk(start, size) for start in range(0, size * chunks, size)]
        self.data = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
        theta = jnp.asarray(layer.query_theta)
        self.theta = theta if rank is None else truncate(theta, rank)
        self.ridge = jnp.asarray(ridge)
        self.fit = jax.jit(fit_projections)(self.theta, self.data, self.ridge)
        whole = chunk(0, N)
        jacobian = jax.jit(jax.jacfwd(forward, argnums=(0, 1)))
        by_theta, by_w = map(np.asarray, jacobian(self.theta, self.fit.w, whole))
        # Theta is indexed (q, m, d), query side first.
        self.j = by_theta.transpose(0, 1, 2, 4, 3, 5).reshape(N * K * E, -1)
        self.v = by_w.reshape(N * K * E, -1)
        labels = np.where((np.arange(K) < lengths[:, None])[..., None], y, 0.0)
        self.residual = (labels - np.asarray(forward(self.theta, self.fit.w, whole))).ravel()
        self._matrix_free = jax.jit(
            solve_reduced_normal_equations, static_argnames=("max_steps", "head_dim", "direct")
        )
        self.step(1.0)
        self.head_scale = np.asarray(self.last.metric.head_scale)

    def schur(self):
        lift = np.trace(self.v.T @ self.v) / self.v.shape[1] * 1e-14 + float(self.ridge)
        gram = self.v.T @ self.v + lift * np.eye(self.v.shape[1])
        return self.j.T @ (self.j - self.v @ np.linalg.solve(gram, self.v.T @ self.j))

    def equations(self, damping):
        """Both sides of the damped normal equations."""
        _, q, d = self.theta.shape
        matrix = self.schur() + float(self.ridge) * np.eye(self.j.shape[1])
        matrix += damping * np.diag(np.tile(np.repeat(self.head_scale, d), q))
        theta = np.asarray(query_first(self.theta)).ravel()
        return matrix, self.j.T @ self.residual - float(self.ridge) * theta

    def step(self, damping, head_dim=None, max_steps=500, direct=False):
        found = self._matrix_free(
            self.theta,
            self.fit,
            self.data,
            ridge=self.ridge,
            damping=jnp.asarray(damping),
            tolerance=jnp.asarray(1e-13),
            max_steps=max_steps,
            head_dim=head_dim,
            direct=direct,
        )
        self.last = found
        return np.asarray(query_first(found.step)).ravel()


@pytest.fixture(scope="module", params=["plain", "everything"])
def case(request):
    with float64():
        if request.param == "plain":
            return Case()
        return Case(bias=True, chunks=3, ridge=0.2)


@in_float64
def test_the_two_orders_of_theta_are_inverse(case):
    flat = query_first(case.theta)
    m, q, d = case.theta.shape
    assert flat.shape == (q, m * d)
    assert float(flat[2, d]) == float(case.theta[1, 2, 0])
    np.testing.assert_array_equal(heads_first(flat, m), case.theta)


@in_float64
def test_the_dense_normal_matrix_equals_the_one_of_an_explicit_jacobian(case):
    normal = jax.jit(reduced_normal_matrix)(case.theta, case.fit, case.data)
    expected = case.schur()
    np.testing.assert_allclose(normal.schur, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    # The elimination matters: without it the matrix is another one.
    assert np.abs(case.j.T @ case.j - expected).max() > 0.1 * np.abs(expected).max()
    q, md, width, e = normal.coupling.shape
    coupling = np.asarray(normal.coupling).transpose(2, 3, 0, 1).reshape(width, e, q * md)
    lifted = np.einsum("ps,sex->pex", np.asarray(normal.chol), coupling).reshape(width * e, -1)
    np.testing.assert_allclose(lifted, case.v.T @ case.j, rtol=0, atol=1e-10)


@pytest.mark.parametrize("damping", [1e-2, 3.0])
@in_float64
def test_a_matrix_free_step_equals_the_dense_solve(case, damping):
    expected = np.linalg.solve(*case.equations(damping))
    assert np.linalg.norm(expected) > 1e-3
    assert np.linalg.norm(case.step(damping) - expected) < 1e-9 * np.linalg.norm(expected)
    assert case.last.solved


@pytest.mark.parametrize("damping", [1e-2, 3.0])
@in_float64
def test_the_predicted_reduction_is_that_of_the_quadratic_model(case, damping):
    """The model of the objective, whose undamped equations have the same matrix and right side."""
    matrix, right = case.equations(0.0)
    step = case.step(damping)
    reduction = 2 * right @ step - step @ matrix @ step
    assert reduction > 1e-3
    assert float(case.last.predicted_reduction) == pytest.approx(reduction, rel=1e-9)


@pytest.mark.parametrize("damping", [1e-6, 1e-2])
@in_float64
def test_a_direct_step_needs_next_to_no_conjugate_gradients(case, damping):
    expected = np.linalg.solve(*case.equations(damping))
    direct = case.step(damping, max_steps=3, direct=True)
    assert np.linalg.norm(direct - expected) < 1e-9 * np.linalg.norm(expected)
    other = case.step(damping, max_steps=3)
    assert not case.last.solved
    assert np.linalg.norm(other - expected) > 1e-3 * np.linalg.norm(expected)


@in_float64
def test_a_step_of_narrow_heads_solves_the_projected_equations():
    rank, damping = 2, 0.1
    case = Case(bias=True, ridge=0.2, rank=rank)
    m, q, d = case.theta.shape
    project = tangent_projection(case.theta, rank)
    units = jnp.eye(m * q * d).reshape(-1, q, m * d)
    projector = jax.vmap(lambda unit: query_first(project(heads_first(unit, m))).ravel())(units)
    values, vectors = np.linalg.eigh(projector)
    basis = vectors[:, values > 0.5]
    assert basis.shape[1] == m * rank * (q + d - rank)
    matrix, right = case.equations(damping)
    expected = basis @ np.linalg.solve(basis.T @ matrix @ basis, basis.T @ right)
    assert np.linalg.norm(expected) > 1e-3
    assert np.linalg.norm(case.step(damping, rank) - expected) < 1e-9 * np.linalg.norm(expected)


@in_float64
def test_the_gradient_is_that_of_the_eliminated_loss(case):
    # Kaufman's matrix is an approximation; the gradient that comes with it is not.
    def loss(theta):
        return fit_projections(theta, case.data, case.ridge).loss

    gradient = query_first(jax.jit(jax.grad(loss))(case.theta))
    expected = -2 * case.j.T @ case.residual
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(np.asarray(gradient).ravel(), expected, rtol=0, atol=1e-9)


@in_float64
def test_the_damping_scale_is_the_mean_diagonal_of_each_head_on_unit_tokens():
    case = Case(inputs="boolean")
    m, q, d = case.theta.shape
    diagonal = np.sum(case.j**2, axis=0).reshape(q, m, d).mean(axis=(0, 2))
    np.testing.assert_allclose(case.head_scale, diagonal, rtol=1e-10)


# The tangent space of narrow heads


def random_matrices(seed, m=2, q=5, d=4):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(m, q, d)))


@given(seed=st.integers(0, 2**32), head_dim=st.integers(1, 4))
@settings(max_examples=15, deadline=None, derandomize=True)
@in_float64
def test_the_tangent_projection_is_an_orthogonal_projector(seed, head_dim):
    theta, a, b = (random_matrices([seed, i]) for i in range(3))
    project = tangent_projection(theta, head_dim)
    np.testing.assert_allclose(project(project(a)), project(a), rtol=0, atol=1e-12)
    np.testing.assert_allclose(jnp.vdot(project(a), b), jnp.vdot(a, project(b)), atol=1e-12)


@given(seed=st.integers(0, 2**32), head_dim=st.integers(1, 3))
@settings(max_examples=15, deadline=None, derandomize=True)
@in_float64
def test_the_tangent_space_is_that_of_products_of_factors(seed, head_dim):
    rng = np.random.default_rng(seed)
    a, da = rng.normal(size=(2, 2, 5, head_dim))
    b, db = rng.normal(size=(2, 2, 4, head_dim))
    project = tangent_projection(jnp.asarray(a @ b.transpose(0, 2, 1)), head_dim)
    along = da @ b.transpose(0, 2, 1) + a @ db.transpose(0, 2, 1)
    np.testing.assert_allclose(project(jnp.asarray(along)), along, rtol=0, atol=1e-9)
    # Normal directions vanish: orthogonal to the columns of a and of b.
    left = np.stack([np.linalg.svd(head)[0][:, head_dim:] for head in a])
    right = np.stack([np.linalg.svd(head)[0][:, head_dim:] for head in b])
    core = rng.normal(size=(2, 5 - head_dim, 4 - head_dim))
    across = left @ core @ right.transpose(0, 2, 1)
    assert np.abs(across).max() > 1e-3
    np.testing.assert_allclose(project(jnp.asarray(across)), 0.0, atol=1e-9)


@pytest.mark.parametrize("head_dim", [1, 2, 4])
@in_float64
def test_retraction_gives_the_nearest_matrices_of_that_rank(head_dim):
    theta = random_matrices(7)
    nearest = np.asarray(truncate(theta, head_dim))
    kind = Dense(Architecture(4, 2, head_dim, bias=True))
    w = jnp.zeros((2 * 4 + 1, 4))
    np.testing.assert_array_equal(kind.retract(DenseHeads(theta, w)).theta, nearest)
    for head, low in zip(np.asarray(theta), nearest, strict=True):
        values = np.linalg.svd(head, compute_uv=False)
        assert np.linalg.matrix_rank(low, tol=1e-10) == head_dim
        distance = np.linalg.norm(head - low)
        np.testing.assert_allclose(distance, np.linalg.norm(values[head_dim:]), atol=1e-12)


@in_float64
def test_full_heads_are_left_alone():
    theta = random_matrices(7)
    project = tangent_projection(theta, None)
    assert project(theta) is theta
    heads = DenseHeads(theta, jnp.zeros((2 * 4 + 1, 4)))
    assert Dense(Architecture(4, 2, bias=True)).retract(heads) is heads


# Memory


def temporary_bytes(chunks, size, k, d, e, m, *, direct=False) -> int:
    """What one descent step of one start holds beside its arguments, as compiled."""

    def of(*shape, dtype=np.float64):
        return jax.ShapeDtypeStruct(shape, dtype)

    data = Chunk(
        tokens=of(chunks, size, k, d),
        queries=of(chunks, size, k, d),
        labels=of(chunks, size, k, e),
        constant=of(chunks, size, k, 0),
        weight=of(chunks, size, k),
        allowed=of(chunks, size, k, k, dtype=np.bool_),
    )
    heads = DenseHeads(of(1, m, d, d), of(1, m * d, e))
    state = State(heads, of(1), of(1), of(1), of(1, dtype=np.bool_))

    kind, options = Dense(Architecture(d, m, out_dim=e)), DIRECT if direct else ITERATIVE
    known = Memory().recall(heads, 0.0, options.single)
    lowered = _step.lower(state, data, 1.0, NO_RIDGE, None, None, known, kind, options, True, 1)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@in_float64
def test_a_descent_step_never_holds_the_jacobian_nor_grows_faster_than_its_patterns():
    k, d, e, m, size = 4, 16, 16, 4, 32
    few, many = (temporary_bytes(chunks, size, k, d, e, m) for chunks in (1024, 8192))
    n = 8192 * size
    jacobian = 8 * (n * k * e) * (m * d**2)
    assert many < jacobian / 20
    # p (m k), the design (m d), the values x_j W_i (m e), and the change (e) of every row.
    row = m * (k + d + e) + e
    growth = (many - few) / (8 * (8192 - 1024) * size * k)
    assert growth < 2 * row
    # What does not grow: some copies of what a gathered chunk may hold.
    assert few - growth * 8 * (1024 * size) * k < 4 * 8 * ROOM


@in_float64
def test_a_direct_step_holds_normal_matrices_and_no_jacobian():
    k, d, e, m, size = 4, 8, 8, 4, 32
    few, many = (temporary_bytes(chunks, size, k, d, e, m, direct=True) for chunks in (8, 64))
    row = m * (k + d + e) + e
    assert many - few < 2 * 8 * (64 - 8) * size * k * row
    assert many < 8 * (64 * size * k * e) * (m * d**2) / 10
    # A few matrices of the unknowns, the coupling to W, and one chunk's intermediates.
    unknowns = m * d**2
    fixed = 8 * (8 * unknowns**2 + 4 * unknowns * m * d * e + 8 * size * k * (m * d) ** 2)
    assert few < fixed + 2 * 8 * 8 * size * k * row
