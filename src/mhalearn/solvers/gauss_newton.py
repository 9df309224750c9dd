"""Damped Gauss-Newton with W eliminated, batched over starts, down to machine precision."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mhalearn._runtime.devices import replicate
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.attention import fit_projections
from mhalearn.layer.batches import Chunk, merge_chunks
from mhalearn.layer.factored import to_heads, to_layer
from mhalearn.layer.layer import AttentionLayer
from mhalearn.run.run import Run
from mhalearn.solvers.gauss_newton_factored import polish_heads
from mhalearn.solvers.scaled_problem import Problem, make_problem
from mhalearn.solvers.variable_projection import solve_reduced_normal_equations, tangent_projection

# Conjugate-gradient steps inside one Gauss-Newton step. Generic layers need about twenty; nearly
# equal heads use them all.
_CG_STEPS = 200
# With the exact factor as preconditioner they only make good for its rounding.
_DIRECT_CG_STEPS = 8
# Unknowns up to which a few of them are worth their price, to finish what is nearly exact.
MAX_FINISHING_UNKNOWNS = 2048
_NEARLY = 1e-10
# A relative squared error of this size is rounding: descent stops there.
ROUNDING = 1e-27


def max_direct_unknowns() -> int:
    """Unknowns of Theta up to which a direct step costs no more than a few of the others."""
    return 512 if jax.default_backend() == "cpu" else MAX_FINISHING_UNKNOWNS


class Ridge(NamedTuple):
    """Penalties on |Theta|^2 and |W|^2, in units of the problem's label energy."""

    theta: float
    w: float


NO_RIDGE = Ridge(0.0, 0.0)


class State(NamedTuple):
    """Starts on their way down."""

    theta: Float[Array, "*s m q d"]
    w: Float[Array, "*s p e"]
    loss: Float[Array, "*s"]  # |Y - F|^2 over the label energy, penalties left out
    damping: Float[Array, "*s"]
    idle: Float[Array, "*s"]  # steps since the objective last fell by more than a thousandth


@in_float64
def init_state(theta: ArrayLike, problem: Problem) -> State:
    """Starts (s, m, q, d) before their first step."""
    thetas = jnp.asarray(theta)
    s, m = thetas.shape[:2]
    return State(
        theta=thetas,
        w=jnp.zeros((s, m * problem.d + problem.bias, problem.out_dim)),
        loss=jnp.ones(s),
        damping=jnp.full(s, 1e-2, thetas.dtype),  # weakly typed, it would compile the step twice
        idle=jnp.zeros(s),
    )


@in_float64
def reset_damping(state: State) -> State:
    """The same starts with a fresh, light damping, for when the objective changes under them."""
    return state._replace(damping=jnp.full_like(state.loss, 1e-3), idle=jnp.zeros_like(state.loss))


@in_float64
def descend(
    state: State,
    problem: Problem,
    ridge: Ridge = NO_RIDGE,
    span: Float[Array, "s q d"] | None = None,
    *,
    direct: bool = False,
    single: bool = False,
) -> State:
    """One damped Gauss-Newton step of every start; the objective never rises.

    Theta stays of the architecture's rank, or in the span of the matrices `span`, where given.
    direct: factor the reduced normal matrix instead of approximating it. It costs more, much more
    with many unknowns, and goes on where saturated attention or near-equal heads stall the other.
    single: solve for the step in single precision, which is faster and mostly exact enough for a
    direction; residuals, W and the decision whether to take the step stay in double.

    Cost: some tens of forward passes a start. Memory: O(n k m (k + d + e)) a start, and with
    `direct` that of `normal.dense`.
    """
    # Side by side, twelve starts were seen to hang in XLA's CPU thread pool; fewer gain nothing.
    one_by_one = jax.default_backend() == "cpu"
    head_dim = problem.architecture.head_dim
    direct = direct and head_dim is None and span is None
    static = (head_dim, one_by_one, direct, single and not direct, problem.devices)
    return replicate(_step(state, problem.data, problem.energy, ridge, span, *static))


