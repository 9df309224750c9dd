"""A layer as a program: its parameters and its arithmetic in one file that JAX alone can run."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from mhalearn._runtime import storage
from mhalearn._runtime.programs import float64
from mhalearn._runtime.types import Array, Float
from mhalearn.layer.attention import forward
from mhalearn.layer.batches import Chunk
from mhalearn.layer.layer import AttentionLayer

SUFFIX = ".jaxexport"
# Those with arithmetic in doubles; lowering for one that is not at hand needs none of it.
PLATFORMS = ("cpu", "cuda", "rocm")


def export_layer(layer: AttentionLayer, path: str | Path) -> None:
    """Write the program of a layer; `AttentionLayer.export` says what it is and how to load it."""
    if Path(path).suffix != SUFFIX:
        raise ValueError(f"{storage.show(path)}: name a file that ends in {SUFFIX}")
    storage.check_writable(path)
    storage.write_atomically(path, serialise(layer))


def serialise(layer: AttentionLayer) -> bytes:
    """The program X (n, k, d) -> Y (n, k, e) in doubles, for any n and k of at least one."""
    try:
        import flatbuffers  # noqa: F401
    except ImportError:
        raise ValueError(
            'jax.export needs flatbuffers to write: pip install "mhalearn[export]"'
        ) from None
    from jax import export

    with float64():
        theta, w = jnp.asarray(layer.query_theta), jnp.asarray(layer.stacked_w)

        @jax.jit
        def attention_layer(x: Float[Array, "n k d"]) -> Float[Array, "n k e"]:
            return forward(theta, w, _whole_chunk(x, layer))

        shape = export.symbolic_shape(f"n, k, {layer.d}")
        tokens = jax.ShapeDtypeStruct(shape, jnp.float64)
        program = export.export(attention_layer, platforms=PLATFORMS)(tokens)
        return bytes(program.serialize())


def _whole_chunk(x: Float[Array, "n k d"], layer: AttentionLayer) -> Chunk:
    """What `make_chunk` makes of sequences of full length, traced: n and k may be symbols."""
    n, k, _ = x.shape
    ones = jnp.ones((n, k, 1))
    positions = jnp.arange(k)
    seen = positions[:, None] >= positions if layer.causal else jnp.ones((k, k), bool)
    return Chunk(
        tokens=x,
        queries=x if layer.key_vector is None else jnp.concatenate([x, ones], axis=-1),
        labels=ones[..., :0],
        constant=ones[..., :0] if layer.out_bias is None else ones,
        weight=ones[..., 0],
        allowed=jnp.broadcast_to(seen, (n, k, k)),
    )
