"""Checks of one subset of the examples against another: does one layer make all their labels?"""

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.judge.certificate import THRESHOLD
from mhalearn.judge.evidence import Evidence
from mhalearn.judge.finding import Found, check
from mhalearn.judge.fit_quality import Fit, classify_fit, describe_error, is_near
from mhalearn.judge.residuals import Residuals
from mhalearn.run.outcome import Outcome

# All examples are as exact as some of them up to this factor.
_AS_EXACT = 3.0
# The floor of exact residuals allows this many times what rounding alone makes.
ROUNDING_MARGIN = 48.0
# Noise makes no example worse than the median by this factor; a corrupted label may.
_ALIKE = 10.0


@check("contradiction")
def contradiction(evidence: Evidence) -> Found | None:
    """`certify` is explained, and `train`, to which the layer was fitted, is not."""
    train, certify = evidence.train_residuals, evidence.certify_residuals
    if classify_fit(evidence) is not Fit.NEAR or is_near(train) or certify is None:
        return None
    bar = max(THRESHOLD, 2 * train.floor)
    contradicting = int(np.sum(train.relative > bar))
    return (
        Outcome.FITTED,
        f"the held-out examples are explained ({_error(certify)}), the training examples "
        f"are not ({train.root_relative**2:.2g}, {contradicting} of them off by more than "
        f"{bar:.2g}): no attention layer makes all these labels",
        {"contradicting": contradicting, "bar": bar},
    )


@check("near the precision")
def near_the_precision(evidence: Evidence) -> Found | None:
    """More than the rounding of labels is left, but rounding of a descent may be as large."""
    train, certify = evidence.train_residuals, evidence.certify_residuals
    if classify_fit(evidence) is not Fit.NEAR or not is_near(train) or certify is None:
        return None
    sentence = (
        f"{describe_error(evidence)}: not at the precision of the labels, but so near it that "
        "rounding errors in an ill-conditioned problem may be the cause"
    )
    if max(train.root_relative, certify.root_relative) <= train.floor:
        sentence = (
            f"{describe_error(evidence)} on the whole, at the precision of the labels, but not in "
            "every part: an output column, an example or a row is off by more than that"
        )
    return Outcome.FITTED, sentence, {"train_residual": train.root_relative}


@check("others not explained")
def others_not_explained(evidence: Evidence) -> Found | None:
    """`train` is fitted exactly and `certify` is not: some labels are wrong, or the layer is."""
    certify, certificate = evidence.certify_residuals, evidence.certificate
    if classify_fit(evidence) is not Fit.TRAIN_ONLY or certify is None or certificate is None:
        return None
    wrong = int(np.sum(certify.relative > max(THRESHOLD, 2 * evidence.train_residuals.floor)))
    count, error = len(certify.relative), _error(certify)
    if 2 * wrong < count:  # of a wrong layer, nearly all would be
        outcome = Outcome.FITTED
        sentence = (
            f"the training examples are explained exactly, {wrong} of {count} held-out "
            f"ones are not ({error}): no attention layer makes all these labels"
        )
    else:
        outcome, null = Outcome.NOT_IDENTIFIED, certificate.null_dimension
        open_ = f", and the Jacobian has a null space of dimension {null}" if null else ""
        sentence = (
            f"the training examples are explained exactly, the held-out ones are not ({error})"
            f"{open_}: give more examples"
        )
    return outcome, sentence, {"wrong": wrong, "of": count}


@check("all examples", expensive=True)
def all_examples(evidence: Evidence) -> Found | None:
    """Those beside the working set: where `train` is fitted exactly, so must they be; where it is
    noisy alike, so must they. Cost: a pass over all."""
    every, train = evidence.all_residuals, evidence.train_residuals
    if every is None:
        return None
    if train.exact:
        return _not_as_exact(evidence, train, every)
    unlike = _count_unlike(every.squared)
    if unlike == 0 or _count_unlike(train.squared):  # the verdict on the working set has seen it
        return None
    return (
        Outcome.FITTED,
        f"{_error(every)} over all examples, {unlike} of which {'is' if unlike == 1 else 'are'} "
        f"off by more than {_ALIKE:.0f} times the median, as wrong labels would be; the layer was "
        f"fitted to {evidence.train.n} of {evidence.subsets.every.n} examples",
        {"outliers": unlike},
    )


def _not_as_exact(evidence: Evidence, train: Residuals, every: Residuals) -> Found | None:
    # Not only exact, but as exact: a working set at rounding allows the others no more.
    level = max(train.root_relative, every.floor / ROUNDING_MARGIN)
    if every.exact and every.root_relative <= _AS_EXACT * level:
        return None
    bar = max(THRESHOLD, 2 * every.floor)
    if not np.any(every.relative > bar):
        bar = _AS_EXACT * level
    wrong = int(np.sum(every.relative > bar))
    return (
        Outcome.FITTED,
        f"{evidence.train.n} random examples are explained exactly, all {evidence.subsets.every.n} "
        f"are not ({_error(every)}, {wrong} of them off by more than {bar:.2g}): no attention "
        "layer makes all these labels",
        {"wrong": wrong, "bar": bar},
    )


def is_noise_without_outliers(evidence: Evidence) -> bool:
    """Whether `train` is off, and no example far more than most: others may be fitted, too.

    Where the fit is exact it says all it can; a wrong label among the others would do harm. What
    `certify` leaves says nothing here: near the counting limit the error of the estimate makes a
    few examples far worse than most, until they are fitted themselves. Whether one of them is wrong
    is seen in what is left then, by `has_outliers`.
    """
    train = evidence.train_residuals
    return not (train.exact or has_outliers(train)) and all_examples(evidence) is None


def has_outliers(residuals: Residuals) -> bool:
    """Whether examples that were fitted are off far more than most, as wrong labels are."""
    return _count_unlike(residuals.squared) > 0


def _count_unlike(squared: Float64) -> int:
    """Examples that are off far more than most."""
    return int(np.sum(squared > _ALIKE**2 * np.median(squared)))


def _error(residuals: Residuals) -> str:
    return f"relative squared error {residuals.root_relative**2:.2g}"
