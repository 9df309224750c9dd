"""AttentionLayer and its canonical form.

F(X) = sum_i softmax(X Theta_i X^T + 1 (X v_i)^T) X W_i + 1 c^T
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime import storage
from mhalearn._runtime.programs import compiled
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn._runtime.validation import check_array, check_inputs, read_count
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.attention import attend
from mhalearn.layer.base import Layer, check_seen
from mhalearn.layer.batches import Chunk
from mhalearn.layer.parametrisation import Parametrisation, Params

if TYPE_CHECKING:
    from mhalearn.layer.token_span import TokenSource

# How the tensors of a layer's file that are factors begin.
_FACTORS = "factors."


class AttentionLayer(Layer):
    """A multi-head attention layer, immutable, in float64.

    theta: (m, d, d) attention (QK) matrices; w: (m, d, e) projection (OV) matrices;
    key_vector: (m, d) or None; out_bias: (e,) or None; causal: token r sees tokens 0..r only.
    metadata: strings that travel with the layer's file (seed, version, how it was learned).
    seen: 64-bit hashes of the examples it was learned from, so that `certify` knows them again.
    factors: the weights of another library that theta, w and the biases were made of, in their own
    dtype, so that they can go back unchanged (`interop.factors` reads them); None for most layers.
    """

    def __init__(
        self,
        theta: ArrayLike,
        w: ArrayLike,
        key_vector: ArrayLike | None = None,
        out_bias: ArrayLike | None = None,
        causal: bool = False,
        *,
        metadata: Mapping[str, str] | None = None,
        seen: NDArray[Any] | None = None,
        factors: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        self.theta = _parameter("theta", theta, 3)
        self.w = _parameter("w", w, 3)
        m, d, d2 = self.theta.shape
        if m == 0 or d == 0:
            raise ValueError(f"theta has shape {self.theta.shape}: a layer has at least one head")
        if d2 != d:
            raise ValueError(f"theta has shape {self.theta.shape}: expected (heads, d, d)")
        if self.w.shape[:2] != (m, d) or self.w.shape[2] == 0:
            raise ValueError(f"w has shape {self.w.shape}: expected ({m}, {d}, e) to match theta")
        self.key_vector = None if key_vector is None else _parameter("key_vector", key_vector, 2)
        if self.key_vector is not None and self.key_vector.shape != (m, d):
            raise ValueError(f"key_vector has shape {self.key_vector.shape}: expected ({m}, {d})")
        self.out_bias = None if out_bias is None else _parameter("out_bias", out_bias, 1)
        if self.out_bias is not None and self.out_bias.shape != self.w.shape[2:]:
            raise ValueError(
                f"out_bias has shape {self.out_bias.shape}: expected ({self.w.shape[2]},)"
            )
        self._causal = bool(causal)
        self.metadata = dict(metadata or {})
        self.seen = np.zeros(0, np.uint64) if seen is None else seen
        check_seen(self.seen)
        self.factors = dict(factors) if factors else None

    @property
    def n_heads(self) -> int:
        return self.theta.shape[0]

    @property
    def d(self) -> int:
        return self.theta.shape[1]

    @property
    def out_dim(self) -> int:
        return self.w.shape[2]

    @property
    def causal(self) -> bool:
        return self._causal

    @cached_property
    def architecture(self) -> Architecture:
        """The class of layers it was learned in, as it says itself, or that of its sizes."""
        head_dim = read_count(self.metadata.get("head_dim", ""))
        if head_dim is None or not 0 < head_dim <= self.d:
            return self._sizes
        ranked = replace(self._sizes, head_dim=head_dim)
        return ranked if ranked.contains(self) else self._sizes

    @property
    def _sizes(self) -> Architecture:
        bias = self.key_vector is not None or self.out_bias is not None
        return Architecture(self.d, self.n_heads, None, self.out_dim, bias, self.causal)

    def __repr__(self) -> str:
        extras = [
            name
            for name, there in [
                ("key_vector", self.key_vector is not None),
                ("out_bias", self.out_bias is not None),
                ("causal", self.causal),
            ]
            if there
        ]
        shape = f"n_heads={self.n_heads}, d={self.d}, out_dim={self.out_dim}"
        return f"AttentionLayer({', '.join([shape, *extras])})"

    def replace(self, **changes: Any) -> AttentionLayer:
        """A copy with some constructor arguments changed; other parameters drop the factors."""
        parameters = ("theta", "w", "key_vector", "out_bias")
        names = (*parameters, "causal", "metadata", "seen", "factors")
        kept = {name: getattr(self, name) for name in names}
        if not changes.keys().isdisjoint(parameters):
            kept["factors"] = None
        return type(self)(**(kept | changes))

    @property
    def query_theta(self) -> Float64:
        """(m, q, d): Theta with the key-side vector, if any, as a last row."""
        if self.key_vector is None:
            return self.theta
        return np.concatenate([self.theta, self.key_vector[:, None, :]], axis=1)

    @property
    def stacked_w(self) -> Float64:
        """(p, e): the projections one under the other, the output bias, if any, last."""
        stacked = self.w.reshape(-1, self.out_dim)
        return stacked if self.out_bias is None else np.vstack([stacked, self.out_bias])

    @property
    def parametrisation(self) -> Parametrisation:
        from mhalearn.layer.dense import Dense  # which makes layers

        return Dense(self._sizes)

    @property
    def params(self) -> Params:
        from mhalearn.layer.dense import DenseHeads

        return DenseHeads(self.query_theta, self.stacked_w)  # type: ignore[arg-type]

    def parameters(self) -> dict[str, Float64]:
        named = {"theta": self.theta, "w": self.w}
        biases = {"key_vector": self.key_vector, "out_bias": self.out_bias}
        return named | {name: bias for name, bias in biases.items() if bias is not None}

    def chunk_options(self) -> dict[str, bool]:
        biases = self.key_vector is not None, self.out_bias is not None
        return {"key_vector": biases[0], "out_bias": biases[1], "causal": self.causal}

    def patterns(self, x: ArrayLike, lengths: ArrayLike | None = None) -> Float64:
        """Attention weights (n, m, k, k): what row r of a head gives to each token.

        A row sums to one, with zeros for keys that are masked or past the example's length; rows
        past it are zero.
        Cost: O(n m k d (d + k)) time; memory that of the result and a fixed workspace.
        """
        tokens, lengths = check_inputs(x, self.d, lengths)
        n, k, _ = tokens.shape
        found = np.empty((n, self.n_heads, k, k))
        for part, weights in self.over_chunks(_patterns, tokens, lengths):
            found[part] = weights[: part.stop - part.start]
        return found

    def canonical(self, *, tolerance: float = 1e-8) -> AttentionLayer:
        """Merge heads of equal attention, drop heads with zero W, order by decreasing norm of W.

        For k >= 3 tokens this is what a layer's function determines. Two heads count as equal when
        their attention parameters differ by at most `tolerance` times the largest head's norm, and
        W as zero when its norm is at most `tolerance` times the largest W's.
        """
        attention = self.query_theta
        norms = np.linalg.norm(self.w, axis=(1, 2))
        apart = np.stack([np.linalg.norm(attention - one, axis=(1, 2)) for one in attention])
        largest = np.linalg.norm(attention, axis=(1, 2)).max()
        groups = group_heads(apart, norms, tolerance * largest)
        # The member with the largest W is the one whose attention the examples see best.
        merged = [(group[0], self.w[group].sum(axis=0)) for group in groups]
        sizes = np.array([np.linalg.norm(w) for _, w in merged])
        order = [g for g in np.argsort(-sizes, kind="stable") if sizes[g] > tolerance * norms.max()]
        if not order:
            return self.replace(
                theta=np.zeros((1, self.d, self.d)),
                w=np.zeros((1, self.d, self.out_dim)),
                key_vector=None if self.key_vector is None else np.zeros((1, self.d)),
            )
        leaders = [merged[g][0] for g in order]
        if leaders == list(range(self.n_heads)):
            return self
        return self.replace(
            theta=self.theta[leaders],
            w=np.stack([merged[g][1] for g in order]),
            key_vector=None if self.key_vector is None else self.key_vector[leaders],
        )

    def on_span(
        self, inputs: ArrayLike | TokenSource, lengths: ArrayLike | None = None
    ) -> AttentionLayer:
        """The centred canonical form on the affine span of some tokens: the same function there.

        inputs: X (n, k, d), or an Examples. Theta and W act on nothing that tokens do not span;
        what is constant there is in the key vectors and the output bias or, of a layer without
        biases whose tokens' span passes zero by, in Theta and W along the span's point nearest to
        zero, in equal shares of all heads. Layers that are equal on the span have the same form, up
        to the order of heads; the layer itself where tokens span the features.
        Cost: O(t d^2) for t tokens. Trust: see `measure_span`.
        """
        from mhalearn.layer.span_coordinates import choose_coordinates
        from mhalearn.layer.token_span import measure_span, read_tokens

        span = measure_span(read_tokens(inputs, lengths))
        if span.d != self.d:
            raise ValueError(f"X has {span.d} features a token, the layer has d = {self.d}")
        coordinates = choose_coordinates(span, self.architecture, whiten=False)
        return self if coordinates is None else coordinates.lift(coordinates.restrict(self))

    def save(self, path: str | Path) -> None:
        """Write the layer to a .safetensors file, atomically."""
        tensors: dict[str, NDArray[Any]] = {"theta": self.theta, "w": self.w}
        if self.key_vector is not None:
            tensors["key_vector"] = self.key_vector
        if self.out_bias is not None:
            tensors["out_bias"] = self.out_bias
        if self.seen.size:
            tensors["seen"] = self.seen
        for name, factor in (self.factors or {}).items():
            tensors[f"{_FACTORS}{name}"] = factor
        metadata = self.metadata | {"kind": "layer", "causal": str(self.causal).lower()}
        storage.write_tensors(path, tensors, metadata)

    def export(self, path: str | Path) -> None:
        """Write the layer as a program, a .jaxexport file, that runs without this package.

        X (n, k, d) in float64, for any n and k; biases and mask are part of it. It is not for
        sequences of different lengths, and works on all of X at once. To run it, with jax and
        flatbuffers alone (`import jax.export`):

            program = jax.export.deserialize(Path("layer.jaxexport").read_bytes())
            with jax.enable_x64(True):
                Y = program.call(X)

        JAX reads such files for some months after the version that wrote them; `save` is for
        keeping. Written atomically, by `jax.export`: needs the extra mhalearn[export].
        """
        from mhalearn.layer.export import export_layer

        export_layer(self, path)


@partial(compiled, static_argnums=0)
def _patterns(
    parametrisation: Parametrisation, params: Params, chunk: Chunk
) -> Float[Array, "b m k k"]:
    p = attend(params.theta, chunk).p * chunk.weight[:, :, None, None]
    return jnp.swapaxes(p, 1, 2)


def load_layer(path: str | Path) -> Any:
    """Read a layer that `save` wrote: an AttentionLayer, a ProjectedLayer, or a Block."""
    tensors, metadata = storage.read_tensors(path, kind="layer", required=())
    if "block" in metadata and "theta" not in tensors:
        from mhalearn.layer.block.block import read_block

        return read_block(path, tensors, metadata)
    if "architecture" in metadata and "theta" not in tensors:
        from mhalearn.layer.projected_layer import read_projected_layer

        return read_projected_layer(path, tensors, metadata)
    storage.check_names(path, tensors, ("theta", "w"))
    causal = metadata.pop("causal", "false") == "true"
    metadata.pop("kind", None)
    try:
        return AttentionLayer(
            tensors["theta"],
            tensors["w"],
            tensors.get("key_vector"),
            tensors.get("out_bias"),
            causal,
            metadata=metadata,
            seen=tensors.get("seen"),
            factors={
                name.removeprefix(_FACTORS): tensor
                for name, tensor in tensors.items()
                if name.startswith(_FACTORS)
            },
        )
    except ValueError as error:
        raise ValueError(f"{storage.show(path)}: {error}") from None


def join_heads(layer: AttentionLayer, other: AttentionLayer) -> AttentionLayer:
    """The sum of two layers, which have the same sizes, mask and kinds of biases."""
    vectors, out_bias = layer.key_vector, layer.out_bias
    if vectors is not None and other.key_vector is not None:
        vectors = np.concatenate([vectors, other.key_vector])
    if out_bias is not None and other.out_bias is not None:
        out_bias = out_bias + other.out_bias
    theta, w = np.concatenate([layer.theta, other.theta]), np.concatenate([layer.w, other.w])
    return AttentionLayer(theta, w, vectors, out_bias, layer.causal)


def group_heads(apart: Float64, sizes: Float64, near: float) -> list[list[int]]:
    """Heads whose distance `apart` from the largest of a group is at most `near`, largest first."""
    groups: list[list[int]] = []
    for i in np.argsort(-sizes, kind="stable").tolist():
        for group in groups:
            if apart[i, group[0]] <= near:
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _parameter(name: str, value: ArrayLike, ndim: int) -> Float64:
    array = np.array(check_array(name, value, ndim), dtype=np.float64)
    array.setflags(write=False)
    return array
