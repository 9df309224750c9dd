"""A linear-attention student, fitted by alternating least squares and read as a softmax layer.

To first order in Theta a softmax layer is its value at uniform attention plus its derivative there,

    y_r ~ xbar_r W_0 + sum_i x_r^T Theta_i C_r W_i + c

with xbar_r and C_r the mean and covariance of the tokens that r may see: attention linear in the
logits, as in Yau et al. (arXiv 2410.10101), who learn it in polynomial time. The student below has
m such heads; it is linear in Theta, and in (W_0, W_1, .., W_m, c), when the other is fixed.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime import devices
from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Array, Float
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.attention import LinearFit, fit_projections, jvp, logits, tangent, vjp
from mhalearn.layer.batches import Chunk, sum_over_chunks
from mhalearn.layer.dense import Dense
from mhalearn.learners.baselines.descent import DescentTask
from mhalearn.learners.baselines.starts import EXACT_ENOUGH, ScoredLayer, conclude, prepare
from mhalearn.learners.baselines.student import student_rng
from mhalearn.learners.options import LinearOptions
from mhalearn.run.checkpoint import to_arrays
from mhalearn.run.outcome import Candidate
from mhalearn.run.run import Run
from mhalearn.solvers.polish import relative_error

_DEFAULTS = LinearOptions()
# Norms of Theta_i tried when the student is read as a softmax layer, in units where a token's
# feature has unit size: first a few with every reading, then all of them with the best one.
_FEW_NORMS = (0.5, 2.0, 6.0)
_NORMS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
_READINGS = 32
_CG_STEPS = 50
_BLOCK = 10  # in one compiled block
_IDLE = 1e-3  # relative decrease of the objective over a block below which a start is done


@in_float64
def learn_linear(
    examples: Examples,
    architecture: Architecture,
    run: Run,
    options: LinearOptions = _DEFAULTS,
) -> Candidate:
    """Fit a linear-attention student, then read it as a softmax layer.

    A sweep solves for the projections exactly and improves Theta by conjugate gradients, so the
    objective (squared error over label energy, plus the ridge times the squares of all parameters)
    never rises. The student determines only the span of its Theta_i: any invertible mixing of them,
    undone in the W_i, changes nothing, the sign and size of a single head included. So random
    orthonormal bases of the span are read as heads, cut to rank `head_dim` where that is given and
    brought to norms from a small grid; W is fitted to the softmax patterns each time, and examples
    that were held out choose among norms and starts.
    Source: the student of Yau et al.; they solve a lifted convex problem and prove it right,
    alternating least squares from random starts is a heuristic, and so is the reading.
    Cost: about two forward passes a conjugate-gradient step, 50 of them a sweep, and a hundred
    least-squares fits of W a start.
    Trust: the student is the limit of a softmax layer as logits vanish, and exact for none. Expect
    one head's direction and roughly the span of several, not a small error: a start for polish.
    """
    head_dim = architecture.head_dim
    task, held_out = prepare(examples, Dense(architecture), run)
    d = task.problem.d
    shape = (architecture.heads, task.problem.query_dim, d)
    with one_lapack_thread():
        # Uniform attention explains some labels by itself: zeros, for one.
        best, finite, first = _read(np.zeros(shape), task, held_out), False, 0
        known = run.checkpoint.recall_layer("starts", "start", "error", "finite")
        if known is not None:
            layer, state = known
            best, finite, first = (
                ScoredLayer(layer, state["error"]),
                state["finite"],
                state["start"],
            )
        for start in range(first, options.starts):
            if best.error <= EXACT_ENOUGH:
                break
            rng = student_rng(run.seed, 2, start)
            theta = rng.standard_normal(shape) / d
            found = fit_student(
                theta,
                task.data,
                float(task.energy),
                options.sweeps,
                options.ridge,
                run,
                start=start,
            )
            if np.isfinite(found).all():
                finite = True
                heads = _choose_reading(found, task.data, head_dim, rng)
                read = (_read(at_norm(heads, norm, head_dim), task, held_out) for norm in _NORMS)
                best = min(best, *read, key=lambda candidate: candidate.error)
            if run.is_over():
                break
            rest = {"start": start + 1, "error": best.error, "finite": finite}
            run.checkpoint.record("starts", to_arrays(best.layer) | rest, now=True)
    return conclude(best, finite, run)


def _read(theta: NDArray[np.float64], task: DescentTask, held_out: Examples) -> ScoredLayer:
    """Attention with the projections that fit it best."""
    fit = devices.replicate(_fit_softmax(jnp.asarray(theta), task.data))
    layer = task.problem.layer(theta, np.asarray(fit.w))
    task.run.keep(layer, float(fit.loss) / float(task.energy))
    return ScoredLayer(layer, relative_error(layer, held_out))


@jax.jit
def _fit_softmax(theta: Float[Array, "m q d"], data: Chunk) -> LinearFit:
    return fit_projections(theta, data, jnp.asarray(0.0))


@jax.jit
def _softmax_losses(thetas: Float[Array, "s m q d"], data: Chunk) -> Float[Array, " s"]:
    return jax.lax.map(lambda theta: _fit_softmax(theta, data).loss, thetas)


def _choose_reading(
    theta: NDArray[np.float64], data: Chunk, head_dim: int | None, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Of random orthonormal bases of the span, the one that explains the labels best as heads."""
    m = theta.shape[0]
    basis = np.linalg.svd(theta.reshape(m, -1), full_matrices=False)[2]
    rotations = np.linalg.qr(rng.standard_normal((_READINGS, m, m)))[0]
    # QR's signs are not random; a head's sign is half of what is to be found.
    rotations *= rng.choice([-1.0, 1.0], size=(_READINGS, 1, m))
    readings = [(rotation @ basis).reshape(theta.shape) for rotation in rotations]
    tried = [at_norm(heads, norm, head_dim) for heads in readings for norm in _FEW_NORMS]
    losses = np.asarray(devices.replicate(_softmax_losses(jnp.asarray(np.stack(tried)), data)))
    return readings[int(np.nanargmin(losses)) // len(_FEW_NORMS)]


def at_norm(theta: NDArray[np.float64], norm: float, head_dim: int | None) -> NDArray[np.float64]:
    """Every head cut to rank `head_dim` and scaled to the given Frobenius norm."""
    u, s, vt = np.linalg.svd(theta, full_matrices=False)
    if head_dim is not None:
        s[:, head_dim:] = 0.0
    s *= norm / np.maximum(np.linalg.norm(s, axis=1, keepdims=True), 1e-300)
    return (u * s[:, None, :]) @ vt


class LinearStudent(NamedTuple):
    """Parameters of the student, and its loss and objective as a sweep left them."""

    theta: Float[Array, "m q d"]
    w: Float[Array, "p e"]  # W_0, the heads' W_i one under the other, and c where it is learned
    loss: Float[Array, ""]
    objective: Float[Array, ""]


def fit_student(
    theta: NDArray[np.float64],
    data: Chunk,
    energy: float,
    sweeps: int,
    ridge: float,
    run: Run,
    *,
    start: int = 0,
) -> NDArray[np.float64]:
    """Alternate until nothing improves, and return the student's Theta."""
    before = math.inf
    for step in range(0, sweeps, _BLOCK):
        weights = jnp.asarray(energy), jnp.asarray(ridge)
        swept = devices.replicate(_sweeps(jnp.asarray(theta), data, *weights))
        theta = np.asarray(swept.theta[-1])
        objectives = np.asarray(swept.objective)
        for i, (loss, objective) in enumerate(zip(np.asarray(swept.loss), objectives, strict=True)):
            run.emit("linear", step + i, float(loss), start=start, objective=float(objective))
        after = float(objectives[-1])
        if run.is_over() or not after < (1 - _IDLE) * before:
            break
        before = after
    return theta


@jax.jit
def _sweeps(
    theta: Float[Array, "m q d"], data: Chunk, energy: Array, ridge: Array
) -> LinearStudent:
    """A block of sweeps, all of them returned."""
    m, _, d = theta.shape
    penalty = ridge * energy

    def sweep(theta: Array, _: None) -> tuple[Array, LinearStudent]:
        w = _fit_linear_projections(theta, data, penalty)
        heads = w[d : d + m * d].reshape(m, d, -1)

        def unexplained(chunk: Chunk) -> Array:
            return vjp(
                tangent(_uniform(chunk, m), heads, chunk), chunk, _without_heads(w, chunk, m)
            )

        def apply(step: Array) -> Array:
            def there_and_back(chunk: Chunk) -> Array:
                at = tangent(_uniform(chunk, m), heads, chunk)
                return vjp(at, chunk, jvp(at, chunk, step))

            return sum_over_chunks(there_and_back, data) + penalty * step

        theta = jax.scipy.sparse.linalg.cg(
            apply, sum_over_chunks(unexplained, data), x0=theta, tol=1e-10, maxiter=_CG_STEPS
        )[0]

        def squared(chunk: Chunk) -> Array:
            at = tangent(_uniform(chunk, m), heads, chunk)
            return jnp.sum((_without_heads(w, chunk, m) - jvp(at, chunk, theta)) ** 2)

        loss = sum_over_chunks(squared, data) / energy
        return theta, LinearStudent(
            theta, w, loss, loss + ridge * (jnp.sum(theta**2) + jnp.sum(w**2))
        )

    return jax.lax.scan(sweep, theta, None, length=_BLOCK)[1]


def _uniform(chunk: Chunk, n_heads: int) -> Float[Array, "b k m k"]:
    """Every head attending evenly to the tokens a query may see."""
    p = chunk.allowed / jnp.sum(chunk.allowed, axis=-1, keepdims=True)
    return jnp.repeat(p[:, :, None], n_heads, axis=2)


def _mean(chunk: Chunk) -> Float[Array, "b k d"]:
    return jnp.einsum("brj,bjd->brd", _uniform(chunk, 1)[:, :, 0], chunk.tokens)


def _without_heads(w: Float[Array, "p e"], chunk: Chunk, n_heads: int) -> Float[Array, "b k e"]:
    """What the mean token and the bias leave for the heads to explain."""
    d = chunk.tokens.shape[-1]
    c = w[d + n_heads * d :]
    plain = _mean(chunk) @ w[:d] + chunk.constant @ c
    return (chunk.labels - plain) * chunk.weight[..., None]


def _fit_linear_projections(
    theta: Float[Array, "m q d"], data: Chunk, penalty: Array
) -> Float[Array, "p e"]:
    """Ridge regression of the labels on xbar_r, the C_r Theta_i^T x_r, and the constant."""
    m = theta.shape[0]

    def moments(chunk: Chunk) -> tuple[Array, Array]:
        b, k, d = chunk.tokens.shape
        p, scores = _uniform(chunk, m), logits(theta, chunk)
        centred = p * (scores - jnp.sum(p * scores, axis=-1, keepdims=True))
        heads = jnp.einsum("brmj,bjd->brmd", centred, chunk.tokens).reshape(b, k, m * d)
        v = jnp.concatenate([_mean(chunk), heads, chunk.constant], axis=-1)
        v = v * chunk.weight[..., None]
        return jnp.einsum("brp,brs->ps", v, v), jnp.einsum("brp,bre->pe", v, chunk.labels)

    gram, right = sum_over_chunks(moments, data)
    factor = jax.scipy.linalg.cho_factor(gram + penalty * jnp.eye(len(gram)))
    return jax.scipy.linalg.cho_solve(factor, right)
