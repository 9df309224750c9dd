"""The letters every array shape in mhalearn is written with.

n  examples          k  tokens of an example (r: the query token, j: a key token)
d  features          e  output features
m  heads             q  query features: d, or d + 1 when a key-side vector is learned
c  chunks            b  examples in a chunk
s  starts            p  columns of the design: m d, or m d + 1 when an output bias is learned
"""

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

__all__ = ["Array", "Bool", "Float", "Float64", "Int", "Shaped"]
