"""Write docs/tails.md and draw a figure a lemma from benchmarks/results/tails.json."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from benchmarks import DOCS, RESULTS
from benchmarks.pages.picture import picture
from benchmarks.pages.prose import reflow
from mhalearn import tails

OUT = DOCS / "tails.md"
# The layer of most figures, and of that of the lemma whose bound says nothing there.
USUAL, FLAT, SPARSE = "dense", "wide and flat", "sparse"

INTRO = """# The lemmas, measured

Written by `benchmarks/pages/write_tails.py` from `benchmarks/results/tails.json`, which
`benchmarks/studies/tails.py` measured; nothing measured here is typed by hand.

Chen and Li's proof uses little of the inputs but upper and lower tails of dense linear functions
and of slices of them. `mhalearn.tails` measures these tails on any layer and any law of tokens,
beside bounds whose constants are written out. Where the literature leaves a constant open, the
version here has one, with its derivation in the file's docstring. What is not proved for the tokens
at hand says so, and is drawn dashed.

```python
import mhalearn as mha
from mhalearn import tails

layer = mha.random_layer(n_heads=2, d=16, scale=4.0)
record = tails.small_ball(layer, "boolean", n=20_000)
figure = tails.plot(record)  # matplotlib: figure.savefig("small_ball.pdf")
records = tails.table(layer, k=3, n=20_000)
print(tails.to_markdown(records))

assert record.proved and all(one.holds for one in records)
```

Shares have Clopper-Pearson intervals that hold for all abscissas of a record together, with
confidence {confidence:g}; every record has {draws:,} draws. A bound *holds* unless a whole interval
lies beyond it. *Slack* is how many times the bound is from what was measured, at the t where it is
least: 1 is tight. *Vacuous* bounds are true of every probability. Layers, ||Θ|| = s:

"""

LEMMAS = {
    "Hanson-Wright": """A logit xᵀΘy of two tokens has a Gaussian tail up to ‖Θ‖_F²/‖Θ‖ and an
exponential one beyond. Both lines are proved: the closed form, and the Chernoff bound it comes
from.""",
    "Berry-Esseen": """Given the query, the log-odds ⟨Θ, x(x' - x'')ᵀ⟩ are a sum of 2d independent
terms. For dense Θ they are within a per cent of normal where the bound allows for many; with
four entries they are not normal at all, which is what the authors' density assumption rules
out.""",
    "small ball": """How seldom two tokens are equally attractive. Erdős's bound takes over from
Berry and Esseen's at small t, where the latter stops falling.""",
    "large log-odds": """Sparse patterns must occur: the log-odds exceed their own standard
deviation with probability at least 6/64 whatever the weights are (the theorem of Dvořák and
Klein the paper cites).""",
    "joint small ball": """All heads undecided between the same two tokens. The normal
prediction falls as t to the power of the heads, and so does what is measured; the bound proved
for signs does not.""",
    "lower tail of the margin": """Rows on which a head is undecided between its two best
tokens, bounded by the union over pairs.""",
    "agreement given the proxy's margin": """Phase 3 trusts rows on which the point of least
norm in the heads' affine hull has a large margin. The dashed line is proved for Gaussian tokens
and a prediction for signs; the dotted one is the share of rows with such a margin: trust is
paid for in rows.""",
    "softmax given a Hamming weight": """The weight a query gives itself varies from example to
example (dotted); its mean, given the Hamming weight of a fixed substring of the query, hardly
does. The proved bound is of order ‖Θ‖_F √(length · log k / d): it speaks only where Θ is small
or d large, as drawn here. Which substring the authors take the sources at hand do not say.""",
    "certified rows": """How often phase 2 finds a row, given the exact sum of projections. No
bound with explicit constants is known to us; [the phases' page](phases.md) has the laws in d, k
and m.""",
}


def read() -> list[dict]:
    return json.loads((RESULTS / "tails.json").read_text())


def slug(name: str) -> str:
    return "tails_" + "".join(c if c.isalnum() else "_" for c in name.lower())


def find(records: list[dict], layer: str, name: str) -> tails.Tail:
    return next(
        tails.read_tail(r["tail"])
        for r in records
        if r["layer"] == layer and r["tail"]["name"] == name
    )


def layer_table(records: list[dict]) -> str:
    text = "| layer | m | d | k | s | tokens |\n|---|---|---|---|---|---|\n"
    for name in dict.fromkeys(r["layer"] for r in records):
        one = next(r for r in records if r["layer"] == name)
        shape = " | ".join(f"{one[key]:g}" for key in ("m", "d", "k", "scale"))
        text += f"| {name} | {shape} | {one['tail']['inputs']} |\n"
    return text


def lemma_section(records: list[dict], name: str, words: str) -> str:
    shown = FLAT if name == "softmax given a Hamming weight" else USUAL
    record = find(records, shown, name)
    text = f"## {name[0].upper()}{name[1:]}\n\n{reflow(words)}\n\n"
    text += f"![{record.event}, on the layer called {shown}](images/{slug(name)}.svg)\n\n"
    for place, bound in enumerate(record.bounds):
        said = "proved" if bound.proved else "not proved"
        text += f"{place + 1}. {bound.side} `{bound.statement}` ({said}; {bound.source})\n"
    text += "\n| layer | t | measured | interval | bound | slack | proved | holds |\n"
    text += "|---|---|---|---|---|---|---|---|\n"
    for r in records:
        if r["tail"]["name"] == name:
            line = tails.to_markdown((tails.read_tail(r["tail"]),)).splitlines()[2]
            text += line.replace(f"| {name} |", f"| {r['layer']} |", 1) + "\n"
    return text + "\n"


def draw(records: list[dict]) -> None:
    for name in LEMMAS:
        shown = FLAT if name == "softmax given a Hamming weight" else USUAL
        with picture(f"{slug(name)}.svg", 6.2, 3.6) as figure:
            tails.plot(find(records, shown, name), figure)
    with picture("tails_sparse.svg", 9.4, 3.6) as figure:
        for half, name in zip(figure.subfigures(1, 2), ("Berry-Esseen", "small ball"), strict=True):
            tails.plot(find(records, SPARSE, name), half)


def main() -> None:
    records = read()
    first = records[0]["tail"]
    text = INTRO.format(confidence=first["confidence"], draws=first["n"][0])
    text += layer_table(records) + "\n"
    for name, words in LEMMAS.items():
        text += lemma_section(records, name, words)
    far = max(find(records, SPARSE, "Berry-Esseen").measured)
    near = max(find(records, USUAL, "Berry-Esseen").measured)
    text += f"""## A layer that breaks them

With four entries in Θ the log-odds take few values: they are {far:.2g} from normal where the dense
layer's are {near:.2g}, and the chance of exact ties does not fall with t. The bounds know: Berry
and Esseen's grows, Erdős's counts the weights that are left. What fails is the small ball the proof
needs, and with it [phase 4](phases.md), as the teacher with four entries shows there.

![Berry-Esseen and small ball on a sparse layer](images/tails_sparse.svg)
"""
    OUT.write_text(text)


if __name__ == "__main__":
    main()
    draw(read())
