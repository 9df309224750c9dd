"""Write docs/block.md and its figure from what benchmarks/blocks.py and block_traps.py measured."""

import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from benchmarks import DOCS
from benchmarks.ledger import read_runs
from benchmarks.pages.picture import picture
from benchmarks.pages.prose import reflow

OUT = DOCS / "block.md"
Record = dict[str, Any]
# Every parameter to this, of those that a block's function determines.
GOOD = 1e-10
ACTIVATIONS = {"gelu": "GELU", "relu": "ReLU", "silu": "SiLU", "glu": "GLU (sigmoid)"}

TEXT = """# A whole block

Written by `benchmarks/pages/write_block.py` from `benchmarks/results/blocks.json` and
`block_traps.json`, which `benchmarks/blocks.py` and `benchmarks/block_traps.py` measured; no number
measured here is typed by hand.

A `Block` is attention, residual paths, norms and a feed-forward part as one function of the
residual stream. It is drawn (`random_block`), read from a model (`block_from_huggingface`: BERT,
GPT-2, Llama and its kin), written as a torch module (`to_torch`), saved, compared, and learned
(`BlockRegressor`, `mhalearn learn --block`).

```python
import mhalearn as mha

block = mha.random_block(n_heads=1, d=4, hidden=4, activation="gelu", norm=None, seed=2)
X = mha.sample_inputs("gaussian", 400, 3, 4, seed=0)
model = mha.BlockRegressor(n_heads=1, hidden=4).fit(X, block(X))
print(model.outcome_.name, model.solution_.reason)

assert mha.compare(model.block_, block).max_error < 1e-8
```

## What is determined

Gains and biases of a norm that a linear map follows are part of that map. A LayerNorm takes a
mean away, so that what follows acts on one feature less, and what precedes has one output less
to show. Without norms the output bias of attention cannot be told from those of the neurons.
Neurons have no order; those of ReLU have no scale, nor do the linear halves of gated ones. The
canonical form (`block.canonical()`) fixes all of that, adds up copies, and makes a neuron and
its mirror image one neuron and a linear map, since act(z) - act(-z) = z; where a linear map is the
sum of what some neurons leave when they are turned over, they are. `compare` uses it.
How many unknowns are left is a formula, tested against ranks of Jacobians; the counting limit
follows from it. It is that of generic blocks: behind a norm inputs are bounded, and a ReLU neuron
whose bias outweighs them is on, or off, for all of them.

## How one is learned

A student with surplus heads and neurons, and a linear map beside them, descends by Adam, in single
precision, under a penalty on all squares that fades by five powers of ten: without it, surplus
neurons stay as groups that cancel. Heads that are alike are merged. How many neurons are needed is
asked of the feed-forward part alone: what the student's neurons put out on the tokens that they see
is fitted by fewer and fewer, all of which move, until one fewer leaves more than the student is off
by. Most true neurons are held as two or three whose inputs are near to each other but not alike:
the others, with new output weights alone, make up for none of these. The problem has no heads, and
its J^T J is made of moments of few numbers a token, so that this takes seconds. Where a student is
too far off to show it, neurons are left out as long as the others and the linear map, with new
output weights, make up for them. Gauss-Newton in all parameters follows, to rounding. Its valleys
are bent, so that where a step does not go as predicted half an acceleration is added to it: the
second derivative of outputs along the step, which costs one more solve (geodesic acceleration).
Where examples that were not descended on are met worse than the others, those that the block fits
worst join: a kink of ReLU may lie between few tokens. The linear map is there because a neuron is
its mirror image and an affine map, act(z) = act(-z) + z (of a sigmoid gate, 1 - act(-z)): students
find some neurons turned over, and without the map need others to make up for that. In the end
linear regression says which were turned: the map is the sum of one matrix of rank one for each of
them, with coefficients zero and one. Two scales that hardly show have numbers of their own in these
steps: that of the stream between two norms, which only epsilon shows, and that of the input of a
neuron that is only bent a little, which is known by its curvature alone. Without them Gauss-Newton
creeps along two bent valleys.

Held-out examples choose among attempts, and an eighth that was set apart certifies: `RECOVERED`
needs labels in double precision that are met to rounding there, no worse than computing the block
in doubles does, and a Jacobian whose null space is the gauge and nothing else. Nothing of this is
proved.

## Random blocks

d = 8, two heads, 16 neurons, biases everywhere, {n} Gaussian examples of {k} tokens, numbers of
heads and neurons found, not told. Seconds are those of one core's processor, compilation
included where a run was the first of its shapes in its process; "dirty" of a commit is the file of
results itself. The wall clock of a machine that
many others used at the same time showed up to {slowdown} times as much.

{recovery}

{failed} {left}

![Error against processor seconds, and heads and neurons found](images/block.svg)

One search (GELU, seed {film_seed}) as it goes on: above, the relative squared error on the
examples of a step; below, heads and neurons of the truth that the block at hand has within a tenth
of their size, and the neurons it holds.

## Larger blocks

`benchmarks/large_blocks.py`, whose records are in `large_blocks.json`: above 2,500 parameters steps
are conjugate gradients in a metric of Kronecker products, and the rank is asked of random
directions. d = 16, four heads of 4, 64 neurons, biases everywhere, 20,000 Gaussian examples of 4
tokens, numbers of heads and neurons found. Each run has one core, and a limit of the
clock. The lines of 198 seconds are of before neurons were counted by what they put out, on a quiet
machine; the others of one that many others used, whose clock was up to {large_slowdown} times
slower than the processor's.

{large}

{large_failed}

{few}## Adam alone

The same student, steps and examples, without the linear map, pruning and Gauss-Newton: relative
squared error on 500 of the examples it descended on.

{peers}

## Traps

d = 4, one head, four neurons, 500 examples of 3 tokens, numbers of heads and neurons told, one
attempt with half as many steps; seeds take GELU, ReLU, SiLU and GLU in turn. None but the first
line, where nothing is wrong, may be `RECOVERED`: {wrong} of {traps} others were. Commits:
{trap_commits}.

{trap_table}

## Not there yet

Inside a block only heads of a Theta and a W each are learned: no rotary, grouped or normalised
ones. The norms' epsilon is taken at the caller's word; activation and norms are told, or found
among candidates (`activation="auto"`, `norm="auto"`). Sequences of one token are learned from like
all others, and not used first. Which neurons are needed is asked of the feed-forward part alone up
to 4,000 of its parameters only. {not_few}Not measured: d = 64 (`benchmarks/large_blocks.py --part
d64`), blocks of trained models (`--part trained`), and a whole model layer by layer. What a block
leaves over is not tested for its cause.
"""


