"""Checks of what a layer leaves: rounding, noise, or a function of the inputs?"""

import numpy as np

from mhalearn.judge.consistency_checks import ROUNDING_MARGIN
from mhalearn.judge.evidence import Evidence
from mhalearn.judge.finding import Found, check
from mhalearn.judge.fit_quality import (
    Fit,
    classify_fit,
    describe_error,
    explains_most,
    hint_at_mask,
    is_certified_exact,
    structured_outcome,
)
from mhalearn.judge.identifiability_checks import is_symmetric
from mhalearn.judge.residual_path import find_own_token_head
from mhalearn.run.outcome import Outcome

# Standard deviations above noise at which what is left counts as a function of the inputs.
_SIGNIFICANT = 6.0
# Held-out examples are off by more than this many times the noise only near the counting limit, or
# where the layer is wrong: output columns that go together by so many times more than noise tell.
_OVERFITTED, _CORRELATED = 1.4, 2.0
# What is left by this factor more than rounding predicts is not rounding alone.
_MORE = 1.1
# Rounding leaves of a few examples up to this many times what it leaves of others; of their rows up
# to this many times what computing does, most of them, and the worst.
_OFF, _OFF_TYPICAL, _OFF_ROW = 2.5, 1.5, 5.0
# Labels for each unknown below which what is left says nothing.
_ENOUGH_LEFT = 1.3
# What nothing explains is called low in error up to this share.
_LOW_UNEXPLAINED = 1e-2


@check("hopeless")
def hopeless(evidence: Evidence) -> Found | None:
    """Most of the label energy is left."""
    certify = evidence.certify_residuals
    if classify_fit(evidence) is not Fit.HOPELESS or certify is None:
        return None
    error = certify.root_relative**2
    return (
        Outcome.STUCK,
        f"the best layer leaves {error:.0%} of the squared labels of held-out examples: it takes "
        "more heads or more examples, the search missed the layer, or no attention layer makes "
        f"these labels{hint_at_mask(evidence)}{evidence.residual_path_hint}",
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
        sentence = f"{error}, and the examples are too few to exclude a missing head: give more"
    else:
        sentence = (
            f"{describe_error(evidence)}; the examples are too few to tell noise from a missing "
            "head: give more"
        )
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
            f"{describe_error(evidence)}, of which one more head explains {gain:.0%}: the layer "
            f"has more heads, or the search missed one{evidence.residual_path_hint}"
        )
    return structured_outcome(evidence), sentence, {"gain": gain}


@check("no time for tests", expensive=True)
def no_time_for_tests(evidence: Evidence) -> Found | None:
    """Time was up before all tests were made that a conclusion rests on."""
    if not evidence.unfinished or evidence.certify_residuals is None:
        return None
    exact = classify_fit(evidence) is Fit.EXACT
    error = evidence.certify_residuals.root_relative**2
    sentence = (
        f"{describe_error(evidence)}; the time limit came before these tests were made: "
        f"{', '.join(evidence.unfinished)}; raise max_seconds"
    )
    outcome = Outcome.FITTED if exact else Outcome.TIME_LIMIT
    return outcome, sentence, {"relative_squared_error": error}


@check("not converged", expensive=True)
def not_converged(evidence: Evidence) -> Found | None:
    """Short of a minimum what is left is a function of the inputs, whatever made the labels."""
    if classify_fit(evidence) is not Fit.PARTIAL or evidence.converged:
        return None
    return (
        structured_outcome(evidence),
        f"{describe_error(evidence)} where the descent stopped, short of a minimum: the residual "
        f"there says nothing of its cause{evidence.residual_path_hint}",
        {},
    )


@check("departure", expensive=True)
def departure(evidence: Evidence) -> Found | None:
    """An alternative to the layer explains most of what is left, and says what it may be."""
    if classify_fit(evidence) is not Fit.PARTIAL:
        return None
    found = [
        one
        for one in evidence.departures
        if evidence.positions_look_alike or not one.alternative.positional
    ]
    if not found:
        return None
    share, alternative = found[0].share, found[0].alternative
    if not explains_most(evidence, share):
        return None
    passing = ""
    if alternative.name == "own token":
        head = find_own_token_head(evidence.fitted_attention)
        passing = head.describe() if head is not None else ""
        passing += evidence.residual_advice
    return (
        structured_outcome(evidence),
        f"{describe_error(evidence)}, {share:.0%} of which goes with "
        f"{_FEATURES[alternative.name]}: {alternative.suggests}{passing}",
        {"share": share},
    )


@check("residual path", expensive=True)
def residual_path(evidence: Evidence) -> Found | None:
    """A head that does nothing but pass tokens on, in a fit that is not exact."""
    if classify_fit(evidence) is not Fit.PARTIAL:
        return None
    head, less = find_own_token_head(evidence.fitted_attention), ", and a head less"
    if head is None and evidence.gain_of_one_more_head:
        head, less = find_own_token_head(evidence.attention_with_one_more_head), ""
    if head is None:
        return None
    told = "as a residual path y = x + F(x) makes it"
    if not evidence.residual:
        told += f": learn with residual=True{less}"
    elif head.scale is not None and head.scale < 0:
        told = f"as labels without a residual path make it: learn without residual{less}"
    return structured_outcome(evidence), f"{describe_error(evidence)}{head.describe()}, {told}", {}


