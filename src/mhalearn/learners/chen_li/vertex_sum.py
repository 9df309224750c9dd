"""Vertex certification: the sum of projections from rows on which all heads look at one token.

Where every head is saturated on token a the label is x_a W_sum. Such rows are far more frequent
than those of phase 2, and a rough sum finds them: their labels lie near one token's image.
All of it is ours; the literal plan does without.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.devices import shard_locally
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float, Float64
from mhalearn.data import Examples
from mhalearn.learners.chen_li.phase3_refined_sum import (
    MarginRows,
    RefinedSum,
    refine_projection_sum,
)
from mhalearn.learners.chen_li.streaming import Lowest, Watcher, spread, up_to_sign, walk
from mhalearn.learners.options import Constants

# Tokens whose image is shorter than this part of the typical one are near everything.
_SHORT = 1e-3


@jax.jit
def _distances(
    x: Array, y: Float[Array, "b k e"], total: Float[Array, "d e"]
) -> Float[Array, "b k j"]:
    """|y_r - x_a W|^2 / |x_a W|^2 for every row and token."""
    images = x.astype(total.dtype) @ total
    lengths = jnp.sum(images**2, axis=-1)
    onto = jnp.einsum("bre,bje->brj", y, images)
    apart = jnp.sum(y**2, axis=-1)[..., None] - 2 * onto + lengths[:, None]
    usable = lengths > _SHORT * jnp.mean(lengths)
    return jnp.where(usable[:, None], apart / jnp.maximum(lengths, 1e-300)[:, None], jnp.inf)


@in_float64
def find_vertices(
    examples: Examples, total: Float64, count: int, most: int, watch: Watcher | None = None
) -> Lowest:
    """The rows and tokens whose labels and images are nearest, of the first `most` examples."""
    nearest = Lowest(count)
    for part in walk(examples, most, watch):
        x, y = shard_locally(part.x), shard_locally(part.y)
        nearest.offer(np.asarray(_distances(x, y, total)), part)
    nearest.merge()
    return nearest


def score_by_vertices(
    examples: Examples, total: Float64, constants: Constants, *, watch: Watcher | None = None
) -> float:
    """Mean log distance of the nearest rows, over their images' length; lower for better sums.

    With the true sum saturated rows are as near as they are saturated, with a wrong one as far as
    it is wrong, so that scale and direction both tell.
    """
    count = constants.vertex_rows * examples.d
    nearest = find_vertices(examples, total, count, constants.compared, watch)
    if not len(nearest.values):
        return np.inf
    return float(0.5 * np.mean(np.log(np.maximum(nearest.values, 1e-24))))


def refine_by_vertices(
    examples: Examples, total: Float64, constants: Constants, *, watch: Watcher | None = None
) -> RefinedSum:
    """Keep the rows whose labels are nearest to a token's image, fit the sum to them robustly, and
    do so again with the better sum.

    Source: ours; phase 3's regression without its proxy. Cost: `vertex_rounds` passes over at most
    `vertex_examples` examples, O(n k^2 e) each.
    Trust: a heuristic; it needs saturated rows, and a start whose error is below the typical
    distance of two images. Phase 1 takes its result only where its rows are nearer.
    """
    k = examples.k
    count = constants.vertex_rows * examples.d
    refined = RefinedSum(total, np.zeros(0), 0.0, np.zeros(0))
    for _ in range(constants.vertex_rounds):
        nearest = find_vertices(
            examples,
            refined.estimate,
            2 * constants.margin_repeats * count,
            constants.vertex_examples,
            watch,
        )
        row, token = np.divmod(nearest.places % k**2, k)
        each = np.arange(len(row))
        tokens, labels = nearest.x[each, token].astype(np.float64), nearest.y[each, row]
        chosen = spread(up_to_sign(tokens), count, constants.margin_repeats)
        rows = MarginRows(tokens[chosen], labels[chosen], -nearest.values[chosen])
        refined = refine_projection_sum(rows, refined.estimate, constants=constants)
    return refined
