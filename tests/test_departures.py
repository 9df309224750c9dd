"""What a layer leaves is named by what explains it, and independent noise is not named at all."""

import numpy as np
import pytest

from mhalearn.data import Examples
from mhalearn.data.inputs import sample_inputs
from mhalearn.judge.departures import find_departures
from mhalearn.judge.fitted_attention import look_at
from mhalearn.judge.tangent_space import flatten, measure_tangent_space
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.random_layers import random_layer
from mhalearn.run.run import Run
from mhalearn.solvers.polish import polish_on

N, K, D = 120, 4, 4
LAYER = random_layer(2, D, seed=3)
X = sample_inputs("gaussian", N, K, D, seed=1)
ARCHITECTURE = Architecture(D, 2)
ROWS = np.arange(K)
AWAY = np.abs(ROWS[:, None] - ROWS)


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attend(weigh, x=X):
    logits = np.einsum("nra,mab,njb->nmrj", x, LAYER.theta, x)
    return np.einsum("nmrj,njd,mde->nre", weigh(logits), x, LAYER.w)


def with_sink(logits, size):
    weights = np.exp(logits)
    return weights / (size + weights.sum(axis=-1, keepdims=True))


def turned(angle):
    """The first two features of queries and keys, by an angle that grows with the position."""
    x = X.copy()
    turn = angle * ROWS
    x[..., 0] = np.cos(turn) * X[..., 0] - np.sin(turn) * X[..., 1]
    x[..., 1] = np.sin(turn) * X[..., 0] + np.cos(turn) * X[..., 1]
    p = softmax(np.einsum("nra,mab,njb->nmrj", x, LAYER.theta, x))
    return np.einsum("nmrj,njd,mde->nre", p, X, LAYER.w)


def departures(y, *, x=X, layer=LAYER, architecture=ARCHITECTURE):
    examples = Examples(x, y)
    layer = polish_on(examples, layer, architecture, Run()).layer
    return find_departures(look_at(layer, examples, architecture, 0)[0])


DEPARTING = [
    ("logits", attend(lambda logits: softmax(20 * np.tanh(logits / 20)))),
    ("distance", attend(lambda logits: softmax(logits - 1e-3 * AWAY))),
    ("distance", attend(lambda logits: softmax(np.where(AWAY <= 2, logits, logits - 1e-2)))),
    ("position", attend(lambda logits: softmax(logits * (1 + 1e-3 * ROWS[:, None])))),
    ("sink", attend(lambda logits: with_sink(logits, 1e-3))),
    ("own token", LAYER(X) + 1e-2 * X),
    ("own token", LAYER(X) + 1e-2 * X @ np.random.default_rng(0).standard_normal((D, D))),
    ("biases", LAYER(X) + 1e-3),
    ("biases", LAYER.replace(key_vector=1e-3 * np.ones((2, D)))(X)),
    ("outputs", np.tanh(0.05 * LAYER(X))),
    ("norm", LAYER(X * (1 + 1e-3 * np.sum(X**2, axis=-1, keepdims=True)))),
]


@pytest.mark.parametrize(("name", "labels"), DEPARTING, ids=[row[0] for row in DEPARTING])
def test_what_explains_the_residual_is_named_first(name, labels):
    found = departures(labels).found
    assert found[0].alternative.name == name
    assert found[0].share > 0.5


def test_a_rotation_is_known_as_positions_or_distances():
    found = departures(turned(1e-3)).found
    assert found[0].alternative.positional
    assert found[0].share > 0.5


NOISES = {
    "gaussian": lambda g: g.standard_normal((N, K, D)),
    "uniform": lambda g: g.uniform(-1, 1, (N, K, D)),
    "heavy tails": lambda g: g.standard_t(3, (N, K, D)),
    "of unequal columns": lambda g: g.standard_normal((N, K, D)) * [1e3, 1, 1e-3, 1],
    "growing with the tokens": lambda g: (
        g.standard_normal((N, K, D)) * np.sum(X**2, axis=-1, keepdims=True)
    ),
    "of some examples": lambda g: g.standard_normal((N, K, D)) * (g.random((N, 1, 1)) < 0.1),
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_noise_is_not_named(noise):
    for seed in range(4):
        y = LAYER(X) + 1e-3 * noise(np.random.default_rng(seed))
        examples = Examples(X, y)
        assert find_departures(look_at(LAYER, examples, ARCHITECTURE, 0)[0]).found == ()


def test_a_share_as_small_as_noise_may_have_is_told():
    g = np.random.default_rng(0)
    few = departures(LAYER(X) + 1e-3 * g.standard_normal(X.shape)).undetected
    x = sample_inputs("gaussian", 5 * N, K, D, seed=2)
    many = departures(LAYER(x) + 1e-3 * g.standard_normal(x.shape), x=x).undetected
    assert 0 < many < few / 3 < 1


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"causal": True}, {"head_dim": 2}])
def test_the_tangent_space_is_that_of_finite_differences(options):
    """Moving a layer within its class moves outputs inside the space, to first order."""
    architecture = Architecture(D, 2, **options)
    rank = options.get("head_dim")
    layers = [
        random_layer(2, D, rank=rank, key_vector=True, out_bias=True, seed=seed) for seed in (3, 4)
    ]
    if not options.get("bias"):
        layers = [layer.replace(key_vector=None, out_bias=None) for layer in layers]
    layers = [layer.replace(causal=bool(options.get("causal"))) for layer in layers]
    near, step = layers[0], 1e-6
    theta, w = near.theta + step * layers[1].theta, near.w + step * layers[1].w
    if rank is not None:
        theta, w = (_nearest_of_rank(heads, rank) for heads in (theta, w))
    moved = near.replace(theta=theta, w=w)
    if options.get("bias"):
        moved = moved.replace(
            key_vector=near.key_vector + step * layers[1].key_vector,
            out_bias=near.out_bias + step * layers[1].out_bias,
        )
    fitted = look_at(near, Examples(X, moved(X)), architecture, 0)[0]
    space = measure_tangent_space(fitted)
    assert space.rank == architecture.count()
    moved_by = flatten(fitted.residual[None])
    left = np.linalg.norm(space.project(moved_by)) / np.linalg.norm(moved_by)
    assert left < 1e-3


def _nearest_of_rank(heads, rank):
    left, values, right = np.linalg.svd(heads)
    return (left[..., :rank] * values[:, None, :rank]) @ right[:, :rank]


def test_a_layer_too_large_for_its_tangent_space_is_asked_about_scalars():
    layer = random_layer(4, 24, seed=0)
    x = sample_inputs("gaussian", 60, 4, 24, seed=0)
    logits = np.einsum("nra,mab,njb->nmrj", x, layer.theta, x)
    p = softmax(logits - 0.1 * AWAY)
    y = np.einsum("nmrj,njd,mde->nre", p, x, layer.w)
    fitted = look_at(layer, Examples(x, y), Architecture(24, 4), 0)[0]
    assert measure_tangent_space(fitted).columns is None
    assert "distance" in [found.alternative.name for found in find_departures(fitted).found]
