"""What can be set about each learner: frozen records whose defaults are documented with reasons.

Only the standard library is imported here, so that the command line knows the learners at once.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, fields, replace
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
    theta_scale: width of the prior on |Theta| of the continuation, where tokens have unit size;
        None for what the labels say, which is little where they are few.
    """

    n_starts: int
    anneal_steps: int
    final_ridge: float
    release_steps: int = 0
    first_order_steps: int = 0
    hops: int = 0
    prior: float = 1.0
    theta_scale: float | None = None

    def __post_init__(self) -> None:
        if self.theta_scale is not None:
            _check_positive(self, "theta_scale")
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
# Where steps are cheap, slow continuations under priors of several widths: which one leads to the
# layer the labels do not say, but with the right one most starts arrive.
SWEEP = tuple(
    Round(2, steps, 1e-3, release_steps=8, theta_scale=width)
    for steps in (200, 200, 400)
    for width in (3.0, 1.5, 6.0)
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
    sweep: rounds between the second and the third of `scarce` where problems are so small that
        NumPy solves them: slow continuations, each under another prior.
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
    sweep: tuple[Round, ...] = SWEEP
    brief: tuple[Round, ...] = BRIEF
    scarce_ratio: float = 3.0
    trusting_ratio: float = 6.0
    same_minimum: float = 1e-6
    idle_hops: int = 150
    sketch_ratio: float = 4.0
    sketch_work: float = 1e7
    exact: float = 1e-16

    def __post_init__(self) -> None:
        for name in ("plenty", "scarce", "sweep", "brief"):
            rounds = getattr(self, name)
            valid = isinstance(rounds, tuple) and all(isinstance(one, Round) for one in rounds)
            if not (valid and rounds):
                raise ValueError(f"{name}={rounds!r}: pass a tuple of at least one Round")
        _check_counts(self, "idle_hops")
        _check_positive(self, "scarce_ratio", "trusting_ratio", "sketch_ratio", "exact")
        _check_positive(self, "same_minimum", "sketch_work", least=0.0)


@dataclass(frozen=True)
class Constants:
    """Every number that the phases of Chen & Li use. Rows are a query token's of one example.

    Phase 1
    scales: of the regression on the other tokens, whose own is biased; the one is chosen whose
        images are nearest to labels. compared: examples on which candidates are compared.
    vertex_rows: rows near one token's image that refine the sum, in units of d; vertex_rounds: how
        often; vertex_examples: searched for them, which is plenty up to six heads.
    least_beyond_linear: share of the labels that no linear map of the tokens explains, below which
        attention is too flat for rows at one token.
    least_strength: share of the labels that a sum must explain; flat: singular values of a sum
        below this share of the largest tell no tokens apart.

    Phases 2 and 4
    trusted_rows: that a body needs, in units of d^2, the unknowns of one head.
    first_rows: kept by the first screen, in the same units: the crude sum confirms only a part of
        what it screens.
    later_rows: the same with a refined sum, for up to two heads and for more: of more heads fewer
        rows are exact.
    least_weight: on a token of a screened pair: below, and above one less it, log-odds are noise.
    worst_score: of the screen, above which a row is not worth certifying.
    on_pair: weight that the linear programme must leave on the screened pair for a row to count.
    reweightings: of the rows by how far they disagree with the body's shape.
    largest_dense: features up to which the constraints' Gram matrix is formed, and screened rows
        are confirmed by linear programmes; beyond, by least squares over the simplex.
    epsilon: of the literal plan, with the crude sum and with a refined one: the residual, as a
        share of the label, that certifies a row; somewhat more than the sum's own error.
        tolerance: the error of its weights that the body allows for, in the same rounds: enough
        that the heads are in it but for false rows.
    support: least weight of a token that takes part in a certified row's constraints.
    most_rows: of the literal body, in units of d^2, in the same rounds; the best are taken. With
        the crude sum most are false and only many tell the proxy; later the best are true.
    penalty: of a constraint's slack; box: half the body's edge, over the centre's largest entry: it
        must not cut the chords short. true_rows: share of the rows that the practical body's centre
        satisfies without slack.

    Phase 3
    margin_rows: that refine the sum, in units of d, its unknowns a column: of fewer, one on which
        heads disagree already spoils the plain fit. margin_repeats: of one token among them, up to
        sign.
    robust_steps: of the robust fit; robust_shrink: of its scale in each.
    rounds: of refined sum and new certification.

    Phase 5
    queried_rows: of the practical body that is queried, in units of d^2. largest_queried: features
        up to which it is, as a check of the eigenvectors that are used.
    widest_angle: sine between the two above which the run warns.
    facets: met by rays in the span by membership, in units of d^2. bisections: membership queries
        for the end of a ray. turn: how far a ray is turned to see its facet from the side;
        turned_bisections: queries for the end of a turned one.

    Phase 6
    net_ratios: examples for the net and for its refinement, over the counting limit.
    net_starts: points of the random net; net_steps: Gauss-Newton steps from each, at most.
    net_radius: of the literal net, over the norm of orthogonal heads of one size; net_spacing: of
        its points, for two, three and four heads.
    select: examples that choose among them, and at most a quarter of all.
    delta: probability with which the literal plan's statement about its choice may fail.
    worst_error: relative squared error on these above which the result is no layer but STUCK.

    Decoding
    decoded: examples that are decoded, in units of d^2. decoded_least: and so many at least.
        decoded_most: and so many at most, for regressions on more take longer than they tell.
    decode_steps: at most. decode_goal: relative squared error on the examples that select at which
        it ends; unless set, that of rounding.
    usable: least weight of a token whose log-odds are used, and the largest that three standard
        errors of the weight may ask for; outside: how far a row's weights may leave the simplex,
        and the most that two standard errors allow.
    decode_reweightings: of the rows in one regression; decode_products: of its conjugate gradients.

    The number of heads
    most_heads: where it is open. one_head_rows: rows tried for a single head; one_head: the share
        of a label that a single head may leave with a crude sum.
    """

    scales: tuple[float, ...] = (0.8, 0.9, 1.0, 1.1, 1.2)
    compared: int = 100_000
    vertex_rows: int = 30
    vertex_rounds: int = 3
    vertex_examples: int = 200_000
    least_beyond_linear: float = 0.01
    least_strength: float = 0.05
    flat: float = 0.05
    first_rows: int = 8
    later_rows: tuple[int, int] = (5, 10)
    trusted_rows: int = 2
    least_weight: float = 0.1
    worst_score: float = 1.0
    on_pair: float = 0.9
    reweightings: int = 8
    largest_dense: int = 32
    epsilon: tuple[float, float] = (0.15, 0.12)
    tolerance: tuple[float, float] = (0.15, 0.12)
    support: float = 0.1
    most_rows: tuple[int, int] = (20, 5)
    penalty: float = 10.0
    box: float = 8.0
    true_rows: float = 0.95
    margin_rows: int = 60
    margin_repeats: int = 4
    robust_steps: int = 60
    robust_shrink: float = 0.8
    rounds: int = 1
    queried_rows: int = 2
    largest_queried: int = 16
    widest_angle: float = 0.5
    facets: float = 1.5
    bisections: int = 50
    turn: float = 0.003
    turned_bisections: int = 20
    net_ratios: tuple[float, float] = (20, 200)
    net_starts: int = 12
    net_steps: int = 40
    net_radius: float = 1.3
    net_spacing: tuple[float, float, float] = (0.1, 0.4, 0.65)
    select: int = 4000
    delta: float = 0.05
    worst_error: float = 0.1
    decoded: int = 16
    decoded_least: int = 4000
    decoded_most: int = 2**16
    decode_steps: int = 25
    decode_goal: float = 1e-28
    usable: tuple[float, float] = (0.1, 0.25)
    outside: tuple[float, float] = (0.02, 0.1)
    decode_reweightings: int = 3
    decode_products: int = 60
    most_heads: int = 6
    one_head_rows: int = 64
    one_head: float = 0.02

    def __post_init__(self) -> None:
        for field in fields(self):
            usual = field.default[0] if isinstance(field.default, tuple) else field.default
            if isinstance(usual, float) or field.name == "net_ratios":
                _check_positive(self, field.name)
            elif field.name in ("largest_queried", "largest_dense", "vertex_rounds"):
                _check_counts(self, field.name, least=0)
            else:
                _check_counts(self, field.name)
        if self.delta >= 1:
            raise ValueError(f"delta={self.delta!r}: pass a probability below 1")


@dataclass(frozen=True)
class ChenLiOptions:
    """Of method "sculpt", the phases of Chen & Li.

    plan: "practical" (robust least squares, eigenvectors and random starts in place of programmes,
        queries and a net), "decode" (the same, after which every row is decoded), "literal" (the
        paper's algorithm as its sources state it), or a `chen_li.Plan` of your own.
    constants: every number they use.
    """

    plan: Any = "practical"
    constants: Constants = Constants()

    def __post_init__(self) -> None:
        if isinstance(self.plan, str) and self.plan not in PLANS:
            raise ValueError(f"plan={self.plan!r}: pass one of {', '.join(PLANS)}, or a Plan")
        if not isinstance(self.constants, Constants):
            raise ValueError(f"constants={self.constants!r}: pass Constants(...)")


PLANS = ("practical", "literal", "decode")


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


def find_options(learner: Learner, given: Any, plan: Any = None) -> Any:
    """The options to learn with: those given, if they are this learner's, or its defaults.

    plan: in place of theirs, for learners that have one.
    """
    kind = learner.options
    if plan is not None:
        if kind is None or "plan" not in {field.name for field in fields(kind)}:
            raise ValueError(f"plan={plan!r}: method {learner.name!r} has none; leave it out")
        known = kind() if given is None else find_options(learner, given)
        if known.plan not in (kind().plan, plan):
            raise ValueError(f"plan={plan!r}, but options.plan={known.plan!r}: pass one of them")
        return replace(known, plan=plan)
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
