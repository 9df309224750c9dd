"""Which outcome a fitted layer deserves, and why, in one sentence."""

import math
from dataclasses import dataclass

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.data.input_information import ENOUGH, Information
from mhalearn.judge.certificate import THRESHOLD, Certificate
from mhalearn.judge.jacobian_spectrum import measure_spectrum
from mhalearn.judge.missing_head import one_more_head
from mhalearn.judge.residual_dependence import residual_dependence_test
from mhalearn.judge.residuals import Residuals, measure_residuals
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.layer import AttentionLayer
from mhalearn.run.outcome import Outcome
from mhalearn.run.run import Run

# A layer that leaves more than this share of the label energy unexplained is not a fit.
_HOPELESS = 0.5
# Below this share a fit is called low in error even where what is left has structure.
_LOW = 1e-4
# Standard deviations above noise at which what is left counts as a function of the inputs.
_SIGNIFICANT = 6.0
# A residual less than this factor above the labels' precision, and below this size, may be
# rounding, made larger by unknowns the examples hardly see.
_NEAR = 1e3
_NEARLY = 1e-2
# All examples are as exact as some of them up to this factor.
_AS_EXACT = 3.0
# The floor of exact residuals allows this many times what rounding alone makes.
_ROUNDING = 48.0
# What is left by this factor more than rounding predicts is not rounding alone.
_MORE = 1.1
# Noise makes no example worse than the median by this factor; a corrupted label may.
_ALIKE = 10.0


@dataclass(frozen=True)
class Evidence:
    """What the verdict rests on."""

    layer: AttentionLayer
    architecture: Architecture  # that was asked for
    fitted: Examples
    held: Examples | None  # None where no example could be spared, and then so is
    certificate: Certificate | None
    information: Information | None = None  # None: nothing is known against the inputs
    equations: float = math.inf  # independent ones over unknowns, the scarcest kind


def judge(evidence: Evidence, run: Run) -> tuple[Outcome, str]:
    """Name the outcome of a run that ended by itself.

    RECOVERED needs the certificate and the head count asked for. What is not recovered is told
    apart by what is left over: nothing, noise, or something one more head would explain.
    """
    layer, held, certificate = evidence.layer, evidence.held, evidence.certificate
    fitted = measure_residuals(layer, evidence.fitted)
    exact_fit = fitted.exact
    if held is None or certificate is None:
        spectrum = None
        if exact_fit:
            spectrum = measure_spectrum(layer, evidence.fitted, evidence.architecture)
        if spectrum is not None and spectrum.null_dimension:
            return Outcome.NOT_IDENTIFIED, _family(evidence, spectrum.null_dimension)
        return Outcome.FITTED, (
            f"relative training error {fitted.root_relative**2:.2g}, and no example could be "
            "spared to certify with: give more examples"
        )
    held_error, near = certificate.relative_mse, min(_NEAR * certificate.floor, _NEARLY)
    error = f"relative squared error {held_error:.2g}"
    if certificate.recovered and exact_fit:
        if evidence.architecture.n_heads not in (None, layer.n_heads):
            return Outcome.NOT_IDENTIFIED, _surplus(evidence)
        return _judge_exact(evidence, fitted, certificate, run)
    if exact_fit and measure_residuals(layer, held).exact:
        if certificate.null_dimension is None:
            return Outcome.FITTED, certificate.reason
        if certificate.null_dimension == 0:
            return Outcome.NOT_IDENTIFIED, certificate.reason
        return Outcome.NOT_IDENTIFIED, _family(evidence, certificate.null_dimension)
    if held_error <= near**2 and fitted.root_relative > near:
        bar = max(THRESHOLD, 2 * fitted.floor)
        contradicting = int(np.sum(fitted.relative > bar))
        return Outcome.FITTED, (
            f"held-out examples are explained ({error}), those to fit are "
            f"not ({fitted.root_relative**2:.2g}, {contradicting} of them off by more than "
            f"{bar:.2g}): no attention layer makes all these labels"
        )
    if held_error <= near**2:
        return Outcome.FITTED, (
            f"{error}: not at the precision of the labels, but too near it "
            "to tell noise from rounding in a badly conditioned problem"
        )
    if exact_fit:
        others = measure_residuals(layer, held).relative
        wrong = int(np.sum(others > max(THRESHOLD, 2 * fitted.floor)))
        if 2 * wrong < len(others):  # of a wrong layer, nearly all would be
            return Outcome.FITTED, (
                f"the examples to fit are explained exactly, {wrong} of {len(others)} held-out "
                f"ones are not ({error}): no attention layer makes "
                "all these labels"
            )
        return Outcome.NOT_IDENTIFIED, (
            f"the examples are fitted exactly but others are not ({error}), with "
            f"{certificate.null_dimension} directions open: give more examples"
        )
    if held_error > _HOPELESS:
        return Outcome.STUCK, (
            f"the best layer leaves {held_error:.0%} of the label energy of held-out examples: "
            "more heads, more examples, a layer that the search did not find, or labels that no "
            "attention layer makes"
        )
    return _judge_rest(evidence, held_error, run)


