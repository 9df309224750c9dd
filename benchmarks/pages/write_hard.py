"""Write docs/hard.md from what hard_queries, hard_curve, hard_attacks and hard_dial measured."""

import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from benchmarks import DOCS, RESULTS
from benchmarks.studies.hard_attacks import LIMIT
from mhalearn.hardness.curve import LEARNED, growth, summarise

OUT = DOCS / "hard.md"

INTRO = """# Hard layers

Written by `benchmarks/pages/write_hard.py` from the JSON in `benchmarks/results`; no figure here is
typed by hand.

**Two theorems.** Chen and Li prove that a non-degenerate layer can be learned from random +-1
examples in time (dk)^{O(m^3)} for m heads (Theorem 1.2). They also prove that in the worst case
some exponential dependence on m cannot be avoided, even with two tokens: for statistical-query
algorithms, and for all efficient algorithms under a cryptographic assumption (Theorem 1.3). This
page makes the second theorem tangible with three families of layers one can generate, check, attack
and plot. The families are ours, in the spirit of the theorem: sharp heads of alternating sign that
add up to a square wave. The theorems are the paper's; its own constructions may differ.

```python
import mhalearn as mha

layer, secret = mha.hard_layer("parity", n_heads=4, d=12, sharpness=12.0, seed=0)
x = mha.sample_inputs("boolean", 1000, 2, 12)
assert abs(layer(x) - secret.labels(x)).max() < 1e-3  # the layer is its closed form
broken = [item.name for item in mha.check_nondegeneracy(layer, k=2).items if not item.ok]
assert "size of the sum of W" in broken  # the heads cancel: Theorem 1.2 does not apply
```

`mhalearn hard parity --heads 4 --dim 16 --out DIR` writes layer, secret and examples;
`mhalearn hard lwr --dimension 4 --modulus 8 --out DIR` those of
[learning with rounding](#learning-with-rounding-by-a-reduction).

**How they work.** With two +-1 tokens and a diagonal Theta_i both rows attend to the other token
with a weight that depends only on the bits b = x_1 * x_2: every head is a soft halfspace of b. In
the *parity* family head i is the step "fewer than i + 1 of the secret coordinates of b are -1",
and the sum of m steps of alternating sign is the parity of m secret bits, shown where b_0 = -1.
In the *rounding* family the count is weighted by secret integers and a head comes every half
period q/2: the label tells in which half of a period the secret inner product lies, modulo q,
which is the shape of learning with rounding; the *lwr* family is learning with rounding itself. In
all of them the projections sum to zero, the Thetas have one large entry a row and hardly any
effective rank: `check_nondegeneracy` names all three.

## What averages see, exactly

For small d all 4^d inputs can be listed. The part of the label that depends on no secret, 1[b_0 =
-1] (x_1 - x_2) U, is subtracted first; entries have unit mean square together. *Few bits*: the
largest |correlation| of an entry with a product of fewer than m - 1 bits of b and any product of
bits of x_1. *m - 1 bits*: the largest with just as many. *Two layers*: the largest |correlation|
between the labels of two layers of the class, all binomial(d - 1, m) secrets or as many random
layers. *Pairwise bound*: min(class, 1 / largest correlation), a lower bound on the statistical
dimension from the worst pair; a learner that sees averages only must ask about that many times
the square of its tolerance. For so small d this says little in itself: what it is a finite
instance of is that no two of binomial(d - 1, m) secrets, of the order of d^m, are correlated. Of
random layers the worst pair decides the column, and it speaks of correlations with the labels only:
their labels have more than two values.

| family | m | d | few bits | m - 1 bits | two layers | class | pairwise bound | d^m |
|---|---|---|---|---|---|---|---|---|
"""

