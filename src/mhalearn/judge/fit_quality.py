"""How well a candidate explains what it was fitted to, and what it was not."""

import enum

from mhalearn.judge.evidence import Evidence
from mhalearn.judge.residuals import Residuals
from mhalearn.run.outcome import Outcome

# A layer that leaves more than this share of the label energy unexplained is not a fit.
_HOPELESS = 0.5
# A residual less than this factor above the labels' precision, and below this size, may be
# rounding, made larger by unknowns the examples hardly see.
_NEAR = 1e3
_NEARLY = 1e-2
# Below this share a fit is called low in error even where what is left has structure.
_LOW = 1e-4
# A departure that explains this share of what is left is named; up to the second, one more head
# must explain less.
_NAMED, _NAMED_ALONE = 0.5, 0.75


class Fit(enum.Enum):
    """One of five, by the residuals on `train` and on `certify`."""

    EXACT = "both to the precision of the labels"
    NEAR = "certify nearly to the precision of the labels"
    TRAIN_ONLY = "train to the precision of the labels, certify not"
    HOPELESS = "neither: most of the label energy is left"
    PARTIAL = "neither, but most of the label energy"


def classify_fit(evidence: Evidence) -> Fit | None:
    """Which of them it is; None where no example could be spared to certify with."""
    train, certify = evidence.train_residuals, evidence.certify_residuals
    if certify is None:
        return None
    if train.exact and certify.exact:
        return Fit.EXACT
    if is_near(certify):
        return Fit.NEAR
    if train.exact:
        return Fit.TRAIN_ONLY
    return Fit.HOPELESS if certify.root_relative**2 > _HOPELESS else Fit.PARTIAL


def is_near(residuals: Residuals) -> bool:
    """Whether they are so near the precision of the labels that they may be rounding."""
    return residuals.root_relative <= min(_NEAR * residuals.floor, _NEARLY)


def is_certified_exact(evidence: Evidence) -> bool:
    """Whether the certificate says recovered, and `train` does not contradict it."""
    return evidence.is_certified and evidence.train_residuals.exact


def describe_error(evidence: Evidence) -> str:
    """The error on `certify`, where there is one."""
    assert evidence.certify_residuals is not None
    error = evidence.certify_residuals.root_relative**2
    return f"relative squared error {error:.2g} on held-out examples"


def structured_outcome(evidence: Evidence) -> Outcome:
    """Where what is left has structure: low in error, or not the layer."""
    certify = evidence.certify_residuals
    low = certify is not None and certify.root_relative**2 <= _LOW
    return Outcome.FITTED if low or classify_fit(evidence) is Fit.EXACT else Outcome.STUCK


def hint_at_mask(evidence: Evidence) -> str:
    """That the first row may be masked, in words that end a sentence; or nothing."""
    first = evidence.first_row
    if evidence.architecture.causal or first is None or not first.sees_itself_alone:
        return ""
    return "; the first output row is linear in the first token, as under a mask: try causal=True"


def explains_most(evidence: Evidence, share: float) -> bool:
    """Whether a departure with this share of what is left explains most of it, and more than one
    more head would."""
    if share < _NAMED:
        return False
    return share >= _NAMED_ALONE or share > (evidence.gain_of_one_more_head or 0.0)
