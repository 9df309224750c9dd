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

**How** (`learners/newton/factored.py`, `decoding.py`, `layer/factored.py`). A student with a
quarter more heads than would fill the features descends by Adam in single precision under a penalty
on its factors, which is the nuclear norm of Theta and W. It begins where it keeps all heads at zero
and fades by three powers of ten: heads appear one after the other, as examples ask for them, and
those too many stay at zero or become copies of another, so that the canonical form tells their
number. Under a strong penalty both factors of a product would fall to nothing, where neither moves
the other, and a head that is asked for later could not grow: as long as the penalty fades, small
random factors take the place of dead ones.

What descent has found of W need only be rough, if sequences are shorter than heads are wide. A
row is y = c + sum p_i X W_i with patterns that sum to one; whatever they are, it lies in an
affine space of m (k - 1) dimensions that X, W and c decide. **W and c** are found by variable
projection: the part of the rows outside of these spaces has no patterns in it, and damped
Gauss-Newton steps take it to rounding in some five steps. **Patterns** follow by least squares,
row by row. **Theta** follows from their log-odds, log(p_a / p_b) = x Theta (x_a - x_b), a matrix
of rank h from linear measurements, the last of them of all examples. No softmax is left in any of
the three, so that sharp heads, which descent fits to single examples before it finds them, are no
harder than others (`solvers/free_patterns.py`, `solvers/score_regression.py`). Heads that turn out
to be parts of one, since their patterns are the same, are merged. Of causal layers the first rows
are decoded, however long sequences are.

On longer sequences, of text above all, **W of any rank is eliminated** where rows are at least four
times the columns of its design: linear regression gives W, the bias and what spreads least of both,
and Gauss-Newton steps move Theta alone, within its rank. Tokens and outputs of a trained layer
spread over some directions ten thousand times further than over others, and descent that moves all
factors at once creeps along the narrow ones. What is found has W of the rank that was told, so that
nothing is cut, and heads too many have none and are dropped (`solvers/polish.py`). Where rows are
fewer, Gauss-Newton steps on the factors take the penalty away instead, tenfold a step and no faster
than the loss falls, and heads that turn out to be copies on the way are merged
(`penalty_path.py`).

**What is certain.** The normal matrix of such a layer has a hundred thousand rows or more and is
never formed. Where heads were decoded, the same two problems show its rank
(`judge/pattern_rank_test.py`): a change that outputs do not show changes no W outside of the spaces
of patterns, hence no pattern, hence no log-odds. A random change is asked for the smallest one with
the same effect on each; if the two differ in no head, the examples leave nothing open, among layers
whose heads have the rank that was told. Elsewhere the same is asked of the outputs themselves
(`judge/randomised_rank_test.py`). `RECOVERED` needs that, and residuals at the labels' precision on
examples that were not fitted.

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

**Rows are of several commits**, each named in its row. Layers on a GPU are of two: 4f3eb8c, and
2cb606d before it, whose rank test had one weight of log-odds and which took 2,000 rough steps.
Layer 0 ran alone on its GPU; rows "beside 3 other fits" shared it with these, and its processor
with ten more processes, which about doubles their seconds; only the first fit of a process
compiled, and beside others not all of it, since they share a cache. Of 4f3eb8c layers 3 and 4,
Gaussian tokens on layers 1 to 5, and k = 8 and 32 are not measured. NOT_IDENTIFIED at N = 1024 is
layer 0, met to 2e-12, whose bound did not resolve a parameter then. N = 512 was tried once, on
layer 4: no head was found. Adam, and the size of GPT-2, are of older commits, and of these GPT-2's
layer is of a solver that did not decode.

"""
TEXT = """
## From recorded text

Inputs and outputs of an attention block on sentences from documentation strings
(`benchmarks/text.py`). small: a layer of a transformer of three layers, d = 64, four causal heads
of 16, trained on such sentences on the spot. minilm with heads: these heads of a layer of
all-MiniLM-L6-v2 on a quarter of the features, every fourth principal direction of its tokens and
of its outputs, so that variances are spread as widely (`recorded/fewer_features.py`), and logits
as large as they were. Tokens are whitened, and LayerNorm leaves one of
their directions open. The number of heads is not told; Adam is told it. Held-out: relative squared
error on other sentences, in the recording's own precision; floor: what rounding alone leaves the
true layer there; patterns: share of attention rows within 0.01 in total variation of the true
ones. CPU s: seconds of the process on both cores together, compilation included; s: those of the
clock, beside much other work on the same cores but for rows of e796dd1, which had two cores for
themselves. Adam has as many CPU seconds as its limit says.
Whole layers of all-MiniLM-L6-v2 on text, which want a GPU, were not recovered when they were last
tried, before W was eliminated first: of 40,000 tokens layer 4 ended after its 130 seconds at a
held-out error of 2e-3 with 14 heads. They were not tried again since. Commit
44c5a4c, with its old results removed, is what became c351160 when it was rebased on others' work;
commits of other rows are as they are called.

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
