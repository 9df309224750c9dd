"""The fitting problem in the solver's own units: scaled, padded, cut into chunks, in float64."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import devices
from mhalearn._runtime.programs import in_float64, on_device
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.batches import Chunk, make_chunk, pack_sequences
from mhalearn.layer.dense import Dense
from mhalearn.layer.factored import Factored
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.layer.units import Units
from mhalearn.solvers.host_steps import Point, Rows, make_rows
from mhalearn.solvers.last_step import Memory

# Doubles a chunk's intermediates may hold on a device, where the normal matrix is formed: 128 MiB
# on a CPU.
WORKSPACE = 2**24
# Share of tokens that are no padding below which sequences are packed, several in a row.
_FULL = 0.8
# Multiplications of a forward pass up to which twice as many take less time than to compile.
_LITTLE_WORK = 1e7
# Unknowns of Theta and multiplications of a direct step up to which it is left to NumPy.
_FEW_UNKNOWNS, _LITTLE_HOST_WORK = 512, 3e8


@dataclass(frozen=True)
class Problem:
    """Examples of one shape, with tokens and labels near unit size."""

    # With a leading chunk axis; over many devices, each has its own examples; of NumPy `on_host`.
    data: Chunk
    parametrisation: Parametrisation  # how layers are written here
    units: Units
    k: int
    rows: int  # rows that count
    energy: float  # sum of squared scaled labels over those rows
    devices: int = 1  # over which the examples are spread

    @property
    def architecture(self) -> Architecture:
        return self.parametrisation.architecture

    @cached_property
    def on_host(self) -> bool:
        """Whether NumPy takes direct steps in less time than a program for them compiles."""
        a = self.architecture
        if not isinstance(self.parametrisation, Dense) or a.head_dim is not None:
            return False
        width, unknowns = a.heads * a.d, a.heads * a.d * a.query_dim
        work = self.rows * unknowns * width * (a.query_dim + a.outputs)
        alone = self.devices == devices.n_processes() == 1 and jax.default_backend() == "cpu"
        return alone and unknowns <= _FEW_UNKNOWNS and work <= _LITTLE_HOST_WORK

    @cached_property
    def host_rows(self) -> Rows:
        return make_rows(self.data)

    @cached_property
    def host_points(self) -> dict[int, Point]:
        """Where steps on the host last ended, start by start: their patterns are at hand."""
        return {}

    @cached_property
    def last_step(self) -> Memory:
        """Where the last step on a device ended."""
        return Memory()

    @property
    def d(self) -> int:
        return self.architecture.d

    @property
    def out_dim(self) -> int:
        return self.architecture.outputs

    @property
    def bias(self) -> bool:
        return self.architecture.bias

    @property
    def query_dim(self) -> int:
        return self.architecture.query_dim

    def count_sequences(self) -> int:
        """Rows of k tokens that hold any; a row may hold several short sequences."""
        return int(np.asarray(devices.replicate(self.data.weight)).any(axis=-1).sum())

    def to_layer(self, params: Params) -> Any:
        """The layer that parameters stand for, in the user's units."""
        return self.parametrisation.to_layer(params, self.units)

    def layer(self, theta: Float64, w: Float64) -> AttentionLayer:
        """Solver units (m, q, d), (p, e) -> the layer in the user's units."""
        return self.units.layer(theta, w, self.architecture)

    def zero_layer(self, n_heads: int) -> AttentionLayer:
        width = n_heads * self.d + self.bias
        return self.layer(
            np.zeros((n_heads, self.query_dim, self.d)), np.zeros((width, self.out_dim))
        )

    def zero_layer_like(self, layer: Layer) -> Any:
        """What zero labels ask for: no attention, no projection, where that is a layer."""
        return self.zero_layer(layer.n_heads) if isinstance(layer, AttentionLayer) else layer

    def theta(self, layer: AttentionLayer) -> Float64:
        """The attention parameters (m, q, d) of a layer, in solver units."""
        return self.units.theta(layer, self.bias)

    def w(self, layer: AttentionLayer) -> Float64:
        """The stacked projections (p, e) of a layer, in solver units."""
        return self.units.w(layer, self.bias)


