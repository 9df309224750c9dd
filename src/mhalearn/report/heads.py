"""The heads: their matrices as pictures, beside the truth and the difference where it is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from mhalearn._runtime.types import Float64
from mhalearn.judge.open_parameters import OpenParameters
from mhalearn.layer.base import Layer
from mhalearn.layer.circuits import match_by_distance, output_matrices, theta_at
from mhalearn.layer.comparison import Comparison, compare
from mhalearn.layer.layer import AttentionLayer
from mhalearn.layer.projected_layer import ProjectedLayer
from mhalearn.report import figures
from mhalearn.report.numbers import number


class Panel(NamedTuple):
    """A drawing with its caption; where the truth is known, the same of it, to switch to."""

    caption: str
    learned: Markup
    truth: Markup | None = None


# Heads that are drawn, and that are listed: what keeps the file under 2 MB at any size.
MOST_DRAWN, MOST_LISTED = 12, 256
# Singular values below this share of the largest are rounding, and a few of them are drawn.
_ROUNDING, _FEW = 1e-10, 4


@dataclass(frozen=True)
class Head:
    """One head of the learned layer, in the truth's order where the truth is known."""

    name: str
    norms: list[tuple[str, float]]  # of its matrices, by their symbols
    errors: list[tuple[str, float]]  # where the truth is known
    panels: list[Panel]  # in the order they are drawn; empty of a head that is only listed


@dataclass(frozen=True)
class Match:
    """The truth beside the learned layer, and how far apart they are."""

    truth: AttentionLayer | ProjectedLayer
    found: Comparison


def match_heads(layer: Layer, truth: Layer, span: OpenParameters | None = None) -> Match | None:
    """Head by head, where both layers have heads of the same shape, number and mask.

    span: of the tokens, where they leave numbers of the layer open: those of the truth are then
    set to least norm, as the learned layer's are.
    """
    known = (AttentionLayer, ProjectedLayer)
    if not (isinstance(layer, known) and isinstance(truth, known)):
        return None
    if isinstance(layer, AttentionLayer) and isinstance(truth, ProjectedLayer):
        if not truth.architecture.shares_only:
            return None
        truth = truth.to_attention_layer()
    found = compare(layer, truth)
    if found.comparable and span is not None and isinstance(truth, AttentionLayer):
        truth = span.on_span(truth)
        found = compare(layer, truth)
    return Match(truth, found) if found.comparable else None


def list_matrices(layer: Layer, head: int) -> list[tuple[str, str, Float64]]:
    """Symbol, name and entries of each matrix of a head.

    Of another kind of attention, whatever has a matrix for each head; what has none is the first
    head's.
    """
    if isinstance(layer, AttentionLayer):
        return [("Θ", "theta", layer.theta[head]), ("W", "w", layer.w[head])]
    if isinstance(layer, ProjectedLayer):
        symbol = "Θ" if layer.architecture.rope is None else "Θ(0)"
        theta, w = theta_at(layer, 0)[head], output_matrices(layer)[head]
        return [(symbol, "theta", theta), ("W", "w", w)]
    shown = []
    for name, leaf in layer.params.items():
        matrices = np.atleast_2d(leaf).reshape(-1, *np.atleast_2d(leaf).shape[-2:])
        if len(matrices) == layer.n_heads or head == 0:
            shown.append((name, name, matrices[min(head, len(matrices) - 1)]))
    return shown


def list_order(layer: Layer, match: Match | None) -> list[int]:
    """The learned heads, in the truth's order where it is known."""
    return list(range(layer.n_heads)) if match is None else match.found.order.tolist()


def describe_heads(layer: Layer, match: Match | None, tokens: int = 0) -> list[Head]:
    """The first heads in pictures, more of them in numbers.

    tokens: of an example, as far as heads whose logits depend on distances are drawn.
    """
    distances = tokens if layer.architecture.has_positions else 0
    heads = []
    for i, learned in enumerate(list_order(layer, match)[:MOST_LISTED]):
        matrices = list_matrices(layer, learned)
        panels: list[Panel] = []
        true = None if match is None else list_matrices(match.truth, i)
        for j, (symbol, parameter, matrix) in enumerate(matrices if i < MOST_DRAWN else []):
            truth = None if true is None else true[j][2]
            panels += _panels(matrix, truth, symbol, f"head-{i + 1}-{parameter}")
        if i < MOST_DRAWN and isinstance(layer, ProjectedLayer) and distances:
            panels += _distance_panels(layer, learned, match, i, distances)
        errors = []
        if match is not None:
            errors = [("Θ", match.found.theta_errors[i]), ("W", match.found.w_errors[i])]
        heads.append(
            Head(
                name=_name(layer if match is None else match.truth, i),
                norms=[(symbol, float(np.linalg.norm(matrix))) for symbol, _, matrix in matrices],
                errors=[(symbol, float(error)) for symbol, error in errors],
                panels=panels,
            )
        )
    return heads


