"""The learner: rounds of starts, each round more patient, until one explains held-out examples."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn.data import Examples
from mhalearn.data.label_precision import label_precision
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.dense import Dense
from mhalearn.layer.layer import AttentionLayer
from mhalearn.learners.newton.annealing import LAST_STRENGTH, anneal_first_order
from mhalearn.learners.newton.continuation import (
    Task,
    anneal_ridge,
    descend_without_ridge,
    finish_with_direct_steps,
    ridge_at,
)
from mhalearn.learners.newton.crossover import KEPT, cross_starts
from mhalearn.learners.newton.factored import learn_factored
from mhalearn.learners.newton.head_count import choose_heads
from mhalearn.learners.newton.head_exchange import exchange_heads, keep_better, rescale_prior
from mhalearn.learners.newton.model_selection import ModelSelection, split_for_selection
from mhalearn.learners.newton.open_kinds import look_for_kind
from mhalearn.learners.newton.parametrised import learn_parametrised
from mhalearn.learners.newton.projected import learn_projected
from mhalearn.learners.newton.starts import Scales, estimate_scales, random_starts
from mhalearn.learners.options import NewtonOptions, Round
from mhalearn.run.checkpoint import generator_from, generator_words
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.damping import ROUNDING
from mhalearn.solvers.gauss_newton import (
    DIRECT,
    ITERATIVE,
    QUICK,
    State,
    StepOptions,
    init_dense,
    reset_damping,
)
from mhalearn.solvers.polish import MAX_FINISHING_UNKNOWNS, max_direct_unknowns, polish
from mhalearn.solvers.scaled_problem import Problem, make_problem

_DEFAULTS = NewtonOptions()
# The loss at which a sketch has done its part: what it leaves out, polishing on all examples adds.
_SKETCHED = 1e-21


class Hopping(NamedTuple):
    """Where a round stands between two hops."""

    hop: int  # made so far
    idle: int  # of them, since a start last got better
    state: State
    scales: Scales
    losses: NDArray[np.float64]  # before any hop
    rng: NDArray[np.uint64]


def learn_newton(
    examples: Examples,
    architecture: Architecture,
    run: Run,
    options: NewtonOptions = _DEFAULTS,
) -> Candidate:
    """Learn a layer with the given number of heads, or with as many as the examples ask for.

    `run.start` is a layer to descend from before any random start.
    Cost: O(n k m d (d + k + e)) a conjugate-gradient step, some hundred of them a start.
    Trust: a heuristic with no guarantee of success; what it returns is checked elsewhere.
    """
    exact = max(options.exact, label_precision(examples).floor ** 2)
    start = run.start if isinstance(run.start, AttentionLayer) else None

    def with_heads(count: int, rounds: tuple[Round, ...] | None = None) -> Candidate:
        asked = architecture.with_heads(count)
        train, select = split_for_selection(examples, asked, run.seed)
        problem = make_problem(train, Dense(asked))
        selection = ModelSelection(problem, select, run)
        ratio = train.n / examples.counting_limit(asked)
        rounds = rounds or _choose_rounds(ratio, problem, options)
        if start is not None and start.n_heads == count:
            selection.offer(polish(start, problem, run).layer)
        descend = partial(
            run_rounds,
            selection=selection,
            exact=exact,
            trusting=ratio >= options.trusting_ratio,
            run=run,
            options=options,
        )
        few = sketch_size(train, asked, options)
        if few < train.n:
            part = make_problem(train.subset(slice(0, few)), Dense(asked))
            descend(part, rounds[:1], stage="subsample")
        return selection.candidate(descend(problem, rounds))

    def attempt(count: int, patient: bool) -> tuple[Candidate, float]:
        work = partial(with_heads, count, None if patient else options.brief)
        candidate = run.once(f"{count} heads, {'patient' if patient else 'brief'}", work)
        return candidate, candidate.loss

    if architecture.attention is not None:
        return learn_parametrised(examples, architecture, exact, run)
    look = partial(look_for_kind, examples, architecture, run, exact)
    if not architecture.is_plain:
        return learn_projected(examples, architecture, exact, run, look)
    if architecture.prefers_factors:
        return learn_factored(examples, architecture, exact, run)
    if architecture.n_heads is None:
        return choose_heads(attempt, most_heads(examples, architecture), exact, run)
    # Below the counting limit no effort helps.
    if examples.n < examples.counting_limit(architecture):
        most = min(architecture.n_heads, most_heads(examples, architecture))
        return with_heads(most, options.plenty[:1])
    candidate = with_heads(architecture.n_heads)
    other = look(candidate.loss)
    return candidate if other is None else replace(candidate, instead=other.layer)


def _choose_rounds(ratio: float, problem: Problem, options: NewtonOptions) -> tuple[Round, ...]:
    if ratio > options.scarce_ratio:
        return options.plenty
    if not problem.on_host:
        return options.scarce
    return options.scarce[:2] + options.sweep + options.scarce[2:]


def run_rounds(
    problem: Problem,
    rounds: tuple[Round, ...],
    *,
    selection: ModelSelection,
    exact: float,
    trusting: bool,
    run: Run,
    options: NewtonOptions = _DEFAULTS,
    stage: str = "round",
) -> Outcome:
    """Offer every start's end point to the selection; stop at the first one that is exact.

    With noise none is; `trusting`, the lowest loss found twice is taken for the lowest there is.
    """
    n_heads = problem.architecture.heads
    if problem.energy == 0.0:
        selection.offer(problem.zero_layer(n_heads))
        return Outcome.FITTED
    scales = estimate_scales(problem)

    def done() -> bool:
        return selection.loss < exact or run.is_over()

    losses: list[float] = []
    for number, round_ in enumerate(rounds):
        name = f"{stage} {number + 1}"
        if not run.checkpoint.begun(name) and (
            done() or (trusting and found_twice(losses, options.same_minimum))
        ):
            break
        task = Task(
            problem,
            run,
            selection.offer_starts,
            options=_choose_steps(number, problem),
            show=selection.show_starts,
            enough=_SKETCHED if stage == "subsample" else ROUNDING,
        )
        theta = random_starts(problem, round_.n_starts, run.seed, number)
        rng = generator(run.seed, Stream.HEAD_EXCHANGE, number)
        prior = scales._replace(theta=round_.theta_scale or scales.theta)
        work = partial(run_round, round_, theta, task, prior, done, rng, options, stage=name)
        with one_lapack_thread():  # starts are made side by side
            losses += run.checkpoint.once(name, work).tolist()
    if selection.layer is None:
        selection.offer(problem.zero_layer(n_heads))
        return Outcome.TIME_LIMIT if run.is_over() else Outcome.NONFINITE
    return Outcome.TIME_LIMIT if run.is_over() and selection.loss >= exact else Outcome.FITTED


def run_round(
    round_: Round,
    theta: NDArray[np.float64],
    task: Task,
    scales: Scales,
    done: Callable[[], bool],
    rng: np.random.Generator,
    options: NewtonOptions = _DEFAULTS,
    *,
    stage: str,
) -> NDArray[np.float64]:
    """Anneal the starts (s, m, q, d) and let them go; where it pays, trade heads and try again.

    Returns the losses the starts came to before they traded.
    """
    problem, checkpoint = task.problem, task.run.checkpoint
    any_rank = problem.architecture.head_dim is None
    finishing = theta[0].size <= MAX_FINISHING_UNKNOWNS and any_rank

    def release_ridge(shaped: State, scales: Scales, stage: str) -> NDArray[np.float64]:
        state = anneal_ridge(
            reset_damping(shaped),
            task,
            scales,
            _release_ridges(round_),
            stage=f"{stage}, ridge release",
        )
        state = descend_without_ridge(state, task, stage=f"{stage}, no ridge")
        if finishing and not task.run.is_over():
            finish_with_direct_steps(state, task, stage=f"{stage}, direct steps")
        return np.asarray(state.loss)

    def descend_all() -> Hopping:
        moved = theta
        if round_.crossovers:
            moved = cross_starts(
                theta,
                problem,
                task.run,
                scales,
                round_.crossovers,
                rng,
                stage=f"{stage}, crossover",
            )
        if round_.first_order_steps:
            name = f"{stage}, first-order annealing"
            moved = anneal_first_order(
                theta, problem, task.run, scales, round_.first_order_steps, stage=name
            )
        state = anneal_ridge(
            init_dense(moved, problem), task, scales, _anneal_ridges(round_), stage=stage
        )
        return Hopping(
            0, 0, state, scales, release_ridge(state, scales, stage), generator_words(rng)
        )

    def hop(now: Hopping, name: str) -> Hopping:
        rng = generator_from(now.rng)
        scales = rescale_prior(now.scales, now.state, round_.prior)
        fresh = init_dense(exchange_heads(now.state, rng), problem)
        trial = anneal_ridge(fresh, task, scales, _hop_ridges(round_), stage=name)
        ridge = ridge_at(round_.final_ridge, scales, problem)
        state, any_better, lowest = keep_better(now.state, trial, ridge)
        if lowest:
            release_ridge(trial, scales, name)
        idle = 0 if any_better else now.idle + 1
        return Hopping(now.hop + 1, idle, state, scales, now.losses, generator_words(rng))

    begun = init_dense(theta[:KEPT] if round_.crossovers else theta, problem)
    nothing = Hopping(0, 0, begun, scales, np.asarray(begun.loss), generator_words(rng))
    now: Hopping | None = checkpoint.recall("hops", like=nothing)
    if now is None:
        with checkpoint.within("descent"):
            now = descend_all()
        checkpoint.record("hops", now)
    while now.hop < round_.hops:
        name = f"{stage}, head exchange {now.hop + 1}"
        if not checkpoint.begun(name) and (done() or now.idle >= options.idle_hops):
            break
        with checkpoint.within(name):
            now = hop(now, name)
        checkpoint.record("hops", now)
    return now.losses


def _anneal_ridges(round_: Round) -> NDArray[np.float64]:
    """Strengths of the ridge along the continuation, from where the round begins."""
    first = LAST_STRENGTH if round_.first_order_steps else 3.0
    return np.geomspace(first, round_.final_ridge, round_.anneal_steps)


def _hop_ridges(round_: Round) -> NDArray[np.float64]:
    """The same after heads were traded, which begins nearer to the end."""
    return np.geomspace(1.0, round_.final_ridge, 25)


def _release_ridges(round_: Round) -> NDArray[np.float64]:
    """From the end of the continuation to hardly any ridge."""
    return np.geomspace(round_.final_ridge, 1e-5, round_.release_steps + 1)[1:]


def _choose_steps(number: int, problem: Problem) -> StepOptions:
    """The first round looks quickly; where unknowns are few, later ones take direct steps."""
    if number == 0:
        return QUICK
    architecture = problem.architecture
    unknowns = architecture.heads * architecture.query_dim * architecture.d
    few = unknowns <= max_direct_unknowns() and architecture.head_dim is None
    return DIRECT if few else ITERATIVE


def found_twice(losses: list[float], same: float = _DEFAULTS.same_minimum) -> bool:
    """Whether two starts ended at the lowest loss, up to the given part of it."""
    low = sorted(loss for loss in losses if np.isfinite(loss))[:2]
    return len(low) == 2 and low[1] <= (1 + same) * low[0]


def sketch_size(
    examples: Examples, architecture: Architecture, options: NewtonOptions = _DEFAULTS
) -> int:
    """How many examples a first round needs: all of them, unless there are plenty."""
    k, d, e = examples.k, examples.d, examples.out_dim
    work = examples.n * k * architecture.heads * d * (d + k + e)
    few = int(np.ceil(options.sketch_ratio * examples.counting_limit(architecture)))
    return few if work > options.sketch_work and 2 * few <= examples.n else examples.n


def most_heads(examples: Examples, architecture: Architecture) -> int:
    """The largest head count the examples could determine; at least one."""
    most = 1
    while examples.counting_limit(architecture.with_heads(most + 1)) <= examples.n:
        most += 1
    return most
