"""Write docs/queries.md from what queries.py, query_conditioning.py and plan.py measured."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

from benchmarks import DOCS
from benchmarks.ledger import Record, read_runs
from benchmarks.pages.prose import reflow
from benchmarks.pages.query_ranks import write_ranks
from benchmarks.queries import LINES, Line, all_outputs, published

OUT = DOCS / "queries.md"

INTRO = """# A box that can be asked

Random examples are all that Chen and Li allow. Who holds a box can ask it about sequences of her
own choice:

```python
import mhalearn as mha

box = mha.random_layer(n_heads=6, d=8, scale=2.0, seed=0)  # stands in for any black box
found = mha.extract(box, d=8, max_calls=40)

assert found.outcome is mha.Outcome.RECOVERED, found.reason
assert found.layer.n_heads == 6 and not found.random_starts  # found, not told
assert found.calls <= 40
```

On the command line: `mhalearn extract boxes:attention --dim 8 --max-calls 40 --checkpoint
answers.sqlite`, where `boxes.py` has a function `attention`, of NumPy arrays, or a torch module.
The box may take many sequences at once or one a call (`one_by_one=True`), and answer at all rows,
at the last row, or with one number. `max_length` is the longest sequence it takes, eight tokens
if nothing is said; `inputs` are the tokens it takes: `"cube"` for +-1, the radius of a ball, or
an array (v, d) of a vocabulary. A call is one sequence, and `max_calls`, `max_tokens` and
`max_scalars` are budgets; `found.calls`, `.tokens`, `.scalars` and `.plan` say what was asked,
and what for.

A call that fails, or takes longer than `timeout` seconds, is made three times more. Every answer
is kept as it comes (`keep="answers.sqlite"`, `--checkpoint`), so that a run that broke, or ended
with its budget and is given a larger one, pays for none of them again (`--resume`).

## The idea

![sigmoids, points, conditioning](images/queries.svg)

**A plane.** Tokens g (alpha u + t_j v) of one call differ along v alone. Head i then attends
along one line, with a slope that two numbers give, p_i = u Theta_i v and s_i = v Theta_i v, and
adds v W_i times a sigmoid of that slope (left). Write all rows of four such calls below each
other: the rank of that matrix is the number of heads, and a head is a point (p, s) whose
sigmoids lie in its column space (middle). A grid over two numbers finds all of them; there is
nothing to start from, and no local minimum to be caught in.

**Off the plane.** Tokens moved by a millionth off the plane change the answers linearly in all
W_i, in Theta_i v, u Theta_i and v Theta_i: one linear least squares problem.

**Heads that write alike.** Where matrices W_i are multiples of each other, as in the parity
layers of the lower bounds, or where there are more heads than outputs, that rank is smaller than
the number of heads. Such heads are told apart by where they turn: far from the origin a head
attends to one end of a call on one side of an angle of the plane, and to the other end beyond.
Sweeps, sharper and sharper where answers bend, show these turns one by one; matching pursuit finds
the points (p, s) behind them. Tokens between the turns, far out, then make the answers linear in
all W_i; tokens at the turns, moved alike, tell Theta_i v; and tokens at the turns of any y, moved
apart, tell the rest of Theta_i, by linear steps. Of the sequences that end it most lie at turns
too. A row there tells of Theta one number for each dimension that heads write to, however many
outputs there are, and sequences are counted by that: from fewer, the rounding of a box comes back a
thousand times larger, and nothing can be certified.

**Narrow heads.** Where heads have a known rank r and together write to no more dimensions than
there are outputs, tokens leave the plane in r random dimensions only. That shows, for as many fewer
calls, the space that each head writes to. Answers in one such space are of one head alone, and that
head is learned on its own, by one descent under a penalty that fades, from where even attention
points. A causal mask changes none of this: rows then average over the tokens that they see.

**Calls that are designed.** Where a fit leaves a direction of the parameters nearly open, the next
calls are those whose outputs move most along it.

