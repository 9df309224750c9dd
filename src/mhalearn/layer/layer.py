"""AttentionLayer and its canonical form.

F(X) = sum_i softmax(X Theta_i X^T + 1 (X v_i)^T) X W_i + 1 c^T
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime import storage
from mhalearn._runtime.programs import compiled, float64, on_device
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn._runtime.validation import check_array, check_inputs
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.attention import forward
from mhalearn.layer.batches import Chunk, make_chunk

# Doubles held at once while a layer is applied: 64 MiB on a CPU.
_WORKSPACE = 2**23

# How the tensors of a layer's file that are factors begin.
_FACTORS = "factors."


class AttentionLayer:
    """A multi-head attention layer, immutable, in float64.

    theta: (m, d, d) attention (QK) matrices; w: (m, d, e) projection (OV) matrices;
    key_vector: (m, d) or None; out_bias: (e,) or None; causal: token r sees tokens 0..r only.
    metadata: strings that travel with the layer's file (seed, version, how it was learned).
    seen: 64-bit hashes of the examples it was learned from, so that `certify` can refuse them.
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
        self.causal = bool(causal)
        self.metadata = dict(metadata or {})
        self.seen = np.zeros(0, np.uint64) if seen is None else seen
        if self.seen.dtype != np.uint64 or self.seen.ndim != 1:
            raise ValueError(
                f"seen has dtype {self.seen.dtype} and shape {self.seen.shape}: "
                "expected a list of uint64 hashes, as Examples.hashes returns them"
            )
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
    def architecture(self) -> Architecture:
        """The class of layers it was learned in, as it says itself, or that of its sizes."""
        bias = self.key_vector is not None or self.out_bias is not None
        sizes = Architecture(self.d, self.n_heads, None, self.out_dim, bias, self.causal)
        said = self.metadata.get("head_dim", "")
        if not (said.isdecimal() and 0 < int(said) <= self.d):
            return sizes
        ranked = replace(sizes, head_dim=int(said))
        return ranked if ranked.contains(self) else sizes

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
        return AttentionLayer(**(kept | changes))

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

    def __call__(self, x: ArrayLike, lengths: ArrayLike | None = None) -> Float64:
        """Apply the layer to X (n, k, d). Rows past an example's length are zero.

        Cost: O(n m k d (d + k + e)) time; memory beside X and Y bounded by a fixed workspace.
        """
        tokens, lengths = check_inputs(x, self.d, lengths)
        outputs = np.empty((*tokens.shape[:2], self.out_dim))
        for part, found in self.over_chunks(_outputs, tokens, lengths):
            outputs[part] = found[: part.stop - part.start]
        return outputs

    def over_chunks(
        self,
        function: Callable[..., Any],
        x: ArrayLike,
        lengths: ArrayLike | None = None,
        labels: NDArray[Any] | None = None,
    ) -> Iterator[tuple[slice, Any]]:
        """A compiled function of (theta, w, chunk) on all examples: which ones, and its arrays.

        Memory: a fixed workspace. What the function returns may hold more examples than were asked
        about: the last ones pad.
        """
        tokens, lengths = check_inputs(x, self.d, lengths)
        n, k, d = tokens.shape
        per_example = k * (self.n_heads * (2 * k + 3 * d) + 2 * d + self.out_dim)
        size = min(_chunk_size(n), max(1, on_device(_WORKSPACE) // per_example))
        with float64():
            theta, w = jnp.asarray(self.query_theta), jnp.asarray(self.stacked_w)
        for start in range(0, n, size):
            part = slice(start, min(start + size, n))
            with float64():
                chunk = make_chunk(
                    tokens[part],
                    lengths[part],
                    key_vector=self.key_vector is not None,
                    out_bias=self.out_bias is not None,
                    causal=self.causal,
                    labels=None if labels is None else labels[part],
                    size=size,
                )
                result = jax.tree.map(np.asarray, function(theta, w, chunk))
            yield part, result

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


def load_layer(path: str | Path) -> AttentionLayer:
    """Read a layer that `AttentionLayer.save` wrote."""
    tensors, metadata = storage.read_tensors(path, kind="layer", required=("theta", "w"))
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


def parameters_hash(layer: AttentionLayer) -> str:
    """SHA-256 of the parameters as 64-bit floats."""
    parts = (layer.theta, layer.w, layer.key_vector, layer.out_bias)
    digest = hashlib.sha256()
    for part in parts:
        if part is not None:
            digest.update(np.ascontiguousarray(part, "<f8").tobytes())
    return digest.hexdigest()


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


@compiled
def _outputs(
    theta: Float[Array, "m q d"], w: Float[Array, "p e"], chunk: Chunk
) -> Float[Array, "b k e"]:
    return forward(theta, w, chunk)


def _parameter(name: str, value: ArrayLike, ndim: int) -> Float64:
    array = np.array(check_array(name, value, ndim), dtype=np.float64)
    array.setflags(write=False)
    return array


def _chunk_size(n: int) -> int:
    """Of few values, so that programs are shared; few examples are all one to an accelerator."""
    if jax.default_backend() != "cpu" and n <= 2048:
        return 256
    return 1 << max(0, n - 1).bit_length()
