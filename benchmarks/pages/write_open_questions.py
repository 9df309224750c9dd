"""Write docs/open_questions.md; its numbers come from the JSON in benchmarks/results."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

from benchmarks import DOCS, RESULTS
from benchmarks.gradient import Cell
from benchmarks.pages import write_block, write_gradient
from benchmarks.pages.prose import reflow
from benchmarks.studies import frequency

OUT = DOCS / "open_questions.md"

TEXT = """# Open questions

Written by `benchmarks/pages/write_open_questions.py`; every number comes from the JSON in
`benchmarks/results`, through the pages named beside it.

Each direction that the authors leave open, what this package measures about it today, and how
one would go on. "Talk": a recorded talk of one of them on the paper; "paper": Chen and Li,
*Provably learning a multi-head attention layer*,
[arXiv:2402.04084](https://arxiv.org/abs/2402.04084), STOC 2025, of which this project has the
abstract and summaries, not the proofs; "summaries": questions that reviews of it put to it.
Nothing here is proved unless it says so.

## Removing the assumptions

**Asked** (talk, paper): how many of the non-degeneracy conditions are needed? **Measured**: for
each condition a teacher that violates it, and the phase that breaks ([phases](phases.md)): of
{violated} violations {harmless} break nothing in any of three seeds. Near-equal Θs,
near-rank-one Ws and a singular sum of W are harmless; four entries in Θ, cancelling or equal Ws
and flat attention are not. Which lemma fails on such a layer: `mhalearn.tails`
([lemmas](tails.md)). **To go on**: `conditions.py` has one size; make the violation a dial, and
find where the share of certified rows gives out.

## Gradient descent, even for two heads

**Asked** (talk): can one prove that gradient descent works; even for two heads, how they come to
part is unclear to the authors. **Measured**: plain full-batch descent from small random starts
on random layers ([gradient descent](gradient.md)): {gradient}. Two heads stay together until the
loss is about {parting_loss}, and part after a time that grows with the logarithm of one over the
distance at which they start. **To go on**: if they leave the saddle where both equal the best
single head along one unstable direction, its growth rate is a second derivative that one can
write down, and `benchmarks/gradient.py` gives the numbers to hold it against. Cells of your own
are one line each.

## Composition with a feed-forward layer

**Asked** (talk): guarantees are known for both parts of a block; do they compose? **Measured**
([block](block.md)): whole blocks are learned from random examples alone, heads and neurons
counted, by a student with surplus, pruning and Gauss-Newton. All parameters were right to 1e-10 and
certified in {blocks}. What a block's function leaves open is counted by a formula, which was held
against the rank of a Jacobian for every activation, norm and bias. Of {block_traps} fits with
something wrong (a neuron missing, another activation, two blocks for one, ...) {block_fooled} were
called recovered. Not measured: {blocks_left}. **Not proved**: any guarantee for the composition.
Nothing says that the student comes near, nor that pruning leaves out the right neurons. A block
that meets fresh labels to rounding with a Jacobian of full rank, which is measured, is the only one
near by, and distant ones are not looked for. The formula is the rank for generic blocks, not for
all: behind a norm a ReLU neuron of large bias is always on, or never. **To go on**: a sequence of
one token shows the feed-forward part alone, with the sum of W in front of it: learn that first, and
phase 2's certification becomes a question about preimages.

## Polynomial time for nice layers

**Asked** (talk): the exponential dependence on m is for the worst case; might nice layers be
polynomial? **Measured**: the exact solver learns random layers near the counting limit in
seconds, with no guarantee ([solver](solver.md)). The share of matched rows falls by a factor of
{factor} a head at tolerance 0.2 ([phases](phases.md)): that luck, not the net, is what the
phases pay for. **To go on**: rows on which one head differs while the others agree ask for less
luck; given the sum they are a noiseless mixture of linear regressions in the W_i.

## Fourier decay, and moments of the softmax

**Asked** (talk): a low-degree polynomial might do, for all that is known; and moments that
involve the softmax might have useful structure, but are hard to reason about. **Measured**
(`open_questions.py`): of the variance of a random one-head layer's labels (two tokens, d = {fd},
all inputs), the share above degree three is

