"""What a layer does: one example, where each head looks, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from mhalearn._runtime.types import Float64
from mhalearn.judge.shown_example import ShownExample
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.report import figures
from mhalearn.report.heads import MOST_DRAWN, Match, list_order
from mhalearn.report.numbers import number

# Columns of a telephone's screen and of a desk's that patterns and outputs share.
_MOST_COLUMNS = 6
# Outputs are drawn over two columns if they have more than so many entries for a token.
_WIDER = 1.5


@dataclass(frozen=True)
class Shown:
    """A drawing of the learned layer and, to switch to, of what it should be, where it is known."""

    caption: str
    learned: Markup
    other: Markup | None


@dataclass(frozen=True)
class AtWork:
    """The section: words, and the drawings of one example."""

    words: str
    patterns: list[Shown]  # of the first heads
    outputs: Shown
    columns: int  # that patterns and outputs take, side by side
    largest: float  # weight, at which the patterns' scale ends
    limit: float  # at which the outputs' scale ends
    names: tuple[str, str]  # of the switch: the learned layer, and what it is compared to
    wide: bool  # whether outputs take two columns


def show_at_work(
    layer: Layer, match: Match | None, example: ShownExample, *, residual: bool = False
) -> AtWork:
    """The layer on one example, beside the truth where it is known, else beside the label.

    residual: whether the example's tokens were taken from its label, as of a run that says so.
    Cost: patterns of at most twelve heads on one example.
    """
    order = list_order(layer, match)[:MOST_DRAWN]
    learned = _patterns(layer, order, example)
    true = None if match is None else _patterns(match.truth, list(range(len(order))), example)
    both = [weights for weights in (learned, true) if weights is not None]
    largest = max((float(weights.max()) for weights in both), default=1.0)
    made = layer(example.x[None])[0]
    asked = example.y if match is None else match.truth(example.x[None])[0]
    limit = max(float(np.abs(values).max()) for values in (made, asked)) or 1.0
    wide = layer.out_dim > _WIDER * len(example.x)
    patterns = []
    for i in range(0 if learned is None else len(learned)):
        panels = [
            figures.pattern(
                weights[i], largest, f"pattern-{i + 1}-{what}", _say(weights[i], i, what)
            )
            for weights, what in zip(both, ("learned", "true"), strict=False)
        ]
        patterns.append(Shown(f"Head {i + 1}", panels[0], panels[1] if len(panels) > 1 else None))
    names = ("learned", "given" if match is None else "true")
    drawn = [
        figures.outputs(values, limit, wide, f"outputs-{name}", f"Outputs, {name}: {_span(values)}")
        for values, name in zip((made, asked), names, strict=True)
    ]
    return AtWork(
        words=_words(example, learned is not None, layer.architecture)
        + _compare(made, asked, names[1], residual),
        patterns=patterns,
        outputs=Shown("Output: a row for each token", drawn[0], drawn[1]),
        columns=min(_MOST_COLUMNS, len(patterns) + 1 + wide),
        largest=largest,
        limit=limit,
        names=names,
        wide=wide,
    )


def _patterns(layer: Layer, heads: list[int], example: ShownExample) -> Float64 | None:
    """Attention weights (heads, k, k); None of a kind of attention that has no softmax heads."""
    if isinstance(layer, ProjectedLayer):
        return np.asarray(layer.patterns(example.x[None])[0][heads], np.float64)
    if not isinstance(layer, AttentionLayer):
        return None
    vector = layer.key_vector
    some = layer.replace(
        theta=layer.theta[heads],
        w=layer.w[heads],
        key_vector=None if vector is None else vector[heads],
    )
    return np.asarray(some.patterns(example.x[None])[0], np.float64)


def _words(example: ShownExample, has_patterns: bool, a: Architecture) -> str:
    which = "that no step of learning has seen" if example.held_out else "that was learned from"
    words = f"One example {which}: {_count(len(example.x), 'token')}."
    if has_patterns:
        seen = " it and the tokens before it," if a.causal else " the tokens,"
        if a.memory is not None:
            seen = " the tokens of the second sequence,"
        words += f" Row r of a head shows how token r spreads its attention over{seen}"
        words += " and sums to one, less what the sink takes." if a.sinks else " and sums to one."
    return words


def _compare(made: Float64, asked: Float64, name: str, residual: bool) -> str:
    """How far apart the outputs are; what is given shows no patterns, and that is said."""
    apart = number(np.abs(made - asked).max())
    if name == "true":
        return f" Outputs of the learned and the true layer differ by at most {apart}."
    given = "the output that was given" + ", less the tokens themselves" * residual
    return (
        f" The switch shows {given}, which differs by at most {apart}; examples show outputs, and "
        "no patterns."
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _say(weights: Float64, head: int, what: str) -> str:
    k = len(weights)
    return (
        f"Head {head + 1}, {what}: attention of {k} tokens on {k} tokens, "
        f"the largest weight {number(weights.max())}"
    )


def _span(values: Float64) -> str:
    rows, columns = values.shape
    return f"{rows} tokens by {columns}, between {number(values.min())} and {number(values.max())}"
