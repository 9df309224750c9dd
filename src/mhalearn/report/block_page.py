"""The report on a learned block: verdict, heads, neurons, descent, certificate."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from mhalearn._runtime import html
from mhalearn._runtime.types import Float64
from mhalearn.judge.certificate import Certificate
from mhalearn.judge.solution import Solution
from mhalearn.layer.block.block import Block
from mhalearn.layer.block.comparison import BlockComparison, compare_blocks
from mhalearn.layer.layer import AttentionLayer
from mhalearn.report.descent import draw_descent, list_stages

# Heads that are drawn; of more, the sizes are told.
_MOST_DRAWN = 16
# Inches of the descent: on a desk, and on a telephone.
_WIDE, _NARROW = 10.4, 4.2
HEADLINES = {
    "RECOVERED": ("The block was recovered", "good"),
    "FITTED": ("The examples are fitted; exactness is not certified", "fair"),
    "NOT_IDENTIFIED": ("The examples do not single out one block", "fair"),
    "STUCK": ("No block was found that explains the examples", "bad"),
    "TOO_FEW_EXAMPLES": ("There are too few examples to determine the block", "bad"),
    "TIME_LIMIT": ("The run was stopped before it had ended", "fair"),
    "NONFINITE": ("The solver diverged", "bad"),
}


class Picture(NamedTuple):
    """A matrix, what it is, and the block's part it belongs to."""

    caption: str
    image: Markup


def describe_block(solution: Solution, truth: Any = None) -> dict[str, Any]:
    """What the page of a block says, by the names its template has for it."""
    block = solution.layer
    assert isinstance(block, Block)
    headline, tone = HEADLINES[solution.outcome.name]
    widths = {"descent-wide": _WIDE, "descent-narrow": _NARROW}
    drawn = [draw_descent(solution.trace, width, name) for name, width in widths.items()]
    match = compare_blocks(block, truth) if isinstance(truth, Block) else None
    return {
        "headline": headline,
        "tone": tone,
        "outcome": solution.outcome,
        "reason": solution.reason,
        "facts": _facts(solution, block, match),
        "match": match,
        "errors": [] if match is None or match.attention is None else _errors(match),
        "heads": _draw_heads(block),
        "neurons": _draw_neurons(block),
        "n_left_out": max(0, block.n_heads - _MOST_DRAWN),
        "descent": None if None in drawn else tuple(drawn),
        "stages": list_stages(solution.trace)[-40:],
        "certificate": solution.certificate,
        "settings": [(name, str(value)) for name, value in sorted(solution.settings.items())],
    }


def _facts(
    solution: Solution, block: Block, match: BlockComparison | None
) -> list[tuple[str, float | int | str]]:
    design, settings = block.design, solution.settings
    norm = "none" if design.norm is None else f"{design.norm}, {_NORMS[design.norm_kind]}"
    told: list[tuple[str, float | int | str]] = [
        ("Heads", block.n_heads),
        ("Neurons", block.hidden),
        ("Features", block.d),
        ("Activation", design.activation),
        ("Norms", norm),
        ("Unknowns", design.count() if design.is_counted else "not counted"),
    ]
    if "n" in settings:
        told.append((f"Examples, of {settings.get('k')} tokens", settings["n"]))
    certificate: Certificate | None = solution.certificate
    if certificate is not None:
        unseen = f"Relative squared error, {certificate.n_examples} unseen examples"
        told.append((unseen, certificate.relative_mse))
    if match is not None:
        told.append(("Largest parameter error", match.max_error))
    if solution.trace:
        told.append(("Seconds", solution.trace[-1].seconds))
    return told


_NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}


def _errors(match: BlockComparison) -> list[tuple[str, float]]:
    assert match.attention is not None
    return [
        ("heads", match.attention.max_error),
        ("neurons, in", float(match.input_errors.max(initial=0.0))),
        ("neurons, out", float(match.output_errors.max(initial=0.0))),
        ("output bias", match.feed_forward_bias_error),
        ("norms", match.norm_error),
    ]


def _draw_heads(block: Block) -> list[list[Picture]]:
    """Of each head what it attends by and what it projects with."""
    heads = block.attention
    if not isinstance(heads, AttentionLayer):
        return []
    theta, w = np.asarray(heads.theta), np.asarray(heads.w)
    limits = _limit(theta), _limit(w)
    return [
        [
            _picture(f"Head {i + 1}: \N{GREEK CAPITAL LETTER THETA}", theta[i], limits[0]),
            _picture(f"Head {i + 1}: W", w[i], limits[1]),
        ]
        for i in range(min(block.n_heads, _MOST_DRAWN))
    ]


def _draw_neurons(block: Block) -> list[Picture]:
    """One column a neuron, in the block's own order."""
    ff = block.canonical().feed_forward
    shown = {"up": ff.up, "gate": ff.gate, "down": ff.down.T}
    return [
        _picture(f"{name}, a column for each neuron", matrix, _limit(matrix))
        for name, matrix in shown.items()
        if matrix is not None and matrix.size
    ]


def _picture(caption: str, matrix: Float64, limit: float) -> Picture:
    return Picture(caption, html.heat_map(matrix, limit, caption))


def _limit(array: Float64) -> float:
    return float(np.abs(array).max(initial=0.0)) or 1.0
