"""What people would use instead of the exact solver, done fairly: Adam, L-BFGS, linear attention.

Each module has one learner, `learn`. This file holds what they share: the student and its random
start, its loss, the loop around an optimiser, and the choice among starts by examples that were not
used to fit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mhalearn._types import Array, Float
from mhalearn.attention import Chunk, float64, gathered, residual, total
from mhalearn.devices import known
from mhalearn.examples import Examples
from mhalearn.journal import from_arrays, to_arrays
from mhalearn.layer import AttentionLayer
from mhalearn.outcome import Outcome, Solution, Trace
from mhalearn.problem import Problem, make_problem

# Parameters by name: w, and theta or its factors query and key; `expand` reads them.
Student = dict[str, Array]

# Keeps students' random numbers apart from teachers': a student drawn like its teacher starts at
# the truth and proves nothing.
_ROOT = 0xBA5E
_HELD_OUT = 8  # one example in so many chooses among the starts
ENOUGH = 1e-12  # held-out error (squared, relative) at which no further start is made
_LOST = 0.5  # held-out error above which nothing was learned
# Doubles a gradient may hold at once: 128 MiB.
_WORKSPACE = 2**24
_LEAST_EXAMPLES = 64  # in a mini-batch, whatever the workspace

# Multiplications of forward passes between two looks at the clock, some hundredths of a second, and
# the fewest and most steps. Not by the clock itself: where blocks end decides where descent does.
_WORK = 2e8
_LEAST_BLOCK, _MOST_BLOCK = 8, 1024

# Norm of a random Theta_i, in units where a token's feature has unit size. From 0.1 to 2 Adam did
# equally well at ten times the counting limit, and 6 lost heads; in six runs at three times the
# limit 0.3 succeeded more often than 1 and 3, which is thin evidence.
_THETA_NORM = 0.3


def student_rng(seed: int, *place: int) -> np.random.Generator:
    return np.random.default_rng([seed, _ROOT, *place])


def hold_out(examples: Examples, seed: int, limit: float) -> tuple[Examples, Examples]:
    """Examples to fit and examples to choose by; the same ones where none can be spared.

    limit: examples below which no method could determine the layer.
    """
    order = student_rng(seed).permutation(examples.n)
    count = max(1, examples.n // _HELD_OUT)
    if examples.n - count < max(1, 1.5 * limit):
        return examples, examples
    return examples.subset(np.sort(order[count:])), examples.subset(np.sort(order[:count]))


def relative_error(layer: AttentionLayer, examples: Examples) -> float:
    """Squared error over squared labels, recomputed from the layer in the user's units."""
    wrong = right = 0.0
    for x, y, lengths in examples.chunks(1024):
        inside = (np.arange(examples.k) < lengths[:, None])[..., None]
        labels = y.astype(np.float64) * inside
        wrong += float(np.sum((layer(x, lengths) - labels) ** 2))
        right += float(np.sum(labels**2))
    return wrong / right if right > 0 else wrong


def random_student(
    problem: Problem, n_heads: int, head_dim: int | None, rng: np.random.Generator
) -> Student:
    """A random start: Theta_i of norm 0.3, and W_i such that outputs have the size of the labels.

    With `head_dim` = h, Theta_i = A_i B_i^T / sqrt(h), a key-side vector being one more row of A_i.
    """
    m, q, d, e = n_heads, problem.query_dim, problem.d, problem.out_dim
    theta, w = _THETA_NORM / d, 1 / math.sqrt(m * d)  # sizes of an entry

    def draw(size: float, *shape: int) -> Array:
        return jnp.asarray(size * rng.standard_normal(shape))

    student: Student = {}
    if head_dim is None:
        student["theta"] = draw(theta, m, q, d)
    else:
        student["query"] = draw(math.sqrt(theta), m, q, head_dim)
        student["key"] = draw(math.sqrt(theta), m, d, head_dim)
    student["w"] = draw(w, m * d + problem.bias, e)
    return student