**The rest.** With W known, small logits make the answers nearly linear in Theta, so that the
smallest of the random sequences are fitted first; Gauss-Newton
ends it on all random sequences, of which some certify: the judge is that of `learn`.

Where answers are coarse or random, where there is one output, or tokens of a cube or a
vocabulary, there is no such plane: random sequences of a size that makes attention neither flat
nor sharp go to the exact solver, which makes random starts. `Extraction.random_starts` says
which it was. So do heads as decoders have them (`rope`, `kv_heads`, `window`, `sinks`, `softcap`,
`qk_norm`, `position_bias`, `latent`, as of `AttentionRegressor`), twenty times the counting limit.
"""

HARD = """## What is hard

Parity layers of four heads and more are out of reach of every learner here from random examples of
two +-1 tokens ([hard layers](hard.md)). They fall to a few hundred calls, as the table shows: the
hardness is that of such examples, not of the layers. {beside}
"""

PAPERS = """## What papers have, and what is ours

Sequences of one token show the sum of all W, and a token repeated n times makes the answer a
rational function of n whose poles separate the heads: so 2608.03294 proves that 4 H d^2 - 2 H +
1 scalars, one a call at the last token, determine a layer in exact arithmetic. ePrint 2026/1678
reports d = 8 with six heads to 2^-51. 2601.16873 treats one head. None has code that we could
find. Ours are the plane in place of the poles, the linear step off it, the turns, and the
tables above; on the right of the figure, the matrix that each asks to be inverted.
"""

OPEN = """## Not reached

Heads as decoders have them are not found by algebra: their calls are random. Turns need tokens of
any size: in a ball, a cube or a vocabulary heads that write alike are left to random starts, and so
are they under a causal mask. Heads whose Theta differ by a thousandth of their size are told
apart in some boxes and not in others, which end as `FITTED` or at the time limit. Fresh sequences
are few near a budget, and the certificate's share of inputs is small accordingly.
"""

RESPONSIBLE = """## Responsible use

Ask only boxes that are yours, or whose owner allows it: terms of service often forbid
extraction, and weights may be somebody's property. A box that answers at all rows with all its
digits gives its weights away in some forty calls: who serves attention outputs should know that.
Rounding costs an attacker calls and digits, as the table shows, and prevents nothing by itself.
Inner layers of a language model cannot be had in this way through its token interface.
"""


def main() -> None:
    OUT.write_text(
        INTRO
        + "\n"
        + _table(read_runs("queries"))
        + "\n"
        + write_ranks(read_runs("queries"))
        + "\n"
        + _conditioning(read_runs("query_conditioning"))
        + "\n"
        + _design(read_runs("query_design"))
        + "\n"
        + _plan(read_runs("plan"))
        + "\n"
        + reflow(HARD.format(beside=_beside(read_runs("queries"))))
        + "\n"
        + OPEN
        + "\n"
        + PAPERS
        + "\n"
        + RESPONSIBLE
    )


def _table(runs: list[Record]) -> str:
    lines = [
        "## Measured",
        "",
        "Written by `benchmarks/pages/write_queries.py` from `benchmarks/results/queries.json`. A",
        "line is one setting, a teacher a seed. Good: every parameter to the goal. Calls and",
        "scalars are medians and all that was asked, certifying calls among them.",
        "Random starts: runs that made any. Seconds are of the processor, medians on a busy",
        "machine. Code: the commits that were measured. Error over bound: root",
        "mean square over parameters, over the Cramer-Rao bound of the calls that were fitted,",
        "median. Over limit: most calls of a run over the counting limit of calls of that length,",
        "where it was recorded. Heads are told where starts are random. `random` and `cube` are",
        "random sequences, Gaussian or +-1, with the same budget; of parity layers, where calls",
        "are named, the median of what turns took, fitted at once (of Gaussian ones five calls",
        "say of what size), and else as many as 40 seconds allowed, fewer.",
        f"Limits in seconds of the processor, compilation among them: {_limits(runs)}; a run ends",
        "when it has been judged, some seconds later. Runs of 600 scalars have none to spare to",
        "certify with, and of 12 bits none is called exact. "
        f"Published at d = 8, six heads: {published(6, 8)} scalars.",
        "A recovered layer is asked about one shorter sequence where the budget allows it: a call",
        "that counts, and that rows of older code lack.",
        "",
        "| setting | good | goal | worst error | recovered | calls | over limit | scalars "
        "| random starts | error over bound | seconds | code |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, line in LINES.items():
        if " of rank " in name:  # a table of their own
            continue
        mine = [run for run in runs if run["line"] == name]
        if mine:
            lines.append(_row(name, line, mine))
    return reflow("\n".join(lines) + "\n")


def _limits(runs: list[Record]) -> str:
    """The lines that were measured with a limit of the processor's time, by limit."""
    limits = {run["line"]: run.get("processor_limit") for run in runs}
    lines_of: dict[float, list[str]] = {}
    for name in LINES:
        if (limit := limits.get(name)) is not None:
            lines_of.setdefault(limit, []).append(f"`{name}`")
    return "; ".join(f"{limit:.0f} of {', '.join(lines_of[limit])}" for limit in sorted(lines_of))


