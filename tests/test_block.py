"""Blocks against naive loops, their counts against ranks, their canonical forms and comparisons."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from oracles import transformer_block

import mhalearn as mha
from mhalearn._runtime.programs import float64
from mhalearn.layer.batches import make_chunk
from mhalearn.layer.block.activations import NAMES
from mhalearn.layer.block.canonical import fold_inputs
from mhalearn.layer.block.neurons import turn_neurons
from mhalearn.layer.block.norms import Norm
from mhalearn.layer.units import Units

ROPE = {"rope": mha.Rope(base=10.0), "causal": True, "head_dim": 2}
# Of heads, one of each kind that a block may have beside those of a Theta and a W.
HEADS = {
    "rotary": ROPE,
    "interleaved, by length": {
        "head_dim": 4,
        "rope": mha.Rope(
            base=10.0,
            layout="interleaved",
            scaling={"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 3},
        ),
    },
    "shared keys": {"head_dim": 2, "kv_heads": 1},
    "window": {"head_dim": 2, "window": 2, "causal": True},
    "sinks": {"head_dim": 2, "sinks": True},
    "soft-cap": {"head_dim": 2, "softcap": 1.5},
    "normalised": {"head_dim": 2, "qk_norm": True},
    "ALiBi": {"head_dim": 2, "position_bias": "alibi", "causal": True},
    "T5": {"head_dim": 2, "position_bias": "t5"},
}
# The others are slow: what they have is tested as layers, too.
DAILY_HEADS = ("interleaved, by length", "sinks", "T5")
KINDS = [one if one in DAILY_HEADS else pytest.param(one, marks=pytest.mark.slow) for one in HEADS]
# Of the counts, one of each activation and norm; together all that a block may have.
COUNTED = {
    "no norm": {"activation": "gelu", "norm": None},
    "no norm, ReLU, no bias": {"activation": "relu", "norm": None, "bias": False},
    "no norm, ReLU": {"activation": "relu", "norm": None},
    "pre, LayerNorm, ReLU": {"activation": "relu", "norm": "pre"},
    "no norm, rank 2": {"activation": "gelu", "norm": None, "head_dim": 2},
    "pre, LayerNorm": {"norm": "pre", "activation": "silu"},
    "pre, LayerNorm, rotary": {"norm": "pre", **ROPE},
    "pre, RMSNorm, gated, no bias": {
        "norm": "pre",
        "norm_kind": "rms",
        "activation": "swiglu",
        "bias": False,
        "kv_heads": 1,
        **ROPE,
    },
    "pre, RMSNorm, GLU": {"norm": "pre", "norm_kind": "rms", "activation": "glu"},
    "post, LayerNorm": {"norm": "post"},
    "post, LayerNorm, epsilon": {"norm": "post", "epsilon": 1e-12, "head_dim": 2},
    "post, RMSNorm, ReGLU": {
        "norm": "post",
        "norm_kind": "rms",
        "activation": "reglu",
        "bias": False,
    },
}


def tokens(block: mha.Block, n: int = 3, k: int = 4, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k, block.d))


def same_function(one: mha.Block, other: mha.Block, tolerance: float = 1e-12) -> bool:
    x = tokens(one)
    return bool(np.abs(one(x) - other(x)).max() < tolerance)


@pytest.mark.parametrize("activation", NAMES)
def test_blocks_equal_naive_loops(activation: str) -> None:
    """Each activation with another place and kind of norm."""
    place = (None, "pre", "post")[NAMES.index(activation) % 3]
    kind = ("layer", "rms")[NAMES.index(activation) % 2]
    block = mha.random_block(2, 4, 3, activation, place, norm_kind=kind, seed=3)
    x, lengths = tokens(block), [4, 2, 1]
    assert np.abs(block(x) - transformer_block(x, block)).max() < 1e-12
    assert np.abs(block(x, lengths) - transformer_block(x, block, lengths=lengths)).max() < 1e-12


@pytest.mark.parametrize("name", KINDS)
def test_heads_of_every_kind_are_those_of_naive_loops_inside_a_block(name: str, tmp_path) -> None:
    """So are their files; and the canonical form is another writing of the same block."""
    place = (None, "pre", "post")[list(HEADS).index(name) % 3]
    block = mha.random_block(2, 4, 3, norm=place, seed=2, **HEADS[name])
    x = tokens(block)
    assert np.abs(block(x) - transformer_block(x, block)).max() < 1e-12
    assert same_function(block, block.canonical())
    assert mha.compare(block.canonical(), block).max_error < 1e-12
    block.save(tmp_path / "block.safetensors")
    assert np.array_equal(mha.load_layer(tmp_path / "block.safetensors")(x), block(x))


def test_rotary_heads_of_a_block_see_distances_alone() -> None:
    block = mha.random_block(2, 4, 3, "swiglu", "pre", bias=False, norm_kind="rms", **ROPE)
    x = tokens(block)
    assert np.abs(block(x) - transformer_block(x, block)).max() < 1e-12
    spread = np.array([0, 3, 4, 9])
    assert np.abs(block(x, positions=spread) - block(x)).max() > 1e-3
    assert np.abs(block(x, positions=spread + 5) - block(x, positions=spread)).max() < 1e-12


def test_heads_that_a_block_cannot_hold_are_refused_by_name() -> None:
    for kind, match in (
        ({"latent": mha.Latent(2), "bias": False}, "through latents"),
        ({"memory": 3}, "of its own tokens"),
    ):
        with pytest.raises(ValueError, match=match):
            mha.random_block(2, 4, 3, head_dim=2, **kind)


def rank(block: mha.Block) -> int:
    """Of the Jacobian of more outputs than there are parameters."""
    kind, architecture, k = block.parametrisation, block.architecture, 5
    n = 2 + 2 * kind.size() // (k * block.d)
    with float64():
        chunk = make_chunk(
            tokens(block, n, k),
            np.full(n, k),
            key_vector=architecture.bias,
            out_bias=architecture.bias,
            causal=architecture.causal,
        )
        chunk = jax.tree.map(jnp.asarray, chunk)
        flat, unflatten = ravel_pytree(jax.tree.map(jnp.asarray, block.params))
        outputs = jax.jit(jax.jacfwd(lambda v: kind.outputs(unflatten(v), chunk).ravel()))
        jacobian = np.array(outputs(flat))
    jacobian /= np.maximum(np.linalg.norm(jacobian, axis=0), 1e-30)
    values = np.linalg.svd(jacobian, compute_uv=False)
    return int(np.sum(values > 1e-9 * values[0]))


@pytest.mark.parametrize("name", COUNTED)
def test_unknowns_are_the_rank_of_the_jacobian(name: str) -> None:
    block = mha.random_block(2, 5, 4, **({"seed": 1} | COUNTED[name]))
    assert block.design.is_counted
    assert block.architecture.count() == rank(block)
    assert block.architecture.counting_limit(5) == block.architecture.count() / (5 * block.d)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("place", [None, "pre layer", "pre rms", "post layer", "post rms"])
@pytest.mark.parametrize("activation", NAMES)
def test_unknowns_of_every_kind_are_the_rank(
    activation: str, place: str | None, bias: bool
) -> None:
    """With small biases: behind a norm a ReLU neuron of a large one does not bend."""
    norm, kind = (None, "layer") if place is None else place.split()
    block = mha.random_block(2, 4, 3, activation, norm, bias=bias, norm_kind=kind, seed=1)
    if bias:
        ff = block.feed_forward
        block = block.replace(feed_forward=ff.replace(up_bias=0.1 * ff.up_bias))
    assert block.architecture.count() == rank(block)


def test_a_relu_neuron_that_is_always_on_behind_a_norm_leaves_something_open() -> None:
    block = mha.random_block(2, 4, 3, "relu", "pre", seed=1)
    ff = block.feed_forward
    on = block.replace(feed_forward=ff.replace(up_bias=ff.up_bias + 20.0 * (np.arange(3) == 1)))
    assert rank(on) < block.architecture.count()


@pytest.mark.parametrize("name", COUNTED)
def test_the_canonical_form_is_the_same_function_and_its_own(name: str) -> None:
    block = mha.random_block(2, 5, 4, **COUNTED[name])
    found = block.canonical()
    assert same_function(block, found, 1e-11 if "epsilon" in name else 1e-12)
    assert mha.compare(found.canonical(), found).max_error < 1e-12
    for mine, other in zip(found.params.values(), found.canonical().params.values(), strict=True):
        assert np.abs(mine - other).max(initial=0.0) < 1e-11


def test_a_canonical_pre_norm_has_no_gain_left() -> None:
    found = mha.random_block(2, 5, 4, norm="pre").canonical()
    assert found.norms is not None
    for norm in found.norms:
        assert np.array_equal(norm.gain, np.ones(5))
        assert norm.bias is not None
        assert not norm.bias.any()
    assert np.abs(found.attention.theta.sum(axis=1)).max() < 1e-12  # a LayerNorm has mean zero


def with_other_gain(block: mha.Block) -> mha.Block:
    """The same post-norm block: a linear map beside the neurons can take up the first gain."""
    first, second = block.norms
    ff, change = block.feed_forward, np.exp(0.2 * np.random.default_rng(0).standard_normal(block.d))
    bias = None if first.bias is None else first.bias * change
    linear = (np.eye(block.d) + ff.linear) / change[:, None] - np.eye(block.d)
    moved = {"up": ff.up / change[:, None], "linear": linear}
    if ff.gate is not None:
        moved["gate"] = ff.gate / change[:, None]
    other = Norm(first.gain * change, bias, first.kind, first.epsilon)
    return block.replace(feed_forward=ff.replace(**moved), norms=(other, second))


@pytest.mark.parametrize("place", [None, "pre layer", "pre rms", "post layer", "post rms"])
@pytest.mark.parametrize("activation", ["relu", "glu", "gelu", "silu"])
def test_neurons_that_are_turned_over_are_turned_back(activation: str, place: str | None) -> None:
    """act(z) is act(-z) + z, or 1 - act(-z): the linear map that is left says which were turned."""
    norm, kind = (None, "layer") if place is None else place.split()
    block = mha.random_block(2, 6, 8, activation, norm, norm_kind=kind, seed=3)
    turned = block.replace(feed_forward=turn_neurons(block.feed_forward, np.array([1, 4, 7])))
    if norm == "post":
        turned = with_other_gain(turned)
    assert same_function(block, turned)
    assert turned.feed_forward.linear is not None
    found = turned.canonical()
    assert found.feed_forward.linear is None
    assert same_function(block, found)
    assert mha.compare(turned, block).max_error < 1e-12


def test_a_linear_map_that_no_turned_neuron_explains_stays() -> None:
    block = mha.random_block(2, 6, 8, "gelu", None)
    ff = block.feed_forward.replace(linear=0.1 * np.eye(6))
    found = block.replace(feed_forward=ff).canonical()
    assert found.feed_forward.linear is not None
    assert same_function(block.replace(feed_forward=ff), found)


@pytest.mark.parametrize("activation", ["gelu", "glu"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_straightened_blocks_are_the_same_blocks(activation: str, norm: str) -> None:
    """At scale one, and along it, where of faint neurons only the fourth order changes."""
    block = mha.random_block(1, 5, 4, activation, norm)
    block = block.replace(feed_forward=turn_neurons(block.feed_forward, np.array([0])))
    kind = block.parametrisation.straightened()
    params = kind.from_layer(block, Units())
    with float64():
        assert same_function(kind.to_layer(params, Units()), block)
        scales = {name: leaf + 0.1 for name, leaf in params.items() if "log_scale" in name}
        moved = kind.to_layer(params | scales, Units())
    names = {"feed_forward.log_scales"} | ({"norm_1.log_scale"} if norm == "post" else set())
    assert set(scales) == names
    x = tokens(block)
    size = np.abs(block(x)).max()
    alone = params | {name: leaf for name, leaf in scales.items() if "norm" in name}
    if norm == "post":  # only epsilon shows the stream's scale
        with float64():
            assert np.abs(kind.to_layer(alone, Units())(x) - block(x)).max() < 1e-4 * size
    assert 0 < np.abs(moved(x) - block(x)).max() < 0.1 * size


@pytest.mark.parametrize("norm", [None, "pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "glu", "gelu"])
def test_compare_sees_no_gauge(activation: str, norm: str | None) -> None:
    """Order of heads and neurons, scales, and biases that can be moved."""
    block = mha.random_block(2, 5, 4, activation, norm)
    ff, heads = block.feed_forward, block.attention
    order, sizes = [2, 0, 3, 1], np.array([2.0, 0.5, 3.0, 1.5])
    if activation == "relu":
        ff = ff.replace(up=ff.up * sizes, up_bias=ff.up_bias * sizes)
    if activation == "glu":
        sizes = sizes * [1, -1, 1, -1]
        ff = ff.replace(up=ff.up * sizes, up_bias=ff.up_bias * sizes)
    if activation != "gelu":
        ff = ff.replace(down=ff.down / sizes[:, None])
    ff = ff.replace(
        up=ff.up[:, order],
        down=ff.down[order],
        up_bias=ff.up_bias[order],
        gate=None if ff.gate is None else ff.gate[:, order],
        gate_bias=None if ff.gate is None else ff.gate_bias[order],
    )
    heads = heads.replace(
        theta=heads.theta[::-1], w=heads.w[::-1], key_vector=heads.key_vector[::-1]
    )
    if norm is None:  # h moves by a constant that the neurons take off again
        shift = np.arange(5.0)
        heads = heads.replace(out_bias=heads.out_bias + shift)
        moved = {"up_bias": ff.up_bias - shift @ ff.up, "down_bias": ff.down_bias - shift}
        if ff.gate is not None:
            moved["gate_bias"] = ff.gate_bias - shift @ ff.gate
        ff = ff.replace(**moved)
    other = block.replace(attention=heads, feed_forward=ff)
    assert same_function(block, other)
    found = mha.compare(other, block)
    assert found.max_error < 1e-12
    assert found.attention.order.tolist() == [1, 0] or found.attention.order.tolist() == [0, 1]


@pytest.mark.parametrize("head", ["plain", "rotary", "sinks"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_compare_sees_no_gains_of_pre_norms(kind: str, head: str) -> None:
    """Nor their biases: they are part of the maps that follow. One writing has both, one none."""
    given = HEADS.get(head, {})
    block = mha.random_block(2, 5, 4, "gelu", "pre", norm_kind=kind, seed=4, **given)
    plain = fold_inputs(block)
    assert same_function(block, plain)
    assert np.array_equal(plain.norms[0].gain, np.ones(5))
    assert not np.array_equal(block.norms[0].gain, np.ones(5))
    assert mha.compare(plain, block).max_error < 1e-12


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_tokens_and_features_may_be_renumbered(norm: str) -> None:
    """Without a mask tokens have no order, and norms treat features alike."""
    block = mha.random_block(2, 5, 4, "gelu", norm, seed=4)
    x, order, p = tokens(block), [2, 0, 3, 1], [4, 2, 0, 1, 3]
    assert np.abs(block(x[:, order]) - block(x)[:, order]).max() < 1e-12
    heads, ff = block.attention, block.feed_forward
    renumbered = block.replace(
        attention=heads.replace(
            theta=heads.theta[:, p][:, :, p],
            w=heads.w[:, p][:, :, p],
            key_vector=heads.key_vector[:, p],
            out_bias=heads.out_bias[p],
        ),
        feed_forward=ff.replace(up=ff.up[p], down=ff.down[:, p], down_bias=ff.down_bias[p]),
        norms=tuple(Norm(n.gain[p], n.bias[p], n.kind, n.epsilon) for n in block.norms),
    )
    assert np.abs(renumbered(x[..., p]) - block(x)[..., p]).max() < 1e-12


def test_compare_sees_what_differs() -> None:
    block = mha.random_block(2, 5, 4)
    ff = block.feed_forward
    other = block.replace(feed_forward=ff.replace(up=ff.up + 1e-3 * (np.arange(4) == 2)))
    found = mha.compare(other, block)
    assert 1e-4 < found.max_error < 1e-2
    assert np.sum(found.input_errors > 1e-6) == 1
    for changed in ({"activation": "relu"}, {"norm": "post"}, {"hidden": 3}):
        sizes = {"n_heads": 2, "d": 5, "hidden": 4} | changed
        found = mha.compare(mha.random_block(**sizes), block)
        assert found.max_error == np.inf
        assert found.why
    with pytest.raises(ValueError, match="with a block"):
        mha.compare(block.attention, block)


def test_dead_equal_and_mirrored_neurons_are_found() -> None:
    block = mha.random_block(2, 5, 4, "gelu", None)
    ff = block.feed_forward
    more = ff.replace(
        up=np.concatenate(
            [ff.up, ff.up[:, :1], -ff.up[:, 1:2], np.zeros((5, 1)), ff.up[:, :1] + 1], 1
        ),
        up_bias=np.concatenate([ff.up_bias, ff.up_bias[:1], -ff.up_bias[1:2], [0.7], [0.1]]),
        down=np.concatenate([ff.down, np.ones((1, 5)), 2 * np.ones((2, 5)), np.zeros((1, 5))]),
    )
    surplus = block.replace(feed_forward=more)
    found = surplus.canonical()
    assert found.hidden == 4
    assert found.feed_forward.linear is not None  # of the mirror image, -z
    assert same_function(surplus, found)
    half = ff.replace(  # 2 act(z) split into a copy and a mirror image, with the linear part undone
        up=np.concatenate([ff.up, ff.up[:, :1]], 1),
        up_bias=np.append(ff.up_bias, ff.up_bias[0]),
        down=np.concatenate([ff.down * [[0.25], [1], [1], [1]], 0.75 * ff.down[:1]]),
    )
    assert mha.compare(block.replace(feed_forward=half), block).max_error < 1e-12


@pytest.mark.parametrize("activation", ["relu", "silu", "glu", "swiglu", "reglu"])
def test_surplus_neurons_of_every_kind_are_left_out(activation: str) -> None:
    """Dead ones, one that does not depend on its input, and a copy that shares the output."""
    block = mha.random_block(2, 5, 4, activation, None, seed=3)
    ff, none = block.feed_forward, np.zeros((5, 1))
    ins, outs = [ff.up, ff.up[:, :1], ff.up[:, 1:2], none], 0.3 * ff.down[:1]
    more = {
        "up": np.concatenate(ins, 1),
        "up_bias": np.concatenate([ff.up_bias, ff.up_bias[:2], [0.7]]),
        "down": np.concatenate([ff.down, outs, np.zeros((1, 5)), np.ones((1, 5))]),
    }
    more["down"][0] = ff.down[0] - outs[0]
    if ff.gate is not None:
        more["gate"] = np.concatenate([ff.gate, ff.gate[:, :2], none], 1)
        more["gate_bias"] = np.concatenate([ff.gate_bias, ff.gate_bias[:2], [0.4]])
    surplus = block.replace(feed_forward=ff.replace(**more))
    found = surplus.canonical()
    assert (surplus.hidden, found.hidden) == (7, 4)
    assert same_function(surplus, found)
    without = {"up": more["up"][:, :6], "up_bias": more["up_bias"][:6], "down": more["down"][:6]}
    if ff.gate is not None:
        without |= {"gate": more["gate"][:, :6], "gate_bias": more["gate_bias"][:6]}
    split = block.replace(feed_forward=ff.replace(**without))
    assert mha.compare(split, block).max_error < 1e-12


def test_equal_heads_of_a_block_are_merged() -> None:
    block = mha.random_block(2, 5, 4, norm=None)
    heads = block.attention
    twice = heads.replace(
        theta=heads.theta[[0, 0, 1]],
        w=heads.w[[0, 0, 1]] * [[[0.5]], [[0.5]], [[1]]],
        key_vector=heads.key_vector[[0, 0, 1]],
    )
    found = block.replace(attention=twice)
    assert same_function(found, block)
    assert mha.compare(found, block).max_error < 1e-12


@pytest.mark.parametrize(
    "name", ["no norm, rank 2", "pre, LayerNorm, rotary", "post, RMSNorm, ReGLU"]
)
def test_files_hold_a_block_bit_by_bit(name: str, tmp_path) -> None:
    block = mha.random_block(2, 5, 4, **COUNTED[name])
    block.save(tmp_path / "block.safetensors")
    found = mha.load_layer(tmp_path / "block.safetensors")
    assert isinstance(found, mha.Block)
    assert found.design == block.design
    assert found.metadata.items() >= block.metadata.items()
    assert np.array_equal(found(tokens(block)), block(tokens(block)))


def test_damaged_files_and_arguments_are_refused(tmp_path) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    block = mha.random_block(2, 5, 4)
    path = tmp_path / "block.safetensors"
    block.save(path)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    for change in ({"block": "[]"}, {"block": metadata["block"].replace("4", '"4"')}):
        save_file(load_file(path), path, metadata | change)
        with pytest.raises(ValueError, match="block"):
            mha.load_layer(path)
    with pytest.raises(ValueError, match="activation='tanh'"):
        mha.random_block(2, 5, 4, "tanh")
    with pytest.raises(ValueError, match="norm='both'"):
        mha.random_block(2, 5, 4, norm="both")
    with pytest.raises(ValueError, match="needs a gate"):
        block.feed_forward.replace(activation="glu")
    with pytest.raises(ValueError, match="give both"):
        mha.Block(block.attention, block.feed_forward, "pre")
    with pytest.raises(ValueError, match="residual path"):
        mha.Block(mha.random_layer(2, 5, out_dim=3), block.feed_forward)


def test_blocks_show_themselves() -> None:
    block = mha.random_block(2, 5, 4)
    assert repr(block) == (
        "Block(n_heads=2, d=5, hidden=4, activation='gelu', norm='pre', norm_kind='layer')"
    )
    assert "feed_forward.up" in block._repr_html_()
    same, other = mha.compare(block, block), mha.compare(block, mha.random_block(2, 5, 3))
    assert "largest relative error" in same._repr_html_()
    assert "4 neurons beside 3" in other._repr_html_()
    assert block.architecture.contains(block)
    assert not mha.random_block(2, 5, 3).architecture.contains(block)
