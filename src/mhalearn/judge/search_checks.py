"""Checks of what was there to learn from, and of how the search ended."""

from mhalearn.judge.evidence import Evidence
from mhalearn.judge.finding import Found, check
from mhalearn.run.outcome import Outcome


@check("too few examples")
def too_few_examples(evidence: Evidence) -> Found | None:
    """Fewer than the counting limit, repeated ones counted once. Trust: necessary, by counting."""
    information, limit = evidence.information, evidence.counting_limit
    if information is None or information.examples >= limit:
        return None
    return (
        Outcome.TOO_FEW_EXAMPLES,
        f"the examples count as {information.examples:.3g} independent ones, below the counting "
        f"limit of {limit:.1f} for this architecture: give more distinct examples",
        {"examples": information.examples, "counting_limit": limit},
    )


@check("time limit")
def time_limit(evidence: Evidence) -> Found | None:
    """The clock stopped the search, or the certificate of what it found."""
    if evidence.candidate.outcome is Outcome.TIME_LIMIT or evidence.time_is_up:
        return _unless_certified(evidence, Outcome.TIME_LIMIT)
    return None


@check("not finite")
def not_finite(evidence: Evidence) -> Found | None:
    """Every start diverged."""
    if evidence.candidate.outcome is Outcome.NONFINITE:
        return _unless_certified(evidence, Outcome.NONFINITE)
    return None


@check("search stuck")
def search_stuck(evidence: Evidence) -> Found | None:
    """The learner itself gave up, for the reason it gives."""
    outcome = evidence.candidate.outcome
    if outcome in (Outcome.FITTED, Outcome.TIME_LIMIT, Outcome.NONFINITE):
        return None
    return _unless_certified(evidence, outcome)


@check("not polished")
def not_polished(evidence: Evidence) -> Found | None:
    """A search that ends short of the best fit leaves more than noise, and no missing head."""
    if evidence.polished or evidence.is_certified:
        return None
    error = evidence.run.best_loss
    sentence = (
        f"relative squared error {error:.1e} before polish, which was left out: short of a minimum "
        "the residual says nothing of noise or missing heads"
    )
    return Outcome.FITTED, sentence, {"relative_squared_error": error}


@check("nothing to certify with")
def nothing_to_certify_with(evidence: Evidence) -> Found | None:
    """All examples were needed to determine the layer, so none is left to show that it is right."""
    if evidence.subsets.certify is not None:
        return None
    error = evidence.train_residuals.root_relative**2
    return (
        Outcome.FITTED,
        f"relative squared error {error:.2g} on the training examples, and no example could be "
        "spared to certify with: give more examples",
        {"relative_training_error": error},
    )


def _unless_certified(evidence: Evidence, outcome: Outcome) -> Found | None:
    """How the search ended is no matter where what it found is certified."""
    if evidence.is_certified:
        return None
    reason = evidence.candidate.reason or outcome.explanation
    certificate = evidence.certificate
    if outcome is Outcome.TIME_LIMIT and certificate is not None and certificate.is_unfinished:
        reason = certificate.reason
    return outcome, f"{reason}{evidence.residual_path_hint}", {}
