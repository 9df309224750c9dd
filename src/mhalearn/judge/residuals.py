"""What a layer leaves of labels, and whether that is no more than their rounding."""

import math
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import compiled
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.data import Examples
from mhalearn.data.label_precision import Precision, label_precision
from mhalearn.layer.base import Layer
from mhalearn.layer.batches import Chunk
from mhalearn.layer.parametrisation import Parametrisation, Params
from mhalearn.run.watch import Watch

# How much further from exact a single output column and the median example may be.
_PARTS = 10
# The same for the worst example, relative to the terms its labels are sums of. Boxes that compute
# in their labels' precision were seen at 1.2, with logits of some hundred.
_WORST = 2
# And for the worst row, which may hold fewer numbers than an example.
_WORST_ROW = 4
_DOUBLE = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Residuals:
    """The difference between a layer and labels, recomputed from scratch in float64."""

    squared: Float64  # of each example: |F - Y|^2
    relative: Float64  # of each example: |F - Y| / |Y|
    root_relative: float  # of all: |F - Y| / |Y|
    label_norm: float  # |Y|, or one where all labels vanish
    noise_level: float  # root mean square
    labels: Precision  # of the labels that were looked at
    rounding: float  # root_relative if nothing but the rounding of the labels is left
    exact: bool  # at the floor: as a whole, in every output column, example and row

    @property
    def precision(self) -> str:
        return self.labels.name

    @property
    def unit(self) -> float:
        return self.labels.unit

    @property
    def floor(self) -> float:
        return self.labels.floor


def measure_residuals(
    layer: Layer,
    examples: Examples,
    precision: Precision | None = None,
    *,
    watch: Watch | None = None,
) -> Residuals:
    """Walk over the examples in chunks; memory of one chunk.

    precision: of the labels, where it is known already; without, a pass over the labels finds it.
    watch: told how far the walk is; OutOfTime where that ends it.
    """
    wrong: list[Float64] = []
    energy: list[Float64] = []
    own: list[Float64] = []
    of_rows: list[Float64] = []
    rows, seen, columns, steps = 0, 0, np.zeros((3, examples.out_dim)), 0.0
    precision = precision or label_precision(examples)
    for x, y, lengths in examples.chunks(1024):
        inside = np.arange(examples.k) < lengths[:, None]
        steps += float(np.sum(precision.steps(y)[inside] ** 2))
        for part, (each, of_columns) in layer.over_chunks(_residual_sums, x, lengths, y):
            count = part.stop - part.start
            for sums, found in zip((wrong, energy, own, of_rows), each, strict=True):
                sums.append(found[:count])
            columns += of_columns
        rows += int(lengths.sum())
        seen += len(x)
        if watch is not None:
            watch(seen, examples.n)
    squared, labels, terms_of = np.concatenate(wrong), np.concatenate(energy), np.concatenate(own)
    # Where labels vanish, the error stands for itself.
    relative = np.sqrt(squared / np.where(labels > 0, labels, 1.0))
    whole = float(labels.sum()) or 1.0
    root_relative = float(np.sqrt(squared.sum() / whole))
    # A few huge labels must not hide what is wrong with all others, nor many good ones a few bad. A
    # column in which heads cancel holds nothing but their rounding, and where they were merged, so
    # did the sum of doubles.
    of_parts = _PARTS * precision.floor
    allowed = of_parts**2 * columns[1] + precision.unit**2 * columns[2] + _DOUBLE**2 * whole
    of_terms = np.sqrt(squared / np.where(terms_of > 0, terms_of, 1.0))
    exact = (
        root_relative <= precision.floor
        and bool(np.all(columns[0] <= allowed))
        and float(np.median(relative)) <= of_parts
        and float(np.max(of_terms)) <= _WORST * precision.floor
        and float(np.max(np.sqrt(np.concatenate(of_rows)))) <= _WORST_ROW * precision.floor
    )
    return Residuals(
        squared=squared,
        relative=relative,
        root_relative=root_relative,
        label_norm=math.sqrt(whole),
        noise_level=float(np.sqrt(squared.sum() / (rows * examples.out_dim))),
        labels=precision,
        rounding=math.sqrt(steps / 12 / whole),  # uniform within half a step either way
        exact=exact,
    )


@partial(compiled, static_argnums=0)
def _residual_sums(
    parametrisation: Parametrisation, params: Params, chunk: Chunk
) -> tuple[Float[Array, "4 b"], Float[Array, "3 e"]]:
    """Squared residuals, labels, and sizes of the terms that labels are sums of: summed over each
    example, with its worst row relative to its terms, and over each output column."""
    residual = parametrisation.outputs(params, chunk) - chunk.labels
    parts = jnp.stack([residual, chunk.labels, parametrisation.term_sizes(params, chunk)]) ** 2
    of_row = jnp.sum(parts, axis=3)
    relative = of_row[0] / jnp.where(of_row[2] > 0, of_row[2], 1.0)
    of_examples = jnp.concatenate([jnp.sum(of_row, axis=2), jnp.max(relative, axis=1)[None]])
    return of_examples, jnp.sum(parts, axis=(1, 2))
