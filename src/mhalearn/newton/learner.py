"""The learner: rounds of starts, each round more patient, until one explains held-out examples."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn.examples import Examples
from mhalearn.journal import generator_from, generator_words
from mhalearn.layer import AttentionLayer
from mhalearn.narrow import is_narrow
from mhalearn.newton.choice import Choice, split_for_choice
from mhalearn.newton.continuation import Task, anneal, finish, free, ridge_at
from mhalearn.newton.exchange import better, exchanged, rescaled
from mhalearn.newton.head_count import choose_heads
from mhalearn.newton.many import Setting, guess_heads, learn_narrow
from mhalearn.newton.slide import LAST, slide
from mhalearn.newton.start import Scales, estimate_scales, random_starts
from mhalearn.outcome import Outcome, Solution, Trace
from mhalearn.polish import FINISHED, State, begin, freed, most_direct, polish
from mhalearn.precision import label_precision
from mhalearn.problem import Problem, make_problem

# Relative squared error on held-out examples that only the true function reaches, where their
# precision allows.
_EXACT = 1e-16


@dataclass(frozen=True)
class Round:
    """Starts that descend side by side: how they are annealed, and how often they trade heads."""

    n_starts: int
    anneal_steps: int
    shaped: float  # the ridge at which heads have taken shape
    release_steps: int = 0  # from there to hardly any, before the ridge is dropped
    slide_steps: int = 0  # of slow annealing before all others
    hops: int = 0
    prior: float = 1.0  # width of the prior on |Theta| that hops use, over what was learned so far

    @property
    def annealing(self) -> NDArray[np.float64]:
        return np.geomspace(LAST if self.slide_steps else 3.0, self.shaped, self.anneal_steps)

    @property
    def hopping(self) -> NDArray[np.float64]:
        return np.geomspace(1.0, self.shaped, 25)

    @property
    def releasing(self) -> NDArray[np.float64]:
        return np.geomspace(self.shaped, 1e-5, self.release_steps + 1)[1:]


class Hopping(NamedTuple):
    """Where a round stands between two hops."""

    hop: int  # made so far
    idle: int  # of them, since a start last got better
    state: State
    scales: Scales
    losses: NDArray[np.float64]  # before any hop
    rng: NDArray[np.uint64]


# Generic layers with a few times the counting limit of examples fall to the first round. With noise
# no loss is known to be the lowest: one patient start that agrees with the quick one tells.
PLENTY = (
    Round(1, 4, 1e-2),
    Round(1, 40, 1e-3, release_steps=8),
    Round(4, 40, 1e-3, release_steps=8),
    Round(5, 8, 1e-3, release_steps=8, slide_steps=12_000),
    Round(5, 60, 1e-3, release_steps=8),
)
# Near the counting limit patience pays: sixteen starts in all.
SCARCE = (
    Round(1, 4, 1e-2),
    Round(1, 40, 1e-3, release_steps=8),
    Round(4, 8, 1e-3, release_steps=8, slide_steps=12_000, hops=20),
    Round(5, 60, 1e-3, release_steps=8, hops=40, prior=1.3),
    Round(5, 8, 1e-3, release_steps=8, slide_steps=24_000, hops=400),
)
# Surplus heads make a lost head rare, so that a search for the head count can be brief.
BRIEF = (Round(1, 10, 1e-2), Round(1, 30, 1e-2))
# Times the counting limit up to which local minima abound and hopping pays.
_SCARCE = 3.0
# From which on two starts that agree are hardly ever both wrong.
_TRUSTING = 6.0
# Hops in which no start got better after which none will.
_IDLE_HOPS = 150
# Times the counting limit that is plenty for a first look, and multiplications a pass over the
# examples must cost for it to be worth its compilation.
_ENOUGH, _WORK = 4.0, 1e7
# Losses that differ by less than this part are those of one minimum.
_SAME = 1e-6


def learn(
    examples: Examples,
    *,
    n_heads: int | str,
    bias: bool,
    causal: bool,
    head_dim: int | None,
    seed: int,
    trace: Trace,
    start: AttentionLayer | None = None,
) -> Solution:
    """Learn a layer with the given number of heads, or with as many as the examples ask for.

    `start` is a layer to descend from before any random start.
    Cost: O(n k m d (d + k + e)) a conjugate-gradient step, some hundred of them a start.
    Trust: a heuristic with no guarantee of success; what it returns is checked elsewhere.
    """

    exact = max(_EXACT, label_precision(examples).floor ** 2)

    def with_heads(count: int, rounds: tuple[Round, ...] | None = None) -> Solution:
        fit, held = split_for_choice(examples, count, bias=bias, head_dim=head_dim, seed=seed)
        problem = make_problem(fit, count, bias=bias, causal=causal)
        choice = Choice(problem, held, trace)
        ratio = fit.n / examples.counting_limit(count, bias, head_dim)
        rounds = rounds or (SCARCE if ratio <= _SCARCE else PLENTY)
        if start is not None and start.n_heads == count:
            choice.offer(polish(start, problem, trace, head_dim=head_dim)[0])
        run = partial(
            run_rounds,
            choice=choice,
            exact=exact,
            trusting=ratio >= _TRUSTING,
            n_heads=count,
            head_dim=head_dim,
            seed=seed,
            trace=trace,
        )
        few = sketch_size(fit, count, bias=bias, head_dim=head_dim)
        if few < fit.n:
            part = make_problem(fit.subset(slice(0, few)), count, bias=bias, causal=causal)
            run(part, rounds[:1], stage="sketch")
        return choice.solution(run(problem, rounds))

    def attempt(count: int, patient: bool) -> tuple[Solution, float]:
        work = partial(with_heads, count, None if patient else BRIEF)
        solution = trace.once(f"{count} heads, {'patient' if patient else 'brief'}", work)
        return solution, solution.loss

    asked = None if isinstance(n_heads, str) else n_heads
    if head_dim is not None:
        heads = asked or guess_heads(examples.d, head_dim)
        if is_narrow(heads, examples.d, head_dim):
            setting = Setting(bias, causal, head_dim, seed)
            return learn_narrow(examples, asked, exact, setting, trace, start)
    if not isinstance(n_heads, str):
        # Below the counting limit no effort helps.
        if examples.n >= examples.counting_limit(n_heads, bias, head_dim):
            return with_heads(n_heads)
        most = most_heads(examples, bias=bias, head_dim=head_dim)
        return with_heads(min(n_heads, most), PLENTY[:1])
    most = most_heads(examples, bias=bias, head_dim=head_dim)
    return choose_heads(attempt, most, exact, trace)


def run_rounds(
    problem: Problem,
    rounds: tuple[Round, ...],
    *,
    choice: Choice,
    exact: float,
    trusting: bool,
    n_heads: int,
    head_dim: int | None,
    seed: int,
    trace: Trace,
    stage: str = "round",
) -> Outcome:
    """Offer every start's end point to the choice; stop at the first one that is exact.

    With noise none is; `trusting`, the lowest loss found twice is taken for the lowest there is.
    """
    if problem.energy == 0.0:
        choice.offer(problem.zero_layer(n_heads))
        return Outcome.FITTED
    scales = estimate_scales(problem, n_heads)
    unknowns = n_heads * problem.query_dim * problem.d

    def done() -> bool:
        return choice.loss < exact or trace.expired

    losses: list[float] = []
    for number, round_ in enumerate(rounds):
        name = f"{stage} {number + 1}"
        if not trace.journal.begun(name) and (done() or (trusting and found_twice(losses))):
            break
        task = Task(
            problem,
            trace,
            choice.offer_starts,
            head_dim,
            direct=number > 0 and unknowns <= most_direct(),
            single=number == 0,
            show=choice.show_starts,
        )
        theta = random_starts(problem, n_heads, round_.n_starts, seed, number)
        rng = np.random.default_rng([seed, 0x2E71, number])
        work = partial(run_round, round_, theta, task, scales, done, rng, stage=name)
        losses += trace.journal.once(name, work).tolist()
    if choice.layer is None:
        choice.offer(problem.zero_layer(n_heads))
        return Outcome.TIME_LIMIT if trace.expired else Outcome.NONFINITE
    return Outcome.TIME_LIMIT if trace.expired and choice.loss >= exact else Outcome.FITTED


def run_round(
    round_: Round,
    theta: NDArray[np.float64],
    task: Task,
    scales: Scales,
    done: Callable[[], bool],
    rng: np.random.Generator,
    *,
    stage: str,
) -> NDArray[np.float64]:
    """Anneal the starts (s, m, q, d) and let them go; where it pays, trade heads and try again.

    Returns the losses the starts came to before they traded.
    """
    problem, journal = task.problem, task.trace.journal
    finishing = theta[0].size <= FINISHED and task.head_dim is None

    def let_go(shaped: State, scales: Scales, stage: str) -> NDArray[np.float64]:
        state = anneal(freed(shaped), task, scales, round_.releasing, stage=f"{stage}, release")
        state = free(state, task, stage=f"{stage}, free")
        if finishing and not task.trace.expired:
            finish(state, task, stage=f"{stage}, finish")
        return np.asarray(state.loss)

    def descend_all() -> Hopping:
        moved = theta
        if round_.slide_steps:
            name = f"{stage}, slide"
            moved = slide(theta, problem, task.trace, scales, round_.slide_steps, stage=name)
        state = anneal(begin(moved, problem), task, scales, round_.annealing, stage=stage)
        return Hopping(0, 0, state, scales, let_go(state, scales, stage), generator_words(rng))

    def hop(now: Hopping, name: str) -> Hopping:
        rng = generator_from(now.rng)
        scales = rescaled(now.scales, now.state, round_.prior)
        fresh = begin(exchanged(now.state, rng), problem)
        trial = anneal(fresh, task, scales, round_.hopping, stage=name)
        ridge = ridge_at(round_.shaped, scales, problem)
        state, any_better, lowest = better(now.state, trial, ridge)
        if lowest:
            let_go(trial, scales, name)
        idle = 0 if any_better else now.idle + 1
        return Hopping(now.hop + 1, idle, state, scales, now.losses, generator_words(rng))

    begun = begin(theta, problem)
    nothing = Hopping(0, 0, begun, scales, np.asarray(begun.loss), generator_words(rng))
    now: Hopping | None = journal.recall("hops", like=nothing)
    if now is None:
        with journal.within("descent"):
            now = descend_all()
        journal.record("hops", now)
    while now.hop < round_.hops:
        name = f"{stage}, hop {now.hop + 1}"
        if not journal.begun(name) and (done() or now.idle >= _IDLE_HOPS):
            break
        with journal.within(name):
            now = hop(now, name)
        journal.record("hops", now)
    return now.losses


def found_twice(losses: list[float]) -> bool:
    """Whether two starts ended at the lowest loss."""
    low = sorted(loss for loss in losses if np.isfinite(loss))[:2]
    return len(low) == 2 and low[1] <= (1 + _SAME) * low[0]


def sketch_size(examples: Examples, n_heads: int, *, bias: bool, head_dim: int | None) -> int:
    """How many examples a first round needs: all of them, unless there are plenty.

    What explains a part of the examples exactly mostly explains all. Below the given work the
    program for another number of examples takes longer to compile than it saves.
    """
    k, d, e = examples.k, examples.d, examples.out_dim
    work = examples.n * k * n_heads * d * (d + k + e)
    few = int(np.ceil(_ENOUGH * examples.counting_limit(n_heads, bias, head_dim)))
    return few if work > _WORK and 2 * few <= examples.n else examples.n


def most_heads(examples: Examples, *, bias: bool, head_dim: int | None) -> int:
    """The largest head count the examples could determine; at least one."""
    most = 1
    while examples.counting_limit(most + 1, bias, head_dim) <= examples.n:
        most += 1
    return most
