"""Draw docs/images/hard_curve.svg and hard_dial.svg from what hard_curve and hard_dial measured."""

import json
from pathlib import Path

import matplotlib
import numpy as np
from hard_dial import DIALS
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from mhalearn.hardness.curve import LEARNED, summarise

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
COLORS = {"newton": "#1b6ca8", "sculpt": "#7a9e3d", "adam": "#e07b39", "lbfgs": "#b3589a"}
TRIVIAL = 0.5


def runs(name: str) -> list[dict]:
    path = HERE / "results" / f"{name}.json"
    return json.loads(path.read_text())["runs"]


def draw_curve() -> None:
    """Seconds a success against heads, one panel a width; and the errors that are left."""
    rows = [row for row in runs("hard_curve") if "crashed" not in row]
    lines = summarise(rows)
    widths = sorted({line.cell.d for line in lines})
    figure = Figure(figsize=(9.2, 6.0), layout="constrained", facecolor="white")
    FigureCanvasSVG(figure)
    panels = figure.subplots(2, len(widths), sharey="row", squeeze=False)
    for column, d in enumerate(widths):
        above, below = panels[:, column]
        for family, dash in (("parity", "-"), ("generic", ":")):
            for method, color in COLORS.items():
                own = [line for line in lines if line.cell.family == family]
                own = [line for line in own if (line.cell.d, line.cell.method) == (d, method)]
                own.sort(key=lambda line: line.cell.n_heads)
                heads = [line.cell.n_heads for line in own]
                above.plot(heads, [line.seconds for line in own], dash, color=color, lw=1.2)
                for line in own:
                    marker = "^" if line.at_least else "o"
                    fill = "white" if line.at_least else color
                    above.plot(line.cell.n_heads, line.seconds, marker, color=color, mfc=fill, ms=5)
                errors = [
                    np.median([row["relative_mse"] for row in rows if same(row, line.cell)])
                    for line in own
                ]
                below.plot(heads, np.maximum(errors, 1e-30), dash + "o", color=color, lw=1.2, ms=4)
        below.axhline(TRIVIAL, color="#555555", lw=1, ls="--")
        above.set_yscale("log")
        below.set_yscale("log")
        below.set_ylim(1e-31, 1e2)
        above.set_title(f"d = {d}", loc="left", fontsize=10)
        below.set_xlabel("heads m")
        for axes in (above, below):
            axes.set_xticks(sorted({line.cell.n_heads for line in lines}))
    panels[0, 0].set_ylabel("seconds a success\n(hollow: at least)")
    panels[1, 0].set_ylabel("median error on fresh inputs\n(dashed: no secret known)")
    for method, color in COLORS.items():
        panels[0, -1].plot([], [], color=color, label=method)
    panels[0, -1].plot([], [], "-", color="#555555", label="parity")
    panels[0, -1].plot([], [], ":", color="#555555", label="random layer")
    panels[0, -1].legend(frameon=False, fontsize=8)
    save(figure, "hard_curve.svg")


def same(row: dict, cell) -> bool:
    named = (row["family"], row["n_heads"], row["d"], row["method"])
    return named == (cell.family, cell.n_heads, cell.d, cell.method)


def draw_dial() -> None:
    """Median error and share learned along the two dials."""
    rows = [row for row in runs("hard_dial") if "crashed" not in row]
    figure = Figure(figsize=(9.2, 3.4), layout="constrained", facecolor="white")
    FigureCanvasSVG(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, dial, fixed in zip(panels, ("mix", "sharpness"), ("sharpness", "mix"), strict=True):
        points = [point for point in DIALS if point[fixed] == {"sharpness": 8.0, "mix": 0.0}[fixed]]
        values = sorted({point[dial] for point in points})
        for method, color in COLORS.items():
            shares = []
            for value in values:
                own = [
                    row
                    for row in rows
                    if row["method"] == method
                    and row[dial] == value
                    and row[fixed] == {"sharpness": 8.0, "mix": 0.0}[fixed]
                ]
                if own:
                    learned = sum(row["relative_mse"] <= LEARNED for row in own)
                    shares.append((value, learned / len(own)))
            if shares:
                axes.plot(*zip(*shares, strict=True), "o-", color=color, label=method, ms=4, lw=1.2)
        axes.set_xlabel({"mix": "mix (0 hard, 1 random)", "sharpness": "sharpness"}[dial])
    panels[1].set_xscale("log")
    panels[0].set_ylabel("share of secrets learned")
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, "hard_dial.svg")


def save(figure: Figure, name: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / name, metadata={"Date": None})


def main() -> None:
    with matplotlib.rc_context({"svg.hashsalt": "mhalearn", "font.size": 9}):
        draw_curve()
        draw_dial()


if __name__ == "__main__":
    main()
