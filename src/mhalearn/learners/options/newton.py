"""What can be set about the solver: the rounds of starts, and when to be content."""

from __future__ import annotations

from dataclasses import dataclass

from mhalearn.learners.options.checks import check_counts, check_positive


@dataclass(frozen=True)
class Round:
    """Starts that descend side by side: how they are annealed, and how often they trade heads.

    n_starts: random starts of the round.
    anneal_steps: of the continuation (homotopy) in the ridge; final_ridge: where it ends.
    release_steps: from there to hardly any ridge, before it is dropped.
    first_order_steps: of slow annealing before all others.
    crossovers: generations of starts that inherit heads from one another under a strong ridge,
        before all others; the best of them go on. In none of the rounds below.
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
    crossovers: int = 0

    def __post_init__(self) -> None:
        if self.theta_scale is not None:
            check_positive(self, "theta_scale")
        check_counts(self, "n_starts", "anneal_steps")
        check_counts(self, "release_steps", "first_order_steps", "hops", "crossovers", least=0)
        check_positive(self, "final_ridge", "prior")


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
        check_counts(self, "idle_hops")
        check_positive(self, "scarce_ratio", "trusting_ratio", "sketch_ratio", "exact")
        check_positive(self, "same_minimum", "sketch_work", least=0.0)
