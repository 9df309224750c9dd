"""Write docs/reasons.md: every reason a run can end with, with an example of each.

    python benchmarks/pages/write_reasons.py

The sentences are those of the checks themselves, on the evidence of the table in
tests/test_checks.py, which has a row for every check.
"""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from benchmarks import DOCS
from mhalearn.judge.checks import CHECKS, OBJECTIONS
from mhalearn.run.outcome import Outcome

OUT = DOCS / "reasons.md"
TESTS = DOCS.parent / "tests"
TOP = """# Why a run ended so

`solution_.reason` is the sentence of the first finding, in the order below; `solution_.findings`
has all that were made, each with its name, sentence and numbers. Here is an example of each, as
the check says it of evidence that was put together by hand (written by
`benchmarks/pages/write_reasons.py` from the table in `tests/test_checks.py`). What such statements
rest on is in [what is proved, what is heuristic](trust.md).

| outcome | meaning |
|---|---|
"""
TABLE = """
## Findings, in their order

| finding | what it looks for | outcome | example |
|---|---|---|---|
"""
AFTER = """
The last is asked only where the first finding speaks for the layer, and then decides. Where tokens
do not span the features, every sentence says so, and `RECOVERED` becomes `RECOVERED_ON_SPAN`.

## Stages of a run

As the live line, the report, the studio and `on_event` tell them (`Event.stage`):

| stage | what happens |
|---|---|
| working set, span, resumed | examples were drawn to memory; tokens span fewer dimensions; a checkpoint was read |
| subsample 1 | starts descend on part of the examples first |
| round n | starts descend by Gauss-Newton under a ridge that fades (continuation) |
| round n, first-order annealing | before that, Adam's steps under the ridge |
| round n, ridge release; no ridge; direct steps | the ridge goes to zero; descent without it; steps by factorisation near the end |
| round n, head exchange k | heads of different starts are recombined, and descend again |
| attempt n; attempt n, no penalty | many narrow heads descend as factors, under a penalty and without |
| open heads n | heads of any kind descend, to see which kind the examples show |
| head count | another number of heads is tried |
| model selection | held-out examples choose among the ends of starts |
| polish | descent to rounding on the training examples |
| phase 1 to phase 6, theory, decode | the phases of Chen and Li ([phase by phase](phases.md)) |
| adam, lbfgs, linear, own optimiser | the baselines, and a [method of your own](own_method.md) |
| identifiability | rank of the Jacobian and covariance of the parameters |
| certificate, outcome | what was found |
| residuals | all examples are compared with the layer |
| residual tests, missing-head test | why the residual is not zero |
"""  # noqa: E501


def main() -> None:
    OUT.write_text(TOP + outcomes() + TABLE + findings() + AFTER)


def outcomes() -> str:
    return "".join(f"| `{one.name}` | {one.explanation} |\n" for one in Outcome)


def findings() -> str:
    """A line for every example; of a check with several, the first has its name."""
    sys.path.insert(0, str(TESTS))
    table = importlib.import_module("test_checks")
    lines = []
    for check in (*CHECKS, *OBJECTIONS):
        about = " ".join((check.look.__doc__ or "").split("\n\n")[0].split())
        name = check.name
        for example, facts, outcome, *_ in table.FOUND:
            if example == check.name:
                found = check(table.known(**facts))
                assert found is not None
                assert found.outcome is outcome
                said = found.sentence.replace("|", "\\|")
                lines.append(f"| {name} | {about} | `{outcome.name}` | {said} |\n")
                name = about = ""
    return "".join(lines)


if __name__ == "__main__":
    main()
