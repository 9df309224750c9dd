"""How damped steps are judged: what counts as progress, as rounding, and as a good model."""

from typing import Any

import jax.numpy as jnp

# A relative squared error of this size is rounding: descent stops there.
ROUNDING = 1e-27
# Factors of this loss are not worth the programs of another descent.
NOTHING_LEFT = 1e-26
# A step that lowers the objective by less than this part is idle, and so many of them are the end.
IDLE, IDLE_STEPS = 1e-3, 4
# Bounds of the damping.
_LEAST_DAMPING, _MOST_DAMPING = 1e-12, 1e8


def update_damping(damping: Any, gain_ratio: Any, xp: Any = jnp) -> Any:
    """Levenberg-Marquardt update by the ratio of actual to predicted reduction.

    A step that was rejected, or is not finite, raises the damping; one near its model lowers it.
    xp: the module of the arrays, jax.numpy or numpy.
    """
    factor = xp.where(gain_ratio > 0.25, 0.2, 1.0)
    factor = xp.where(gain_ratio > 0, factor, 20.0)
    return xp.minimum(xp.maximum(damping * factor, _LEAST_DAMPING), _MOST_DAMPING)
