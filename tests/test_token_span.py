"""Where tokens lie, and layers in the coordinates of their span."""

import numpy as np
import pytest

import mhalearn as mha
from mhalearn._runtime.precision import find_precision
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.span_coordinates import centred_coordinates, choose_coordinates
from mhalearn.layer.token_span import are_nearly_isotropic, measure_span, read_tokens

D, E, K, N = 6, 6, 4, 60


def normalised(x):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / x.std(axis=-1, keepdims=True)


def gaussian(rng):
    return rng.standard_normal((N, K, D))


def layer_norm(rng):
    return normalised(gaussian(rng))


def layer_norm_with_gain(rng):
    return layer_norm(rng) * rng.uniform(0.5, 2.0, D) + rng.standard_normal(D)


def one_hot(rng):
    return np.eye(D)[rng.integers(0, D, (N, K))]


def constant_feature(rng):
    x = gaussian(rng)
    x[..., 2] = 3.0
    return x


def subspace(rng):
    return rng.standard_normal((N, K, 3)) @ rng.standard_normal((3, D))


def weak(rng):
    return gaussian(rng) * np.array([1, 1, 1, 1, 1, 1e-9]) + 2.0


def other_units(rng):
    return gaussian(rng) * 10.0 ** np.array([0, 9, -9, 3, 0, -3])


# law of the tokens: dimensions of the hull, and whether it passes through zero
LAWS = {
    gaussian: (D, True),
    layer_norm: (D - 1, True),
    layer_norm_with_gain: (D - 1, False),
    one_hot: (D - 1, False),
    constant_feature: (D - 1, False),
    subspace: (3, True),
    weak: (D, True),
    other_units: (D, True),
}


def layer_of(rng, m=2, bias=False, rank=None, e=E):
    return mha.random_layer(
        m, D, out_dim=e, rank=rank, key_vector=bias, out_bias=bias, seed=int(rng.integers(99))
    )


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_hull_of_tokens_has_its_dimension(law):
    x = law(np.random.default_rng(0))
    span = measure_span(read_tokens(x))
    assert (span.rank, span.through_zero) == LAWS[law]
    np.testing.assert_allclose(span.mean, x.mean(axis=(0, 1)), atol=1e-12 * np.abs(x).max())
    assert span.distance(x).max() <= 1e-13 * np.linalg.norm(x, axis=-1).max()
    z = ((x - span.mean) @ span.coordinates).reshape(-1, span.rank)
    np.testing.assert_allclose(np.cov(z.T, bias=True), np.eye(span.rank), atol=1e-5)
    np.testing.assert_allclose(span.directions @ span.coordinates, np.eye(span.rank), atol=1e-7)
    np.testing.assert_allclose(span.normals @ span.normals.T, np.eye(D - span.rank), atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    "law", [layer_norm, layer_norm_with_gain, subspace, gaussian], ids=lambda law: law.__name__
)
def test_rounding_of_tokens_spans_nothing(law, dtype):
    x = law(np.random.default_rng(1)).astype(dtype).astype(np.float64)
    assert measure_span(read_tokens(x)).rank == LAWS[law][0]


def test_labels_finer_than_tokens_see_what_rounding_did():
    x = layer_norm(np.random.default_rng(1)).astype(np.float32)
    doubles = find_precision(lambda: [np.random.default_rng(0).standard_normal(9)])
    assert measure_span(read_tokens(x), finest=doubles).rank == D


def test_padding_is_no_token_and_examples_are_read_as_arrays_are():
    rng = np.random.default_rng(0)
    x, lengths = subspace(rng), rng.integers(2, K + 1, N)
    padded = np.where(np.arange(K)[:, None] < lengths[:, None, None], x, 7.0)
    examples = mha.Examples(padded, np.zeros((N, K, 1)), lengths)
    for read in (read_tokens(padded, lengths), read_tokens(examples)):
        span = measure_span(read)
        assert (span.rank, span.tokens) == (3, lengths.sum())
    in_span = examples.in_span(
        centred_coordinates(measure_span(read_tokens(examples)), Architecture(D))
    )
    z, _, _ = in_span.arrays()
    assert z.shape == (N, K, 3)
    assert not z[np.arange(K) >= lengths[:, None]].any()


