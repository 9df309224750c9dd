"""Write docs/phases.md from what phases.py, conditions.py, frequency.py and scaling.py measured."""

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

from benchmarks import DOCS, RESULTS
from benchmarks.studies import frequency
from benchmarks.studies.phases import LINES, good
from benchmarks.studies.scaling import laws

OUT = DOCS / "phases.md"

INTRO = """# The algorithm, phase by phase

Written by `benchmarks/pages/write_phases.py` from the JSON in `benchmarks/results`, the figures by
`benchmarks/pages/draw_phases.py` from the same; nothing measured here is typed by hand.

The algorithm of Chen and Li learns m heads from random labelled examples alone. `method="sculpt"`
runs it, one file a phase in `src/mhalearn/learners/chen_li`; `learner.py` shows their order on
one screen. In the figures each line is one size of layer (m heads, d features, k tokens,
||Theta|| = s, N examples, G: Gaussian inputs instead of +-1) and each dot one of its random
layers. The truth is used to measure, never to learn.

## Phase 1: a crude sum of projections

Inputs and labels are correlated: what comes out is near W_1 + ... + W_m, because the weights of
a head add up to one, so that its projection counts once wherever it looks. It is a rough
estimate, and enough to begin with (`phase1_crude_sum.py`).

![Phase 1: relative error of the crude sum in every run](images/phase_1.svg)

## Phase 2: certify rows, sculpt a body

If all heads of a row attend alike, its label is p X W_sum for one vector p of weights, and this
can be tested without knowing the heads: a linear programme looks for such a p. A row that passes
is certified, and gives linear constraints which every Theta_i satisfies. Together they cut a
convex body around the affine hull of the Theta_i (`phase2_certification.py`, `phase2_body.py`,
`body_shape.py`). Precision: the share of certified rows on which all heads have the row's
log-odds to within one. Recall: the share of such rows that the screen keeps. Score: how far a row
is from exact.

![Phase 2: precision, recall and score of rows certified with the crude sum](images/phase_2.svg)

## Phase 3: a proxy, and a refined sum

The point of the hull nearest to zero has the same inner product with every head. Where it puts
one token far ahead, most heads look at that token, and the label is that token times W_sum.
Robust least squares over such rows gives a far better sum (`phase3_refined_sum.py`). The control
puts a random matrix in the place of the proxy: then the fit believes almost no row, and errs.

![Phase 3: error of both sums, and rows believed, beside a random proxy](images/phase_3.svg)

## Phase 4: certify again

With the better sum fewer rows pass by accident, and the scores fall, the less the more heads
there are. Phases 3 and 4 run twice.

![Phase 4: precision, recall and score of rows certified with the refined sum](images/phase_4.svg)

## Phase 5: the span

The body is thin, except along the differences of heads. Its wide directions and the proxy span
the Theta_i (`body_shape.py` by eigenvectors; `phase5_span.py` asks the body itself, by linear
programmes, to check them). Where the spectrum of the constraints has its largest gap tells the
number of heads.

![Phase 5: angle between the heads and the span, and the gap of the spectrum](images/phase_5.svg)

## Phase 6: the net

In the span a layer is m x m numbers. Random starts in it descend on them, with the projections by
least squares, and held-out examples choose (`phase6_net.py`). Polish then takes any good layer to
rounding; it is not part of the algorithm.

![Phase 6: error of the layer before and after polish](images/phase_6.svg)

## Does it work?

Errors are before polish. Every run has two cores; most shared a larger machine with seven
others, so times are upper bounds. Ten layers a line, drawn at random with ||Theta|| = s. "Good"
means that all bars of the line hold (where it has any) and that polish then reaches a relative
squared error of 1e-20.

| m, d, k | s | N | inputs | good | MSE, median (worst)| sine | sum error | sec | precision, recall|
|---|---|---|---|---|---|---|---|---|---|
"""

CONTROLS = """
Precision and recall are those of phase 4. With four heads more than half of the certified rows are
false, and only the robust fit carries them.

## Controls

The refined sum's relative error, medians over three seeds: by the phases; with a random matrix in
place of the proxy; with plain in place of robust least squares. Last, what the exact solver makes
of 400 of the examples from random starts: it needs no phases, so an error after polish proves
nothing about them.

| m, d, k | s | inputs | sum error | random proxy | plain | inliers, proxy / random | solver alone |
|---|---|---|---|---|---|---|---|
"""

EXACT = """
## Where accuracy is lost

Each phase from exact inputs, first seed of each line: the span from certification with the exact
sum, the sum from the exact proxy, the net from the exact span.

| m, d, k | s | inputs | span sine | sum error | MSE |
|---|---|---|---|---|---|
"""