def _judge_exact(
    evidence: Evidence, fitted: Residuals, certificate: Certificate, run: Run
) -> tuple[Outcome, str]:
    """RECOVERED, unless chance, another layer or a missing head would look the same."""
    information, reason = evidence.information, certificate.reason
    if evidence.equations < ENOUGH:
        return Outcome.FITTED, (
            f"the inputs hold {evidence.equations:.2f} times as many independent equations as "
            "unknowns (mirror images, near copies and repeated tokens ask nothing new): labels "
            "that no layer made would be met as well"
        )
    if information is not None and information.centrally_symmetric:
        if evidence.fitted.k > 2 and int(evidence.fitted.arrays().lengths.max()) > 2:
            return Outcome.NOT_IDENTIFIED, (
                "the tokens of every row are symmetric about their mean, as two tokens are, and "
                "opposite attention mirrors it: other heads make the same outputs here"
            )
        reason += "; as a function: with two tokens other heads can make the same one"
    doubt = _doubt(evidence, fitted, run)
    if doubt:
        return Outcome.FITTED, doubt
    if fitted.precision == "float64":
        if fitted.root_relative > fitted.floor / _ROUNDING:
            reason += "; a head as small as that would not be seen"
    elif fitted.root_relative > _MORE * fitted.rounding:
        units = fitted.root_relative / fitted.unit
        reason += f"; what is left, {units:.1f} units in their last place, no test explains"
    return Outcome.RECOVERED, reason


def _doubt(evidence: Evidence, fitted: Residuals, run: Run) -> str | None:
    """Why a residual at the floor of coarse labels may still be more than rounding, or None.

    Black boxes that compute in their labels' precision err by more than the rounding of labels, but
    not by something that one more head explains or that varies smoothly with the inputs.
    """
    if fitted.precision == "float64" or fitted.root_relative <= _MORE * fitted.rounding:
        return None
    error = f"the relative residual {fitted.root_relative:.2g} is more than the rounding of labels"
    gain = _gain_of_one_more(evidence, run)
    if gain is None:
        return f"{error}, and the examples are too few to exclude a missing head"
    if gain > 0:
        return f"{error}, and one more head explains {gain:.0%} of its square"
    if run.is_over():
        return f"{error}, and the time limit came before a missing head was excluded"
    excess = residual_dependence_test(evidence.layer, evidence.fitted, run.seed)
    if excess > _SIGNIFICANT:
        return f"{error}, and depends on the inputs ({excess:.0f} standard deviations above noise)"
    return None


