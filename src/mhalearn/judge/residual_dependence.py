"""Is what a layer leaves unexplained noise, or does it depend on the inputs?"""

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.layer.base import Layer

_MOST_ROWS = 1500
_FLIPS = 400


def residual_dependence_test(layer: Layer, examples: Examples, seed: int) -> float:
    """How many standard deviations the residuals' dependence on the inputs lies above noise.

    The statistic sum_{rows r != s} K(r, s) <residual_r, residual_s> is large when rows with similar
    inputs have similar residuals; under independent symmetric noise, flipping the signs of
    residuals leaves its distribution alone, which gives its spread. Four kernels are tried, and the
    largest value is returned: quadratic in the token and the mean token; that of linear attention,
    (x_r . x_s) <C, C'> with C the second moment of an example's tokens; and each of them between
    rows at the same position, less the average over positions: a layer does not count its tokens,
    a box may.
    Trust: a test with power against smooth structure, not against everything.
    Cost: O(rows^2 (d^2 + flips)) with at most 1500 rows.
    """
    part = examples.subset(slice(0, max(2, _MOST_ROWS // examples.k)))
    x, y, lengths = part.arrays()
    inside = np.arange(part.k) < lengths[:, None]
    tokens = x.astype(np.float64) * inside[..., None]
    residual = (layer(x, lengths) - y)[inside]
    mean = np.broadcast_to((tokens.sum(axis=1) / lengths[:, None])[:, None], tokens.shape)[inside]
    moment = np.einsum("njd,nje->nde", tokens, tokens) / lengths[:, None, None]
    moments = _standard(moment.reshape(part.n, -1), lengths)
    example = np.repeat(np.arange(part.n), lengths)
    rows = tokens[inside]
    products = residual @ residual.T
    signs = generator(seed, Stream.RESIDUAL_DEPENDENCE).choice(
        [-1.0, 1.0], size=(_FLIPS, len(rows))
    )
    together = np.hstack([_standard(rows), _standard(mean)])
    quadratic = (1 + together @ together.T / together.shape[1]) ** 2
    attention = (_standard(rows) @ _standard(rows).T) * (moments @ moments.T)[example][:, example]
    position = np.broadcast_to(np.arange(part.k), inside.shape)[inside]
    here = np.equal.outer(position, position) - 1 / part.k
    kernels = (quadratic, attention, here * quadratic, here * attention)
    return max(_excess(kernel, products, signs) for kernel in kernels)


def _standard(features: Float64, times: NDArray[np.int64] | None = None) -> Float64:
    """Features of mean zero and deviation one over rows, each of which counts so many times."""
    centred = features - np.average(features, axis=0, weights=times)
    spread = np.sqrt(np.average(centred**2, axis=0, weights=times))
    return centred / np.where(spread > 0, spread, 1.0)


def _excess(kernel: Float64, products: Float64, signs: Float64) -> float:
    weighted = kernel * products
    np.fill_diagonal(weighted, 0.0)
    flipped = np.einsum("fr,fr->f", signs @ weighted, signs)
    spread = float(flipped.std())
    return float((weighted.sum() - flipped.mean()) / spread) if spread > 0 else 0.0
