import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhalearn._runtime.programs import float64, in_float64
from mhalearn.data.inputs import sample_inputs
from mhalearn.layer.attention import (
    attend,
    covariance_products,
    design_matrix,
    fit_projections,
    forward,
    jvp,
    residual,
    stacked_heads,
    tangent,
    vjp,
)
from mhalearn.layer.batches import Chunk, make_chunk, sum_over_chunks
from mhalearn.layer.random_layers import random_layer

N, K, D, E, HEADS = 5, 4, 3, 2, 2
LENGTHS = np.array([4, 2, 3, 1, 4])
KINDS = {
    "plain": {},
    "key vector": {"key_vector": True},
    "bias": {"out_bias": True},
    "causal": {"causal": True},
    "lengths": {"lengths": LENGTHS},
    "everything": {"key_vector": True, "out_bias": True, "causal": True, "lengths": LENGTHS},
}


class Case:
    """A layer, examples of it with noise on their labels, and both as the numerics see them."""

    def __init__(self, key_vector=False, out_bias=False, causal=False, lengths=None):
        self.layer = random_layer(
            HEADS, D, out_dim=E, key_vector=key_vector, out_bias=out_bias, causal=causal, seed=1
        )
        self.options = {"key_vector": key_vector, "out_bias": out_bias, "causal": causal}
        self.lengths = np.full(N, K) if lengths is None else lengths
        self.x = sample_inputs("gaussian", N, K, D, seed=2)
        rng = np.random.default_rng(3)
        self.y = rng.normal(size=(N, K, E))
        self.chunk = self.make_chunk()
        self.theta = jnp.asarray(self.layer.query_theta)
        self.w = jnp.asarray(self.layer.stacked_w)
        self.heads = stacked_heads(self.w, HEADS, D)
        self.step = jnp.asarray(rng.normal(size=self.theta.shape))
        self.change = jnp.asarray(rng.normal(size=(N, K, E)))

    def make_chunk(self, part=slice(None), size=None) -> Chunk:
        return make_chunk(
            self.x[part], self.lengths[part], labels=self.y[part], size=size, **self.options
        )

    @property
    def tangent(self):
        return tangent(attend(self.theta, self.chunk).p, self.heads, self.chunk)

    def patterns(self) -> dict:
        """(example, row, head) -> attention over all tokens, in loops; rows that count only."""
        found = {}
        theta = np.asarray(self.theta)
        for n in range(N):
            for r in range(self.lengths[n]):
                query = self.x[n, r]
                if self.options["key_vector"]:
                    query = np.append(query, 1.0)
                last = r + 1 if self.options["causal"] else self.lengths[n]
                for i in range(HEADS):
                    powers = np.zeros(K)
                    for j in range(last):
                        powers[j] = np.exp(query @ theta[i] @ self.x[n, j])
                    found[n, r, i] = powers / powers.sum()
        return found


@pytest.fixture(params=KINDS, ids=lambda name: name.replace(" ", "-"))
def case(request):
    with float64():
        return Case(**KINDS[request.param])


@in_float64
def test_push_is_the_derivative_of_forward(case):
    _, expected = jax.jvp(
        lambda theta: forward(theta, case.w, case.chunk), (case.theta,), (case.step,)
    )
    pushed = jvp(case.tangent, case.chunk, case.step)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(pushed, expected, rtol=0, atol=1e-13)


@in_float64
def test_pull_is_the_transposed_derivative_of_forward(case):
    _, back = jax.vjp(lambda theta: forward(theta, case.w, case.chunk), case.theta)
    (expected,) = back(case.change)
    pulled = vjp(case.tangent, case.chunk, case.change)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(pulled, expected, rtol=0, atol=1e-13)


@in_float64
def test_covariance_products_equal_a_naive_loop(case):
    pattern = attend(case.theta, case.chunk)
    products = covariance_products(pattern, case.heads, case.chunk)
    expected = np.zeros((N, K, HEADS, D, E))
    for (n, r, i), p in case.patterns().items():
        mean = p @ case.x[n]
        covariance = case.x[n].T @ np.diag(p) @ case.x[n] - np.outer(mean, mean)
        expected[n, r, i] = covariance @ case.layer.w[i]
    np.testing.assert_allclose(products, expected, rtol=0, atol=1e-13)


@in_float64
def test_the_jacobian_is_queries_times_covariance_products(case):
    pattern = attend(case.theta, case.chunk)
    products = covariance_products(pattern, case.heads, case.chunk)
    by_hand = jnp.einsum("brq,mqd,brmde->bre", case.chunk.queries, case.step, products)
    np.testing.assert_allclose(jvp(case.tangent, case.chunk, case.step), by_hand, atol=1e-13)


def stack(parts):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