def expand(student: Student) -> tuple[Float[Array, "m q d"], Float[Array, "p e"]]:
    """The attention and the stacked projections a student stands for."""
    if "theta" in student:
        return student["theta"], student["w"]
    query, key = student["query"], student["key"]
    return jnp.einsum("mqh,mdh->mqd", query, key) / math.sqrt(key.shape[-1]), student["w"]


def batches(problem: Problem, n_heads: int) -> Chunk:
    """The problem's examples cut for gradients, which need less room than normal equations."""
    if problem.data.weight.shape[0] == 1:
        return problem.data
    if problem.devices > 1:
        return gathered(problem.data, n_heads, problem.devices)
    k, d = problem.k, problem.d
    n = math.prod(problem.data.weight.shape[:2])
    flat = jax.tree.map(lambda leaf: leaf.reshape(n, *leaf.shape[2:]), problem.data)
    most = max(_LEAST_EXAMPLES, _WORKSPACE // (k * n_heads * (3 * k + 4 * d)))
    count = -(-n // most)
    size = -(-n // count)
    missing = size * count - n

    def cut(leaf: Array) -> Array:
        # Repeats of the last example, not zeros: a softmax needs a key. Their weight is zero.
        padded = jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)])
        return padded.reshape(count, size, *leaf.shape[1:])

    counts = jnp.arange(size * count).reshape(count, size, 1) < n
    cuts: Chunk = jax.tree.map(cut, flat)
    return cuts._replace(weight=jnp.where(counts, cuts.weight, 0.0))


def value_and_gradient(student: Student, data: Chunk, energy: Array) -> tuple[Array, Student]:
    """Relative squared error and its gradient. Memory: one chunk's, forward and back."""

    def squared(student: Student, chunk: Chunk) -> Array:
        return jnp.sum(residual(*expand(student), chunk) ** 2) / energy

    return total(lambda chunk: jax.value_and_grad(squared)(student, chunk), data)


@jax.jit
def relative_loss(student: Student, data: Chunk, energy: Array) -> Array:
    return total(lambda chunk: jnp.sum(residual(*expand(student), chunk) ** 2) / energy, data)


@dataclass(frozen=True)
class Run:
    """What every start of a run shares."""

    problem: Problem
    data: Chunk  # the problem's examples, cut for gradients
    energy: Array
    goal: float  # relative training error at which a start stops
    trace: Trace

    def layer(self, student: Student) -> AttentionLayer:
        theta, w = expand(student)
        return self.problem.layer(np.asarray(theta), np.asarray(w))

    def keep(self, student: Student, loss: float) -> None:
        """Give the trace what is known so far, not more often than is worth its cost."""
        if loss < 0.5 * self.trace.best_loss:
            self.trace.keep(self.layer(student), loss)


class Descent(NamedTuple):
    """Where a start ended: its last finite student, and whether it stayed finite."""

    student: Student
    loss: float
    finite: bool


class Walk(NamedTuple):
    """An optimiser on its way."""

    student: Student
    memory: Any  # the optimiser's own
    step: Array
    loss: Array  # of the batch that the last step saw, before it


def descend_in_blocks(
    run: Run,
    advance: Callable[[Walk, Array], Walk],
    student: Student,
    memory: Any,
    *,
    stage: str,
    start: int,
    steps: int,
    least_gain: float,
) -> Descent:
    """Blocks of compiled steps, until the steps, the goal, the clock or a divergence ends it.

    advance(walk, until) makes steps up to number `until`, or to the goal. least_gain: the fraction
    of the loss a block must take off for another to follow.
    """
    journal = run.trace.journal
    walk = Walk(student, memory, jnp.asarray(0), jnp.asarray(math.inf))
    loss = float(relative_loss(student, run.data, run.energy))
    walk, loss = journal.recall("walk", like=(walk, loss)) or (walk, loss)
    student, step, block = walk.student, int(walk.step), _block(run, expand(student)[0].shape[0])
    while step < steps and loss > run.goal and not run.trace.expired:
        until = jnp.asarray(min(step + block, steps))
        walk = known(advance(walk._replace(loss=jnp.asarray(math.inf)), until))
        latest, step = float(relative_loss(walk.student, run.data, run.energy)), int(walk.step)
        at_hand = partial(run.layer, walk.student)
        run.trace.emit(stage, step, latest, at_hand=at_hand, start=start)
        if not math.isfinite(latest):
            return Descent(student, loss, False)
        gain = 1 - latest / loss
        student, loss = walk.student, latest
        run.keep(student, loss)
        if gain < least_gain:
            break
        journal.record("walk", (walk, loss))
    return Descent(student, loss, True)


