"""Draw docs/images/queries.svg: sigmoids, heads as points of a plane, and conditioning."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

from benchmarks.ledger import read_runs
from benchmarks.pages.picture import picture
from benchmarks.queries import RANKS
from benchmarks.query_conditioning import draw
from mhalearn.layer.architecture import Architecture
from mhalearn.learners.queries.plane import find_heads_in_plane, mean_under_softmax

COLORS = ("#1b6ca8", "#e07b39", "#7a9e3d", "#9b4f96")


def main() -> None:
    layer, calls = draw(4, 2)
    with picture("queries.svg", 10.5, 3.2) as figure:
        left, middle, right = figure.subplots(1, 3)
        p, s = (np.einsum("d,mde,e->m", x, layer.theta, calls.v) for x in (calls.u, calls.v))
        draw_sigmoids(left, calls, p, s)
        draw_plane(middle, layer, calls, p, s)
        draw_conditioning(right, read_runs("query_conditioning"))
    with picture("query_ranks.svg", 5.0, 3.2) as figure:
        draw_ranks(figure.subplots(), read_runs("queries"))


def draw_sigmoids(axes, calls, p, s) -> None:
    alpha = np.linspace(-2, 2, 201)
    for i, color in zip(range(len(p)), COLORS, strict=False):
        mean = mean_under_softmax(alpha * p[i] + 0.3 * s[i], calls.t)[0]
        axes.plot(alpha, mean, color=color, label=f"head {i}")
    axes.set_xlabel("coefficient of u in the query")
    axes.set_ylabel("mean coefficient of v attended to")
    axes.set_title("What a box adds up: a sigmoid a head", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def draw_plane(axes, layer, calls, p, s) -> None:
    """How far features of (p, s) are from the column space of the answers."""
    answers = layer(calls.tokens).reshape(-1, layer.out_dim)
    away = calls.shift / np.linalg.norm(calls.shift)
    found = find_heads_in_plane(calls, layer(calls.tokens), 1e-16)
    basis = np.linalg.svd(answers - np.outer(away, away @ answers), full_matrices=False)[0]
    basis = basis[:, : found.n_heads]
    reach = 1.25 * float(np.max(np.abs([p, s])))
    side = np.linspace(-reach, reach, 81)
    features = calls.features(*np.meshgrid(side, side, indexing="ij"))
    features -= (features @ away)[..., None] * away
    features /= np.maximum(np.linalg.norm(features, axis=-1, keepdims=True), 1e-12)
    outside = np.sum((features - (features @ basis) @ basis.T) ** 2, axis=-1)
    axes.contour(side, side, np.log10(outside + 1e-12).T, levels=12, cmap="viridis", linewidths=0.7)
    axes.plot(p, s, "o", mfc="none", color="#c0392b", label="true heads")
    axes.plot(found.p, found.s, "+", color="#222222", label="found")
    axes.set_xlabel("p = u Theta v")
    axes.set_ylabel("s = v Theta v")
    axes.set_title("Distance to the answers' column space", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def draw_ranks(axes, runs) -> None:
    """Scalars of runs that ended as RECOVERED, and unknowns, against r d."""
    for r, d in RANKS:
        mine = [run for run in runs if run["line"] == f"4 heads of rank {r}, d = {d}"]
        good = [run["scalars"] for run in mine if run["outcome"] == "RECOVERED"]
        axes.plot([r * d] * len(good), good, "o", color=COLORS[0], ms=4, mfc="none")
        axes.plot(r * d, Architecture(d, 4, r, 4 * r).count(), "_", color=COLORS[1], ms=10)
    axes.plot([], [], "o", color=COLORS[0], mfc="none", label="asked, certifying ones included")
    axes.plot([], [], "_", color=COLORS[1], label="unknowns")
    reach = np.array([min(r * d for r, d in RANKS), max(r * d for r, d in RANKS)])
    axes.plot(reach, 50 * reach, ":", color="#888888", label="in proportion to r d")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("rank times features, r d")
    axes.set_ylabel("scalars, four heads")
    axes.legend(frameon=False, fontsize=8)


def draw_conditioning(axes, runs) -> None:
    heads = sorted({run["m"] for run in runs})
    for name, color, label in (
        ("condition", COLORS[0], "points of a plane"),
        ("condition_of_poles", COLORS[1], "poles of repeated tokens"),
    ):
        values = [[run[name] for run in runs if run["m"] == m] for m in heads]
        axes.plot(heads, [np.median(one) for one in values], "-o", color=color, label=label, ms=3)
        low, high = ([take(one) for one in values] for take in (min, max))
        axes.fill_between(heads, low, high, color=color, alpha=0.2)
    axes.set_yscale("log")
    axes.set_xlabel("heads")
    axes.set_ylabel("condition number, d = 8")
    axes.set_title("Conditioning: median and range", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    main()
