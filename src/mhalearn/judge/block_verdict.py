"""What may be said of a block: few outcomes, each with its evidence.

The certificate is that of layers: fresh residuals at rounding, and a Jacobian of full rank up to
the gauge; and residuals must not be more than computing the block in doubles leaves. What a block
that is not certified leaves over is not looked into further: the tests for layers do not know
neurons, so that no noise is ever claimed.
"""

from __future__ import annotations

from typing import NamedTuple

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.data.label_precision import DOUBLE, label_precision
from mhalearn.judge.block_rounding import MARGIN, computing_error
from mhalearn.judge.certificate import Certificate, make_certificate
from mhalearn.judge.residuals import Residuals, measure_residuals
from mhalearn.layer.block.block import Block
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run

# Relative squared error on fresh examples up to which a block counts as fitted.
_FITTED = 1e-2


class BlockVerdict(NamedTuple):
    outcome: Outcome
    reason: str
    certificate: Certificate | None


class Asked(NamedTuple):
    """What the caller said of the block's sizes; None where they were to be found."""

    n_heads: int | None
    hidden: int | None


def judge_block(
    candidate: Candidate,
    train: Examples,
    certify: Examples | None,
    asked: Asked,
    run: Run,
) -> BlockVerdict:
    """The outcome of a search for a block, by examples that it has not seen.

    RECOVERED needs labels in double precision: of coarser ones it is not known how far computing a
    block in their precision may be off.
    """
    block = candidate.layer
    assert isinstance(block, Block)
    counted = block.design.without_linear
    limit = train.counting_limit(counted)
    if train.n < limit:
        return BlockVerdict(
            Outcome.TOO_FEW_EXAMPLES,
            f"{train.n} examples are fewer than {limit:.1f}, the counting limit of "
            f"{counted.count()} unknowns",
            None,
        )
    if certify is None or not certify.n:
        return BlockVerdict(
            Outcome.FITTED, "no example could be spared to certify with: give more", None
        )
    precision = label_precision(train)
    residuals = measure_residuals(block, certify, precision)
    if not _finite(residuals.squared):
        return BlockVerdict(Outcome.NONFINITE, "outputs of the block are not finite", None)
    certificate = make_certificate(block, residuals, train, block.architecture, run=run)
    if (faint := _say_faint(block, residuals, certify)) is not None:
        outcome, reason = Outcome.FITTED, faint
    else:
        outcome, reason = _conclude(candidate, block, residuals, certificate, asked, precision.name)
    if outcome is not Outcome.RECOVERED:
        certificate = certificate.withdrawn(reason).without_noise()
    return BlockVerdict(outcome, reason, certificate)


def _conclude(
    candidate: Candidate,
    block: Block,
    residuals: Residuals,
    certificate: Certificate,
    asked: Asked,
    precision: str,
) -> tuple[Outcome, str]:
    error = residuals.root_relative**2
    if residuals.exact:
        return _judge_exact(block, certificate, asked, precision)
    said = f"the relative squared error on fresh examples is {error:.2g}"
    if candidate.outcome is Outcome.TIME_LIMIT:
        return Outcome.TIME_LIMIT, f"the time limit came first; {said}: raise max_seconds"
    more = "tests of what is left do not know blocks, so that nothing is said of its cause"
    if error < _FITTED:
        return Outcome.FITTED, f"{said}, which is not the labels' rounding; {more}"
    return Outcome.STUCK, f"{said}: no attempt reached a block of this kind that explains them"


def _say_faint(block: Block, residuals: Residuals, certify: Examples) -> str | None:
    """What stands against a block that meets labels in double precision less well than computing
    it does; None where nothing does."""
    if not residuals.exact or residuals.precision != DOUBLE.name:
        return None
    left = residuals.root_relative
    if left <= MARGIN * residuals.unit:  # which is no more in any case
        return None
    expected = computing_error(block, certify)
    if left <= MARGIN * expected:
        return None
    return (
        f"the relative residual {left:.2g} on fresh examples is small, but more than computing the "
        f"block in double precision leaves ({expected:.1g}): a faint neuron or head may be "
        "missing, the labels computed less precisely, or the descent ended early"
    )


def _judge_exact(
    block: Block, certificate: Certificate, asked: Asked, precision: str
) -> tuple[Outcome, str]:
    """Of a block that meets fresh labels to rounding."""
    found = {"heads": block.n_heads, "neurons": block.hidden}
    for what, told in (("heads", asked.n_heads), ("neurons", asked.hidden)):
        if told is not None and found[what] < told:
            return Outcome.NOT_IDENTIFIED, (
                f"a block of {_count(found[what], what[:-1])} explains the labels to their "
                "precision, and "
                f"{told} were asked for: what the others are is not determined"
            )
    if block.feed_forward.linear is not None:
        return Outcome.NOT_IDENTIFIED, (
            f"{_count(block.hidden, 'neuron')} and a linear map beside them explain the labels to "
            "their precision, and pairs of neurons can be such a map in many ways"
        )
    if not certificate.recovered:
        # A rank that a randomised test could not show is not known, rather than known to be less.
        known = certificate.null_dimension is not None
        return Outcome.NOT_IDENTIFIED if known else Outcome.FITTED, certificate.reason
    if precision != "float64":
        return Outcome.FITTED, (
            f"fresh labels are met to their rounding, but they are {precision}: blocks are called "
            "recovered from labels in double precision only"
        )
    return Outcome.RECOVERED, (
        f"the relative residual {certificate.relative_mse**0.5:.2g} on fresh examples is rounding, "
        f"and the Jacobian has full rank up to the block's gauge: {_count(block.n_heads, 'head')} "
        f"and {_count(block.hidden, 'neuron')} are determined, up to distant blocks, of which none "
        "was tested"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _finite(values: Float64) -> bool:
    return bool((values < float("inf")).all())
