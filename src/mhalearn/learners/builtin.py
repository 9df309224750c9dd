"""The learners that come with the package, on one screen: their names and what they can do.

Their numerics are imported when they are first asked to learn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mhalearn.learners.options import (
    AdamOptions,
    ChenLiOptions,
    LbfgsOptions,
    LinearOptions,
    NewtonOptions,
)
from mhalearn.learners.protocol import Learner

if TYPE_CHECKING:
    from mhalearn.data import Examples
    from mhalearn.layer.architecture import Architecture
    from mhalearn.run.outcome import Candidate
    from mhalearn.run.run import Run


class _SoftmaxOnly(Learner):
    """A learner that is written for softmax heads, by their matrices."""

    def supports(self, architecture: Architecture) -> str | None:
        if extras := architecture.extras():
            return f"{', '.join(extras)}: method {self.name!r} does not know such heads; use newton"
        if architecture.attention is None:
            return None
        return f"method {self.name!r} learns softmax heads and no other attention; use newton"


class Newton(Learner):
    """The exact solver: random starts, ridge continuation, Gauss-Newton, model selection."""

    name = "newton"
    title = "Newton: the exact solver"
    color = "#1b6ca8"
    options = NewtonOptions
    counts_heads = True
    accepts_start = True
    whitens = True

    def supports(self, architecture: Architecture) -> str | None:
        a = architecture
        if a.is_plain or a.n_heads is not None:
            return None
        from mhalearn.layer.position_bias import Alibi

        told = {
            "kv_heads": a.kv_heads is not None,  # groups of how many, the number of heads says
            "position_bias='alibi'": isinstance(a.distance_bias, Alibi),  # and so it does slopes
            "a latent": a.latent is not None,
            "a norm of all heads": a.norm is not None and a.norm.across_heads,
            "no head_dim": a.head_dim is None,
        }
        for what, needs in told.items():
            if needs:
                return f"n_heads is open, which heads with {what} need: give a number"
        return None

    def learn(
        self, examples: Examples, architecture: Architecture, run: Run, options: NewtonOptions
    ) -> Candidate:
        from mhalearn.learners.newton.learner import learn_newton

        return learn_newton(examples, architecture, run, options)

    def supports_open(self, architecture: Architecture, examples: Examples) -> str | None:
        from mhalearn.learners.newton.open_kinds import can_be_open

        reason = can_be_open(architecture, examples)
        return None if reason is None else f"'auto' finds kinds of heads {reason}"

    def find_kind(
        self,
        examples: Examples,
        architecture: Architecture,
        fields: frozenset[str],
        run: Run,
        options: NewtonOptions,
    ) -> tuple[Architecture, Candidate | None] | None:
        from mhalearn.learners.newton.open_kinds import fill_fields

        return fill_fields(examples, architecture, fields, run, options.exact)


class ChenLi(_SoftmaxOnly):
    """The six phases of Chen & Li, which end where polish begins."""

    name = "sculpt"
    title = "Sculpt: phases of Chen & Li"
    color = "#7a9e3d"
    options = ChenLiOptions
    streams = True
    counts_heads = True
    needs_polish = True

    def supports(self, architecture: Architecture) -> str | None:
        for name in ("bias", "causal", "head_dim"):
            if given := getattr(architecture, name):
                return f"{name}={given}: the paper's phases do not know it; use newton"
        return super().supports(architecture)

    def learn(
        self, examples: Examples, architecture: Architecture, run: Run, options: ChenLiOptions
    ) -> Candidate:
        from mhalearn.learners.chen_li.learner import learn_chen_li

        return learn_chen_li(examples, architecture, run, options)


class Adam(_SoftmaxOnly):
    """Adam on all parameters at once, from several random starts."""

    name = "adam"
    title = "Adam"
    color = "#e07b39"
    options = AdamOptions

    def learn(
        self, examples: Examples, architecture: Architecture, run: Run, options: AdamOptions
    ) -> Candidate:
        from mhalearn.learners.baselines.adam import learn_adam

        return learn_adam(examples, architecture, run, options)


class Lbfgs(_SoftmaxOnly):
    """L-BFGS on all parameters at once, from several random starts."""

    name = "lbfgs"
    title = "L-BFGS"
    color = "#b3589a"
    options = LbfgsOptions

    def learn(
        self, examples: Examples, architecture: Architecture, run: Run, options: LbfgsOptions
    ) -> Candidate:
        from mhalearn.learners.baselines.lbfgs import learn_lbfgs

        return learn_lbfgs(examples, architecture, run, options)


class Linear(_SoftmaxOnly):
    """A linear-attention student read as a softmax layer: exact for none, a start for polish."""

    name = "linear"
    title = "Linear attention"
    color = "#555555"
    options = LinearOptions
    consistent = False

    def learn(
        self, examples: Examples, architecture: Architecture, run: Run, options: LinearOptions
    ) -> Candidate:
        from mhalearn.learners.baselines.linear import learn_linear

        return learn_linear(examples, architecture, run, options)
