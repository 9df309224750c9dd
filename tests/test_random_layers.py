import numpy as np
import pytest

from mhalearn.layer.random_layers import random_layer


@pytest.mark.parametrize("rank", [None, 1, 3])
def test_theta_has_the_norm_asked_for(rank):
    layer = random_layer(4, 6, scale=3.5, rank=rank, seed=2)
    np.testing.assert_allclose(np.linalg.norm(layer.theta, axis=(1, 2)), 3.5, rtol=1e-14)


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("out_dim", [None, 10])
def test_entries_of_w_have_mean_square_one_over_d(rank, out_dim):
    d = 20
    layer = random_layer(200, d, rank=rank, out_dim=out_dim, seed=2)
    # Per head, the mean square of a product of rank-4 factors varies by about a half.
    assert np.mean(layer.w**2) * d == pytest.approx(1.0, abs=0.1)
    assert abs(np.mean(layer.w)) < 0.01


def test_rank_is_the_rank():
    layer = random_layer(3, 8, rank=2, out_dim=5, seed=2)
    for matrices in (layer.theta, layer.w):
        assert (np.linalg.matrix_rank(matrices) == 2).all()
    assert (np.linalg.matrix_rank(random_layer(3, 8, rank=6, out_dim=5).w) == 5).all()
    assert (np.linalg.matrix_rank(random_layer(3, 8).theta) == 8).all()


def test_key_vectors_are_the_size_of_a_row_of_theta():
    layer = random_layer(50, 16, scale=3.0, key_vector=True, seed=2)
    rows = np.linalg.norm(layer.theta, axis=2)
    vectors = np.linalg.norm(layer.key_vector, axis=1)
    assert np.sqrt(np.mean(vectors**2) / np.mean(rows**2)) == pytest.approx(1.0, abs=0.15)


def test_out_bias_has_variance_one_over_d():
    layer = random_layer(1, 4, out_dim=2000, out_bias=True, seed=2)
    assert np.mean(layer.out_bias**2) * 4 == pytest.approx(1.0, abs=0.15)


def test_options_leave_theta_and_w_as_they_were():
    plain = random_layer(3, 5, seed=4)
    full = random_layer(3, 5, key_vector=True, out_bias=True, causal=True, seed=4)
    np.testing.assert_array_equal(full.theta, plain.theta)
    np.testing.assert_array_equal(full.w, plain.w)
    assert full.key_vector.shape == (3, 5)
    assert full.out_bias.shape == (5,)
    assert full.causal
    assert plain.key_vector is None
    assert plain.out_bias is None
    assert not plain.causal


def test_a_seed_names_a_layer_and_its_heads_are_apart():
    layer = random_layer(3, 16, seed=4)
    np.testing.assert_array_equal(random_layer(3, 16, seed=4).theta, layer.theta)
    assert not np.array_equal(random_layer(3, 16, seed=5).theta, layer.theta)
    flat = layer.theta.reshape(3, -1) / 2.0
    assert np.abs(flat @ flat.T - np.eye(3)).max() < 0.3
    assert abs(np.corrcoef(layer.theta.ravel(), layer.w.ravel())[0, 1]) < 0.2


def test_metadata_tells_how_to_make_it_again():
    layer = random_layer(2, 4, scale=1.5, rank=2, out_bias=True, seed=9)
    assert layer.metadata["seed"] == "9"
    again = eval(layer.metadata["teacher"], {"random_layer": random_layer})
    np.testing.assert_array_equal(again.theta, layer.theta)
    np.testing.assert_array_equal(again.out_bias, layer.out_bias)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n_heads": 0}, "n_heads=0"),
        ({"d": 0}, "d=0"),
        ({"out_dim": -1}, "out_dim=-1"),
        ({"rank": 0}, "rank=0"),
        ({"rank": 17}, "rank=17: a 16 x 16 matrix"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"scale": float("inf")}, "scale=inf"),
        ({"seed": -1}, "seed=-1"),
        ({"n_heads": True}, "n_heads=True"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        random_layer(**arguments)
