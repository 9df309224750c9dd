"""ProjectedLayer: a layer that is held by its heads' projections."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime import storage
from mhalearn._runtime.programs import compiled
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn._runtime.validation import check_array
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.architecture_record import read_architecture, write_architecture
from mhalearn.layer.base import ParametrisedLayer, check_seen
from mhalearn.layer.batches import Chunk
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.layer.projected import OPTIONAL, Projected


class ProjectedLayer(ParametrisedLayer):
    """A layer of heads that are held by their projections, immutable, in float64.

    architecture: what its heads have: rotary positions, shared keys, norms, windows and so on.
    params: query (m, d, h), key (g, d, h), value (g, d, v), out (m, v, e) and, where there are
    such, query_bias (m, h), key_bias (g, h), value_bias (g, v), out_bias (e,), query_gain,
    key_gain, sink (m,), position_table (buckets, m). With a latent: latent (d, r), latent_gain (r,)
    and rotary_key (d, rotated), and keys and values have r rows; query_latent (d, r') and
    query_latent_gain (r',), and queries have r' rows.
    metadata, seen: as in every layer.
    """

    def __init__(
        self,
        architecture: Architecture,
        params: Mapping[str, ArrayLike],
        *,
        metadata: Mapping[str, str] | None = None,
        seen: NDArray[Any] | None = None,
    ) -> None:
        if architecture.is_plain:
            raise ValueError("these heads have nothing but a Theta and a W: make an AttentionLayer")
        kind = Projected(architecture)
        super().__init__(kind, _checked(kind, params), metadata=metadata, seen=seen)
        check_seen(self.seen)
        for leaf in self._params.values():
            leaf.setflags(write=False)

    def __repr__(self) -> str:
        a = self.architecture
        sizes = f"n_heads={a.n_heads}, d={a.d}, head_dim={a.head_dim}, out_dim={a.outputs}"
        return f"ProjectedLayer({', '.join([sizes, *a.extras()])})"

    def replace(self, **changes: Any) -> ProjectedLayer:
        """A copy with some constructor arguments changed."""
        kept: dict[str, Any] = {"architecture": self.architecture, "params": self._params}
        kept |= {"metadata": self.metadata, "seen": self.seen}
        return ProjectedLayer(**(kept | changes))

    def save(self, path: str | Path) -> None:
        """Write the layer to a .safetensors file, atomically."""
        tensors: dict[str, NDArray[Any]] = dict(self._params)
        if self.seen.size:
            tensors["seen"] = self.seen
        said = {"kind": "layer", "architecture": write_architecture(self.architecture)}
        storage.write_tensors(path, tensors, self.metadata | said)

    def patterns(
        self,
        x: ArrayLike,
        lengths: ArrayLike | None = None,
        *,
        positions: ArrayLike | None = None,
        memory: ArrayLike | None = None,
        memory_lengths: ArrayLike | None = None,
    ) -> Float64:
        """Attention weights (n, m, k, k): what row r of a head gives to each token; (n, m, k, k')
        where a memory of k' tokens is given.

        A row sums to one, or to less where a sink takes its share; zeros for keys that are not seen
        and for rows past an example's length.
        """
        rows = np.shape(x)[1] if np.ndim(x) == 3 else None
        keys = np.shape(memory)[1] if memory is not None and np.ndim(memory) == 3 else None
        tokens, lengths = self.bring_memory(x, lengths, memory, memory_lengths)
        n, k, _ = tokens.shape
        found = np.empty((n, self.n_heads, k, k))
        for part, weights in self.over_chunks(_patterns, tokens, lengths, positions=positions):
            found[part] = weights[: part.stop - part.start]
        return found[:, :, :rows, :keys]

    def canonical(self) -> ProjectedLayer:
        """The same function by projections that are chosen alike for all layers that compute it.

        Heads of equal attention stay two: their W together may have more than head_dim dimensions.
        See `layer.projected_canonical`.
        """
        from mhalearn.layer.projected_canonical import canonical_form  # which makes layers

        return canonical_form(self)

    def to_attention_layer(self) -> AttentionLayer:
        """The same function by Theta and W, where heads have no more than shared keys."""
        a, params = self.architecture, self._params
        if not a.shares_only:
            raise ValueError(f"heads with {', '.join(a.extras())} have no single matrix Theta")
        scale = a.qk_rank**-0.5 if a.logit_scale is None else a.logit_scale
        each = a.heads // a.groups
        key, value = (np.repeat(params[name], each, axis=0) for name in ("key", "value"))
        vector = out_bias = None
        if "query_bias" in params:
            vector = np.einsum("mh,mdh->md", params["query_bias"], key) * scale
        if "value_bias" in params:
            shared = np.repeat(params["value_bias"], each, axis=0)
            out_bias = np.einsum("mh,mhe->e", shared, params["out"])
        said = {"head_dim": str(a.head_dim)}
        if "out_bias" in params:
            out_bias = params["out_bias"] + (0.0 if out_bias is None else out_bias)
        return AttentionLayer(
            params["query"] @ key.swapaxes(1, 2) * scale,
            value @ params["out"],
            vector,
            out_bias,
            a.causal,
            metadata=self.metadata | (said if a.value_dim is None else {}),
            seen=self.seen,
        )


def by_matrices(layer: AttentionLayer | ProjectedLayer) -> AttentionLayer:
    """A layer by Theta and W; a ValueError where its heads have more than those."""
    return layer.to_attention_layer() if isinstance(layer, ProjectedLayer) else layer


def read_projected_layer(
    path: str | Path, tensors: dict[str, NDArray[Any]], metadata: dict[str, str]
) -> ProjectedLayer:
    """The layer of a file's tensors and metadata; `load_layer` calls it."""
    kept = {name: text for name, text in metadata.items() if name not in ("kind", "architecture")}
    params = {name: tensor for name, tensor in tensors.items() if name != "seen"}
    try:
        architecture = read_architecture(metadata["architecture"])
        return ProjectedLayer(architecture, params, metadata=kept, seen=tensors.get("seen"))
    except ValueError as error:
        raise ValueError(f"{storage.show(path)}: {error}") from None


def _checked(kind: Projected, params: Mapping[str, ArrayLike]) -> dict[str, Float64]:
    """Parameters of the shapes the architecture has; the user's mistakes are a ValueError."""
    shapes = kind.shapes()
    if unknown := sorted(set(params) - set(shapes)):
        raise ValueError(f"{unknown[0]!r} is no parameter of {', '.join(shapes)}")
    found = {}
    for name, shape in shapes.items():
        if params.get(name) is None:
            if name not in OPTIONAL:
                raise ValueError(f"{name} is missing: expected shape {shape}")
            continue
        array = check_array(name, params[name], len(shape))
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}: expected {shape}")
        found[name] = np.array(array, np.float64)
    return found


@partial(compiled, static_argnums=0)
def _patterns(
    parametrisation: Parametrisation, params: Params, chunk: Chunk
) -> Float[Array, "b m k k"]:
    assert isinstance(parametrisation, Projected)
    p = parametrisation.attend(params, chunk).p * chunk.weight[:, :, None, None]
    return jnp.swapaxes(p, 1, 2)
