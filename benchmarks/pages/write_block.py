"""Write docs/block.md from benchmarks/results/blocks.json, which benchmarks/blocks.py measured."""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from benchmarks import DOCS, RESULTS
from benchmarks.pages.prose import reflow

OUT = DOCS / "block.md"
Record = dict[str, Any]
# Every parameter to this, of those that a block's function determines.
GOOD = 1e-10
ACTIVATIONS = {"gelu": "GELU", "relu": "ReLU", "silu": "SiLU", "glu": "GLU (sigmoid)"}

TEXT = """# A whole block

Written by `benchmarks/pages/write_block.py` from `benchmarks/results/blocks.json`, which
`benchmarks/blocks.py` measured; no number measured here is typed by hand.

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
its mirror image one neuron and a linear map, since act(z) - act(-z) = z. `compare` uses it.
How many unknowns are left is a formula, tested against ranks of Jacobians; the counting limit
follows from it.

## How one is learned

A student with surplus heads and neurons descends by Adam, in single precision, under a penalty
on all squares that fades by five powers of ten: without it, surplus neurons stay as groups that
cancel. Heads that are alike are merged. Neurons are left out one after the other as long as the
others, with new output weights, make up for them. Gauss-Newton in all parameters follows, to
rounding. Held-out examples choose among attempts, and an eighth that was set apart certifies:
`RECOVERED` needs labels in double precision that are met to rounding there, and a Jacobian whose
null space is the gauge and nothing else. Nothing of this is proved; that the gap between
neurons that count and others is wide was seen on random blocks, and decides nothing by itself.

## Random blocks

d = 8, two heads, 16 neurons, biases everywhere, no norm, {n} Gaussian examples of {k} tokens,
numbers of heads and neurons found, not told. Seconds are of the processor (all threads), with
compilation in the first run of each kind, on two cores that others used at the same time.

{recovery}

{failed} {left}

## Adam alone

The same student, steps and examples, without pruning and Gauss-Newton: relative squared error on
500 of the examples it descended on.

{peers}

## Traps

Each with the numbers of heads and neurons told, GELU, one attempt. None may be `RECOVERED`:
{wrong} of {traps} were.

{trap_table}

## Not there yet

Inside a block only heads of a Theta and a W each are learned: no rotary, grouped or normalised
ones. Norms are taken at the caller's word, their epsilon too; activations are told, or tried one
after the other (`activation="auto"`). Sequences of one token are learned from like all others,
and not used first. Blocks of d = 16 and more, pre- and post-norms, and blocks of trained models
have not been measured; nor how few examples suffice. What a block leaves over is not tested for
its cause, and the report and the studio do not know blocks.
"""


def read_runs() -> list[Record]:
    return json.loads((RESULTS / "blocks.json").read_text())["runs"]


def recovery_table(runs: list[Record]) -> str:
    table = "| neurons | runs | recovered, all parameters to 1e-10 | worst error of those | "
    table += "examples over the counting limit | processor seconds: median, most |\n"
    table += "|---|---|---|---|---|---|\n"
    for case, name in ACTIVATIONS.items():
        rows = [run for run in runs if run["case"] == case]
        if not rows:
            continue
        good = [run for run in rows if is_good(run)]
        seconds = [run["processor_seconds"] for run in rows]
        worst = f"{max(run['max_error'] for run in good):.0e}" if good else "-"
        table += f"| {name} | {len(rows)} | {len(good)} | {worst} | {rows[0]['ratio']:.0f} | "
        table += f"{median(seconds):.0f}, {max(seconds):.0f} |\n"
    return table.rstrip()


def is_good(run: Record) -> bool:
    error = run.get("max_error")
    return run.get("outcome") == "RECOVERED" and error is not None and error <= GOOD


def failures(runs: list[Record]) -> str:
    """What became of the runs that are not good, each."""
    bad = [run for run in runs if not is_good(run)]
    if not bad:
        return "All of these runs ended so."
    said = [
        f"{ACTIVATIONS[run['case']]}, seed {run['seed']}: `{run['outcome']}` with {run['heads']} "
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
    table = "| trap | seed | outcome | heads, neurons |\n|---|---|---|---|\n"
    for run in runs:
        table += f"| {run['trap']} | {run['seed']} | `{run['outcome']}` | "
        table += f"{run['heads']}, {run['neurons']} |\n"
    return table.rstrip()


def block_numbers() -> dict[str, object]:
    """What other pages say of these runs."""
    runs = [run for run in read_runs() if run["part"] == "recovery"]
    return {
        "block_good": sum(is_good(run) for run in runs),
        "block_runs": len(runs),
    }


def main() -> None:
    runs = read_runs()
    parts = {
        part: [run for run in runs if run["part"] == part]
        for part in ("recovery", "peers", "traps")
    }
    seeds = {run["seed"] for run in parts["recovery"]}
    left = f"Twenty seeds of each were asked for, and at most {len(seeds)} were run."
    text = TEXT.format(
        n="3,000",
        k=4,
        recovery=recovery_table(parts["recovery"]),
        failed=failures(parts["recovery"]),
        left=left,
        peers=peer_table(parts["peers"]),
        wrong=sum(run["outcome"] == "RECOVERED" for run in parts["traps"]),
        traps=len(parts["traps"]),
        trap_table=trap_table(parts["traps"]),
    )
    OUT.write_text(reflow(text))


if __name__ == "__main__":
    main()