def _name(layer: Layer, head: int) -> str:
    """With the number of its keys, where heads share them."""
    a = layer.architecture
    if a.kv_heads is None or not isinstance(layer, ProjectedLayer):
        return f"Head {head + 1}"
    return f"Head {head + 1}, keys {head * a.groups // a.heads + 1}"


def _distance_panels(
    layer: ProjectedLayer, learned: int, match: Match | None, i: int, tokens: int
) -> list[Panel]:
    """The logits of a head by distance: of a token with itself, and the size of any."""
    distances = np.arange(max(2, tokens), dtype=np.float64)
    ours = [part[learned] for part in match_by_distance(layer, distances)]
    true = None
    if match is not None and isinstance(match.truth, ProjectedLayer):
        true = [part[i] for part in match_by_distance(match.truth, distances)]
    panels = []
    for j, (caption, meaning) in enumerate(_BY_DISTANCE):
        of_truth = None if true is None else true[j]
        described = (
            f"Head {i + 1}, {meaning} at distances 0 to {int(distances[-1])}: between "
            f"{number(ours[j].min())} and {number(ours[j].max())}"
        )
        drawn = figures.by_distance(ours[j], of_truth, f"head-{i + 1}-distance-{j}", described)
        panels.append(Panel(caption, drawn))
    return panels


# Captions, and what they mean in words: what `match_by_distance` returns.
_BY_DISTANCE = (
    ("tr Θ by distance", "mean logit of a token with itself"),
    ("‖Θ‖ by distance", "root mean square of logits"),
)


def _panels(matrix: Float64, truth: Float64 | None, symbol: str, name: str) -> list[Panel]:
    """A matrix of a head, as learned and as it truly is; the difference; its singular values."""
    title = f"Head {name.split('-')[1]}, {symbol}"
    limit = float(np.abs(matrix if truth is None else truth).max())
    values = _spectrum_panel(matrix, truth, symbol, f"{name}-values", title)
    caption = f"{symbol}, to ±{number(limit)}"
    learned = _heat_map(matrix, limit, f"{name}-learned", f"{title}, learned")
    if truth is None:
        return [Panel(caption, learned), values]
    true = _heat_map(truth, limit, f"{name}-truth", f"{title}, truth")
    difference = matrix - truth
    largest = number(np.abs(difference).max())
    described = f"{title}, learned minus truth: at most {largest} in size"
    apart = f"{symbol} \N{MINUS SIGN} true"
    if not figures.is_blank(difference, limit):
        apart += f", to {largest}"
    return [
        Panel(caption, learned, true),
        Panel(apart, figures.difference_map(difference, limit, f"{name}-difference", described)),
        values,
    ]


def _heat_map(matrix: Float64, limit: float, name: str, title: str) -> Markup:
    rows, columns = matrix.shape
    described = (
        f"{title}: heat map of {rows} by {columns} entries between "
        f"{number(matrix.min())} and {number(matrix.max())}"
    )
    return figures.heat_map(matrix, limit, name, described)


def _spectrum_panel(
    matrix: Float64, truth: Float64 | None, symbol: str, name: str, title: str
) -> Panel:
    values = _singular_values(matrix)
    true_values = None if truth is None else _singular_values(truth)
    rank, drawn = values.size, values.size
    if values[0] > 0:
        rank = int(np.sum(values > _ROUNDING * values[0]))
        drawn = min(values.size, rank + _FEW)
    described = (
        f"{title}: {values.size} singular values between {number(values[-1])} "
        f"and {number(values[0])}"
    )
    caption = f"spectrum of {symbol}"
    if rank < values.size:
        caption = f"{symbol} has rank {rank}"
        described += f", {rank} of them above rounding"
    of_truth = None if true_values is None else true_values[:drawn]
    return Panel(caption, figures.singular_values(values[:drawn], of_truth, name, described))


def _singular_values(matrix: Float64) -> Float64:
    return np.asarray(np.linalg.svd(matrix, compute_uv=False), np.float64)