def _beside(runs: list[Record]) -> str:
    """How parity layers fared from random sequences with the budget of turns."""
    found, limits = {}, set()
    for tokens, inputs in (("Gaussian", "any"), ("+-1", "cube")):
        counts = []
        for name, line in LINES.items():
            if line.examples is None or line.inputs != inputs:
                continue
            mine = [run for run in runs if run["line"] == name]
            good = sum(_error(run) <= line.goal for run in mine)
            counts.append(f"{good}/{len(mine)} at {line.heads} heads")
            limits |= {f"{run['processor_limit']:.0f}" for run in mine}
        found[tokens] = ", ".join(counts)
    return (
        "Of as many random sequences of eight tokens, fitted in "
        f"{' or '.join(sorted(limits))} seconds of the processor, the solver found "
        + "; ".join(f"{counts} ({tokens})" for tokens, counts in found.items())
        + ". With more time it may find more."
    )


def _error(run: Record) -> float:
    return np.inf if run.get("error") is None else run["error"]


def _row(name: str, line: Line, runs: list[Record]) -> str:
    """What rounding of doubles leaves is no noise with a bound: exact answers have none."""
    goal, exact = line.goal, line.box is all_outputs
    errors = [_error(run) for run in runs]
    good = sum(error <= goal for error in errors)
    recovered = sum(run.get("outcome") == "RECOVERED" for run in runs)
    over = [] if exact else [run["over_bound"] for run in runs if run.get("over_bound")]
    starts = sum(bool(run.get("random_starts")) for run in runs)

    def median(what: str) -> float:
        return float(np.median([run[what] for run in runs if what in run]))

    cells = (
        name,
        f"{good}/{len(runs)}",
        f"{goal:.0e}",
        f"{max(errors):.1e}",
        f"{recovered}/{len(runs)}",
        f"{median('calls'):.0f}",
        f"{most:.2f}" if (most := _most_over_limit(runs)) else "-",
        f"{median('scalars'):.0f}",
        f"{starts}/{len(runs)}",
        f"{np.median(over):.2f}" if over else "-",
        f"{median('processor_seconds'):.1f}",
        ", ".join(sorted({run["code"] for run in runs})),
    )
    return "| " + " | ".join(cells) + " |"


def _most_over_limit(runs: list[Record]) -> float:
    return max((run["over_limit"] for run in runs if run.get("over_limit")), default=0.0)


