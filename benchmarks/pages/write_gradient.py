"""Write docs/gradient.md and draw its figures from benchmarks/results/gradient.json."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np
from matplotlib.axes import Axes

from benchmarks import DOCS, RESULTS
from benchmarks.gradient import LEARNED, PARTED, STEPS, TOGETHER, Cell, panels
from benchmarks.pages.picture import picture
from benchmarks.pages.prose import reflow

OUT = DOCS / "gradient.md"
COLOURS = {2: "#1b6ca8", 4: "#5a9e4b", 6: "#e07b39"}
# What is varied in a panel, in words, the cells' field, and whether its axis has decades.
VARIED = {
    "d": ("features d", "d", True),
    "k": ("tokens k", "k", True),
    "scale": ("norm of Theta", "scale", True),
    "width": ("student's heads over teacher's", "width", True),
    "start": ("size of the start over the teacher's", "start", True),
    "examples": ("examples over the counting limit", "ratio", True),
}

INTRO = """# Does gradient descent learn the heads?

Written by `benchmarks/pages/write_gradient.py` from `benchmarks/results/gradient.json`, which
`benchmarks/gradient.py` measured; nothing measured here is typed by hand.

The authors call gradient descent the question that matters most, and open even for two heads:
how to argue about two heads that begin alike and must part is not clear to them (talk on the
paper). This page proves nothing. It measures what such a proof would have to explain: plain
gradient descent on all Θ and W at once, from small random starts, without momentum or
preconditioning, on random teachers with Boolean tokens.

"""

RULES = """Step rule: {rule}

A start has learned when its relative squared error on fresh inputs is at most {learned:g} after at
most {steps} steps. Of those that have not, the stuck ones lost less than 1 % of their loss in the
last quarter of the steps; the others were still falling. Each cell has {starts} starts, each with a
teacher of its own; intervals are Clopper and Pearson's, of 95 %. Unless said otherwise d = {d},
k = {k}, ||Θ|| = {scale:g}, a student as wide as the teacher, starts of {start:g} times the
teacher's size, and {ratio:g} times as many examples as the counting limit.
Run on: {machine}.