@partial(jax.jit, static_argnames=("head_dim", "one_by_one", "direct", "single", "devices"))
def _step(
    state: State,
    data: Chunk,
    energy: Array,
    ridge: Ridge,
    span: Float[Array, "s q d"] | None,
    head_dim: int | None,
    one_by_one: bool,
    direct: bool,
    single: bool,
    devices: int,
) -> State:
    max_steps = _DIRECT_CG_STEPS if direct else _CG_STEPS
    if not direct:
        data = merge_chunks(data, state.theta.shape[1], devices)
    if span is not None:  # there are only so many directions to search
        max_steps = 2 * state.theta.shape[1] * len(span)

    def step_one(state: State) -> State:
        theta = state.theta
        on_theta, on_w = ridge.theta * energy, ridge.w * energy
        fit = fit_projections(theta, data, on_w)
        before = fit.loss + on_theta * jnp.sum(theta**2)
        # Damping in proportion to the residual's norm keeps convergence quadratic on data that can
        # be fitted exactly (Fan & Yuan 2005).
        level = jnp.sqrt(jnp.minimum(1.0, before / energy))
        change = solve_reduced_normal_equations(
            theta,
            fit,
            data,
            ridge=on_theta,
            damping=state.damping * level,
            tolerance=jnp.clip(level, 1e-3, 1e-1),
            max_steps=max_steps,
            head_dim=head_dim,
            span=span,
            direct=direct,
            single=single,
        )
        trial = tangent_projection(theta, head_dim).retract(theta + change)
        trial_fit = fit_projections(trial, data, on_w)
        after = trial_fit.loss + on_theta * jnp.sum(trial**2)
        better = after < before
        kept = jax.tree.map(lambda new, old: jnp.where(better, new, old), trial_fit, fit)
        return State(
            theta=jnp.where(better, trial, theta),
            w=kept.w,
            loss=(kept.loss - on_w * jnp.sum(kept.w**2)) / energy,
            damping=jnp.clip(state.damping * jnp.where(better, 0.2, 20.0), 1e-12, 1e8),
            idle=jnp.where(after < 0.999 * before, 0.0, state.idle + 1),
        )

    return jax.lax.map(step_one, state) if one_by_one else jax.vmap(step_one)(state)


def has_converged(state: State) -> NDArray[np.bool_]:
    """Which starts have nothing left to gain: at rounding, idle for four steps, or not finite."""
    loss = np.asarray(state.loss)
    return (loss < ROUNDING) | (np.asarray(state.idle) >= 4) | ~np.isfinite(loss)


def best_start(state: State) -> int:
    return int(np.argmin(np.nan_to_num(np.asarray(state.loss), nan=np.inf)))


def best_layer(state: State, problem: Problem) -> AttentionLayer:
    """The start with the lowest loss, as a layer."""
    best = best_start(state)
    return problem.layer(np.asarray(state.theta)[best], np.asarray(state.w)[best])


def polish(
    layer: AttentionLayer,
    problem: Problem,
    run: Run,
    *,
    max_steps: int = 200,
) -> tuple[AttentionLayer, float]:
    """Descend from a layer until nothing improves; returns the layer and its relative loss.

    Trust: a stationary point of the training loss, to rounding. Not a certificate.
    """
    if problem.energy == 0.0:  # zero labels: no attention, no projection
        return problem.zero_layer(layer.n_heads), 0.0
    state = init_state(problem.theta(layer)[None], problem)
    direct = state.theta[0].size <= max_direct_unknowns()
    loss = float("inf")
    for step in range(max_steps):
        state, before = descend(state, problem, direct=direct), loss
        loss = float(state.loss[0])
        run.emit("polish", step, loss, at_hand=partial(best_layer, state, problem))
        if run.is_over():
            break
        if loss < ROUNDING and loss < before / 2:
            continue  # badly conditioned parameters gain even where the loss is rounding
        if has_converged(state).all():
            worth_it = ROUNDING < loss < _NEARLY and state.theta[0].size <= MAX_FINISHING_UNKNOWNS
            if direct or not worth_it:
                break
            direct, state = True, reset_damping(state)
    loss = float(state.loss[0])
    if not np.isfinite(loss):  # nothing to fit W to: a design of rank zero, say
        return layer, float("inf")
    return best_layer(state, problem), loss


def polish_on(
    examples: Examples, layer: AttentionLayer, architecture: Architecture, run: Run
) -> tuple[AttentionLayer, float]:
    """`polish` on examples within an architecture, by the heads' factors where ranks are low.

    Such heads that already fit to rounding are left as they are.
    """
    architecture = architecture.with_heads(layer.n_heads)
    factored = architecture.is_low_rank
    if factored and architecture.contains(layer):
        loss = relative_error(layer, examples)
        if loss < ROUNDING:
            return layer, loss
    problem = make_problem(examples, architecture, factored=factored)
    if not factored or problem.energy == 0.0:
        return polish(layer, problem, run)
    units = problem.units
    heads = to_heads(layer, architecture, units)
    heads, loss = polish_heads(heads, problem, run, stage="polish")
    return to_layer(heads, architecture, units), loss


def relative_error(layer: AttentionLayer, examples: Examples) -> float:
    """|Y - F|^2 over |Y|^2, in the user's units. Memory: that of one chunk of examples."""
    wrong = energy = 0.0
    for x, y, lengths in examples.chunks(1024):
        inside = np.arange(examples.k) < lengths[:, None]
        labels = y[inside].astype(np.float64)
        wrong += float(np.sum((layer(x, lengths)[inside] - labels) ** 2))
        energy += float(np.sum(labels**2))
    return wrong / (energy or 1.0)