def _design(runs: list[Record]) -> str:
    lines = [
        "**Designed calls** (`benchmarks/query_design.py`): the smallest singular value of the",
        "Jacobian after four more calls, over that after four random ones; range over layers.",
        "Pool: the best of 200 random calls in the weakest direction. Apart: the distance of the",
        "second Theta from the first, over its size; none where heads are independent. Calls that",
        "chase the weakest direction gain where one is far weaker than the others, and lose else.",
        "",
        "| heads | d | apart | layers | before | pool over random | designed over random |",
        "|---|---|---|---|---|---|---|",
    ]
    for m, d, apart in dict.fromkeys((run["m"], run["d"], run["apart"]) for run in runs):
        mine = [run for run in runs if (run["m"], run["d"], run["apart"]) == (m, d, apart)]
        before = float(np.median([run["first"] for run in mine]))
        pool, designed = (
            [run[way] / run["random"] for run in mine] for way in ("pool", "designed")
        )
        lines.append(
            f"| {m} | {d} | {apart or 'none'} | {len(mine)} | {before:.0e} "
            f"| {min(pool):.1f} to {max(pool):.1f} | {min(designed):.1f} to {max(designed):.1f} |"
        )
    return "\n".join(lines) + "\n"


def _conditioning(runs: list[Record]) -> str:
    lines = [
        "**Conditioning against heads** (`benchmarks/query_conditioning.py`, d = 8, eight tokens,",
        "four calls a plane). Found: the number of heads and all of their points.",
        "",
        "| heads | found | worst error of p | condition of the plane | of the poles |",
        "|---|---|---|---|---|",
    ]
    for m in sorted({run["m"] for run in runs}):
        mine = [run for run in runs if run["m"] == m]
        errors = [run["error"] for run in mine if run["error"] is not None]
        found = sum(error < 1e-4 for error in errors)
        plane, poles = (
            float(np.median([run[name] for run in mine]))
            for name in ("condition", "condition_of_poles")
        )
        worst = f"{max(errors):.0e}" if errors else "-"
        lines.append(f"| {m} | {found}/{len(mine)} | {worst} | {plane:.0f} | {poles:.0e} |")
    return "\n".join(lines) + "\n"


def _plan(runs: list[Record]) -> str:
    lines = [
        "## Plan before paying",
        "",
        '`mha.plan(mha.Architecture(8, n_heads=6), 1e-6, labels="float32")`, or `mhalearn plan',
        "--dim 8 --heads 6 --error 1e-6 --labels float32`, says how many examples or calls a",
        "wanted parameter error takes, from the Fisher information of a layer of that class.",
        "Achieved over predicted error (`benchmarks/plan.py`, the layer itself in place of a",
        "guess; root mean squares over teachers and four draws of inputs, and range):",
        "",
        "| heads, d | labels | ratio 2 | ratio 4 | ratio 8 |",
        "|---|---|---|---|---|",
    ]
    for m, d in sorted({(run["heads"], run["d"]) for run in runs}, reverse=True):
        for labels in ("float64", "float32", "bfloat16"):
            cells = []
            for ratio in (2.0, 4.0, 8.0):
                found = [
                    run["achieved"] / run["predicted"]
                    for run in runs
                    if (run["heads"], run["d"], run["labels"], run["ratio"])
                    == (m, d, labels, ratio)
                ]
                together = np.sqrt(np.mean(np.square(found)))
                cells.append(f"{together:.2f} ({min(found):.2f} to {max(found):.2f})")
            lines.append(f"| {m}, {d} | {labels} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Errors were {_worst(runs)} times what was predicted. In double precision labels",
        "are rounded less than a fit in doubles loses: what that loses is computed with more",
        "digits, and is part of the prediction. Achieved is the error of a least",
        "squares fit, carried on until",
        "it only rounds; the descent of `learn` ends some way above that in double precision. A",
        "plan made without a guess is of another layer of the class, and says nothing of finding",
        "the layer, which takes more examples where labels are coarse.",
    ]
    return "\n".join(lines) + "\n"


def _worst(runs: list[Record]) -> str:
    """The smallest and the largest ratio."""
    ratios = [run["achieved"] / run["predicted"] for run in runs]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


if __name__ == "__main__":
    main()
