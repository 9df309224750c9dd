"""How the report draws: matplotlib to inline SVG that takes its colours from the page."""

import io
import math
import re

from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from mhalearn.report.numbers import RAISED

# Matplotlib wants fixed colours, the page has CSS variables: each of these stands for a variable
# and is exchanged for it in the finished SVG.
INK, MUTED, RULE, CARD = "#010101", "#020202", "#030303", "#050505"
SERIES = ("#040401", "#040402", "#040403", "#040404", "#040405")
_VARIABLES = {
    INK: "currentColor",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    CARD: "var(--card)",
} | {colour: f"var(--series-{i})" for i, colour in enumerate(SERIES, start=1)}

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mhalearn",
    "svg.image_inline": True,
    "path.simplify": True,
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.labelsize": 10.0,
    "xtick.labelsize": 10.0,
    "ytick.labelsize": 10.0,
    "mathtext.default": "regular",
    "axes.unicode_minus": True,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "figure.dpi": 72,
    "savefig.dpi": 72,
    "figure.constrained_layout.use": False,
}


def log_ticks(axes: Axes, low: int, high: int) -> None:
    powers = [p for p in range(low, high + 1) if (p - high) % max(1, -(-(high - low) // 6)) == 0]
    axes.yaxis.set_major_locator(FixedLocator([10.0**p for p in powers]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: "10" + str(round(math.log10(value))).translate(RAISED))
    )


def calm(axes: Axes) -> None:
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)


def svg(figure: Figure, name: str, title: str) -> Markup:
    """The figure as an <svg> element: titled, coloured by the page, ids its own or gone."""
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(
        buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    # A style sheet inside an inline SVG would govern the whole page; the page has its own fonts.
    text = re.sub(r"<style.*?</style>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    text = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", text)
    text = re.sub(r"(<(defs|g)>\s*</\2>|<g */>)\s*", "", text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    text = _own_ids(text, name)
    box = re.search(r'viewBox="([^"]+)"', text)
    assert box is not None
    opening = (
        f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{name}-title"'
        ' xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'\n<title id="{name}-title">{escape(title)}</title>'
    )
    return Markup(re.sub(r"^<svg[^>]*>", lambda _: opening, text).strip())


def _own_ids(text: str, name: str) -> str:
    """Keep the ids that are referred to, under the figure's name; drop all others."""
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))

    def own(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r'\sid="([^"]+)"', own, text)
    return re.sub(r'(url\(#|href="#)([^)"]+)', lambda m: f"{m[1]}{name}-{m[2]}", text)