@check("residual dependence", expensive=True)
def residual_dependence(evidence: Evidence) -> Found | None:
    """The residual depends on the inputs. Trust: see `residual_dependence_test`, `departures`."""
    if _fit_to_test(evidence) is Fit.EXACT:
        excess = evidence.residual_dependence
        sentence = (
            f"{_more_than_rounding(evidence)}, and depends on the inputs ({excess:.0f} standard "
            "deviations above noise)"
        )
        found = Outcome.FITTED, sentence, {"deviations": excess}
        # Computing goes with the inputs too, by less than a unit in the last place.
        large = evidence.train_residuals.root_relative > evidence.train_residuals.unit
        return found if large and excess > _SIGNIFICANT else None
    if classify_fit(evidence) is not Fit.PARTIAL:
        return None
    excess, departures = evidence.residual_dependence, evidence.departures
    if excess <= _SIGNIFICANT and not departures:
        return None
    by, share = f"{excess:.0f} standard deviations above noise", 0.0
    if departures:
        share = departures[0].share
        by = f"{share:.0%} of it goes with {_FEATURES[departures[0].alternative.name]}"
    return (
        structured_outcome(evidence),
        f"{describe_error(evidence)}, and the residual depends on the inputs ({by}), not as one "
        "more head would explain: several heads are missing, the search missed the layer, or no "
        f"attention layer makes these labels{hint_at_mask(evidence)}{evidence.residual_path_hint}",
        {"deviations": excess, "share": share},
    )


_FEATURES = {
    "distance": "distances between tokens",
    "position": "positions",
    "own token": "the row's own token",
    "biases": "constants",
    "logits": "powers of logits",
    "sink": "the sum of a row's weights",
    "norm": "norms of tokens",
    "outputs": "powers of outputs",
}


@check("departure of coarse labels", expensive=True)
def coarse_departure(evidence: Evidence) -> Found | None:
    """Below the precision of float32, float16 or bfloat16, many examples show a departure."""
    if not _is_coarse_exact(evidence) or evidence.rounding_test.departure is None:
        return None
    sentence = evidence.rounding_test.describe(evidence.train_residuals)
    return Outcome.FITTED, sentence, {"share": evidence.rounding_test.departure.share}


@check("held-out examples off", expensive=True)
def held_out_off(evidence: Evidence) -> Found | None:
    """Below the precision of the labels, but not by rounding: that is the same for all examples,
    and in every row what computing makes it."""
    train, certify = evidence.train_residuals, evidence.certify_residuals
    if not _is_coarse_exact(evidence) or certify is None:
        return None
    scalars = evidence.train.rows * evidence.train.out_dim
    taken = min(evidence.class_of_layer.count() / scalars, 0.9)
    more = np.sqrt((1 + taken) / (1 - taken))  # by the error of an estimate
    of_train = max(train.root_relative, certify.rounding)
    times = certify.root_relative / (_OFF * more * of_train) if of_train > 0 else 0.0
    rows = evidence.held_out_rows
    if rows is not None and rows.size:
        typical = np.sqrt(np.mean(rows**2)) / _OFF_TYPICAL
        times = max(times, typical / more, rows.max() / more / _OFF_ROW)
    if times <= 1:
        return None
    return (
        Outcome.FITTED,
        f"the relative residual {certify.root_relative:.2g} of held-out examples is not rounding "
        f"of the labels: on the whole or in single rows it is {times:.1f} times the most that "
        "rounding explains",
        {"times": float(times)},
    )


@check("more than computing leaves", expensive=True)
def more_than_computing(evidence: Evidence) -> Found | None:
    """Below the precision of the labels, but more than a box that computes in it would leave."""
    if not _is_coarse_exact(evidence) or evidence.rounding_test.passed:
        return None
    test = evidence.rounding_test
    sentence = test.describe(evidence.train_residuals)
    return Outcome.FITTED, sentence, {"residual": test.residual, "expected": test.expected}


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
        structured_outcome(evidence),
        f"{describe_error(evidence)}: in root mean square {times:.1f} times the noise that the "
        f"training examples show, whose residual is correlated between outputs {correlation:.1f} "
        "times as much as noise; the search missed the layer, or no attention layer makes these "
        "labels",
        {"times_noise": times, "correlation": correlation},
    )


@check("rounding", expensive=True, error_bars=True)
def rounding(evidence: Evidence) -> Found | None:
    """Labels were rounded to a known step, and what is left is no more than that."""
    certify, labels = evidence.certify_residuals, evidence.label_precision
    if classify_fit(evidence) not in (Fit.PARTIAL, Fit.NEAR) or certify is None:
        return None
    noise_level = evidence.train_noise
    train = evidence.train_residuals
    if not labels.is_coarse or labels.name != "float64" or not (noise_level and train.rounding):
        return None
    share = noise_level / train.noise_level * train.root_relative / train.rounding
    if share > _MORE:
        return None
    return (
        Outcome.FITTED,
        f"{describe_error(evidence)}: as much as rounding leaves of labels {labels.describe()}",
        {"relative_squared_error": certify.root_relative**2},
    )


