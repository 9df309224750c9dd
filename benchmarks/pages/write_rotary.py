"""Write docs/rotary.md and draw its figures from one layer of a small decoder.

The layer and its inputs are benchmarks/results/decoder_layer.safetensors and
decoder_text.safetensors, which benchmarks/recorded/decoder.py trained and recorded.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks import DOCS, RESULTS
from benchmarks.pages.picture import picture
from benchmarks.pages.prose import reflow
from mhalearn.layer import circuits

OUT = DOCS / "rotary.md"
FAR = 16  # distances that are drawn
SHOWN = 16  # principal directions of tokens that matrices are drawn in
COLOURS = ("#1b6ca8", "#4a90c8", "#8fbde0", "#b4521e", "#e07b39", "#f0b184")

INTRO = """# What is the QK circuit of a rotary head?

Written, with its figures, by `benchmarks/pages/write_rotary.py` from one layer of a small decoder;
nothing measured here is typed by hand.

A head without positions has one matrix: the logit of a key token y for a query token x is x Θ y,
wherever they stand. A rotary head turns queries and keys by their positions, and has no such
matrix. What it has instead, and all that its function determines, is one complex matrix of rank
one for each frequency. With the key δ tokens before the query,

    logit(x, y, δ) = x Θ(δ) y,    Θ(δ) = Θ₀ + Σ_f Re( e^{i w_f δ} M_f ),    M_f = a_f b_fᴴ

where a_f and b_f are the columns of the query and key projections that make a pair, as complex
numbers, times the scale of the logits, and Θ₀ belongs to the dimensions that are not rotated. A
complex number may be moved from a_f to b_f and nothing is seen of it; M_f stays. So `compare` asks
for M_f, and so should whoever asks whether two rotary heads are the same.

```python
import numpy as np

import mhalearn as mha
from mhalearn.layer import circuits

layer = mha.random_layer(2, 8, head_dim=4, rope=mha.Rope(base=100.0), causal=True, seed=1)
found = circuits.rotary_circuit(layer)  # M_f by its factors, and the frequencies w_f
matrices = found.matrices(0)  # of the first head, (2, 8, 8)

x, y = np.random.default_rng(0).standard_normal((2, 8))
turned = np.exp(1j * found.frequencies * 3)  # the key stands three tokens before
logit = np.einsum("f,d,fde,e->", turned, x, matrices, y).real
theta = circuits.theta_at(layer, 3)[0]
assert abs(logit - x @ theta @ y) < 1e-12

tokens = np.stack([y, 0 * y, 0 * y, x])[None]
weights = layer.patterns(tokens)[0, 0, 3]  # the last row of the first head
here = x @ circuits.theta_at(layer, 0)[0] @ x
assert abs(np.log(weights[0] / weights[3]) - (logit - here)) < 1e-12
```

## A trained layer

The layer below is the second of three of a decoder built as Llama is: d = {d}, {heads} heads of
{width} dimensions, {groups} sets of keys and values that {each} heads each share, rotary
frequencies of base {base:g}, causal. It was trained to predict the next word of sentences from the
documentation of Python packages ({trained}); it is small, and no more than an example. Its weights
are rounded to half precision. Tokens are its inputs on {sentences} sentences of {tokens} words.

"""

MATRICES = """## M_f

![M_f of one head at three frequencies](images/rotary_matrices.svg)

Real and imaginary parts of M_f of head {head}, at the three frequencies at which they are largest
as logits, in the basis of the principal directions of the tokens, each as long as tokens are along
it. A frequency w_f has the period 2π / w_f. The first direction is nearly that of the mean token
(cosine {cosine:.2f}), and the entry where it meets itself holds {share:.0%} of the squares of these
three matrices: that part of the logit depends on where tokens stand, and hardly on what they say.

![The size of M_f by frequency](images/rotary_sizes.svg)

The sizes ‖M_f‖ of all heads, by period. {long} of the {count} periods are longer than twice the
{tokens} tokens of a sentence: such frequencies turn by less than half a circle from its first token
to its last, the slowest by {turn:.1f} degrees, and short sequences hardly tell those apart.

"""

LOGITS = """## The logit as a function of distance

![Logits of two mean tokens by distance](images/rotary_logits.svg)

Left, the logit of two mean tokens μ, μ Θ(δ) μ, as they move apart: what positions alone say. Right,
how head {head} makes its curve: a cosine a frequency, with the amplitude and the phase of the
complex number μ M_f μ. Those that are slow beside the distances drawn add a constant, here
nearly zero.

"""

BACK = """## Which heads look back by how much

![Attention by distance](images/rotary_back.svg)

The mean weight of attention at each distance, over all rows of the {sentences} sentences that see a
token so far back.

