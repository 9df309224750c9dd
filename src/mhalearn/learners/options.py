"""What can be set about each learner: frozen records whose defaults are documented with reasons.

Only the standard library is imported here, so that the command line knows the learners at once.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mhalearn.learners.protocol import Learner


def _check_counts(options: Any, *names: str, least: int = 1) -> None:
    for name in names:
        for value in _entries(options, name):
            try:
                count = operator.index(value)
            except TypeError:
                count = least - 1
            if count < least or isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: pass an integer of at least {least}")


def _check_positive(options: Any, *names: str, least: float | None = None) -> None:
    """Finite numbers above 0 or, with `least`, of at least that."""
    said = "a number above 0" if least is None else f"a number of at least {least:g}"
    for name in names:
        for value in _entries(options, name):
            try:
                known = math.isfinite(value) and not isinstance(value, bool)
            except TypeError:
                known = False
            if not (known and (value > 0 if least is None else value >= least)):
                raise ValueError(f"{name}={value!r}: pass {said}")


def _entries(options: Any, name: str) -> tuple[Any, ...]:
    """The value itself, or those of a tuple, which has as many as the default has."""
    value, usual = getattr(options, name), type(options).__dataclass_fields__[name].default
    if isinstance(usual, tuple):
        if not (isinstance(value, tuple) and len(value) == len(usual)):
            raise ValueError(f"{name}={value!r}: pass a tuple of {len(usual)} numbers")
        return value
    return (value,)


@dataclass(frozen=True)
class Round:
    """Starts that descend side by side: how they are annealed, and how often they trade heads.

    n_starts: random starts of the round.
    anneal_steps: of the continuation (homotopy) in the ridge; final_ridge: where it ends.
    release_steps: from there to hardly any ridge, before it is dropped.
    first_order_steps: of slow annealing before all others.
    hops: how often heads are traded between starts, at most.
    prior: width of the prior on |Theta| that hops use, over what was learned so far.
    """

    n_starts: int
    anneal_steps: int
    final_ridge: float
    release_steps: int = 0
    first_order_steps: int = 0
    hops: int = 0
    prior: float = 1.0

    def __post_init__(self) -> None:
        _check_counts(self, "n_starts", "anneal_steps")
        _check_counts(self, "release_steps", "first_order_steps", "hops", least=0)
        _check_positive(self, "final_ridge", "prior")


# Generic layers with a few times the counting limit of examples fall to the first round. With noise
# no loss is known to be the lowest: one patient start that agrees with the quick one tells.
PLENTY = (
    Round(1, 4, 1e-2),
    Round(1, 40, 1e-3, release_steps=8),
    Round(4, 40, 1e-3, release_steps=8),
    Round(5, 8, 1e-3, release_steps=8, first_order_steps=12_000),
    Round(5, 60, 1e-3, release_steps=8),
)
# Near the counting limit patience pays: sixteen starts in all.
SCARCE = (
    Round(1, 4, 1e-2),
    Round(1, 40, 1e-3, release_steps=8),
    Round(4, 8, 1e-3, release_steps=8, first_order_steps=12_000, hops=20),
    Round(5, 60, 1e-3, release_steps=8, hops=40, prior=1.3),
    Round(5, 8, 1e-3, release_steps=8, first_order_steps=24_000, hops=400),
)
# Surplus heads make a lost head rare, so that a search for the head count can be brief.
BRIEF = (Round(1, 10, 1e-2), Round(1, 30, 1e-2))


@dataclass(frozen=True)
class NewtonOptions:
    """Of method "newton". The rounds are made in their order until a start is exact.

    plenty: rounds where examples are many. The first alone recovers most generic layers; the later
        ones are for sharp heads and for noise, where two starts that agree are waited for.
    scarce: rounds up to `scarce_ratio` times the counting limit, where local minima abound and
        trading heads between starts pays.
    brief: rounds for each head count but the chosen one, where the count is searched for; surplus
        heads make a lost head rare.
    scarce_ratio: examples over the counting limit up to which they are scarce.
    trusting_ratio: from which on two starts that agree are hardly ever both wrong, so that the
        lowest loss found twice ends the search.
    same_minimum: losses that differ by less than this part are those of one minimum.
    idle_hops: hops in which no start got better after which none will.
    sketch_ratio: examples over the counting limit that suffice for a first look; what explains a
        part of the examples exactly mostly explains all.
    sketch_work: multiplications a pass over all examples must cost for a first look at a part to
        be worth its own compilation.
    exact: relative squared error on the examples that select which only the true function reaches,
        where the precision of the labels allows it.
    """

    plenty: tuple[Round, ...] = PLENTY
    scarce: tuple[Round, ...] = SCARCE
    brief: tuple[Round, ...] = BRIEF
    scarce_ratio: float = 3.0
    trusting_ratio: float = 6.0
    same_minimum: float = 1e-6
    idle_hops: int = 150
    sketch_ratio: float = 4.0
    sketch_work: float = 1e7
    exact: float = 1e-16

    def __post_init__(self) -> None:
        for name in ("plenty", "scarce", "brief"):
            rounds = getattr(self, name)
            valid = isinstance(rounds, tuple) and all(isinstance(one, Round) for one in rounds)
            if not (valid and rounds):
                raise ValueError(f"{name}={rounds!r}: pass a tuple of at least one Round")
        _check_counts(self, "idle_hops")
        _check_positive(self, "scarce_ratio", "trusting_ratio", "sketch_ratio", "exact")
        _check_positive(self, "same_minimum", "sketch_work", least=0.0)


@dataclass(frozen=True)
class ChenLiOptions:
    """Of method "sculpt", the phases of Chen & Li. Rows are a query token's of one example.

    first_rows: kept by the first screen of phase 2, in units of d^2, the unknowns of one head: a
        body needs 2 d^2, and the crude sum confirms only a part of what it screens.
    later_rows: the same with a refined sum, for up to two heads and for more: of more heads fewer
        rows are exact.
    margin_rows: that refine the sum in phase 3, in units of d; its unknowns are d a column.
    rounds: of refined sum and new certification (phases 3 and 4): once with the crude body's proxy,
        once with the better one.
    worst_score: of the screen, above which a row is not worth certifying.
    on_pair: weight that the linear programme must leave on the screened pair for a row to count.
    queried_rows: of the body that is queried in phase 5, in units of d^2.
    largest_queried: features up to which it is queried, as in the paper, beside the eigenvectors
        that are used; beyond, the queries would outlast all phases.
    net_ratios: examples of phase 6 for the net and for its refinement, over the counting limit.
    net_starts: points of the random net; net_steps: Gauss-Newton steps from each, at most.
    select: examples that choose among them, and at most a quarter of all.
    worst_error: relative squared error on these above which the result is no layer but STUCK.
    most_heads: where their number is open.
    one_head_rows: rows tried for a single head; one_head: the share of a label that a single head
        may leave with a crude sum.
    """

    first_rows: int = 8
    later_rows: tuple[int, int] = (5, 10)
    margin_rows: int = 60
    rounds: int = 2
    worst_score: float = 1.0
    on_pair: float = 0.9
    queried_rows: int = 2
    largest_queried: int = 24
    net_ratios: tuple[float, float] = (20, 200)
    net_starts: int = 12
    net_steps: int = 40
    select: int = 4000
    worst_error: float = 0.1
    most_heads: int = 6
    one_head_rows: int = 64
    one_head: float = 0.02

    def __post_init__(self) -> None:
        _check_counts(self, "first_rows", "later_rows", "margin_rows", "rounds", "queried_rows")
        _check_counts(self, "net_starts", "net_steps", "select", "most_heads", "one_head_rows")
        _check_counts(self, "largest_queried", least=0)
        _check_positive(self, "worst_score", "on_pair", "net_ratios", "worst_error", "one_head")


@dataclass(frozen=True)
class AdamOptions:
    """Of method "adam". The defaults come from a small search (three teachers, two starts each).

    learning_rate: at the first step; it falls to zero along a half cosine. With ||Theta|| = 2 at
        ratio 10, 0.03 was fastest for (heads, d, k) = (4, 8, 8). With ||Theta|| = 6, (4, 8, 8) at
        ratio 5 needed 10,000 steps at 0.03; 0.1 was several times faster there but got stuck in
        some runs, and was best for (3, 16, 8) at ratio 17. Robust, then, and not the fastest.
    steps: of a start. starts: random ones, until one explains the examples that select.
    goal: relative squared training error at which a start ends. Below 1e-20 Adam's steps often
        turn unstable until the rate has fallen: little accuracy for many steps.
    """

    learning_rate: float = 0.03
    steps: int = 10_000
    starts: int = 3
    goal: float = 1e-20

    def __post_init__(self) -> None:
        _check_counts(self, "steps", "starts")
        _check_positive(self, "learning_rate")
        _check_positive(self, "goal", least=0.0)


@dataclass(frozen=True)
class LbfgsOptions:
    """Of method "lbfgs".

    memory: gradient differences kept, more than the usual ten: a step costs three passes over the
        examples, beside which thirty products of vectors are little.
    steps: of a start. starts: random ones, until one explains the examples that select.
    goal: relative squared training error at which a start ends, near rounding.
    """

    memory: int = 30
    steps: int = 5_000
    starts: int = 5
    goal: float = 1e-24

    def __post_init__(self) -> None:
        _check_counts(self, "memory", "steps", "starts")
        _check_positive(self, "goal", least=0.0)


@dataclass(frozen=True)
class LinearOptions:
    """Of method "linear".

    sweeps: of alternating least squares from a start, at most; most end earlier, without progress.
    starts: random ones, among which the examples that select choose.
    ridge: times the squares of all parameters, over the label energy: it fixes the scale that
        Theta and W share.
    """

    sweeps: int = 200
    starts: int = 3
    ridge: float = 1e-6

    def __post_init__(self) -> None:
        _check_counts(self, "sweeps", "starts")
        _check_positive(self, "ridge")


def find_options(learner: Learner, given: Any) -> Any:
    """The options to learn with: those given, if they are this learner's, or its defaults."""
    kind = learner.options
    if given is None:
        return None if kind is None else kind()
    if kind is None:
        raise ValueError(f"options={given!r}: method {learner.name!r} has none; leave them out")
    if not isinstance(given, kind):
        said = repr(given) if isinstance(given, type) else f"of type {type(given).__name__}"
        raise ValueError(f"options {said}: method {learner.name!r} takes {kind.__name__}(...)")
    return given


def list_options(options: Any) -> dict[str, Any]:
    """All fields of some options by name; none where there are no options."""
    if options is None:
        return {}
    return {field.name: getattr(options, field.name) for field in fields(options)}


def describe_options(options: Any) -> str:
    """The call that makes these options; empty where there are none, or all have their defaults."""
    usual = {} if options is None else list_options(type(options)())
    said = [
        f"{name}={value!r}"
        for name, value in list_options(options).items()
        if repr(value) != repr(usual[name])
    ]
    return f"{type(options).__name__}({', '.join(said)})" if said else ""
