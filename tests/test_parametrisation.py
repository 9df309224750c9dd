"""Layers as numbers: products by automatic differentiation, counts by rank, own attentions."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mhalearn as mha
from mhalearn._runtime.programs import float64
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.layer.base import ParametrisedLayer
from mhalearn.layer.batches import make_chunk
from mhalearn.layer.dense import Dense
from mhalearn.layer.factored import Factored
from mhalearn.layer.parametrisation import Parametrisation, _generic_rank
from mhalearn.layer.units import Units

ARCHITECTURES = [
    mha.Architecture(5, 2),
    mha.Architecture(5, 2, bias=True, causal=True, out_dim=3),
    mha.Architecture(5, 2, head_dim=2, out_dim=4),
    mha.Architecture(5, 2, head_dim=2, bias=True),
]


def chunk_of(architecture, n=4, k=3):
    rng = np.random.default_rng(0)
    return make_chunk(
        rng.standard_normal((n, k, architecture.d)),
        np.array([k, k - 1] * (n // 2)),
        key_vector=architecture.bias,
        out_bias=architecture.bias,
        causal=architecture.causal,
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_products_of_our_own_are_those_of_automatic_differentiation(architecture):
    kind = architecture.parametrisation()
    assert isinstance(kind, Factored if architecture.is_low_rank else Dense)
    with float64():
        chunk = chunk_of(architecture)
        params, step = (
            jax.tree.map(jnp.asarray, kind.init(np.random.default_rng(seed))) for seed in (1, 2)
        )

        @jax.jit
        def products(params, step):
            at = kind.linearise(params, chunk)
            change = kind.jvp(params, at, chunk, step)
            _, pull = jax.vjp(lambda params: kind.outputs(params, chunk), params)
            automatic = Parametrisation.jvp(kind, params, None, chunk, step), pull(change)[0]
            return (change, kind.vjp(params, at, chunk, change)), automatic

        (change, back), (automatic, pulled) = products(params, step)
        np.testing.assert_allclose(change, automatic, atol=1e-13)
        for ours, theirs in zip(back, pulled, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_the_generic_rank_is_the_count_and_what_is_left_is_gauge(architecture):
    kind = architecture.parametrisation()
    assert _generic_rank(kind) == architecture.count() == kind.count()
    gauge = 0
    if architecture.is_low_rank:
        gauge = 2 * (architecture.qk_rank**2 + architecture.ov_rank**2)
    assert kind.size() == architecture.count() + gauge


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_a_layer_comes_back_from_its_parameters(architecture):
    kind, units = architecture.parametrisation(), Units(2.0, 0.5)
    layer = kind.to_layer(kind.init(np.random.default_rng(3)), units)
    assert architecture.contains(layer)
    again = kind.to_layer(kind.from_layer(layer, units), units)
    assert mha.compare(again, layer).max_error < 1e-13


@dataclass(frozen=True)
class Gated(Parametrisation):
    """Heads that weigh tokens by a sigmoid of factored logits: a gauge that nobody told."""

    architecture: mha.Architecture

    def shapes(self):
        a = self.architecture
        return {"a": (a.heads, a.d, 2), "b": (a.heads, a.d, 2), "w": (a.heads, a.d, a.outputs)}

    def forward(self, params, chunk):
        queries = jnp.einsum("brd,mdh->brmh", chunk.tokens, params["a"])
        keys = jnp.einsum("bjd,mdh->bjmh", chunk.tokens, params["b"])
        gates = jax.nn.sigmoid(jnp.einsum("brmh,bjmh->brmj", queries, keys))
        gates = jnp.where(chunk.allowed[:, :, None], gates, 0.0)
        return jnp.einsum("brmj,bjd,mde->bre", gates, chunk.tokens, params["w"])


GATED = mha.Architecture(4, 1, attention=Gated)
TRUTH = ParametrisedLayer(Gated(GATED), Gated(GATED).init(np.random.default_rng(0)))
X = mha.sample_inputs("gaussian", 100, 4, 4, seed=1)


def test_an_attention_of_ones_own_counts_by_itself():
    assert Gated(GATED).size() == 32
    assert GATED.count() == 32 - 4  # an invertible 2 x 2 matrix between queries and keys
    assert GATED.counting_limit(4) == 28 / 16
    assert GATED.contains(TRUTH)
    assert not mha.Architecture(4, 1).contains(TRUTH)
    few = mha.Examples(X[:1], TRUTH(X[:1]))
    assert measure_spectrum(TRUTH, few).null_dimension == 28 - 16
    assert measure_spectrum(TRUTH, mha.Examples(X, TRUTH(X))).null_dimension == 0


def test_an_attention_of_ones_own_is_learned_certified_and_reported(tmp_path):
    path = tmp_path / "run.safetensors"
    settings = {"n_heads": 1, "attention": Gated, "checkpoint": path}
    model = mha.AttentionRegressor(**settings).fit(X, TRUTH(X))
    assert model.outcome_ is mha.Outcome.RECOVERED, model.solution_.reason
    fresh = mha.sample_inputs("gaussian", 200, 4, 4, seed=2)
    np.testing.assert_allclose(model.predict(fresh), TRUTH(fresh), atol=1e-11)
    assert mha.certify(model.layer_, fresh, TRUTH(fresh)).recovered
    mha.write_report(model, tmp_path / "report.html", truth=TRUTH)
    page = (tmp_path / "report.html").read_text()
    assert "Gated" in page
    assert "The layer was recovered" in page
    again = mha.AttentionRegressor(**settings, resume=True).fit(X, TRUTH(X))
    assert np.array_equal(again.layer_.params["w"], model.layer_.params["w"])
    model.layer_.save(tmp_path / "layer.safetensors")


@pytest.mark.slow
def test_what_is_no_layer_of_ones_own_attention_is_not_recovered():
    x = mha.sample_inputs("gaussian", 300, 4, 4, seed=1)
    labels = mha.random_layer(1, 4, seed=3)(x)
    model = mha.AttentionRegressor(1, attention=Gated).fit(x, labels)
    assert model.outcome_ is mha.Outcome.STUCK


def test_the_heads_of_ones_own_attention_are_not_counted():
    with pytest.raises(ValueError, match="give n_heads a number"):
        mha.AttentionRegressor(attention=Gated).fit(X, TRUTH(X))


@pytest.mark.parametrize("method", ["sculpt", "adam", "lbfgs", "linear"])
def test_other_learners_say_that_they_do_not_know_it(method):
    with pytest.raises(ValueError, match="attention"):
        mha.AttentionRegressor(1, method, attention=Gated).fit(X, TRUTH(X))
