"""Checks of what a layer leaves: rounding, noise, or a function of the inputs?"""

from mhalearn.judge.consistency_checks import ROUNDING_MARGIN
from mhalearn.judge.evidence import Evidence
from mhalearn.judge.finding import Found, check
from mhalearn.judge.fit_quality import Fit, classify_fit, describe_error, is_certified_exact
from mhalearn.judge.identifiability_checks import is_symmetric
from mhalearn.run.outcome import Outcome

# Below this share a fit is called low in error even where what is left has structure.
_LOW = 1e-4
# Standard deviations above noise at which what is left counts as a function of the inputs.
_SIGNIFICANT = 6.0
# Held-out examples are off by more than this many times the noise only near the counting limit, or
# where the layer is wrong: output columns that go together by so many times more than noise tell.
_OVERFITTED, _CORRELATED = 1.4, 2.0
# What is left by this factor more than rounding predicts is not rounding alone.
_MORE = 1.1


@check("hopeless")
def hopeless(evidence: Evidence) -> Found | None:
    """Most of the label energy is left."""
    certify = evidence.certify_residuals
    if classify_fit(evidence) is not Fit.HOPELESS or certify is None:
        return None
    error = certify.root_relative**2
    return (
        Outcome.STUCK,
        f"the best layer leaves {error:.0%} of the label energy of held-out examples: "
        "more heads, more examples, a layer that the search did not find, or labels that no "
        "attention layer makes",
        {"relative_squared_error": error},
    )


@check("no test for a missing head", expensive=True)
def no_test_for_a_head(evidence: Evidence) -> Found | None:
    """The examples could not determine one more head."""
    fit = _fit_to_test(evidence)
    if fit is None or evidence.gain_of_one_more_head is not None:
        return None
    if fit is Fit.EXACT:
        error = _more_than_rounding(evidence)
        sentence = f"{error}, and the examples are too few to exclude a missing head"
    else:
        sentence = f"{describe_error(evidence)}; too few examples to tell noise from a missing head"
    return Outcome.FITTED, sentence, {}


@check("missing head", expensive=True)
def missing_head(evidence: Evidence) -> Found | None:
    """One more head explains examples better that it was not fitted to. Cost: a descent."""
    fit = _fit_to_test(evidence)
    gain = None if fit is None else evidence.gain_of_one_more_head
    if gain is None or gain <= 0:
        return None
    if fit is Fit.EXACT:
        error = _more_than_rounding(evidence)
        sentence = f"{error}, and one more head explains {gain:.0%} of its square"
    else:
        sentence = (
            f"{describe_error(evidence)}, of which one more head explains {gain:.0%}: "
            "more heads than asked for, or a start that missed one"
        )
    return _structured(evidence, fit), sentence, {"gain": gain}


@check("no time for tests", expensive=True)
def no_time_for_tests(evidence: Evidence) -> Found | None:
    """Time was up before a residual above rounding was looked at."""
    if _fit_to_test(evidence) is not Fit.EXACT or not evidence.run.is_over():
        return None
    error = _more_than_rounding(evidence)
    sentence = f"{error}, and the time limit came before a missing head was excluded"
    return Outcome.FITTED, sentence, {}


@check("residual dependence", expensive=True)
def residual_dependence(evidence: Evidence) -> Found | None:
    """The residual depends on the inputs. Trust: see `residual_dependence_test`."""
    fit = _fit_to_test(evidence)
    if fit is None or evidence.residual_dependence <= _SIGNIFICANT:
        return None
    excess = evidence.residual_dependence
    if fit is Fit.EXACT:
        sentence = (
            f"{_more_than_rounding(evidence)}, and depends on the inputs ({excess:.0f} standard "
            "deviations above noise)"
        )
    else:
        sentence = (
            f"{describe_error(evidence)}, which depends on the inputs ({excess:.0f} standard "
            "deviations above noise) and not like one more head: more heads than that, or labels "
            "that no attention layer makes"
        )
    return _structured(evidence, fit), sentence, {"deviations": excess}


@check("overfitted", expensive=True)
def overfitted(evidence: Evidence) -> Found | None:
    """`train` is explained better than noise and the error of an estimate allow, and not by a layer
    that leaves noise. Trust: a heuristic; see `measure_residual_correlation`."""
    certify, noise_level = evidence.certify_residuals, evidence.train_noise
    if classify_fit(evidence) is not Fit.PARTIAL or certify is None or not noise_level:
        return None
    times = certify.noise_level / noise_level
    if times <= _OVERFITTED or evidence.residual_correlation <= _CORRELATED:
        return None
    correlation = evidence.residual_correlation
    return (
        _structured(evidence, Fit.PARTIAL),
        f"{describe_error(evidence)}, by size {times:.1f} times the noise that the examples to fit "
        f"show, and what is left of those is correlated between outputs {correlation:.1f} times as "
        "much as noise: a layer that the search did not find, or labels that no attention layer "
        "makes",
        {"times_noise": times, "correlation": correlation},
    )


@check("noise", expensive=True)
def noise(evidence: Evidence) -> Found | None:
    """Nothing else was found in what is left."""
    certify = evidence.certify_residuals
    if classify_fit(evidence) is not Fit.PARTIAL or certify is None:
        return None
    sentence = f"{describe_error(evidence)}; the rest looks like noise"
    return Outcome.FITTED, sentence, {"relative_squared_error": certify.root_relative**2}


@check("recovered", expensive=True)
def recovered(evidence: Evidence) -> Found | None:
    """Nothing was found against a layer that is certified; its reason, and what it cannot say."""
    train, certificate = evidence.train_residuals, evidence.certificate
    if not is_certified_exact(evidence) or certificate is None:
        return None
    reason = certificate.reason
    if is_symmetric(evidence):
        reason += "; as a function: with two tokens other heads can make the same one"
    if train.precision == "float64":
        if train.root_relative > train.floor / ROUNDING_MARGIN:
            reason += "; a head as small as that would not be seen"
    elif train.root_relative > _MORE * train.rounding:
        units = train.root_relative / train.unit
        reason += f"; what is left, {units:.1f} units in their last place, no test explains"
    return Outcome.RECOVERED, reason, {"train_residual": train.root_relative}


def _fit_to_test(evidence: Evidence) -> Fit | None:
    """The fit, where what it leaves may be a function of the inputs; None where it cannot.

    Black boxes that compute in their labels' precision err by more than the rounding of labels, but
    not by something that one more head explains or that varies smoothly with the inputs.
    """
    if classify_fit(evidence) is Fit.PARTIAL:
        return Fit.PARTIAL
    train = evidence.train_residuals
    coarse = train.precision != "float64" and train.root_relative > _MORE * train.rounding
    return Fit.EXACT if coarse and is_certified_exact(evidence) else None


def _more_than_rounding(evidence: Evidence) -> str:
    residual = evidence.train_residuals.root_relative
    return f"the relative residual {residual:.2g} is more than the rounding of labels"


def _structured(evidence: Evidence, fit: Fit | None) -> Outcome:
    """Where what is left has structure: low in error, or not the layer."""
    certify = evidence.certify_residuals
    low = certify is not None and certify.root_relative**2 <= _LOW
    return Outcome.FITTED if low or fit is Fit.EXACT else Outcome.STUCK
