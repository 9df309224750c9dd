"""Draw docs/images/first.svg from benchmarks/results/first.json."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from benchmarks.ledger import read_runs
from benchmarks.pages.picture import picture
from benchmarks.peers.race import standings


def main() -> None:
    runs = read_runs("first")
    with picture("first.svg", 9.2, 3.2) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
        draw_errors(left, [run for run in runs if run["part"] == "recovery"])
        draw_times(right, [run for run in runs if run["part"] == "speed"])


def draw_errors(axes, runs) -> None:
    cases = sorted({run["case"] for run in runs})
    for height, case in enumerate(cases):
        errors = [run["max_error"] for run in runs if run["case"] == case]
        axes.plot(errors, [height] * len(errors), "o", alpha=0.6, color="#1b6ca8")
    axes.axvline(1e-10, color="#888888", linestyle="--", linewidth=1)
    axes.text(1e-10, len(cases) - 0.55, "bar ", ha="right", color="#555555")
    axes.set_xscale("log")
    axes.set_xlim(1e-17, 1e-8)
    axes.set_ylim(-0.6, len(cases) - 0.2)
    axes.set_yticks(range(len(cases)), cases)
    axes.set_xlabel("largest relative parameter error, a dot a run")
    axes.set_title("Heads recovered from 200 examples", loc="left", fontsize=10)


def draw_times(axes, runs) -> None:
    """For every case and method, the best setting's median; a run that fails counts the limit."""
    cases = sorted({run["case"] for run in runs})
    methods = ["newton", "L-BFGS", "Adam", "optimistix LM", "scipy least_squares"]
    for place, case in enumerate(cases):
        best = standings([run for run in runs if run["case"] == case])
        heights = [len(methods) - i + (0.18 if place == 0 else -0.18) for i in range(len(methods))]
        values = [best[method].median if method in best else float("nan") for method in methods]
        color = ("#1b6ca8", "#e07b39")[place]
        axes.barh(heights, values, height=0.34, color=color, label=case)
        for height, value in zip(heights, values, strict=True):
            axes.text(value * 1.1, height, f"{value:.3g} s", va="center", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 8)
    axes.set_yticks(range(len(methods), 0, -1), methods)
    axes.set_xlabel("seconds to relative training error 1e-20, median")
    axes.set_title("Time to an exact fit, same data", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper right")


if __name__ == "__main__":
    main()