{fourier}

and a second moment of input and label, E[(x_a ⊗ F_r)(x_b ⊗ F_r)ᵀ] over different tokens, has
eigenvectors near the span of the W_i: largest sine {moments} (random directions: {random}), from
{moment_n:,} examples at d = {moment_d}. A bias remains, as in phase 1. **To go on**: remove that
bias as phase 3 does. A span of the W_i that needs no luck, and a net in it, would leave only the
net exponential.

## Parameter learning

**Asked** (talk): the theorem gives a layer that predicts well, not the parameters; they should
be identifiable, up to an ambiguity that was left. **Measured**: for three or more tokens a
canonical form (equal heads merged, empty ones dropped) leaves the order alone; for two, sign
symmetries too, which are tried before anything is called recovered. How far heads were from the
true ones is in [the solver's page](solver.md), local identifiability is judged from the Jacobian
([trust](trust.md)). **To go on**: a proof that the canonical form is all there is; numerical
rank is evidence only.

## Low rank

**Asked** (talk): low-rank Θs have structure that the guarantees do not use. **Measured**:
`head_dim=h` learns narrow heads by their factors, from the fewer examples that their count of
unknowns allows ([real layers](real.md)); the phases do not use it. Rank-one Θs break phase 6 in
{rank_one} of three seeds. **To go on**: the constraints of certified rows are linear in Θ; so a
proxy of least nuclear norm is as convex as the present one.

## More tokens than features

**Asked** (talk): with k beyond d every label is a combination of tokens, and certification has
false positives. **Measured**: m(k - 1) against the width of the output is among the conditions,
and a teacher beyond it stops in phase 2. With k the share of matched rows falls as k to the
power {k_slope} for two heads. **To go on**: certify sparse patterns only; phase 2 here already
screens pairs.

## Noise, or a softmax on top

**Asked** (talk, from the audience): would it survive label noise or an output non-linearity? The
authors would worry about phase 1, which uses linearity. **Measured**: the solver under noise
stays near the Cramér-Rao bound ([solver](solver.md)). The phases bear it too: two heads (m = 2,
d = 16) end at {noise_phases} with labels that err by {noise_level}, median of {noise_seeds} seeds,
and at {noise_decoded} where every row is decoded ([plans](plans.md)). **To go on**: an output
non-linearity; `conditions.py` takes any teacher.

## Other kinds of attention

**Asked** (talk): only smoothness of the softmax is used, so others should work; would polynomial
attention make the theory clearer? **Measured**: any kind of attention is one class to the exact
solver ([extend](extend.md), with sigmoid attention as the example). The phases have the
softmax's log-odds built in. **To go on**: certification does not use the softmax at all; only
the link from p to a constraint does. For p proportional to a power of the logit, p_a / p_b fixes
the ratio of two logits, which is a linear constraint on Θ again.

## Helpful correlations

**Asked** (talk): inputs with structure should make the problem easier. **Measured**: tails on a
vocabulary of 64 random tokens beside those on signs ([lemmas](tails.md)): certified rows are
{more:.1f} times as frequent there, at tolerance {tolerance:.2g}. Laws of tokens other than ±1
and Gaussian are a sampler or an array away in every function of `mhalearn.tails`.
Run on
{laws} other laws of tokens, the phases and decoding recover {laws_good} of them in every seed,
among them vocabularies and a trained model's embeddings; of bits that a token shares with the next
with probability .9 they recover {chain_good} ([plans](plans.md)).
**To go on**:
count matched rows on the tokens of real text, by `tails.certified_share`.

## Positions, and the next token

**Asked** (talk): positional encodings and next-token prediction were left aside. **Measured**:
causal masks and sequences of different lengths are learned by the exact solver, and by no phase;
labels that depend on positions are recognised and named ([trust](trust.md)). **To go on**: under
a causal mask the second row sees two tokens, and is a teacher with k = 2 inside every example.

## Sample complexity, and the exponent of the error

**Asked** (summaries): can N = (kd)^Θ(m) be lowered, and error (kd)^-Ω(m) improved? **Measured**:
matched rows against d, k, m and the tolerance, each by itself: in d the exponent is {d_slope}
for two heads and {d_slope_3} for three, in the tolerance {t2} and {t3}. The rows that a run
needs, about d², grow faster than their share falls. The solver needs hardly more than the
counting limit ([solver](solver.md)). **To go on**: the theorem's power comes from the accuracy
asked for; a phase that works at constant tolerance would lose it.

## Agnostic learning

**Asked** (summaries): labels that no layer fits. **Measured**: no error is promised beside that
of the best layer. Labels that no layer makes are not called recovered, and the reason is named
where one of the known departures explains them ([trust](trust.md),
[solver](solver.md#never-fooled)). **To go on**: the linear programme of phase 2 finds the best p
for any label; the body then needs slack, which it has.

## Why statistical queries fail

**Asked** (paper, summaries): where does the lower bound come from? **Measured**: a family of
parities whose correlations with few bits vanish, computed exactly, and a learner by queries that
pays for it ([hard layers](hard.md)). The family is this project's; parities fall to elimination.
**To go on**: plug your own query algorithm into `mhalearn.hardness.QueryOracle`.

## Why two tokens suffice

**Asked** (paper, summaries): hardness appears at k = 2 already. **Measured**: with two ±1 tokens
and diagonal Θ a head is a soft halfspace of the bits x₁x₂, and m sharp ones of alternating sign
make any square wave of a weighted count ([hard layers](hard.md)). **To go on**: whether *dense*
Θs can hide as much is open to us; the hard families violate the density condition by design.
"""


def read(name: str) -> list[dict]:
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return found if isinstance(found, list) else found["runs"]


def condition_numbers() -> dict[str, int]:
    runs = [r for r in read("conditions") if r["condition"]]
    teachers = dict.fromkeys(r["teacher"] for r in runs)
    works = "none: it works all the same"
    harmless = [t for t in teachers if all(r["broke"] == works for r in runs if r["teacher"] == t)]
    broke = [r for r in runs if r["teacher"] == "Thetas of rank one" and r["broke"] != works]
    return {"violated": len(teachers), "harmless": len(harmless), "rank_one": len(broke)}


def gradient_numbers() -> dict[str, str]:
    runs = write_gradient.read()
    shares = [(m, write_gradient.find(runs, Cell(m))) for m in (2, 6)]
    said = " and ".join(
        f"with m = {m}, {run['learned']} of {run['starts']} starts learn "
        f"(95 % interval {run['interval'][0]:.2f} to {run['interval'][1]:.2f})"
        for m, run in shares
        if run
    )
    two = write_gradient.find(runs, Cell(2))
    assert two is not None
    return {"gradient": said, "parting_loss": write_gradient.median(two["parting"]["loss"])}


def frequency_numbers() -> dict[str, str]:
    records = read("frequency")

    def slope(along: str, show: Callable[[float], str] = "{:.2f}".format, **fixed: int) -> str:
        fitted, low, high = frequency.Line(records, along, **fixed).slope()
        ends = sorted([show(low), show(high)], key=float)
        return f"{show(fitted)} ({ends[0]} to {ends[1]})"

    return {
        "factor": slope("m", lambda rate: f"{np.exp(-rate):.0f}", d=24, k=3),
        "k_slope": slope("k", m=2, d=24),
        "d_slope": slope("d", m=2, k=3),
        "d_slope_3": slope("d", m=3, k=3),
        "t2": slope("tolerance", m=2, d=24, k=3),
        "t3": slope("tolerance", m=3, d=24, k=3),
    }


def vocabulary_numbers() -> dict[str, float]:
    """Certified rows on a vocabulary, over those on signs, at the tolerance in the middle."""
    own = {r["layer"]: r["tail"] for r in read("tails") if r["tail"]["name"] == "certified rows"}
    signs, words = own["dense"], own["dense, 64 tokens"]
    place = len(signs["t"]) // 2
    more = words["measured"][place] / signs["measured"][place]
    return {"more": more, "tolerance": signs["t"][place]}


def plan_numbers() -> dict[str, object]:
    """Of noise and of other laws of tokens, from the study of the plans."""
    runs = read("plans")
    noisy = [r for r in runs if (r["study"], r["line"]) == ("noise", 0) and "mse" in r]
    laws: dict[str, list[bool]] = {}
    for r in runs:
        if r["study"] == "distributions":
            laws.setdefault(r["what"], []).append(r.get("mse", 1.0) <= 1e-10)
    chain = laws["Markov bits .9"]
    return {
        "noise_level": f"{noisy[0]['what'][-1]:.0%}",
        "noise_seeds": len(noisy),
        "noise_phases": f"{np.median([r['net_mse'] for r in noisy]):.0e}",
        "noise_decoded": f"{np.median([r['mse'] for r in noisy]):.0e}",
        "laws": len(laws),
        "laws_good": sum(all(good) for good in laws.values()),
        "chain_good": f"{sum(chain)} of {len(chain)}",
    }


# Parts of large_blocks.json, and what they are.
LARGE = {
    "d16": "d = 16 with 64 neurons",
    "d64": "d = 64 with 256 neurons",
    "trained": "blocks of a trained model",
}


def block_numbers() -> dict[str, object]:
    """What was learned of whole blocks, and what was not tried."""
    small = [run for run in read("blocks") if run["part"] == "recovery"]
    measured, left = {"d = 8 with 16 neurons": small}, []
    for part, name in LARGE.items():
        runs = [run for run in read("large_blocks") if run["part"] == part]
        if runs:
            measured[name] = runs
        else:
            left.append(name)
    said = [
        f"{sum(map(write_block.is_good, runs))} of {len(runs)} runs ({name})"
        for name, runs in measured.items()
    ]
    wrong = [run for run in read("block_traps") if run["trap"] != "none"]
    return {
        "blocks": " and ".join(said) if len(said) < 3 else f"{', '.join(said[:-1])} and {said[-1]}",
        "blocks_left": ", ".join([*left, "a whole model layer by layer"]),
        "block_traps": len(wrong),
        "block_fooled": sum(run.get("outcome") == "RECOVERED" for run in wrong) or "none",
    }


def study_numbers() -> dict[str, object]:
    runs = read("open_questions")
    spectra = [r for r in runs if r["part"] == "fourier"]
    moments = [r for r in runs if r["part"] == "moments"]
    table = "| norm of Θ | share above degree three, median of seeds | above degree five |\n"
    table += "|---|---|---|\n"
    for scale in sorted({r["scale"] for r in spectra}):
        above = [
            np.median([sum(r["by_degree"][degree:]) for r in spectra if r["scale"] == scale])
            for degree in (3, 5)
        ]
        table += f"| {scale:g} | {above[0]:.2g} | {above[1]:.2g} |\n"

    def sines(name: str) -> str:
        heads = sorted({r["m"] for r in moments})
        found = [np.median([r[name] for r in moments if r["m"] == m]) for m in heads]
        return ", ".join(f"{s:.2f} (m = {m})" for s, m in zip(found, heads, strict=True))

    return {
        "fd": spectra[0]["d"],
        "fourier": table.rstrip(),
        "moments": sines("sine"),
        "random": f"{np.median([r['sine_of_random'] for r in moments]):.2f}",
        "moment_n": moments[0]["n"],
        "moment_d": moments[0]["d"],
    }


def main() -> None:
    numbers = condition_numbers() | gradient_numbers() | frequency_numbers() | plan_numbers()
    numbers |= block_numbers()
    OUT.write_text(reflow(TEXT.format(**numbers, **vocabulary_numbers(), **study_numbers())))


if __name__ == "__main__":
    main()