@check("noise", expensive=True, error_bars=True)
def noise(evidence: Evidence) -> Found | None:
    """Nothing else was found in what is left, and it is as even as noise."""
    certify = evidence.certify_residuals
    if classify_fit(evidence) is not Fit.PARTIAL or certify is None:
        return None
    if not evidence.residual_law.is_noise or _is_deterministic(evidence):
        return None
    if evidence.scalars_left_over < _ENOUGH_LEFT:
        return None
    sentence = (
        f"{describe_error(evidence)}; the residual looks like independent noise to every test"
    )
    twice = 0.0 if evidence.answers is None else evidence.answers.twice
    if twice > 0:
        sentence += f", and asked twice the box answers otherwise, by {twice:.2g} of its answers"
    return Outcome.FITTED, sentence, {"relative_squared_error": certify.root_relative**2}


@check("not explained", expensive=True)
def not_explained(evidence: Evidence) -> Found | None:
    """The residual has a cause that no test identifies, and is not like noise of one size."""
    certify = evidence.certify_residuals
    if classify_fit(evidence) is not Fit.PARTIAL or certify is None:
        return None
    error = certify.root_relative**2
    low = error <= _LOW_UNEXPLAINED
    if _is_deterministic(evidence):
        assert evidence.answers is not None
        same = "the same" if evidence.answers.twice == 0 else "nearly the same"
        why = (
            f"asked twice the box answers {same}, so the residual is not noise: the search missed "
        )
        why += "the layer, or no attention layer makes these labels"
    elif evidence.scalars_left_over < _ENOUGH_LEFT:
        why = "the examples, of which those with nearly equal inputs count as one, are too few to "
        why += "test the residual: give more distinct examples"
    else:
        why = f"the residual {evidence.residual_law.describe()}, and its cause is not known: label "
        why += "errors of varying size, a few wrong labels, a layer that the search missed, "
        if not evidence.architecture.is_plain:
            why += 'heads of another kind (which fields set to "auto" look for), '
        why += "or no attention layer at all"
    return (
        Outcome.FITTED if low else Outcome.STUCK,
        f"{describe_error(evidence)}; {why}{evidence.residual_path_hint}",
        {"relative_squared_error": error},
    )


@check("recovered", expensive=True)
def recovered(evidence: Evidence) -> Found | None:
    """Nothing was found against a layer that is certified; its reason, and what it cannot say."""
    train, certificate = evidence.train_residuals, evidence.certificate
    if not is_certified_exact(evidence) or certificate is None:
        return None
    reason = certificate.reason
    if is_symmetric(evidence):
        reason += "; this holds for the function: with two tokens other heads can make the same one"
    if train.precision == "float64":
        if train.root_relative > train.floor / ROUNDING_MARGIN:
            reason += "; a head as small as that residual would go undetected"
    else:
        units = train.root_relative / train.unit
        if train.root_relative > _MORE * train.rounding:
            reason += (
                f"; on the training examples it is {units:.1f} ulp (units in the last place), "
            )
            reason += f"no more than evaluating the layer in {train.precision} leaves"
        reason += f"; a smooth deviation of {evidence.rounding_test.undetected:.1g} of the labels "
        reason += "would go undetected"
    return Outcome.RECOVERED, reason, {"train_residual": train.root_relative}


def _fit_to_test(evidence: Evidence) -> Fit | None:
    """The fit, where what it leaves may be a function of the inputs; None where it cannot.

    Black boxes that compute in their labels' precision err by more than the rounding of labels, but
    not by something that one more head explains or that varies smoothly with the inputs.
    """
    if classify_fit(evidence) is Fit.PARTIAL:
        return Fit.PARTIAL
    train = evidence.train_residuals
    more = train.root_relative > _MORE * train.rounding
    return Fit.EXACT if more and _is_coarse_exact(evidence) else None


def _is_coarse_exact(evidence: Evidence) -> bool:
    """Whether labels of less than double precision are met to that, by the one layer that does."""
    certificate = evidence.certificate
    if evidence.train_residuals.precision == "float64" or certificate is None:
        return False
    return classify_fit(evidence) is Fit.EXACT and certificate.null_dimension == 0


def _is_deterministic(evidence: Evidence) -> bool:
    """Whether a box was asked twice and said the same, but for less than what is left."""
    answers = evidence.answers
    if answers is None or answers.asked == 0:
        return False
    # Of independent noise two answers differ by its root of two.
    return answers.twice < evidence.train_residuals.root_relative


def _more_than_rounding(evidence: Evidence) -> str:
    residual = evidence.train_residuals.root_relative
    return f"the relative residual {residual:.2g} is more than rounding of the labels"