def _judge_rest(evidence: Evidence, held_error: float, run: Run) -> tuple[Outcome, str]:
    """Noise, or structure? Ask whether one more head explains held-out examples better."""
    error = f"relative squared error {held_error:.2g}"
    gain = _gain_of_one_more(evidence, run)
    if gain is None:
        return Outcome.FITTED, f"{error}; too few examples to tell noise from a missing head"
    structured = Outcome.FITTED if held_error <= _LOW else Outcome.STUCK
    if gain > 0:
        return structured, (
            f"{error}, of which one more head explains {gain:.0%}: "
            "more heads than asked for, or a start that missed one"
        )
    excess = residual_dependence_test(evidence.layer, evidence.fitted, run.seed)
    if excess > _SIGNIFICANT:
        return structured, (
            f"{error}, which depends on the inputs ({excess:.0f} standard "
            "deviations above noise) and not like one more head: more heads than that, or labels "
            "that no attention layer makes"
        )
    return Outcome.FITTED, f"{error}; the rest looks like noise"


def is_noise_without_outliers(layer: AttentionLayer, fitted: Examples, held: Examples) -> bool:
    """Whether all examples are off, and none far more than most.

    Where the fit is exact it says all it can; a wrong label among the others would do harm.
    """
    known, others = measure_residuals(layer, fitted), measure_residuals(layer, held)
    return not known.exact and _count_unlike(np.concatenate([known.squared, others.squared])) == 0


def _count_unlike(squared: Float64) -> int:
    """Examples that are off far more than most."""
    return int(np.sum(squared > _ALIKE**2 * np.median(squared)))


def check_all_examples(layer: AttentionLayer, part: Examples, examples: Examples) -> str | None:
    """What all examples say against a layer that part of them speaks for, or None. A pass.

    Where the part is fitted exactly, so must all be; where it is noisy alike, so must they.
    """
    known, every = measure_residuals(layer, part), measure_residuals(layer, examples)
    error = f"relative squared error {every.root_relative**2:.2g}"
    if known.exact:
        # Not only exact, but as exact: a working set at rounding allows the others no more.
        level = max(known.root_relative, every.floor / _ROUNDING)
        if every.exact and every.root_relative <= _AS_EXACT * level:
            return None
        bar = max(THRESHOLD, 2 * every.floor)
        if not np.any(every.relative > bar):
            bar = _AS_EXACT * level
        wrong = int(np.sum(every.relative > bar))
        return (
            f"{part.n} random examples are explained exactly, all {examples.n} are not "
            f"({error}, {wrong} of them off by more than {bar:.2g}): no attention layer makes all "
            "these labels"
        )
    unlike = _count_unlike(every.squared)
    if unlike == 0 or _count_unlike(known.squared):  # the verdict on the part has seen it
        return None
    return (
        f"{error} over all examples, of which {unlike} are off by more than {_ALIKE:.0f} times the "
        f"median; fitted to {part.n} of {examples.n} examples"
    )


def _gain_of_one_more(evidence: Evidence, run: Run) -> float | None:
    assert evidence.held is not None
    layer, fitted, architecture = evidence.layer, evidence.fitted, evidence.architecture
    return one_more_head(layer, fitted, evidence.held, architecture, run)


def _family(evidence: Evidence, null: int) -> str:
    surplus = _surplus_dimension(evidence)
    at_least = "at least " if surplus else ""
    return f"a family of layers of dimension {at_least}{null + surplus} fits the examples exactly"


def _surplus(evidence: Evidence) -> str:
    found, asked = evidence.layer.n_heads, evidence.architecture.n_heads
    return (
        f"{found} heads explain the examples exactly, so a family of layers with {asked} heads "
        f"does too (dimension at least {_surplus_dimension(evidence)}): ask for n_heads={found}"
    )


def _surplus_dimension(evidence: Evidence) -> int:
    """Heads asked for beyond those found have any attention, or any share of another's W."""
    layer, asked = evidence.layer, evidence.architecture.n_heads
    surplus = 0 if asked is None else max(0, asked - layer.n_heads)
    one = evidence.architecture.with_heads(1).count_by_kind()
    return surplus * max(one.attention, one.w)