"""

END = """Heads {near} give more than two fifths of their attention to the two tokens before; head
{far} looks farthest back in the mean (over the second half of each sentence, which has room to look
back).

A report on such a layer (`mha.write_report`) draws, for each head, Θ(0), W, and the trace and the
norm of Θ(δ) by distance; heads that share keys carry the number of those. How such heads are
learned from examples is on another page: [decoders](positions.md).
"""


class Look(NamedTuple):
    """What is drawn and said of the layer."""

    layer: mha.ProjectedLayer
    tokens: Any  # (n, k, d)
    circuit: circuits.RotaryCircuit
    logits: Any  # of mean tokens, (m, distances)
    back: Any  # (m, k)
    head: int  # whose curve is steepest

    @property
    def mean(self) -> Any:
        return self.tokens.reshape(-1, self.layer.d).mean(axis=0)


def look() -> Look:
    layer = mha.load_layer(RESULTS / "decoder_layer.safetensors")
    x = mha.load_examples(RESULTS / "decoder_text.safetensors").arrays().x.astype(np.float64)
    mean = x.reshape(-1, layer.d).mean(axis=0)
    logits = circuits.logit_by_distance(layer, np.arange(FAR), mean, mean)
    steepest = int(np.argmax(np.ptp(logits, axis=1)))
    back = circuits.mean_look_back(layer.patterns(x))
    return Look(layer, x, circuits.rotary_circuit(layer), logits, back, steepest)


def main() -> None:
    seen = look()
    draw_matrices(seen)
    draw_sizes(seen)
    draw_logits(seen)
    draw_back(seen)
    OUT.write_text(write(seen))


def write(seen: Look) -> str:
    a, (n, k, _) = seen.layer.architecture, seen.tokens.shape
    periods = 2 * np.pi / seen.circuit.frequencies
    said = {
        "d": a.d,
        "heads": a.heads,
        "width": a.qk_rank,
        "groups": a.groups,
        "each": a.heads // a.groups,
        "base": a.rope.base,
        "trained": seen.layer.metadata["trained"],
        "sentences": n,
        "tokens": k,
        "head": seen.head + 1,
        "long": int(np.sum(periods > 2 * k)),
        "count": len(periods),
    }
    means = mean_distances(seen)
    basis, inside, chosen = principal_matrices(seen)
    squares = np.abs(inside[chosen]) ** 2
    said |= {
        "cosine": float(basis[0] @ seen.mean / np.linalg.norm(seen.mean)),
        "share": float(squares[:, 0, 0].sum() / squares.sum()),
        "turn": float(np.degrees(seen.circuit.frequencies.min() * (k - 1))),
    }
    near = [str(i + 1) for i in np.flatnonzero(seen.back[:, 1:3].sum(axis=1) > 0.4)]
    end = {"near": f"{', '.join(near[:-1])} and {near[-1]}", "far": int(np.argmax(means)) + 1}
    intro, code, rest = INTRO.partition("```python")[0], *_code_and_rest()
    page = reflow(_keep_formula(intro)) + code + reflow(rest.format(**said))
    page += reflow((MATRICES + LOGITS + BACK).format(**said)) + table(seen, means)
    return page.replace("~", " ") + reflow(END.format(**end))


def _code_and_rest() -> tuple[str, str]:
    start = INTRO.index("```python")
    stop = INTRO.index("```\n", start + 3) + 4
    return INTRO[start:stop], INTRO[stop:]


def _keep_formula(text: str) -> str:
    """Blanks that reflowing must not take: those of the indented line."""
    lines = [
        line.replace(" ", "~") if line.startswith("    ") else line for line in text.split("\n")
    ]
    return "\n".join(lines)


def mean_distances(seen: Look) -> Any:
    """How far back heads look in the mean, over rows of the second half of a sentence."""
    weights = seen.layer.patterns(seen.tokens)
    k = weights.shape[3]
    apart = np.arange(k)[:, None] - np.arange(k)
    rows = slice(k // 2, None)
    return (weights * apart)[:, :, rows].sum(axis=3).mean(axis=(0, 2))


def table(seen: Look, means: Any) -> str:
    a = seen.layer.architecture
    periods = 2 * np.pi / seen.circuit.frequencies
    lines = [
        "| head | keys | largest M_f at period | logit of mean tokens highest at "
        "| weight on itself | on the one before | looks back in the mean |",
        "|---|---|---|---|---|---|---|",
    ]
    for i in range(a.heads):
        loudest = periods[int(np.argmax(seen.circuit.sizes()[i]))]
        peak = int(np.argmax(seen.logits[i]))
        own, before = seen.back[i, :2]
        lines.append(
            f"| {i + 1} | {i * a.groups // a.heads + 1} | {loudest:.3g} | {peak} | {own:.2f} | "
            f"{before:.2f} | {means[i]:.1f} |"
        )
    return "\n".join(lines) + "\n\n"


# Figures


def principal_matrices(seen: Look) -> tuple[Any, Any, Any]:
    """Principal directions of the tokens; M_f of one head in them, as logits of tokens as large
    along each as they are; and the three largest."""
    flat = seen.tokens.reshape(-1, seen.layer.d)
    basis = np.linalg.svd(flat, full_matrices=False).Vh[:SHOWN]
    basis = basis * np.sign(basis @ seen.mean)[:, None]
    sizes = np.linalg.norm(flat @ basis.T, axis=0) / np.sqrt(len(flat))
    matrices = seen.circuit.matrices(seen.head)
    inside = (basis @ matrices @ basis.T) * sizes[:, None] * sizes
    return basis, inside, np.argsort(-np.linalg.norm(inside, axis=(1, 2)))[:3]


def draw_matrices(seen: Look) -> None:
    _, inside, chosen = principal_matrices(seen)
    limit = float(np.abs(inside[chosen]).max())
    with picture("rotary_matrices.svg", 7.6, 5.0) as figure:
        panels = figure.subplots(2, 3)
        for column, f in enumerate(chosen):
            for row, (part, name) in enumerate(((inside[f].real, "Re"), (inside[f].imag, "Im"))):
                axes = panels[row][column]
                shown = axes.imshow(part, cmap="RdBu_r", vmin=-limit, vmax=limit)
                axes.set(xticks=[0, SHOWN - 1], yticks=[0, SHOWN - 1])
                axes.set_xticklabels([1, SHOWN])
                axes.set_yticklabels([1, SHOWN])
                period = 2 * np.pi / seen.circuit.frequencies[f]
                axes.set_title(f"{name} M_f, period {period:.3g}", fontsize=9)
        panels[0][0].set_ylabel("query direction")
        panels[1][0].set_ylabel("query direction")
        panels[1][1].set_xlabel("key direction")
        figure.colorbar(shown, ax=panels, shrink=0.7, label="logit")


def draw_sizes(seen: Look) -> None:
    sizes, periods = seen.circuit.sizes(), 2 * np.pi / seen.circuit.frequencies
    with picture("rotary_sizes.svg", 6.4, 3.0) as figure:
        axes = figure.subplots()
        for i, line in enumerate(sizes):
            axes.plot(periods, line, "o-", markersize=3.5, color=COLOURS[i], label=_name(seen, i))
        axes.axvline(seen.tokens.shape[1], color="#888888", linestyle="--", linewidth=1)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("period in tokens; dashed: the length of a sentence")
        axes.set_ylabel("norm of M_f")
        axes.legend(frameon=False, fontsize=8, ncols=2)


def draw_logits(seen: Look) -> None:
    fine = np.linspace(0, FAR - 1, 241)
    curves = circuits.logit_by_distance(seen.layer, fine, seen.mean, seen.mean)
    with picture("rotary_logits.svg", 9.2, 3.4) as figure:
        left, right = figure.subplots(1, 2)
        for i, curve in enumerate(curves):
            left.plot(fine, curve, color=COLOURS[i], label=_name(seen, i), linewidth=1.2)
            left.plot(np.arange(FAR), seen.logits[i], "o", markersize=2.5, color=COLOURS[i])
        left.legend(frameon=False, fontsize=8)
        left.set_ylabel("logit of two mean tokens")
        circuit, i = seen.circuit, seen.head
        amplitudes = (circuit.left[i] @ seen.mean) * (circuit.right[i].conj() @ seen.mean)
        for amplitude, w in zip(amplitudes, circuit.frequencies, strict=True):
            part = (amplitude * np.exp(1j * w * fine)).real
            right.plot(fine, part, linewidth=0.9, label=f"period {2 * np.pi / w:.3g}")
        right.plot(fine, curves[i], color="black", linewidth=1.6, label="their sum")
        right.set_title(f"head {i + 1}, by frequency", loc="left", fontsize=9)
        right.legend(frameon=False, fontsize=7, ncols=2)
        for axes in (left, right):
            axes.axhline(0, color="#bbbbbb", linewidth=0.6)
            axes.set_xlabel("distance δ")


def draw_back(seen: Look) -> None:
    with picture("rotary_back.svg", 6.4, 3.0) as figure:
        axes = figure.subplots()
        for i, line in enumerate(seen.back[:, :FAR]):
            axes.plot(line, "o-", markersize=3, color=COLOURS[i], label=_name(seen, i))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("distance")
        axes.set_ylabel("mean weight")
        axes.legend(frameon=False, fontsize=8)


def _name(seen: Look, head: int) -> str:
    a = seen.layer.architecture
    return f"head {head + 1}, keys {head * a.groups // a.heads + 1}"


if __name__ == "__main__":
    main()
