"""Was another kind of heads asked for than the examples show?"""

from __future__ import annotations

from mhalearn.judge.evidence import Evidence
from mhalearn.judge.finding import Found, check
from mhalearn.judge.fit_quality import describe_error, structured_outcome
from mhalearn.judge.kind_words import list_differences

# Of the squared error on held-out examples, what another kind may leave to be named.
_FAR_LESS = 1e-2


@check("another kind")
def another_kind(evidence: Evidence) -> Found | None:
    """Heads of another kind, which a learner came upon, explain held-out examples far better.

    Trust: both errors are measured on examples that neither was fitted to. It is not said that the
    other kind is the only one that does.
    """
    other, theirs = evidence.candidate.instead, evidence.residuals_instead
    certify = evidence.certify_residuals
    if other is None or theirs is None or certify is None or certify.exact:
        return None
    error, mine = theirs.root_relative**2, certify.root_relative**2
    if not (theirs.exact or error <= _FAR_LESS * mine):
        return None
    found = list_differences(evidence.architecture, other.architecture)
    if not found:
        return None
    heads = ", ".join(one.said for one in found)
    settings = ", ".join(one.setting for one in found)
    left = "explain them to their precision" if theirs.exact else f"leave {error:.2g} of them"
    return (
        structured_outcome(evidence),
        f"{describe_error(evidence)}, but heads with {heads} {left}: learn with {settings}",
        {"relative_squared_error": mine, "of_the_other_kind": error},
    )
