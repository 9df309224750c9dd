"""Checks of layers that explain the examples exactly: does another one, too?"""

from mhalearn.data.input_information import ENOUGH_EQUATIONS
from mhalearn.judge.certificate import Certificate
from mhalearn.judge.evidence import Evidence
from mhalearn.judge.finding import Found, check
from mhalearn.judge.fit_quality import Fit, classify_fit, is_certified_exact
from mhalearn.judge.identifiability import RESOLVED
from mhalearn.run.outcome import Outcome

# A parameter that may be off by less than the size of a head is known, if not well.
_KNOWN = 1.0


@check("family of layers, by the inputs to fit", expensive=True)
def family_without_certificate(evidence: Evidence) -> Found | None:
    """Directions that `train` leaves open, where no example was spared. Cost: a spectrum."""
    if evidence.subsets.certify is not None or not evidence.train_residuals.exact:
        return None
    null = evidence.train_null_dimension
    return _family(evidence, null) if null else None


@check("surplus heads")
def surplus_heads(evidence: Evidence) -> Found | None:
    """Fewer heads than asked for explain everything: the others may be anything. Or more do."""
    found, asked = evidence.layer.n_heads, evidence.architecture.n_heads
    if not is_certified_exact(evidence) or asked is None or asked == found:
        return None
    dimension = _surplus_dimension(evidence)
    heads = "1 head explains" if found == 1 else f"{found} heads explain"
    if found > asked:
        return (
            Outcome.STUCK,
            f"{heads} the examples exactly, and {asked} {'was' if asked == 1 else 'were'} asked "
            f"for: ask for n_heads={found}",
            {"heads_found": found, "heads_asked": asked},
        )
    return (
        Outcome.NOT_IDENTIFIED,
        f"{heads} the examples exactly, so a family of layers with {asked} heads does too "
        f"(dimension at least {dimension}): ask for n_heads={found}",
        {"heads_found": found, "heads_asked": asked, "dimension": dimension},
    )


@check("too few equations")
def too_few_equations(evidence: Evidence) -> Found | None:
    """Labels are met exactly by chance where independent equations are no more than unknowns."""
    if not is_certified_exact(evidence) or evidence.equations >= ENOUGH_EQUATIONS:
        return None
    return (
        Outcome.FITTED,
        f"the inputs give {evidence.equations:.2f} independent equations an unknown, less than "
        f"{ENOUGH_EQUATIONS:g} (mirror images, near copies and repeated tokens add none): labels "
        "that no layer made would be fitted as well; give more distinct inputs",
        {"equations_over_unknowns": evidence.equations},
    )


@check("central symmetry")
def central_symmetry(evidence: Evidence) -> Found | None:
    """See `Information`. With two tokens the function is recovered, and said to be one."""
    if not is_certified_exact(evidence) or not is_symmetric(evidence) or _has_two_tokens(evidence):
        return None
    return (
        Outcome.NOT_IDENTIFIED,
        "the tokens of every example lie symmetrically about their mean, as two tokens always do: "
        "heads with Theta and W of opposite sign make the same outputs; give inputs that are not "
        "symmetric",
        {},
    )


@check("rank not certain")
def rank_not_certain(evidence: Evidence) -> Found | None:
    """The randomised rank test did not exclude a null space, or had no time to."""
    certificate = _uncertified(evidence)
    if certificate is None or certificate.null_dimension is not None:
        return None
    return Outcome.FITTED, certificate.reason, {}


@check("parameter not resolved", error_bars=True)
def parameter_not_resolved(evidence: Evidence) -> Found | None:
    """The residual, though at the precision of the labels, leaves a parameter room: with coarse
    labels an error bar; where a parameter may be anything, it is not identified."""
    certificate = _uncertified(evidence)
    if certificate is None or certificate.null_dimension != 0 or _is_resolved(certificate):
        return None
    bound = certificate.parameter_bound
    coarse = evidence.train_residuals.precision != "float64"
    known = coarse and bound is not None and bound < _KNOWN
    return (
        Outcome.FITTED if known else Outcome.NOT_IDENTIFIED,
        certificate.reason,
        {} if bound is None else {"parameter_bound": bound},
    )


@check("sign symmetry")
def sign_symmetry(evidence: Evidence) -> Found | None:
    """Heads of opposite sign, Theta and W, explain the labels as well."""
    certificate = _uncertified(evidence)
    if certificate is None or certificate.null_dimension != 0 or not _is_resolved(certificate):
        return None
    return Outcome.NOT_IDENTIFIED, certificate.reason, {}


@check("rival layer", expensive=True)
def rival_layer(evidence: Evidence) -> Found | None:
    """Another start ended at another layer that explains the examples as exactly."""
    if not is_certified_exact(evidence) or evidence.rival is None:
        return None
    return (
        Outcome.NOT_IDENTIFIED,
        "another start ended at a layer with other heads that explains all examples as exactly: "
        "the inputs do not tell the two apart; give more examples",
        {},
    )


@check("family of layers")
def family_of_layers(evidence: Evidence) -> Found | None:
    """The Jacobian has a null space."""
    certificate = _uncertified(evidence)
    if certificate is None or not certificate.null_dimension:
        return None
    return _family(evidence, certificate.null_dimension)


def is_symmetric(evidence: Evidence) -> bool:
    return evidence.information is not None and evidence.information.centrally_symmetric


def _has_two_tokens(evidence: Evidence) -> bool:
    return evidence.train.k <= 2 or int(evidence.train.arrays().lengths.max()) <= 2


def _uncertified(evidence: Evidence) -> Certificate | None:
    """The certificate of a layer that is exact on all subsets and yet not recovered."""
    uncertified = not evidence.is_certified and classify_fit(evidence) is Fit.EXACT
    return evidence.certificate if uncertified else None


def _is_resolved(certificate: Certificate) -> bool:
    return certificate.parameter_bound is not None and certificate.parameter_bound <= RESOLVED


def _family(evidence: Evidence, null: int) -> Found:
    surplus = _surplus_dimension(evidence)
    at_least = "at least " if surplus else ""
    fewer = f", or ask for n_heads={evidence.layer.n_heads}" if surplus else ""
    return (
        Outcome.NOT_IDENTIFIED,
        f"a family of layers of dimension {at_least}{null + surplus} fits the examples exactly: "
        f"give more examples, or inputs that vary more{fewer}",
        {"dimension": null + surplus},
    )


def _surplus_dimension(evidence: Evidence) -> int:
    """Heads asked for beyond those found have any attention, or any share of another's W."""
    asked = evidence.architecture.n_heads
    surplus = 0 if asked is None else max(0, asked - evidence.layer.n_heads)
    one = evidence.architecture.with_heads(1).count_by_kind()
    return surplus * max(one.attention, one.w)
