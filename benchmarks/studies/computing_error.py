"""How much torch's attention in float32 leaves, over what computing the layer here leaves.

    python benchmarks/studies/computing_error.py

The margins of `judge.computing_error.computing_margin` rest on the largest ratios printed here.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np
import torch
from rich.table import Table

import mhalearn as mha
from benchmarks.ledger import console
from mhalearn.judge.computing_error import (
    compute_by_factors,
    compute_coarsely,
    computing_margin,
)
from mhalearn.judge.fitted_attention import look_at

SHAPES = [(8, 2), (16, 4), (32, 4), (64, 8), (128, 8)]
SCALES = (1.0, 3.0)
UNIT = float(np.finfo(np.float32).eps)


def rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


def measure(d: int, heads: int, scale: float, boolean: bool) -> tuple[float, float]:
    """Relative errors, in units in the last place: of torch's module, and of computing here."""
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(d, heads, bias=False, batch_first=True).eval()
    with torch.no_grad():
        module.in_proj_weight *= scale
    x = np.random.default_rng(0).standard_normal((200, 8, d))
    x = (np.sign(x) if boolean else x).astype(np.float32)
    layer = mha.from_torch(module)
    exact = layer(x)
    given = (torch.tensor(x),) * 3
    box = module(*given, need_weights=False)[0].detach().numpy()
    fitted, _ = look_at(layer, mha.Examples(x, exact), layer.architecture, 0)
    true = layer(fitted.x)
    ways = (compute_coarsely(fitted, "float32"), compute_by_factors(fitted, "float32"))
    ours = max(rms(way - true) / rms(true) for way in ways)
    return rms(box - exact) / rms(exact) / UNIT, ours / UNIT


def main() -> None:
    shown = Table(title="Errors of float32 attention, in units in the last place")
    for column in ("d", "heads", "scale", "tokens", "torch", "here", "ratio", "margin"):
        shown.add_column(column)
    for d, heads in SHAPES:
        for scale in SCALES:
            for boolean in (False, True):
                box, ours = measure(d, heads, scale, boolean)
                tokens = "+-1" if boolean else "Gaussian"
                figures = (f"{box:.2f}", f"{ours:.2f}", f"{box / ours:.2f}")
                shown.add_row(
                    str(d), str(heads), f"{scale:g}", tokens, *figures, f"{computing_margin(d):.2f}"
                )
    console.print(shown)


if __name__ == "__main__":
    main()