CONDITIONS = """
## A teacher for each violated condition

m = 2, d = 16, k = 3, s = 4, 200,000 examples, three seeds (`conditions.py`, which has the bars).

| teacher | condition | value | threshold | what breaks | MSE |
|---|---|---|---|---|---|
"""

FREQUENCY = """
## How often a row is lucky

The phases live on rows on which all heads agree. Their share, with the exact sum, against the
tolerance, d, k and m, one at a time (`frequency.py`; ||Theta|| = 4, eight layers a point, at
tolerance 0.2 where that is not what varies; bands are Clopper-Pearson intervals of the pooled
shares, intervals of slopes come from drawing the layers anew).

![Share of matched rows against tolerance, d, k and m, with fitted slopes](images/frequency.svg)

| law | fitted | interval | what is said of it |
|---|---|---|---|
"""

SCALING = """
At a fixed tolerance and norm of Theta the share falls with d, too, but far less than with k or m.
At d = 8 three heads take 6 of 8 directions of the output, and some rows match by accident: hence
the fit without them. The theorem's (kd)^-Theta(m) is about the accuracy that it asks for,
1/poly(kd), and no line of this table is a test of it.

## Scaling laws

![Error and time, with fitted exponents](images/scaling.svg)

Exponents by least squares on logarithms, of the phases as they are run (`scaling.py` says where the
expectations come from; none is proved).

| law | fitted exponent | expected |
|---|---|---|
"""


def read(name: str) -> list[dict]:
    return json.loads((RESULTS / name).read_text())


def middle(values: list) -> float:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else float("nan")


def label(line: int) -> str:
    m, d, k, scale, *_ = LINES[line]
    return f"{m}, {d}, {k} | {scale:g}"


def phase_tables(records: list[dict]) -> str:
    text, controls, exact = "", "", ""
    for line, (*_, n, inputs, mse_bar, _, _, _, _) in enumerate(LINES):
        mine = [r for r in records if r["line"] == line]
        done = [r for r in mine if "failure" not in r]
        last = [r["certification"][-1] for r in done]
        bar = f" (bar {mse_bar:g})" if mse_bar else ""
        text += (
            f"| {label(line)} | {n:.0e} | {inputs} | {sum(map(good, mine))}/{len(mine)} | "
            f"{middle([r['mse'] for r in done]):.1e} ({max(r['mse'] for r in done):.1e}){bar} | "
            f"{middle([r['span_sine'] for r in done]):.3f} | "
            f"{middle([r['sum_error'] for r in done]):.1e} | "
            f"{middle([r['seconds'] for r in done]):.0f} | "
            f"{middle([q['precision'] for q in last]):.2f}, "
            f"{middle([q['recall'] for q in last]):.2f} |\n"
        )
        held = [r for r in done if "controls" in r]
        of = {name: middle([r["controls"][name] for r in held]) for name in held[0]["controls"]}
        controls += (
            f"| {label(line)} | {inputs} | {middle([r['sum_error'] for r in held]):.1e} | "
            f"{of['sum error, random, robust']:.2g} | {of['sum error, proxy, plain']:.2g} | "
            f"{of['inliers, proxy']:.0%} / {of['inliers, random']:.0%} | "
            f"{middle([r['mse_without_phases'] for r in held]):.0e} |\n"
        )
        for r in done:
            if "from_exact_inputs" in r:
                found = list(r["from_exact_inputs"].values())
                exact += f"| {label(line)} | {inputs} | " + " | ".join(f"{v:.1e}" for v in found)
                exact += " |\n"
    return text + CONTROLS + controls + EXACT + exact


def condition_table(records: list[dict]) -> str:
    text = ""
    for name in dict.fromkeys(r["teacher"] for r in records):
        mine = [r for r in records if r["teacher"] == name]
        value, threshold = mine[0]["conditions"].get(mine[0]["condition"], (None, None))
        broke = ", ".join(
            f"{what} ({n}/{len(mine)})" for what, n in Counter(r["broke"] for r in mine).items()
        )
        errors = [r["qualities"].get("phase 6: mse of the net") for r in mine]
        mse = middle(errors)
        text += f"| {name} | {mine[0]['condition']} | "
        text += f"{value:.2g} | {threshold:g} | " if value is not None else "- | - | "
        text += f"{broke} | {'-' if np.isnan(mse) else f'{mse:.1e}'} |\n"
    return text


def main() -> None:
    text = INTRO + phase_tables(read("phases.json"))
    text += CONDITIONS + condition_table(read("conditions.json"))
    text += FREQUENCY + "".join(
        f"| {' | '.join(row)} |\n" for row in frequency.laws(read("frequency.json"))
    )
    text += SCALING + "".join(
        f"| {name} | {fitted:.2f} | {expected} |\n"
        for name, fitted, expected in laws(read("scaling.json"))
    )
    OUT.write_text(text)


if __name__ == "__main__":
    main()