QUERIES = """
What is left of the parities' correlations is the sharpness of the heads (exp(-16)) and rounding. A
random layer of the same shape shows itself in averages with no bits or one. A learner that asks for
one correlation after the other, from few bits to many (`mhalearn.hardness.learn_by_queries`), pays
for it:

| m | d | tolerance | secrets found | median queries | binomial(d - 1, m) |
|---|---|---|---|---|---|
"""

ORACLES = """
The right product correlates with an entry of the label by a quarter. From a tolerance of half of
that on the secret is hidden from this learner, which then asks nothing.

Those answers are rounded. The oracle of the proofs is an adversary: it answers what coins in place
of the secret's signs would make wherever that is within its tolerance (`answers="adversarial"`), so
that a query tells of the secret only if it must. And VSTAT(t) of Feldman et al. (STOC 2013) tells
the mean p of a query with values from 0 to 1 up to max(1/t, sqrt(p (1 - p) / t)), which is what t
examples would tell (`vstat=t`). The same learner, on the closed form of parities; *withheld* are
answers that know no secret:

| m | d | oracle | answers | secrets found | median queries | withheld |
|---|---|---|---|---|---|---|
"""

CURVE = """
This learner needs one telling answer, the last; an adversary withholds all others, which does not
slow it down. What an adversary changes is what can be proved: of all learners, not only of this.

## What it costs our learners

Secrets learned within the budget; seconds spent for each that was learned; and the median number
of examples of those. Where none of n was learned the chance of success is at most 1 - 0.05^(1/n),
with 95 % confidence, and the seconds of a try over that chance are what is printed, after a >.
Each learner gets 16 times the counting limit of examples and, if that fails, 128 times, on two
cores and with {budgets} seconds a fit (d = {widths}). Learners look at the clock between steps; a
try took at most {overruns} times what it was given. Sculpt gives parities up by itself within
seconds; on random layers of d = 32 it was run on a few only, as the counts say. What is timed is
learning alone, compiled before: certificates are not counted. Learned means relative squared error
at most 0.01 on fresh inputs, and that the secret's coordinates are those that move the outputs
most. (Two-token layers have exact twins, so heads are not compared.) To ignore the secret leaves
one half.

![Seconds a success and errors against the number of heads](images/hard_curve.svg)

| family | m | d | learner | learned | seconds a success | examples |
|---|---|---|---|---|---|---|
"""

GROWTH = """
How the seconds of a success grow with each head: least squares in the logarithm of the known costs.
Where a lower bound lies above that line, the flattest line that fits as well is told, after a >,
rounded down; left out where even a fall would fit. Known costs are estimates from ten layers, and
several bounds of 95 % do not hold together with 95 %. The budget limits what can be seen: with ten
failures no bound exceeds four times the seconds of a try.

| family | d | learner | factor a head |
|---|---|---|---|
"""

ATTACKS = """
## Attacks that do not obey the rules

Whoever guesses the structure reads one bit from every example with b_0 = -1, and a noiseless
**parity** is a linear system over GF(2) with d - 1 unknowns: as many such examples, twice as many
in all, give the secret, and ten more make sure that it is no accident
(`mhalearn.hardness.attacks.break_parity`). Label noise flips bits;
elimination on all examples then fails at the first wrong one. Elimination on up to 200 random
subsets of d + 3 still succeeds while a subset without a wrong bit is likely; a secret counts as
found only if the other examples agree with it more often than chance allows. Noise is relative to
the labels' root mean square; a label has d entries that speak of one bit, so that much of it is
needed.

| m | d | examples / d | noise | wrong bits | secrets broken |
|---|---|---|---|---|---|
"""

ROUNDINGS = """
Small **roundings** fall to a search through all integer vectors, or to an integer program
(HiGHS): the secret inner product lies in a half period whose number has a known parity. Four
heads, 300 examples (600 for the program), without noise; work is vectors tried, or nodes of the
branching tree; the integer program stops after 20 seconds.

| attack | d | modulus | broken | median work | median seconds |
|---|---|---|---|---|---|
"""