FEW = """## How few examples

Blocks of d = 8 as above, from fewer examples; a tenth is held out to choose by, and an eighth
certifies.

![Share recovered against examples over the counting limit](images/block_few.svg)

| block | examples | over the counting limit | recovered, all parameters to 1e-10 |
|---|---|---|---|
"""

# Of runs in large_blocks.json that do not say: --minutes 3.3
FIRST_MINUTES = 3.3


def recovery_table(runs: list[Record]) -> str:
    table = "| block | runs | recovered, all parameters to 1e-10 | worst error of those | "
    table += "examples over the counting limit | processor seconds: median, most | commits |\n"
    table += "|---|---|---|---|---|---|---|\n"
    for case in dict.fromkeys([*ACTIVATIONS, *(run["case"] for run in runs)]):
        rows = [run for run in runs if run["case"] == case]
        if not rows:
            continue
        good = [run for run in rows if is_good(run)]
        seconds = [run["processor_seconds"] for run in rows]
        worst = f"{max(run['max_error'] for run in good):.0e}" if good else "-"
        commits = ", ".join(sorted({run["code"] for run in rows}))
        table += f"| {say_case(case)} | {len(rows)} | {len(good)} | {worst} | "
        table += f"{rows[0]['ratio']:.0f} | {median(seconds):.0f}, {max(seconds):.0f} | "
        table += f"{commits} |\n"
    return table.rstrip()


def large_table(runs: list[Record]) -> str:
    """Lines by the limit, for what came later had another."""
    table = "| block | limit, seconds | runs | recovered, all parameters to 1e-10 | worst error of "
    table += (
        "those | examples over the counting limit | seconds of the clock: median, most | of the "
    )
    table += "processor | commits |\n|---|---|---|---|---|---|---|---|---|\n"
    for case, minutes in dict.fromkeys((run["case"], limit_of(run)) for run in runs):
        rows = [run for run in runs if (run["case"], limit_of(run)) == (case, minutes)]
        good, seconds = [run for run in rows if is_good(run)], [run["seconds"] for run in rows]
        worst = f"{max(run['max_error'] for run in good):.0e}" if good else "-"
        used = [run["processor_seconds"] for run in rows if "processor_seconds" in run]
        spent = f"{median(used):.0f}, {max(used):.0f}" if used else "not recorded"
        commits = ", ".join(sorted({run["code"] for run in rows}))
        table += f"| {say_case(case)} | {60 * minutes:.0f} | {len(rows)} | {len(good)} | {worst} | "
        table += f"{rows[0]['ratio']:.0f} | {median(seconds):.0f}, {max(seconds):.0f} | {spent} | "
        table += f"{commits} |\n"
    return table.rstrip()


def limit_of(run: Record) -> float:
    return run.get("minutes", FIRST_MINUTES)


