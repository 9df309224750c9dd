"""Draw docs/images/speed.svg from benchmarks/results/speed.json."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, ScalarFormatter

from benchmarks.ledger import read_runs
from benchmarks.pages.picture import picture
from benchmarks.peers.race import has_arrived, standings
from benchmarks.studies.speed import GROWTH, LETTERS, RACES, growth_medians, theory

SHOWN = {"newton": "#1b6ca8", "L-BFGS": "#e07b39", "Adam": "#7a9e3d", "Adam + ridge": "#b3589a"}


def main() -> None:
    rows = read_runs("speed")
    with picture("speed.svg", 9.2, 5.6) as figure:
        above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1))
        draw_races(above.subplots(), [row for row in rows if row["part"] == "race"])
        growth = [row for row in rows if row["part"] == "growth"]
        panels = below.subplots(1, len(GROWTH), sharey=True)
        for axes, along in zip(panels, GROWTH, strict=True):
            draw_growth(axes, along, growth)
        panels[0].set_ylabel("seconds to 1e-20, median")


def draw_races(axes: Axes, rows: list[dict]) -> None:
    """A method's best setting in every case; a hollow bar where most runs hit the time limit."""
    names = [str(case) for case, *_ in RACES]
    for place, name in enumerate(names):
        best = standings([row for row in rows if row["case"] == name])
        for offset, (method, color) in enumerate(SHOWN.items()):
            if method not in best:
                continue
            standing = best[method]
            failed = 2 * sum(map(has_arrived, standing.rows)) < len(standing.rows)
            x = place + 0.2 * (offset - 1.5)
            fill = "white" if failed else color
            axes.bar(x, standing.median, 0.18, color=fill, edgecolor=color)
            axes.text(x, standing.median * 1.1, f"{standing.median:.2g}", ha="center", fontsize=7)
    for method, color in SHOWN.items():
        axes.bar(0, 0, color=color, label=method)
    axes.set_yscale("log")
    axes.set_ylim(top=axes.get_ylim()[1] * 3)
    axes.set_xticks(range(len(names)), [name.replace(" N", "\nN") for name in names], fontsize=8)
    axes.set_ylabel("seconds to 1e-20, median")
    axes.set_title("Time to an exact fit (hollow: most runs fail)", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper right")


def draw_growth(axes: Axes, along: str, rows: list[dict]) -> None:
    """Medians beside the work of one conjugate-gradient step, scaled to meet them."""
    letter, medians = LETTERS[along], growth_medians(along, rows)
    if not medians:
        return
    x = [getattr(case, letter) for case in medians]
    seconds = np.array(list(medians.values()))
    work = np.array([theory(case) for case in medians])
    axes.plot(x, seconds, "o", color=SHOWN["newton"])
    scale = np.exp(np.mean(np.log(seconds / work)))
    axes.plot(x, scale * work, "--", color="#888888", linewidth=1, label="work of a step")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(x)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"{along} {letter}")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


if __name__ == "__main__":
    main()
