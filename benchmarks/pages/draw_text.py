"""Draw docs/images/text.svg from benchmarks/results/text.json: errors against seconds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np
from matplotlib.axes import Axes

from benchmarks.ledger import read_runs
from benchmarks.pages.picture import picture

COLORS = {"mhalearn": "#1b6ca8", "optax": "#7a9e3d", "torch": "#e07b39"}
DASHES = ("-", "--", ":")


def main() -> None:
    runs = [run for run in read_runs("text") if run.get("curve") and run["precision"] == "float64"]
    cases = sorted({run["case"] for run in runs})
    with picture("text.svg", 9.2, 3.2) as figure:
        panels = np.atleast_1d(figure.subplots(1, len(cases), sharey=True))
        for axes, case in zip(panels, cases, strict=True):
            draw_case(axes, case, [run for run in runs if run["case"] == case])
        panels[0].set_ylabel("relative squared error")


def draw_case(axes: Axes, case: str, runs: list[dict]) -> None:
    """Errors of the examples that a step saw, and a point at the end for other sentences."""
    seen: dict[str, int] = {}
    for run in runs:
        name = run["method"].partition(",")[0]
        dash = DASHES[seen.setdefault(name, 0) % len(DASHES)]
        seen[name] += 1
        seconds, errors = zip(*run["curve"], strict=True)
        label = run["method"] if name == "mhalearn" else f"Adam, {run['method']}"
        axes.plot(seconds, errors, dash, color=COLORS[name], label=label, linewidth=1.2)
        if run["held_out"] is not None:
            axes.plot(run["worked"], run["held_out"], "o", color=COLORS[name], markersize=4)
    axes.set_yscale("log")
    axes.set_title(f"layer {case.split()[-1]}", loc="left", fontsize=10)
    axes.set_xlabel("seconds of the process")
    axes.legend(frameon=False, fontsize=7)


if __name__ == "__main__":
    main()
