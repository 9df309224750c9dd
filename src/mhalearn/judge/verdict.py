"""Which outcome a candidate deserves, and why, in one sentence."""

from dataclasses import dataclass, replace

from mhalearn.judge.certificate import Certificate
from mhalearn.judge.checks import CHECKS, OBJECTIONS
from mhalearn.judge.evidence import Evidence
from mhalearn.judge.finding import Check, Finding
from mhalearn.judge.noise import with_noise
from mhalearn.judge.structure_checks import no_time_for_tests
from mhalearn.run.outcome import Outcome
from mhalearn.run.watch import OutOfTime


@dataclass(frozen=True)
class Verdict:
    """The findings of a run; the first decides."""

    findings: tuple[Finding, ...]

    @property
    def outcome(self) -> Outcome:
        return self.findings[0].outcome

    @property
    def has_error_bars(self) -> bool:
        """Whether what is left may be taken for independent errors."""
        return self.findings[0].has_error_bars

    @property
    def reason(self) -> str:
        return self.findings[0].sentence


def judge(
    evidence: Evidence,
    checks: tuple[Check, ...] = CHECKS,
    objections: tuple[Check, ...] = OBJECTIONS,
) -> Verdict:
    """Name the outcome of a run: that of the first finding, in the order of the checks.

    All cheap checks are asked, so that their findings can be told too. Expensive ones (a spectrum,
    a missing head, the dependence of residuals, all examples) are asked only while nothing is
    found, and so are the conclusions, noise and recovered, which rest on their silence. Objections
    are asked where the first finding speaks for the layer, and overrule it. A check whose evidence
    could not be had before time was up is `unfinished`, and then no conclusion is drawn.

    RECOVERED needs the certificate, `train` as exact, and the head count asked for. What is not
    recovered is told apart by what is left over: nothing, noise, or something one more head would
    explain.
    """
    found: list[Finding] = []
    for check in checks:
        if not (found and check.expensive):
            found += _asked(check, evidence)
    assert found, "the checks leave a case open"
    if found[0].outcome in (Outcome.RECOVERED, Outcome.FITTED):
        objected = [finding for check in objections for finding in _asked(check, evidence)]
        if any(check.name in evidence.unfinished for check in objections):
            objected += _asked(no_time_for_tests, evidence)
        found = objected + found
    return Verdict(tuple(found))


def agree(evidence: Evidence, verdict: Verdict) -> Certificate | None:
    """The certificate with nothing in it that the verdict contradicts: a noise level and intervals
    stand only where what is left is the rounding of labels, or may be taken for noise."""
    certificate = evidence.certificate
    if certificate is None:
        return None
    if verdict.outcome is Outcome.RECOVERED:
        if certificate.label_precision == "float64":
            return certificate
        return replace(certificate, undetected=evidence.rounding_test.undetected)
    certificate = certificate.withdrawn(verdict.reason)
    if verdict.has_error_bars:
        return with_noise(certificate, evidence.train_noise)
    fitted = verdict.outcome in (Outcome.FITTED, Outcome.STUCK)
    met = evidence.certify_residuals is not None and evidence.certify_residuals.exact
    return certificate if met and not fitted else certificate.without_noise()


def _asked(check: Check, evidence: Evidence) -> list[Finding]:
    try:
        finding = check(evidence)
    except OutOfTime:
        evidence.unfinished.append(check.name)
        return []
    return [] if finding is None else [finding]
