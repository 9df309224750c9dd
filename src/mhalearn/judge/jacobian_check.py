"""A derivative check users can run: does the Jacobian predict small changes of the layer?"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_inputs
from mhalearn.layer.attention import attend, forward, jvp, logits, stacked_heads, tangent, vjp
from mhalearn.layer.batches import make_chunk
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer, by_matrices


@dataclass(frozen=True)
class JacobianCheck:
    """slope: of log |F(Theta + h D) - F - h J D| against log h, 2 for a right Jacobian.
    adjoint_error: relative disagreement of <J D, R> and <D, J^T R>.
    """

    slope: float
    adjoint_error: float
    steps: Float64
    errors: Float64
    ok: bool


@in_float64
def check_jacobian(
    layer: AttentionLayer | ProjectedLayer, X: ArrayLike, *, seed: int = 0
) -> JacobianCheck:
    """Check the Jacobian in Theta along a random direction by its Taylor remainder.

    The remainder must fall as h^2 where rounding does not yet show. If it is at rounding for every
    h (a layer that does not depend on Theta there), the check holds trivially.
    """
    layer = by_matrices(layer)
    tokens, lengths = check_inputs(X, layer.d)
    vector, bias = layer.key_vector is not None, layer.out_bias is not None
    chunk = make_chunk(tokens, lengths, key_vector=vector, out_bias=bias, causal=layer.causal)
    theta, w = jnp.asarray(layer.query_theta), jnp.asarray(layer.stacked_w)
    rng = generator(seed, Stream.JACOBIAN_CHECK)
    direction = jnp.asarray(rng.normal(size=theta.shape))
    # A unit step changes logits by one, whatever the units of the inputs.
    direction = direction / (float(jnp.sqrt(jnp.mean(logits(direction, chunk) ** 2))) or 1.0)
    at = tangent(attend(theta, chunk).p, stacked_heads(w, layer.n_heads, layer.d), chunk)
    base, change = forward(theta, w, chunk), jvp(at, chunk, direction)
    steps = np.geomspace(1e-1, 1e-4, 10)
    errors = np.array(
        [
            float(jnp.linalg.norm(forward(theta + h * direction, w, chunk) - base - h * change))
            for h in steps
        ]
    )
    visible = errors > 1e3 * np.finfo(float).eps * float(jnp.linalg.norm(base))
    slope = 2.0
    if visible.sum() >= 3:
        slope = float(np.polyfit(np.log(steps[visible]), np.log(errors[visible]), 1)[0])
    probe = jnp.asarray(rng.normal(size=change.shape))
    left = float(jnp.sum(change * probe))
    right = float(jnp.sum(direction * vjp(at, chunk, probe)))
    # Saturated attention has derivatives below the rounding of its outputs.
    size = float((jnp.linalg.norm(change) + jnp.linalg.norm(base)) * jnp.linalg.norm(probe)) or 1.0
    adjoint_error = abs(left - right) / size
    ok = abs(slope - 2.0) < 0.15 and adjoint_error < 1e-12
    return JacobianCheck(slope, adjoint_error, steps, errors, ok)
