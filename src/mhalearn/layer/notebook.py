"""What a notebook shows for a layer: its sizes, and its heads as small pictures."""

import numpy as np
from markupsafe import Markup

from mhalearn._runtime import html
from mhalearn._runtime.types import Float64
from mhalearn.layer.base import Layer

# Heads that are drawn, and lines of metadata that are listed.
_MOST_DRAWN, _MOST_LINES = 8, 40
_SYMBOLS = {"theta": "\N{GREEK CAPITAL LETTER THETA}", "w": "W", "key_vector": "v", "out_bias": "c"}


def describe_layer(layer: Layer) -> Markup:
    """A card; cost: that of the norms of its matrices."""
    parameters = {_SYMBOLS.get(name, name): leaf for name, leaf in layer.parameters().items()}
    matrices = {
        name: leaf for name, leaf in parameters.items() if leaf.ndim == 3 and leaf.shape[0] > 0
    }
    parts = []
    if matrices:
        drawn = min(layer.n_heads, _MOST_DRAWN)
        parts += [_draw_heads(matrices, drawn), _explain(matrices, layer.n_heads - drawn)]
    rest = [f"{name} {leaf.shape}" for name, leaf in parameters.items() if name not in matrices]
    if rest:
        parts.append(html.paragraph("and " + ", ".join(rest)))
    if layer.metadata:
        lines = [(name, str(value)) for name, value in layer.metadata.items()]
        parts.append(html.folded("metadata", html.table(lines[:_MOST_LINES])))
    return html.card(html.title(_name(layer), _sizes(layer)), parts)


def _name(layer: Layer) -> str:
    kind = type(layer.parametrisation).__name__
    return type(layer).__name__ + ("" if kind == "Dense" else f" ({kind})")


def _sizes(layer: Layer) -> str:
    heads = "1 head" if layer.n_heads == 1 else f"{layer.n_heads} heads"
    rank = layer.architecture.head_dim
    said = [
        heads + (f" of rank {rank}" if rank else ""),
        f"{layer.d} features",
        f"{layer.out_dim} outputs",
    ]
    return ", ".join(said + ["causal"] * layer.causal)


def _draw_heads(matrices: dict[str, Float64], drawn: int) -> Markup:
    """A column a head: each of its matrices, and the norm below it."""
    rows: list[list[str | Markup]] = []
    for name, leaf in matrices.items():
        limit, shown = _largest(leaf), range(min(drawn, len(leaf)))
        rows.append([name, *(html.heat_map(leaf[i], limit, f"{name} {i + 1}") for i in shown)])
        rows.append([f"|{name}|", *(f"{np.linalg.norm(leaf[i]):.3g}" for i in shown)])
    return html.table(rows, ["", *(f"head {i + 1}" for i in range(drawn))])


def _explain(matrices: dict[str, Float64], left_out: int) -> Markup:
    scales = ", ".join(f"{_largest(leaf):.2g} ({name})" for name, leaf in matrices.items())
    said = f"Blue is negative, orange positive, full colour {scales}."
    if any(max(leaf.shape[1:]) > html.MOST_CELLS for leaf in matrices.values()):
        said += " A cell is the largest of several entries."
    return html.paragraph(said + (f" {left_out} more heads are not drawn." if left_out else ""))


def _largest(leaf: Float64) -> float:
    return float(np.abs(leaf).max(initial=0.0))