def _block(run: Run, n_heads: int) -> int:
    """Steps between two looks at the clock."""
    k, d, e = run.problem.k, run.problem.d, run.problem.out_dim
    work = run.data.weight.size * n_heads * d * (d + k + e)
    return int(2 ** np.floor(np.log2(np.clip(_WORK / work, _LEAST_BLOCK, _MOST_BLOCK))))


class Candidate(NamedTuple):
    """A layer and its error on the examples held out."""

    layer: AttentionLayer
    error: float


def best_of_starts(
    descend: Callable[[Run, Student, int], Descent],
    examples: Examples,
    *,
    n_heads: int,
    bias: bool,
    causal: bool,
    head_dim: int | None,
    seed: int,
    starts: int,
    goal: float,
    trace: Trace,
    settings: dict[str, Any],
) -> Solution:
    """Descend from random starts one after the other; keep the best on held-out examples.

    No further start is made once one explains the held-out examples to 1e-12.
    """
    with float64():
        limit = examples.counting_limit(n_heads, bias, head_dim)
        training, held_out = hold_out(examples, seed, limit)
        problem = make_problem(training, n_heads, bias=bias, causal=causal)
        run = Run(
            problem=problem,
            data=batches(problem, n_heads),
            energy=jnp.asarray(problem.energy if problem.energy > 0 else 1.0),
            goal=goal,
            trace=trace,
        )
        best: Candidate | None = None
        finite = False
        for start in range(starts):
            student = random_student(problem, n_heads, head_dim, student_rng(seed, 1, start))

            def work(student: Student = student, start: int = start) -> dict[str, Any]:
                end = descend(run, student, start)
                layer = run.layer(end.student)
                error = relative_error(layer, held_out)
                rest = {"error": error, "loss": end.loss, "finite": end.finite}
                return to_arrays(layer) | rest

            needs = ("theta", "w", "causal", "error", "loss", "finite")
            end = trace.journal.once(f"start {start + 1}", work, needs)
            candidate = Candidate(from_arrays(end), end["error"])
            trace.keep(candidate.layer, end["loss"])
            trace.emit(
                "select", start, end["loss"], f"start {start + 1}", held_out_error=candidate.error
            )
            finite = finite or end["finite"]
            if best is None or candidate.error < best.error:
                best = candidate
            if best.error <= ENOUGH or trace.expired:
                break
    assert best is not None
    shared = {"n_heads": n_heads, "bias": bias, "causal": causal, "head_dim": head_dim}
    return conclude(best, finite, trace, shared | {"seed": seed, "starts": starts} | settings)


def conclude(best: Candidate, finite: bool, trace: Trace, settings: dict[str, Any]) -> Solution:
    """The provisional outcome; whether a layer is recovered is not for a learner to say."""
    short = best.error > ENOUGH
    if short and trace.expired:
        outcome, reason = Outcome.TIME_LIMIT, f"held-out error {best.error:.1e} when time was up"
    elif short and not finite:
        outcome, reason = Outcome.NONFINITE, "every start diverged"
    elif not best.error <= _LOST:
        outcome, reason = Outcome.STUCK, f"held-out error {best.error:.1e} after every start"
    else:
        outcome, reason = Outcome.FITTED, f"held-out error {best.error:.1e}, not certified"
    return Solution(best.layer, outcome, trace.events, reason, settings=settings)