@in_float64
def make_problem(examples: Examples, parametrisation: Parametrisation) -> Problem:
    """Bring examples into solver units. Memory: one float64 copy of the examples, padded.

    The number of examples is padded to three leading bits, or to a power of two where that costs
    little, so that fits of nearly the same size share one compiled program.
    Sequences of different lengths that are moved by factors are packed, several in a row, which
    saves what padding would cost.
    Where it pays (`devices.how_many`) the examples are spread over all devices: each process
    brings its own, and pads them to as many as the largest share.
    """
    n, k, d, out_dim = examples.n, examples.k, examples.d, examples.out_dim
    architecture, dense = parametrisation.architecture, isinstance(parametrisation, Dense)
    n_heads, bias = architecture.n_heads or 1, architecture.bias
    over = devices.count_useful_devices(n * k * n_heads * d * (d + k + out_dim))
    processes = devices.n_processes() if over > 1 else 1
    x, y, lengths = (examples.mine() if over > 1 else examples).arrays()
    most = int(np.diff(examples.bounds).max()) if over > 1 else n
    inside = np.arange(k) < lengths[:, None]
    rows, x_squares, y_squares = _sums(x, y, inside, processes)
    x_scale = y_scale = 1.0
    if parametrisation.scales and not examples.columns.marked:  # a mark is no feature
        x_scale = _power_of_two_near(np.sqrt(x_squares / (rows * d)))
        y_scale = _power_of_two_near(np.sqrt(y_squares / (rows * out_dim)))
    sequences = None
    if isinstance(parametrisation, Factored) and over == 1 and rows < _FULL * n * k:
        packing = pack_sequences(lengths, k)
        numbers = np.broadcast_to(np.arange(n)[:, None], (n, k))
        x, y, sequences = (packing.place(part, lengths) for part in (x, y, numbers))
        lengths, most = packing.used(lengths), packing.rows
    query_dim, width = d + bias, n_heads * d + bias
    # Of a row; the products C_i W_i are there three times, as a sum, centred and transposed.
    held = (n_heads * d) ** 2 + 3 * n_heads * d * out_dim + query_dim * (width + query_dim)
    if not dense:
        held = n_heads * (k + 2 * d + out_dim)
    little = most * k * n_heads * d * (d + k + out_dim) <= _LITTLE_WORK
    padded, here = _few_bits_above(most, 1 if little else 3), over // processes
    chunks = -(-padded * k * held // (on_device(WORKSPACE) * here))
    size = here * -(-padded // (chunks * here))
    parts = [
        make_chunk(
            x[start : start + size] / x_scale,
            lengths[start : start + size],
            key_vector=bias,
            out_bias=bias,
            causal=architecture.causal,
            labels=y[start : start + size] / y_scale,
            size=size,
            sequences=None if sequences is None else sequences[start : start + size],
            columns=examples.columns,
        )
        for start in range(0, size * chunks, size)
    ]
    data: Chunk = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
    problem = Problem(
        data=data,
        parametrisation=parametrisation,
        units=Units(x_scale, y_scale),
        k=k,
        rows=int(rows),
        energy=y_squares / y_scale**2,
        devices=over,
    )
    if problem.on_host:
        return problem
    # Batches are drawn from each device's examples: it should have as many as the others.
    place = partial(_spread, turns=1 if dense else here) if over > 1 else jnp.asarray
    return replace(problem, data=jax.tree.map(place, data))


def _sums(
    x: NDArray[Any], y: NDArray[Any], inside: NDArray[np.bool_], processes: int
) -> NDArray[np.float64]:
    """Rows that count, and the squares of their tokens and labels, over all processes."""
    rows = [
        np.einsum("nkd,nkd->nk", part, part, dtype=np.float64, casting="unsafe") for part in (x, y)
    ]
    sums = np.array([inside.sum(), *(float(squares[inside].sum()) for squares in rows)])
    return devices.sum_over_processes(sums) if processes > 1 else sums


def _spread(leaf: NDArray[Any], turns: int) -> Any:
    """Examples over all devices: one part after the other, or dealt out in turns."""
    chunks, size, *rest = leaf.shape
    dealt = leaf.reshape(chunks, size // turns, turns, *rest).swapaxes(1, 2)
    return devices.shard_examples(dealt.reshape(leaf.shape))


def _power_of_two_near(value: float) -> float:
    return float(2.0 ** np.round(np.log2(value))) if value > 0 else 1.0


def _few_bits_above(n: int, bits: int) -> int:
    """The least number of so many leading bits that is no less than n."""
    step = 1 << max(0, (n - 1).bit_length() - bits)
    return -(-n // step) * step