def test_isotropic_tokens_are_taken_as_they_are():
    rng = np.random.default_rng(0)
    for x in (gaussian(rng), mha.sample_inputs("boolean", N, K, D)):
        assert are_nearly_isotropic(read_tokens(x), N * K)
        assert choose_coordinates(measure_span(read_tokens(x)), Architecture(D)) is None
    for law in (one_hot, layer_norm, subspace, weak, constant_feature):
        assert not are_nearly_isotropic(read_tokens(law(rng)), N * K)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [None, 2, 4])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_layer_restricted_and_lifted_is_the_same_on_the_span(law, rank, bias):
    rng = np.random.default_rng(2)
    x, layer = law(rng), layer_of(rng, bias=bias, rank=rank)
    architecture = Architecture(D, 2, rank, E, bias)
    if law is other_units:
        x = x * 1e-9  # logits that a softmax can hold
    coordinates = choose_coordinates(measure_span(read_tokens(x)), architecture)
    if coordinates is None:
        assert law is gaussian
        return
    inside = coordinates.restrict(layer)
    assert coordinates.reduced.contains(inside)
    scale = np.abs(layer(x)).max()
    np.testing.assert_allclose(inside(coordinates.tokens(x)), layer(x), atol=1e-12 * scale)
    lifted = coordinates.lift(inside)
    assert architecture.contains(lifted)
    np.testing.assert_allclose(lifted(x), layer(x), atol=1e-12 * scale)
    if LAWS[law][0] < D:  # what is not spanned is zero on the key side
        assert np.abs(lifted.theta @ coordinates.span.normals.T).max() < 1e-12
        moved = x.copy()
        moved[:, 0] += coordinates.span.normals[0]
        assert np.abs(lifted(moved) - layer(moved)).max() > 1e-3


def test_coordinates_are_not_changed_where_tokens_are_too_few_to_tell():
    x = np.random.default_rng(0).standard_normal((2, 2, D))
    assert choose_coordinates(measure_span(read_tokens(x)), Architecture(D)) is None
    assert (
        choose_coordinates(measure_span(read_tokens(np.ones((5, 2, D)))), Architecture(D)) is None
    )


def numerical_rank(layer, x, architecture):
    """Of the Jacobian of outputs in Theta, v, W, c, along the layer's class, by central
    differences of its factors."""
    h = architecture.head_dim

    def build(flat):
        m, d, e = layer.n_heads, D, layer.out_dim
        cut = iter(np.split(flat, np.cumsum(sizes)[:-1]))
        q = d + architecture.bias
        if h is None:
            rows, w = next(cut).reshape(m, q, d), next(cut).reshape(m, d, e)
        else:
            rows = next(cut).reshape(m, q, h) @ next(cut).reshape(m, h, d)
            w = next(cut).reshape(m, d, h) @ next(cut).reshape(m, h, e)
        c = next(cut) if architecture.bias else None
        return rows[:, :d], rows[:, d] if architecture.bias else None, w, c

    def outputs(flat):
        theta, v, w, c = build(flat)
        logits = x @ theta[:, None] @ x.swapaxes(1, 2)
        if v is not None:
            logits = logits + np.einsum("mb,njb->mnj", v, x)[:, :, None]
        p = np.exp(logits - logits.real.max(axis=-1, keepdims=True))
        p = p / p.sum(axis=-1, keepdims=True)
        y = (p @ x @ w[:, None]).sum(axis=0)
        return (y if c is None else y + c).ravel()

    m, d, e, q = layer.n_heads, D, layer.out_dim, D + architecture.bias
    sizes = [m * q * d, m * d * e] if h is None else [m * q * h, m * h * d, m * d * h, m * h * e]
    sizes = [*sizes, e] if architecture.bias else sizes
    at = np.random.default_rng(5).standard_normal(sum(sizes)) * 0.6
    steps = np.eye(len(at)) * 1e-30j
    jacobian = np.stack([outputs(at + step).imag / 1e-30 for step in steps])
    values = np.linalg.svd(jacobian, compute_uv=False)
    return int(np.sum(values > 1e-9 * values[0]))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [None, 4, 2])
@pytest.mark.parametrize(
    "law",
    [layer_norm, layer_norm_with_gain, one_hot, constant_feature, subspace],
    ids=lambda law: law.__name__,
)
def test_the_number_of_open_parameters_is_that_of_an_explicit_jacobian(law, rank, bias):
    heads = 2
    rng = np.random.default_rng(3)
    x, layer = law(rng), layer_of(rng, heads, bias)
    architecture = Architecture(D, heads, rank, E, bias)
    coordinates = choose_coordinates(measure_span(read_tokens(x)), architecture)
    found = numerical_rank(layer, x[:40], architecture)
    assert architecture.count() - coordinates.count_open(heads) == found


def test_layer_norm_leaves_twelve_of_sixty_four_open():
    span = measure_span(read_tokens(layer_norm(np.random.default_rng(0))))
    coordinates = choose_coordinates(span, Architecture(6, 1, 4))
    assert (Architecture(6, 1, 4).count(), coordinates.count_open(1)) == (64, 12)
    assert Architecture(6, 2, 4).count() - coordinates.count_open(2) == 104