LWR = """
**Learning with rounding** falls to linear algebra where the modulus is small. The label bit is
binomial(<a, s>, q/2) modulo 2, so a polynomial over GF(2) in the bits of a, in which only products
of bits occur whose place values sum to at most q/2. Taking its binomial(n + q/2, n) - 1
coefficients for unknowns, in the manner of Arora and Ge (ICALP 2011), elimination finds them, and
those of single bits are the bits of s: q = 2 is a parity, q = 4 a quadratic form, and for every
fixed q the cost is a power of n. Where q grows with n it is not. Search through all q^n vectors,
and an integer program (HiGHS, {limit:g} seconds at most) for the point of a lattice near the
middles of the half periods seen, need few examples and no small q, but small n. Work is unknowns,
vectors tried, or nodes of the branching tree. All labels are without noise; broken means that the
vector was found, digit by digit.

| attack | n | q | heads m | features d | examples | broken | median work | median seconds |
|---|---|---|---|---|---|---|---|---|
"""

LARGEST = """
The largest sizes, by n t, that these attacks broke on two cores for every secret tried:
{largest}.

They are not the best attacks. Small n are broken by lattice reduction (for learning with errors, of
which rounding is the variant without coins: Albrecht, Player and Scott, J. Math. Cryptology 2015)
and, given many examples, by combining those that agree in some coordinates (Duc, Tramèr and
Vaudenay, Eurocrypt 2015). We ran neither, and no size that fits in memory here should be thought to
withstand them.
"""

REDUCTION = """
## Learning with rounding, by a reduction

```python
import mhalearn as mha
import numpy as np

layer, secret = mha.hard_layer("lwr", dimension=4, modulus=16, seed=0)
a = np.random.default_rng(0).integers(0, 16, (1000, 4))
x = secret.encode(a)
assert np.array_equal(secret.read(x, layer(x)), 2 * (a @ secret.vector) // 16 % 2)
```

Write a in Z_q^n, q = 2^t, as n t bits and let each be the sign of a coordinate of b. With the
weight s_j 2^l mod q on bit l of a_j the count of the rounding family is congruent to the inner
product of a and s modulo q, so that the label shows floor(2 <a, s> / q) mod 2, exactly and for
every a: a sample of *learning with rounding* to one bit (Banerjee, Peikert and Rosen, Eurocrypt
2012).

**The reduction.** Given samples (a, bit), make examples: with probability one half X = `encode(a)`,
whose first token is random, with the label -2 bit (x_other - x_own) U; else an input with b_0 = +1
and the label zero. For uniform a the inputs are uniform. If the bits come from a secret vector,
these are the examples of its layer; if they are coins, nobody leaves less than half of the labels'
energy on fresh ones. A learner that leaves less, from random examples of such layers, therefore
tells samples of learning with rounding from coins. What it costs: d = 1 + n t features, and as
heads the least even number of at least 2 n (t - 1) + 2 (n + 1) / q - 1. That is enough for every
vector, so that their number tells nothing of the one at hand.

**What the reduction covers.** The closed form, `secret.labels`. Bits are read exactly from every
layer sharper than log 3; softer ones are refused. But a soft layer tells in later digits how near
the count is to a step, which gives equations modulo q without any rounding. Lwr layers are
therefore made with sharpness 40, where that is below the last digit of a double; the rounding
errors of a computed label still depend on how many heads have stepped, and nothing is claimed of
learners that look at them.
"""