@in_float64
def test_the_total_over_chunks_is_the_total_over_one(case):
    # The last chunk is part full, and one more is empty.
    several = stack([case.make_chunk(slice(start, start + 2), 2) for start in (0, 2, 4, 6)])

    def moments(chunk):
        return {
            "rows": jnp.sum(chunk.weight),
            "squared": jnp.sum(residual(case.theta, case.w, chunk) ** 2),
            "pulled": vjp(
                tangent(attend(case.theta, chunk).p, case.heads, chunk),
                chunk,
                residual(case.theta, case.w, chunk),
            ),
        }

    one, many = sum_over_chunks(moments, stack([case.chunk])), sum_over_chunks(moments, several)
    assert float(one["rows"]) == case.lengths.sum()
    assert one.keys() == many.keys()
    for name, value in one.items():
        np.testing.assert_allclose(many[name], value, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("ridge", [0.0, 0.3])
@in_float64
def test_fitted_projections_equal_lstsq(case, ridge):
    rows = sorted({(n, r) for n, r, _ in case.patterns()})
    patterns = case.patterns()
    v = np.array([np.concatenate([patterns[n, r, i] @ case.x[n] for i in (0, 1)]) for n, r in rows])
    if case.options["out_bias"]:
        v = np.hstack([v, np.ones((len(v), 1))])
    y = np.array([case.y[n, r] for n, r in rows])
    width = v.shape[1]
    tall = np.vstack([v, np.sqrt(ridge) * np.eye(width)])
    expected, *_ = np.linalg.lstsq(tall, np.vstack([y, np.zeros((width, E))]), rcond=None)
    fit = fit_projections(case.theta, stack([case.chunk]), jnp.asarray(ridge))
    np.testing.assert_allclose(fit.w, expected, rtol=0, atol=1e-9)
    loss = np.sum((y - v @ expected) ** 2) + ridge * np.sum(expected**2)
    assert loss > 0.1
    np.testing.assert_allclose(fit.loss, loss, rtol=1e-10)
    np.testing.assert_allclose(fit.gram, v.T @ v + ridge * np.eye(width), rtol=0, atol=1e-11)


@in_float64
def test_a_head_that_repeats_another_leaves_the_fit_solvable():
    case = Case()
    data = stack([case.chunk])
    one = fit_projections(case.theta[:1], data, jnp.asarray(0.0))
    two = fit_projections(case.theta[jnp.array([0, 0])], data, jnp.asarray(0.0))
    assert np.isfinite(two.w).all()
    np.testing.assert_allclose(two.loss, one.loss, rtol=1e-10)


@pytest.mark.parametrize("garbage", [7.0, 1e6, 1e300])
@in_float64
def test_what_pads_has_no_influence_at_all(garbage):
    clean, dirty = Case(**KINDS["everything"]), Case(**KINDS["everything"])
    padding = np.arange(K) >= LENGTHS[:, None]
    dirty.x, dirty.y = dirty.x.copy(), dirty.y.copy()
    dirty.x[padding] = garbage
    dirty.y[padding] = -garbage
    dirty.chunk = dirty.make_chunk(size=N + 2)
    outcomes = []
    for case in (clean, dirty):
        change = jnp.concatenate([case.change, jnp.ones((len(case.chunk.weight) - N, K, E))])
        pattern = attend(case.theta, case.chunk)
        fit = fit_projections(case.theta, stack([case.chunk]), jnp.asarray(0.0))
        for_each_row = (
            design_matrix(pattern, case.chunk),
            forward(case.theta, case.w, case.chunk),
            residual(case.theta, case.w, case.chunk),
            jvp(case.tangent, case.chunk, case.step),
            covariance_products(pattern, case.heads, case.chunk),
        )
        for array in for_each_row:
            assert not np.asarray(array)[:N][padding].any()
            assert not np.asarray(array)[N:].any()
        outcomes.append(
            [np.asarray(array)[:N] for array in for_each_row]
            + [vjp(case.tangent, case.chunk, change), *fit]
        )
    for expected, found in zip(*outcomes, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-14)


@in_float64
def test_rows_that_pad_get_no_part_of_a_change():
    case = Case(**KINDS["lengths"])
    padding = np.arange(K) >= LENGTHS[:, None]
    other = jnp.where(padding[..., None], 1e3, case.change)
    np.testing.assert_array_equal(
        vjp(case.tangent, case.chunk, other), vjp(case.tangent, case.chunk, case.change)
    )


def test_double_precision_stays_inside():
    def of_default():
        return jnp.ones(2).dtype

    @in_float64
    def fails():
        assert of_default() == jnp.float64
        raise RuntimeError("inside")

    before = jax.config.jax_enable_x64
    assert not before
    assert in_float64(of_default)() == jnp.float64
    with pytest.raises(RuntimeError, match="inside"):
        fails()
    with float64():
        assert forward(*_arguments()).dtype == jnp.float64
    assert jax.config.jax_enable_x64 == before
    assert of_default() == jnp.float32


def _arguments():
    case = Case()
    return case.theta, case.w, case.chunk