"""

RULE = """0.1 at first, on the relative squared error; 2 % longer after a step that lowers the loss,
otherwise the step is undone and halved. The control has 0.5 throughout."""


def read() -> list[dict]:
    """The runs with the most starts, in the order of the grid."""
    runs = json.loads((RESULTS / "gradient.json").read_text())["runs"]
    most = max(run["starts"] for run in runs)
    order = list(panels())
    return sorted(
        (run for run in runs if run["starts"] == most), key=lambda run: order.index(run["panel"])
    )


def cell_of(run: dict) -> Cell:
    return Cell(**{name: run[name] for name in Cell.__dataclass_fields__})


def find(runs: list[dict], cell: Cell) -> dict | None:
    return next((run for run in runs if cell_of(run) == cell), None)


def line_of(runs: list[dict], panel: str, m: int) -> list[tuple[float, dict]]:
    """The runs of a panel with m heads and the one they are varied from, by what is varied."""
    field = VARIED[panel][1]
    own = [run for run in runs if run["panel"] == panel and run["m"] == m]
    base = find(runs, Cell(m))
    return sorted(
        ((run[field], run) for run in [*own, *([base] if base and own else [])]),
        key=lambda point: point[0],
    )


def draw_shares(axes: Axes, points: list[tuple[float, dict]], m: int) -> None:
    x = np.array([value for value, _ in points], float)
    share = np.array([run["learned"] / run["starts"] for _, run in points])
    low, high = np.array([run["interval"] for _, run in points]).T
    axes.fill_between(x, low, high, color=COLOURS[m], alpha=0.18, lw=0)
    axes.plot(x, share, "o-", color=COLOURS[m], ms=3.5, lw=1.2, label=f"m = {m}")


def draw_learned(runs: list[dict]) -> None:
    with picture("gradient_learned.svg", 9.6, 5.0) as figure:
        grid = figure.subplots(2, 3, sharey=True)
        for axes, (panel, (words, _, decades)) in zip(grid.flat, VARIED.items(), strict=True):
            ticks: list[float] = []
            for m in COLOURS:
                if points := line_of(runs, panel, m):
                    draw_shares(axes, points, m)
                    ticks = [value for value, _ in points]
            if decades:
                axes.set_xscale("log")
                axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
                axes.minorticks_off()
            axes.set_xlabel(words)
            axes.set_ylim(-0.03, 1.03)
        for axes in grid[:, 0]:
            axes.set_ylabel("share of starts that learn")
        grid[0, 2].legend(frameon=False, fontsize=8, loc="lower right")


def draw_curves(runs: list[dict]) -> None:
    """Loss, and how far two heads are apart, along the descent."""
    with picture("gradient_parting.svg", 9.6, 3.4) as figure:
        loss, apart, law = figure.subplots(1, 3)
        shown = [run for run in runs if run["panel"] == "separation" and run["separation"]]
        for place, run in enumerate(shown):
            shade = 0.25 + 0.75 * place / max(1, len(shown) - 1)
            style = {"color": "#1b6ca8", "alpha": shade, "lw": 1.2}
            steps = run["curves"]["step"]
            label = f"{run['separation']:g}"
            loss.loglog(steps, run["curves"]["loss"][1], label=label, **style)
            apart.loglog(steps, np.maximum(run["curves"]["spread"][1], 1e-16), **style)
        points = [(run["separation"], times(run)) for run in shown if times(run)]
        if points:
            x = [separation for separation, _ in points]
            low, middle, high = np.array([np.quantile(t, [0.25, 0.5, 0.75]) for _, t in points]).T
            law.fill_between(x, low, high, color="#1b6ca8", alpha=0.18, lw=0)
            law.semilogx(x, middle, "o-", color="#1b6ca8", ms=3.5)
        loss.set(xlabel="step", title="median loss")
        apart.set(xlabel="step", title="median share by which the two differ")
        law.set(xlabel="separation of the start", title="time together (quartiles)")
        loss.set_ylim(bottom=1e-6)
        loss.legend(frameon=False, fontsize=7, title="separation", title_fontsize=7)
        for axes in (loss, apart, law):
            axes.set_title(axes.get_title(), loc="center", fontsize=9)


def times(run: dict) -> list[float]:
    """How long two heads were together, of the starts in which they parted."""
    return [time for time in run["parting"]["time"] if time is not None]


def median(values: list) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle = float(np.median(known))
    return f"{middle:.0f}" if middle >= 10 else f"{middle:.2g}"


def share_row(name: str, run: dict) -> str:
    low, high = run["interval"]
    steps = "-" if run["steps_to_learn"] is None else str(run["steps_to_learn"])
    return (
        f"| {name} | {run['m']} | {run['learned']}/{run['starts']} | {low:.2f} to {high:.2f} | "
        f"{run['stuck']} | {run['falling']} | {steps} |\n"
    )


def heads_table(runs: list[dict]) -> str:
    text = "| what | m | learned | interval | stuck | falling | steps, median |\n"
    text += "|---|---|---|---|---|---|---|\n"
    for m in range(1, 7):
        if run := find(runs, Cell(m)):
            text += share_row("as said", run)
    for panel, (words, field, _) in VARIED.items():
        for run in runs:
            if run["panel"] == panel:
                text += share_row(f"{words}: {run[field]:g}", run)
    for run in runs:
        if run["panel"] == "rule":
            text += share_row("constant step", run)
    return text


def parting_table(runs: list[dict]) -> str:
    text = "| two heads | learned | came together and parted | loss then | mean's length then | "
    text += "steps together | time together |\n|---|---|---|---|---|---|---|\n"
    for run in runs:
        if run["panel"] == "separation":
            name = f"start: apart by {run['separation']:g}"
        elif run["panel"] == "cosine":
            name = f"teacher: cosine {run['cosine']:g}"
        elif run["panel"] == "start" and run["m"] == 2:
            name = f"start: size {run['start']:g}"
        else:
            continue
        parting = run["parting"]
        parted = sum(value is not None for value in parting["loss"])
        text += f"| {name} | {run['learned']}/{run['starts']} | {parted}/{run['starts']} | "
        text += " | ".join(median(parting[key]) for key in ("loss", "centre", "steps", "time"))
        text += " |\n"
    return text


def law_sentence(runs: list[dict]) -> str:
    """How the time together grows with each factor of ten in the separation, fitted."""
    points = [
        (np.log10(run["separation"]), np.median(times(run)))
        for run in runs
        if run["panel"] == "separation" and run["separation"] and times(run)
    ]
    if len(points) < 3:
        return ""
    slope, _ = np.polyfit(*np.array(points).T, 1)
    return (
        f"Each factor of ten by which the two start closer keeps them together for {-slope:.0f}\n"
        "more units of time (the sum of step lengths): a logarithm, as of an unstable direction\n"
        "that grows exponentially. "
    )


def main() -> None:
    runs = read()
    base = Cell(2)
    machines = ", ".join(dict.fromkeys(run["machine"] for run in runs))
    text = INTRO + reflow(
        RULES.format(
            rule=RULE,
            learned=LEARNED,
            steps=STEPS,
            starts=runs[0]["starts"],
            d=base.d,
            k=base.k,
            scale=base.scale,
            start=base.start,
            ratio=base.ratio,
            machine=machines,
        )
    )
    text += "## How often it learns\n\n"
    text += "![Share of starts that learn](images/gradient_learned.svg)\n\n"
    text += heads_table(runs)
    text += f"""
## How two heads part

Two small heads see the same gradient at first: they grow along one direction, that of the best
single head, sit near what one head can explain, and part only when their difference has grown.
"Together" means that they differ by at most {TOGETHER:g} of what the teacher's heads differ by,
"parted" by at least {PARTED:g} of it; the length of their mean at that moment is over that of the
teacher's mean. Two heads that start exactly alike (apart by 0) stay so for ever: the control.

![Loss, distance of two heads, and how long they are together](images/gradient_parting.svg)

{law_sentence(runs)}Medians over the starts that parted:

"""
    text += parting_table(runs)
    missing = sum(len(own) for own in panels().values()) - len(runs)
    if missing > 0:
        text += f"\n{missing} cells of the grid are not measured yet.\n"
    OUT.write_text(text)


if __name__ == "__main__":
    main()
    draw_learned(read())
    draw_curves(read())
