"""What can be set about Adam, L-BFGS and linear attention."""

from __future__ import annotations

from dataclasses import dataclass

from mhalearn.learners.options.checks import check_counts, check_positive


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
        check_counts(self, "steps", "starts")
        check_positive(self, "learning_rate")
        check_positive(self, "goal", least=0.0)


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
        check_counts(self, "memory", "steps", "starts")
        check_positive(self, "goal", least=0.0)


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
        check_counts(self, "sweeps", "starts")
        check_positive(self, "ridge")