END = """
## A gentle slope

Between generic and hard: `mix` takes the parameters of a hard layer (0) to those of a random one
(1), `sharpness` makes the heads of the hard layer softer. Four heads, d = 8, 16 times the counting
limit of examples.

![Share of layers learned along the two dials](images/hard_dial.svg)

{dial}

## What is hard, for whom

- *Proved*, for the closed form of the parities (and for correlations with the labels of sharp
  layers), where m is small against d: learners that see only averages up to a tolerance, such as
  moment methods, need d^{{Omega(m)}} queries or a tolerance of d^{{-Omega(m)}}. The last digits of
  a finitely sharp layer tell more: queries that look at them are not bound by this.
- *Not hard*: parities without noise, for whoever guesses the family. Hardness for statistical
  queries is not hardness for everybody.
- *Assumed*: with label noise the parities are sparse parities with noise, conjectured to take time
  d^{{Omega(m)}}. The roundings have the shape of learning with rounding, with bits for inputs and a
  wave that is only spread out where m is of the order of sqrt(d) or more; no reduction is claimed
  for them. To learn lwr layers is as hard as learning with rounding of the same n and q, to one
  bit: an assumption where q grows with n, and easy where it does not. Our small instances prove
  nothing about any of these: they show how the cost of known attacks grows.
- *Only measured*: what newton, Adam and L-BFGS do. They use exact averages over a finite sample,
  not answers with a tolerance; nothing proves that they must fail, and with two heads and small d
  they do not.
"""


def runs(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text())["runs"]


def grouped(rows: list[dict], *names: str) -> dict[tuple, list[dict]]:
    groups = defaultdict(list)
    for row in rows:
        if "crashed" not in row:
            groups[tuple(row[name] for name in names)].append(row)
    return dict(sorted(groups.items()))


def line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"


def main() -> None:
    text = INTRO
    asked = runs("hard_queries")
    for row in asked:
        if row["part"] == "dimension":
            m, d, degrees = row["n_heads"], row["d"], row["by_degree"]
            text += line(
                "parity" if row["family"] == "parity" else "random", m, d,
                f"{max(degrees[: m - 1]):.1e}", f"{degrees[m - 1]:.2f}", f"{row['largest']:.1e}",
                row["size"], f"{row['dimension']:.1f}", d**m,
            )  # fmt: skip
    text += QUERIES
    parts = [row for row in asked if row["part"] == "queries"]
    for (m, d, tolerance), rows in grouped(parts, "n_heads", "d", "tolerance").items():
        found = [row["asked"] for row in rows if row["found"]]
        median = f"{statistics.median(found):.0f}" if found else "-"
        text += line(m, d, tolerance, f"{len(found)}/{len(rows)}", median, math.comb(d - 1, m))
    text += ORACLES + oracle_lines([row for row in asked if row["part"] == "oracles"])
    curve = runs("hard_curve")
    budgets = sorted({(row["d"], row["budget"]) for row in curve})
    text += CURVE.format(
        budgets=", ".join(f"{seconds:g}" for _, seconds in budgets),
        widths=", ".join(str(d) for d, _ in budgets),
        overruns=overruns(curve),
    )
    lines = sorted(
        summarise(curve),
        key=lambda one: (
            one.cell.family != "parity",
            one.cell.d,
            one.cell.method,
            one.cell.n_heads,
        ),
    )
    for one in lines:
        cell = one.cell
        text += line(
            "parity" if cell.family == "parity" else "random", cell.n_heads, cell.d, cell.method,
            f"{one.learned}/{one.secrets}", f"{'> ' * one.at_least}{one.seconds:.1f}",
            "-" if one.examples is None else f"{one.examples:.0f}",
        )  # fmt: skip
    text += GROWTH
    for rate in growth(lines):
        family = "parity" if rate.family == "parity" else "random"
        factor = f"{rate.factor:.1f}"
        if rate.at_least:
            factor = f"> {math.floor(10 * rate.factor) / 10}"
        if not rate.at_least or rate.factor > 1:
            text += line(family, rate.d, rate.method, factor)
    attacks = runs("hard_attacks")
    text += REDUCTION + ATTACKS
    parts = [row for row in attacks if row["part"] == "parity"]
    for key, rows in grouped(parts, "n_heads", "d", "multiple", "noise").items():
        wrong = statistics.mean(row["wrong_bits"] for row in rows)
        broken = sum(row["broken"] for row in rows)
        text += line(*key, f"{wrong:.1%}", f"{broken}/{len(rows)}")
    text += ROUNDINGS
    parts = [row for row in attacks if row["part"] == "rounding"]
    for key, rows in grouped(parts, "attack", "d", "modulus").items():
        broken = sum(row["broken"] for row in rows)
        work = statistics.median(row["work"] for row in rows)
        seconds = statistics.median(row["taken"] for row in rows)
        text += line(*key, f"{broken}/{len(rows)}", f"{work:.0f}", f"{seconds:.2g}")
    text += lwr_lines([row for row in attacks if row["part"] == "lwr"])
    OUT.write_text(text + END.format(dial=dial_words()))


