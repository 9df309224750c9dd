"""What every layer can do: be applied, in chunks, whatever kind of attention it has."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime import storage
from mhalearn._runtime.programs import compiled, float64, on_device
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn._runtime.validation import check_inputs, check_positions
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.batches import Chunk, make_chunk
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.layer.token_columns import pack_memory

# Doubles held at once while a layer is applied: 64 MiB on a CPU.
_WORKSPACE = 2**23
# Multiplications that take less time than to compile a program for one more size.
_LITTLE_WORK = 10_000_000


class Layer(ABC):
    """A function of sequences with parameters, in float64.

    metadata: strings that travel with the layer's file (seed, version, how it was learned).
    seen: 64-bit hashes of the examples it was learned from, so that `certify` knows them again.
    """

    metadata: dict[str, str]
    seen: NDArray[np.uint64]

    @property
    @abstractmethod
    def architecture(self) -> Architecture:
        """The class of layers it belongs to."""

    @property
    @abstractmethod
    def parametrisation(self) -> Parametrisation:
        """How it is written as numbers."""

    @property
    @abstractmethod
    def params(self) -> Params:
        """Those numbers, in the user's units."""

    @abstractmethod
    def replace(self, **changes: Any) -> Layer:
        """A copy with some constructor arguments changed."""

    @abstractmethod
    def save(self, path: str | Path) -> None:
        """Write the layer to a .safetensors file, atomically."""

    def parameters(self) -> dict[str, Float64]:
        """Its parameters by name."""
        return dict(self.params)

    def _repr_html_(self) -> str:
        """What a notebook shows: sizes, and the heads as small pictures."""
        from mhalearn.layer.notebook import describe_layer  # which knows layers

        return describe_layer(self)

    @property
    def n_heads(self) -> int:
        return self.architecture.n_heads or 1

    @property
    def d(self) -> int:
        return self.architecture.d

    @property
    def out_dim(self) -> int:
        return self.architecture.outputs

    @property
    def causal(self) -> bool:
        return self.architecture.causal

    def chunk_options(self) -> dict[str, Any]:
        """Which extra features its chunks have."""
        bias = self.architecture.bias
        return {"key_vector": bias, "out_bias": bias, "causal": self.causal}

    def __call__(
        self,
        x: ArrayLike,
        lengths: ArrayLike | None = None,
        *,
        positions: ArrayLike | None = None,
        memory: ArrayLike | None = None,
        memory_lengths: ArrayLike | None = None,
    ) -> Float64:
        """Apply the layer to X (n, k, d). Rows past an example's length are zero.

        positions: (k,) or (n, k) position ids, 0 to k - 1 where they are not given; layers without
        positions do not look at them.
        memory: (n, k', d'), the second sequence that keys and values of cross-attention are of, and
        memory_lengths (n,) where not all of its rows are tokens.
        X may bring both with it, as `Examples.arrays` does (`layer.token_columns`).
        Cost: O(n m k d (d + k + e)) time; memory beside X and Y bounded by a fixed workspace.
        """
        rows = np.shape(x)[1] if np.ndim(x) == 3 else None
        tokens, lengths = self.bring_memory(x, lengths, memory, memory_lengths)
        outputs = np.empty((*tokens.shape[:2], self.out_dim))
        for part, found in self.over_chunks(_outputs, tokens, lengths, positions=positions):
            outputs[part] = found[: part.stop - part.start]
        return outputs[:, :rows]

    def bring_memory(
        self,
        x: ArrayLike,
        lengths: ArrayLike | None,
        memory: ArrayLike | None,
        memory_lengths: ArrayLike | None,
    ) -> tuple[NDArray[Any], ArrayLike | None]:
        """Tokens with those of the memory beside them, where one is given, and their lengths."""
        if memory is None:
            if memory_lengths is not None:
                raise ValueError("memory_lengths without memory: pass both, or leave it out")
            return check_inputs(x, None, lengths)
        if self.architecture.memory is None:
            raise ValueError("memory: keys and values of this layer are of X itself; leave it out")
        packed = pack_memory(x, memory, lengths, memory_lengths)
        wanted = (self.d, self.architecture.memory)
        if packed.columns[:2] != wanted:
            raise ValueError(
                f"X and memory have {packed.columns.features} and {packed.columns.memory} features "
                f"a token, the layer has {wanted[0]} and {wanted[1]}"
            )
        return packed.tokens, packed.lengths

    def over_chunks(
        self,
        function: Callable[..., Any],
        x: ArrayLike,
        lengths: ArrayLike | None = None,
        labels: NDArray[Any] | None = None,
        positions: ArrayLike | None = None,
    ) -> Iterator[tuple[slice, Any]]:
        """A compiled function of (parametrisation, params, chunk) on all examples: which ones, and
        its arrays.

        Memory: a fixed workspace. What the function returns may hold more examples than were asked
        about: the last ones pad.
        """
        tokens, lengths = check_inputs(x, None, lengths)
        n, k, d = tokens.shape
        columns = self.architecture.columns(d)
        places = None if positions is None else check_positions(positions, n, k)
        if not self.architecture.has_positions:
            places = None
        per_example = k * (self.n_heads * (2 * k + 3 * d) + 2 * d + self.out_dim)
        work = per_example * d
        size = min(_chunk_size(n, work), max(1, on_device(_WORKSPACE) // per_example))
        for start in range(0, n, size):
            part = slice(start, min(start + size, n))
            with float64():
                chunk = make_chunk(
                    tokens[part],
                    lengths[part],
                    labels=None if labels is None else labels[part],
                    size=size,
                    positions=None if places is None else places[part],
                    columns=columns,
                    **self.chunk_options(),
                )
                result = jax.tree.map(
                    np.asarray, function(self.parametrisation, self.params, chunk)
                )
            yield part, result


class ParametrisedLayer(Layer):
    """A layer of any kind of attention: a parametrisation, and parameters for it."""

    def __init__(
        self,
        parametrisation: Parametrisation,
        params: Mapping[str, ArrayLike],
        *,
        metadata: Mapping[str, str] | None = None,
        seen: NDArray[Any] | None = None,
    ) -> None:
        self._parametrisation = parametrisation
        self._params = {name: np.array(leaf, np.float64) for name, leaf in params.items()}
        self.metadata = dict(metadata or {})
        self.seen = np.zeros(0, np.uint64) if seen is None else seen

    @property
    def architecture(self) -> Architecture:
        return self._parametrisation.architecture

    @property
    def parametrisation(self) -> Parametrisation:
        return self._parametrisation

    @property
    def params(self) -> dict[str, Float64]:
        return self._params

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}{leaf.shape}" for name, leaf in self._params.items())
        return f"ParametrisedLayer({type(self._parametrisation).__name__}, {shapes})"

    def replace(self, **changes: Any) -> ParametrisedLayer:
        kept: dict[str, Any] = {"metadata": self.metadata, "seen": self.seen}
        kept["params"] = self._params
        return type(self)(self._parametrisation, **(kept | changes))

    def save(self, path: str | Path) -> None:
        """Write the parameters by their names. Its kind of attention is code, and not in the file:
        `ParametrisedLayer(parametrisation, safetensors.numpy.load_file(path))` reads them."""
        kind = {"kind": "parameters", "parametrisation": type(self._parametrisation).__name__}
        storage.write_tensors(path, dict(self._params), self.metadata | kind)


def check_seen(seen: NDArray[Any]) -> None:
    """Refuse what are no hashes of examples."""
    if seen.dtype != np.uint64 or seen.ndim != 1:
        raise ValueError(
            f"seen has dtype {seen.dtype} and shape {seen.shape}: "
            "expected a list of uint64 hashes, as Examples.hashes returns them"
        )


def parameters_hash(layer: Layer) -> str:
    """SHA-256 of the parameters as 64-bit floats."""
    digest = hashlib.sha256()
    for leaf in layer.parameters().values():
        digest.update(np.ascontiguousarray(leaf, "<f8").tobytes())
    return digest.hexdigest()


@partial(compiled, static_argnums=0)
def _outputs(
    parametrisation: Parametrisation, params: Params, chunk: Chunk
) -> Float[Array, "b k e"]:
    return parametrisation.outputs(params, chunk)


def _chunk_size(n: int, work: int) -> int:
    """Powers of two, so that compiled programs are reused; few examples share one size, where that
    costs little. work: multiplications an example."""
    if jax.default_backend() != "cpu" and n <= 2048:
        return 256
    least = 1 << max(0, min(128, _LITTLE_WORK // work).bit_length() - 1)
    return max(least, 1 << max(0, n - 1).bit_length())