def few_part(runs: list[Record]) -> str:
    """How few examples, as a table and a figure, where it was measured."""
    if not runs:
        return ""
    cases = dict.fromkeys(run["case"] for run in runs)
    rows = []
    with picture("block_few.svg", 5.0, 2.6) as figure:
        axes = figure.subplots()
        for case in cases:
            sizes = sorted({run["n"] for run in runs if run["case"] == case})
            among = [[r for r in runs if (r["case"], r["n"]) == (case, n)] for n in sizes]
            ratios = [same[0]["ratio"] for same in among]
            good = [sum(map(is_good, same)) for same in among]
            shares = [count / len(same) for count, same in zip(good, among, strict=True)]
            axes.semilogx(ratios, shares, "o-", ms=3, label=say_case(case))
            rows += [
                f"| {say_case(case)} | {n:,} | {ratio:.1f} | {count} of {len(same)} |"
                for n, ratio, count, same in zip(sizes, ratios, good, among, strict=True)
            ]
        axes.set_xlabel("examples over the counting limit")
        axes.set_ylabel("share recovered")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return FEW + "\n".join(rows) + "\n\n"


def say_case(case: str) -> str:
    """Blocks with norms have GELU."""
    if case.startswith("d16-"):
        return f"GELU, {case.removeprefix('d16-')} LayerNorm, d = 16"
    return f"{ACTIVATIONS[case]}, no norm" if case in ACTIVATIONS else f"GELU, {case}"


def is_good(run: Record) -> bool:
    error = run.get("max_error")
    return run.get("outcome") == "RECOVERED" and error is not None and error <= GOOD


def failures(runs: list[Record]) -> str:
    """What became of the runs that are not good, each."""
    bad = [run for run in runs if not is_good(run)]
    if not bad:
        return "All of these runs ended so."
    said = [
        f"{say_case(run['case'])}, seed {run['seed']}: `{run['outcome']}` with {run['heads']} "
        f"heads and {run['neurons']} neurons, held-out error {run['held_out']:.0e}"
        for run in bad
    ]
    return f"The others: {'; '.join(said)}."


def peer_table(runs: list[Record]) -> str:
    if not runs:
        return "Not measured yet."
    table = "| student | seed | without penalty | with the fading penalty |\n|---|---|---|---|\n"
    for run in runs:
        width = {"exact": "exact width", "surplus": "half as many again"}[run["student"]]
        table += f"| {width} | {run['seed']} | {run['without_penalty']:.0e} | "
        table += f"{run['with_penalty']:.0e} |\n"
    return table.rstrip()


def trap_table(runs: list[Record]) -> str:
    table = "| what is wrong | fits | outcomes |\n|---|---|---|\n"
    for trap in dict.fromkeys(run["trap"] for run in runs):
        rows = [run.get("outcome", "crashed") for run in runs if run["trap"] == trap]
        said = ", ".join(f"`{name}` {count}" for name, count in Counter(rows).most_common())
        table += f"| {'nothing' if trap == 'none' else trap} | {len(rows)} | {said} |\n"
    return table.rstrip()


def draw(record: Record) -> None:
    """Error, and what is found, against processor seconds."""
    frames = record["frames"]
    seconds = [frame["seconds"] for frame in frames]
    with picture("block.svg", 8.0, 4.4) as figure:
        above, below = figure.subplots(2, 1, sharex=True)
        above.semilogy(seconds, [max(frame["error"], 1e-34) for frame in frames], ".-", ms=3)
        above.set_ylabel("relative squared error")
        for name, label in (("heads", "heads found"), ("neurons", "neurons found")):
            below.step(seconds, [frame[name] for frame in frames], where="post", label=label)
        held = [frame["held"] for frame in frames]
        below.step(seconds, held, where="post", ls=":", label="neurons held")
        below.set_xlabel("processor seconds")
        below.legend(loc="center right", frameon=False)
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)


def _slowdown(runs: list[Record]) -> int:
    both = [run for run in runs if "processor_seconds" in run]
    return round(max([1.0, *(run["seconds"] / run["processor_seconds"] for run in both)]))


def main() -> None:
    runs = read_runs("blocks")
    parts = {
        part: [run for run in runs if run["part"] == part]
        for part in ("recovery", "peers", "film", "few")
    }
    recovery, film = parts["recovery"], parts["film"][0]
    draw(film)
    traps, large = read_runs("block_traps"), read_runs("large_blocks")
    wrong = [run for run in traps if run["trap"] != "none"]
    counts = Counter(run["case"] for run in recovery)
    short = [f"{say_case(case)}: {count}" for case, count in counts.items() if count < 20]
    left = f"Twenty seeds of each were asked for; fewer were run of {'; '.join(short)}."
    text = TEXT.format(
        n="3,000",
        k=4,
        slowdown=round(max(run["wall_seconds"] / run["processor_seconds"] for run in recovery)),
        few=few_part(parts["few"]),
        not_few="" if parts["few"] else "How few examples suffice was not measured. ",
        recovery=recovery_table(recovery),
        failed=failures(recovery),
        left=left if short else "",
        film_seed=film["seed"],
        large=large_table(large),
        large_slowdown=_slowdown(large),
        large_failed=failures(large),
        peers=peer_table(parts["peers"]),
        wrong=sum(run.get("outcome") == "RECOVERED" for run in wrong),
        traps=len(wrong),
        trap_commits=", ".join(sorted({run["code"] for run in traps})),
        trap_table=trap_table(traps),
    )
    OUT.write_text(reflow(text))


if __name__ == "__main__":
    main()
