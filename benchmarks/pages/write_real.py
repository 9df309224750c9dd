"""Write docs/real.md from what real.py and text.py measured."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from benchmarks import DOCS
from benchmarks.ledger import read_runs
from benchmarks.studies.real import COLUMNS, lines

OUT = DOCS / "real.md"

INTRO = """# Real layers

The layer people hold has a dozen heads of rank 32 or 64, several hundred features, biases, and
trained weights. It is learned by its factors, Theta_i = A_i B_i^T and W_i = C_i D_i, when the
rank of the heads is told:

```python
import mhalearn as mha

layer = mha.random_layer(n_heads=2, d=16, rank=3, seed=0)  # stands in for any black box
examples = mha.Examples.from_callable(layer, "boolean", n=300, k=6, d=16, seed=1)
model = mha.AttentionRegressor(head_dim=3, random_state=0).fit(examples)

assert model.outcome_ is mha.Outcome.RECOVERED, model.solution_.reason
assert model.n_heads_ == 2  # found, not told
```

A trained layer is the same three lines, with `mha.from_huggingface("model.safetensors",
layer_index=3)` or the module itself for `layer`, `head_dim=32, bias=True`, and a GPU.

**How** (`learners/newton/factored.py`, `penalty_path.py`, `layer/factored.py`). A student with a
quarter more heads than would fill the features descends by Adam in single precision under a penalty
on its factors, which is the nuclear norm of Theta and W. It begins where it keeps all heads at zero
and fades by three powers of ten: heads appear one after the other, as examples ask for them, and
those too many stay at zero or become copies of another, so that the canonical form tells their
number. Under a strong penalty both factors of a product would fall to nothing, where neither moves
the other, and a head that is asked for later could not grow: as long as the penalty fades, small
random factors take the place of dead ones. Gauss-Newton steps on the factors then take the penalty
away, tenfold a step and no faster than the loss falls; without it, sharp heads fit single examples
before they are found. Residuals are in double and directions in single precision; the last steps
double their correct digits until none is left to gain. With fewer than twelve times the counting
limit of examples the penalty fades four times slower.

**What is certain.** The normal matrix of such a layer has a hundred thousand rows or more and is
never formed. A random change of all parameters is asked for the smallest change with the same
effect on the outputs (`judge/randomised_rank_test.py`): if the two differ in no head, the examples
leave nothing open, among layers whose heads have the rank that was told. `RECOVERED` needs that,
and residuals at the labels' precision on examples that were not fitted.

## Measured

Written by `benchmarks/pages/write_real.py` from `benchmarks/results/real.json`. Random +-1 tokens
and k = 16 unless the row says otherwise. minilm: a layer of all-MiniLM-L6-v2 (Hugging Face,
trained), 12 heads of rank 32, d = 384, biases; minilm as 96x8: the same with 96 features and heads
of rank 8, in which heads keep their norms and likeness (`recorded/reduced.py`), at the same ratio;
trained-like: random heads with norms and biases as trained ones have, heads x features x rank.
Exact: every Theta, W and bias to 1e-10 and the number of heads. Seconds are of one fit in a process
that has compiled nothing before (first), and of later fits in it; CPU s: seconds of the process on
all its cores; the longest of all runs. Ratio: examples over the counting limit. Adam is told the
number of heads and gets the same examples, and 20 seconds for each of its rates; its heads are
matched after equal ones are merged.

**Rows are of several commits**, each named in its row; where it is none of e796dd1, the row is of a
student whose heads could die and whose penalty Adam alone took away. Of those of a GPU only rows of
e796dd1 are of the code as it is now, nearly: since then the penalty falls no faster than the loss.
They are of three fits at once on one GPU, which makes each slower by a factor not measured here,
and had 90 seconds each: layer 0 is not exact within them, of layer 5 two seeds were run, and of
layers 1 and 3 none. Not measured at full size: Gaussian tokens, k = 8 and 32, N = 1024 and the size
of GPT-2. Rows of 3d5caba and 7d5f657, and those of text in float32 and float16, are of a penalty
that faded at two paces, which was taken back.

"""
TEXT = """
## From recorded text

Inputs and outputs of an attention block on sentences from documentation strings
(`benchmarks/text.py`). small: a layer of a transformer of three layers, d = 64, four causal heads
of 16, trained on such sentences on the spot. Tokens are whitened, and LayerNorm leaves one of
their directions open. The number of heads is not told; Adam is told it. Held-out: relative squared
error on other sentences, in the recording's own precision; floor: what rounding alone leaves the
true layer there; patterns: share of attention rows within 0.01 in total variation of the true
ones. CPU s: seconds of the process on both cores together, compilation included; s: those of the
clock, beside much other work on the same cores but for rows of e796dd1, which had two cores for
themselves. Adam has as many CPU seconds as its limit says.
Layers of all-MiniLM-L6-v2 on text, which want a GPU, are not measured yet. Commit 44c5a4c, with its
old results removed, is what became c351160 when it was rebased on others' work; commits of other
rows are as they are called.

"""
FIGURE = """
![Error against seconds, beside Adam](images/text.svg)

Lines: the error of the examples that steps saw; points: on other sentences, at the end, when
`mhalearn` has also written its certificate.
"""
TEXT_COLUMNS = ("layer", "tokens", "precision", "method", "outcome", "heads", "held-out", "floor")


def main() -> None:
    head, *rest = ("| " + " | ".join(row) + " |\n" for row in (COLUMNS, *lines(read_runs("real"))))
    OUT.write_text(INTRO + head + "|---" * len(COLUMNS) + "|\n" + "".join(rest) + text_table())


def text_table() -> str:
    columns = (*TEXT_COLUMNS, "patterns", "CPU s", "s", "limit", "commit")
    rows = [columns, ["---"] * len(columns)]
    runs = read_runs("text")
    for run in sorted(runs, key=lambda run: (run["case"], run["precision"], run["method"])):
        if "crashed" in run:
            found = (run["case"], "-", run["precision"], run["method"], run["crashed"][:40])
            rows.append([*found, *["-"] * (len(columns) - len(found) - 1), run["code"]])
            continue
        found = (run["case"], str(run["fitted_tokens"]), run["precision"], run["method"])
        held = "-" if run["held_out"] is None else f"{run['held_out']:.1e}"
        errors = (held, f"{run['floor']:.1e}", f"{run['patterns_within']:.1%}")
        heads = f"{run['n_heads']} of {run['true_heads']}"
        limit = f"{run['seconds']:.0f}" if run["seconds"] else "none"
        times = (f"{run['worked']:.0f}", f"{run['taken']:.0f}", limit, run["code"])
        rows.append([*found, run.get("outcome", "-"), heads, *errors, *times])
    return TEXT + "".join("| " + " | ".join(row) + " |\n" for row in rows) + FIGURE


if __name__ == "__main__":
    main()