def oracle_lines(rows: list[dict]) -> str:
    text = ""
    names = ("n_heads", "d", "oracle", "value", "answers")
    for (m, d, oracle, value, answers), some in grouped(rows, *names).items():
        found = [row for row in some if row["found"]]
        told = f"VSTAT({value:g})" if oracle == "vstat" else f"tolerance {value:g}"
        median = f"{statistics.median(row['asked'] for row in found):.0f}" if found else "-"
        withheld, all_asked = (sum(row[name] for row in some) for name in ("withheld", "asked"))
        share = f"{withheld / all_asked:.0%}" if all_asked else "-"
        text += line(m, d, told, answers, f"{len(found)}/{len(some)}", median, share)
    return text


def lwr_lines(rows: list[dict]) -> str:
    """The table of attacks, and the largest size that each breaks every time."""
    text, largest = LWR.format(limit=LIMIT), {}
    names = ("attack", "modulus", "dimension", "n_heads", "d", "examples")
    for (attack, q, n, m, d, examples), some in grouped(rows, *names).items():
        broken = sum(row["broken"] for row in some)
        work = statistics.median(row["work"] for row in some)
        seconds = statistics.median(row["taken"] for row in some)
        shown = f"{broken}/{len(some)}", f"{work:.0f}", f"{seconds:.2g}"
        text += line(attack, n, q, m, d, examples, *shown)
        if broken == len(some):
            largest[attack] = max(largest.get(attack, (0, 0, 0)), (n * math.log2(q), n, q))
    said = "; ".join(f"{name} n = {n}, q = {q}" for name, (_, n, q) in largest.items())
    return text + LARGEST.format(largest=said)


def overruns(curve: list[dict]) -> str:
    """How far over its seconds each learner went, at most."""
    most = {}
    for row in curve:
        shape = row["n_heads"], row["d"]
        last = max(r["examples"] for r in curve if (r["n_heads"], r["d"]) == shape)
        given = row["budget"] * (2 if row["examples"] == last else 1)
        most[row["method"]] = max(most.get(row["method"], 0.0), row["seconds"] / given)
    return ", ".join(f"{most[name]:.1f} ({name})" for name in sorted(most))


def dial_words() -> str:
    """Where along the dials at least half of the layers are learned."""
    said = []
    rows = [row for row in runs("hard_dial") if "crashed" not in row]
    for method in sorted({row["method"] for row in rows}):
        own = [row for row in rows if row["method"] == method]
        for name, fixed in (("mix", ("sharpness", 8.0)), ("sharpness", ("mix", 0.0))):
            points = grouped([row for row in own if row[fixed[0]] == fixed[1]], name)
            good = [
                value
                for (value,), some in points.items()
                if statistics.median(row["relative_mse"] for row in some) <= LEARNED
            ]
            ends = dict.fromkeys((f"{value:g}" for value in (min(good), max(good))) if good else ())
            span = " to ".join(ends) or "none of the values tried"
            said.append(f"- {method}: at least half of the layers are learned at {name} {span}.")
    return "\n".join(said)


if __name__ == "__main__":
    main()
