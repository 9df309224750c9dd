"""Do the output columns of what a layer leaves go together, more than those of noise would?"""

import numpy as np

from mhalearn.data import Examples
from mhalearn.layer.base import Layer

_MOST_ROWS = 1500


def measure_residual_correlation(layer: Layer, examples: Examples) -> float:
    """Root mean square correlation of two output columns, over that of independent noise.

    One for noise that is independent between columns, of any size in each; a fit that takes part of
    the noise makes it up to one and a half from three times the counting limit on. What a wrong
    head leaves lies in the few directions of its W and gives two and a half or more. Zero where
    there is one column. Cost: a forward pass over at most 1500 rows, and their Gram matrix.
    Trust: a heuristic. Noise that one cause brings into all columns looks like structure here.
    """
    part = examples.subset(slice(0, max(2, _MOST_ROWS // examples.k)))
    x, y, lengths = part.arrays()
    inside = np.arange(part.k) < lengths[:, None]
    residual = (layer(x, lengths) - y)[inside]
    rows, columns = residual.shape
    gram = residual.T @ residual
    size = np.sqrt(np.diag(gram))
    if columns < 2 or not size.all():
        return 0.0
    correlations = (gram / np.outer(size, size))[np.triu_indices(columns, 1)]
    return float(np.sqrt(np.mean(correlations**2) * rows))
