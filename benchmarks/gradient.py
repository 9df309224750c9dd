"""Does plain gradient descent learn the heads, and when do two of them part?

    python benchmarks/gradient.py                  all cells, appended to the JSON one by one
        --budget 340                               start no cell after so many seconds
        --out FILE --only heads --seeds 16         another file, one panel, fewer starts
    python benchmarks/pages/write_gradient.py      docs/gradient.md and its figures

A cell is a kind of teacher and of student; each of its starts has a teacher, examples and a start
of its own, and all of them descend in one compiled program, on whatever device JAX finds. Descent
is full-batch on the relative squared error, over all Thetas and Ws together, with no momentum and
no preconditioning. Step rule: 0.1 at first; after a step that lowers the loss 2 % longer, otherwise
the step is undone and halved ("adaptive"); or 0.5 throughout ("constant", a control). Examples:
sixteen times the counting limit of the teacher, so that examples are not what is missing, except
where fewer are asked for. Labels and errors on fresh inputs are computed apart, in float64.
A start has learned when its relative squared error on fresh inputs is at most 1e-3; of the others
those are stuck whose loss fell by less than 1 % over the last quarter of the steps.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is a package there

import jax
import jax.numpy as jnp
import numpy as np

import mhalearn as mha
from benchmarks import RESULTS

FILE = RESULTS / "gradient.json"
STARTS, STEPS, AT_ONCE = 64, 4000, 500
FRESH = 1000
LEARNED, STUCK, DONE = 1e-3, 0.01, 1e-7
FIRST_STEP, LONGER, CONSTANT_STEP = 0.1, 1.02, 0.5
# Two heads count as together while they differ by at most this share of what the teacher's differ
# by, and as parted from the other one on.
TOGETHER, PARTED = 0.2, 0.5


@dataclass(frozen=True)
class Cell:
    """m heads of d features on k tokens, ||Theta|| = scale, at this cosine to each other (two heads
    only); a student of width m heads whose starts have `start` times the teacher's size.

    separation: how far the student's heads start apart, over their size; None: independently.
    ratio: examples over the counting limit.
    """

    m: int
    d: int = 8
    k: int = 4
    scale: float = 4.0
    width: float = 1.0
    start: float = 0.01
    separation: float | None = None
    cosine: float | None = None
    rule: str = "adaptive"
    ratio: float = 16.0

    @property
    def heads(self) -> int:
        return round(self.width * self.m)

    @property
    def n(self) -> int:
        limit = mha.Architecture(self.d, self.m, None, self.d).counting_limit(self.k)
        return 8 * math.ceil(self.ratio * limit / 8)


def panels() -> dict[str, list[Cell]]:
    """What is varied, one thing at a time around d = 8, k = 4, scale 4; the first come first."""
    two, some = Cell(2), [Cell(m) for m in (2, 4, 6)]
    return {
        "heads": [Cell(m) for m in range(1, 7)],
        "separation": [replace(two, separation=s) for s in (1.0, 0.1, 1e-2, 1e-3, 1e-4, 0.0)],
        "cosine": [replace(two, cosine=c) for c in (0.0, 0.5, 0.9, 0.99)],
        "scale": [replace(c, scale=s) for s in (0.5, 1.0, 2.0, 8.0, 16.0) for c in some],
        "start": [replace(c, start=s) for s in (1e-4, 1e-3, 0.1, 1.0) for c in some],
        "rule": [replace(c, rule="constant") for c in some],
        "width": [replace(c, width=w) for w in (2.0, 4.0) for c in some],
        "d": [replace(c, d=d) for d in (4, 16, 24) for c in some],
        "k": [replace(c, k=k) for k in (2, 8, 16) for c in some],
        "examples": [replace(c, ratio=r) for r in (2.0, 4.0, 8.0) for c in some],
    }


def predict(theta: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
    """F(X), (n, k, d), of one layer."""
    logits = jnp.einsum("mnre,nje->mnrj", jnp.einsum("nrd,mde->mnre", x, theta), x)
    mean = jnp.einsum("mnrj,njd->mnrd", jax.nn.softmax(logits, axis=-1), x)
    return jnp.einsum("mnrd,mde->nre", mean, w)


def relative_loss(heads: tuple, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum((predict(*heads, x) - y) ** 2) / jnp.sum(y**2)


def spread(theta: jax.Array) -> jax.Array:
    """(s,): the share of the heads' squared norm by which they differ from their mean."""
    centre = theta.mean(axis=1, keepdims=True)
    return jnp.sum((theta - centre) ** 2, axis=(1, 2, 3)) / jnp.sum(theta**2, axis=(1, 2, 3))


@partial(jax.jit, static_argnames="steps")
def descend(state: dict, x: jax.Array, y: jax.Array, adapt: jax.Array, steps: int) -> tuple:
    """So many steps of every start; what is watched on the way, each (steps, s)."""
    both = jax.vmap(jax.value_and_grad(relative_loss))

    def step(at: dict, _: None) -> tuple[dict, dict]:
        length = at["length"][:, None, None, None]
        tried = jax.tree.map(lambda p, g: p - length * g, at["heads"], at["slope"])
        loss, slope = both(tried, x, y)
        taken = (loss < at["loss"]) | ~adapt
        new = {"heads": tried, "slope": slope, "loss": loss}

        def choose(one: jax.Array, other: jax.Array) -> jax.Array:
            return jnp.where(taken.reshape(-1, *(1,) * (one.ndim - 1)), one, other)

        kept = jax.tree.map(choose, new, {name: at[name] for name in new})
        factor = jnp.where(adapt, jnp.where(taken, LONGER, 0.5), 1.0)
        kept["length"] = at["length"] * factor
        kept["time"] = at["time"] + jnp.where(taken, at["length"], 0.0)
        theta, w = kept["heads"]
        seen = {
            "loss": kept["loss"],
            "time": kept["time"],
            "spread": spread(theta),
            "spread_w": spread(w),
            "centre": jnp.linalg.norm(theta.mean(axis=1), axis=(1, 2)),
        }
        return kept, seen

    return jax.lax.scan(step, state, None, length=steps)


def label(theta: np.ndarray, w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """F(X) of one layer in float64, apart from the code that descends."""
    found = np.zeros((*x.shape[:2], w.shape[2]))
    for one, projection in zip(theta, w, strict=True):
        logits = (x @ one) @ x.transpose(0, 2, 1)
        p = np.exp(logits - logits.max(axis=2, keepdims=True))
        found += (p / p.sum(axis=2, keepdims=True)) @ x @ projection
    return found


def draw_teacher(cell: Cell, seed: int) -> mha.AttentionLayer:
    layer = mha.random_layer(cell.m, cell.d, scale=cell.scale, seed=seed)
    if cell.cosine is None:
        return layer
    first, second = layer.theta.reshape(2, -1) / cell.scale
    second = second - (first @ second) * first
    second *= np.sqrt(1 - cell.cosine**2) / np.linalg.norm(second)
    turned = np.stack([first, cell.cosine * first + second]) * cell.scale
    return layer.replace(theta=turned.reshape(layer.theta.shape))


def draw_start(cell: Cell, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Heads of the teacher's sizes times `start`: independent, or around a common one."""
    rng = np.random.default_rng([seed, 0x57A27])
    found = []
    for size in (cell.scale, np.sqrt(cell.d)):
        common, own = (rng.standard_normal((number, cell.d, cell.d)) for number in (1, cell.heads))
        one = own if cell.separation is None else common + cell.separation * own
        norms = np.linalg.norm(one, axis=(1, 2), keepdims=True)
        found.append(cell.start * size * one / norms)
    return found[0], found[1]


def measure(cell: Cell, starts: int) -> dict:
    began = time.monotonic()
    teachers = [draw_teacher(cell, seed) for seed in range(starts)]
    x = [
        mha.sample_inputs("boolean", cell.n + FRESH, cell.k, cell.d, seed=seed).astype(float)
        for seed in range(starts)
    ]
    y = [label(layer.theta, layer.w, own) for layer, own in zip(teachers, x, strict=True)]
    train = stack([own[: cell.n] for own in x]), stack([own[: cell.n] for own in y])
    heads = tuple(map(stack, zip(*(draw_start(cell, s) for s in range(starts)), strict=True)))
    adapt = jnp.asarray(cell.rule == "adaptive")
    each = jnp.ones(starts, jnp.float32)
    # With no slope yet, the first step stays where it is, and finds loss and slope.
    state = {
        "heads": heads,
        "slope": jax.tree.map(jnp.zeros_like, heads),
        "loss": each * jnp.inf,
        "length": each * jnp.where(adapt, FIRST_STEP, CONSTANT_STEP),
        "time": 0 * each,
    }
    seen = []
    for _ in range(0, STEPS, AT_ONCE):
        state, watched = descend(state, *train, adapt, AT_ONCE)
        seen.append(jax.tree.map(np.asarray, watched))
        if np.max(seen[-1]["loss"][-1]) < DONE:
            break
    learned = zip(*(np.asarray(part, float) for part in state["heads"]), x, y, strict=True)
    error = np.array(
        [fresh_error(theta, w, a[cell.n :], b[cell.n :]) for theta, w, a, b in learned]
    )
    path = {name: np.concatenate([part[name] for part in seen]) for name in seen[0]}
    truth = np.stack([layer.theta for layer in teachers])
    seconds = round(time.monotonic() - began, 2)
    return summarise(cell, error, path, truth) | {"seconds": seconds}


def stack(parts: Sequence[np.ndarray]) -> jax.Array:
    return jnp.asarray(np.stack(parts), jnp.float32)


def fresh_error(theta: np.ndarray, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    if not (np.isfinite(theta).all() and np.isfinite(w).all()):
        return math.inf
    return float(np.sum((label(theta, w, x) - y) ** 2) / np.sum(y**2))


def summarise(cell: Cell, error: np.ndarray, path: dict, truth: np.ndarray) -> dict:
    learned, starts = error <= LEARNED, len(error)
    quarter = path["loss"][-max(1, len(path["loss"]) // 4)]
    stuck = ~learned & ~(path["loss"][-1] < (1 - STUCK) * quarter)
    lower, upper = mha.tails.clopper_pearson([int(learned.sum())], starts, 0.95)
    found = {
        "starts": starts,
        "n": cell.n,
        "steps": len(path["loss"]),
        "learned": int(learned.sum()),
        "interval": [float(lower[0]), float(upper[0])],
        "stuck": int(stuck.sum()),
        "falling": int(starts - learned.sum() - stuck.sum()),
        "errors": [float(f"{e:.3g}") if np.isfinite(e) else None for e in np.sort(error)],
        "steps_to_learn": int(np.median(np.argmax(path["loss"] <= LEARNED, axis=0)[learned]))
        if learned.any()
        else None,
    }
    if cell.heads == 2:
        found |= {"parting": find_parting(path, truth), "curves": find_curves(path)}
    return found


def find_parting(path: dict, truth: np.ndarray) -> dict:
    """When two heads came together and parted, of each start; None where they did not.

    loss: at the moment they part; centre: how long their mean is then, over that of the teacher's;
    steps and time: that they were together, the latter as the sum of step lengths.
    """
    found: dict[str, list] = {name: [] for name in ("closest", "loss", "centre", "steps", "time")}
    centres = np.linalg.norm(truth.mean(axis=1), axis=(1, 2))
    differ = np.asarray(spread(jnp.asarray(truth)))
    for s in range(path["loss"].shape[1]):
        apart = path["spread"][:, s] / differ[s]
        closest = int(np.argmin(apart))
        found["closest"].append(float(f"{apart[closest]:.3g}"))
        later = np.flatnonzero(apart[closest:] >= PARTED)
        if apart[closest] > TOGETHER or not later.size:
            values = [None] * 4
        else:
            came = int(np.argmax(apart <= TOGETHER))
            left = closest + int(later[0])
            values = [
                float(f"{path['loss'][left, s]:.3g}"),
                float(f"{path['centre'][left, s] / centres[s]:.3g}"),
                left - came,
                float(f"{path['time'][left, s] - path['time'][came, s]:.3g}"),
            ]
        for name, value in zip(("loss", "centre", "steps", "time"), values, strict=True):
            found[name].append(value)
    return found


def find_curves(path: dict) -> dict:
    """Medians and quartiles over starts, at some fifty steps."""
    last = len(path["loss"])
    at = np.unique(np.geomspace(1, last, 50).astype(int)) - 1
    curves: dict[str, list] = {"step": (at + 1).tolist()}
    for name in ("loss", "spread", "spread_w"):
        values = np.quantile(path[name][at], [0.25, 0.5, 0.75], axis=1)
        curves[name] = [[float(f"{v:.3g}") for v in row] for row in values]
    return curves


def key_of(panel: str, cell: Cell, starts: int) -> dict:
    return {"panel": panel, **asdict(cell), "starts": starts}


def describe_machine() -> str:
    return f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {platform.machine()}"


def write(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"runs": records}, indent=1, allow_nan=False) + "\n")
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--only", choices=list(panels()), help="one panel")
    parser.add_argument("--seeds", type=int, default=STARTS, help="starts of a cell")
    options = parser.parse_args()
    began = time.monotonic()
    records = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    cells = [
        (panel, cell)
        for panel, own in panels().items()
        for cell in own
        if options.only in (None, panel)
    ]
    with jax.default_matmul_precision("highest"):  # float32 all through, on GPUs too
        for panel, cell in cells:
            key = key_of(panel, cell, options.seeds)
            if any(key.items() <= record.items() for record in records):
                continue
            if time.monotonic() - began > options.budget:
                print(f"budget of {options.budget:g} s spent: run again for the other cells")
                break
            record = key | measure(cell, options.seeds) | {"machine": describe_machine()}
            records.append(record)
            write(options.out, records)
            print(
                f"{panel}: {cell}: {record['learned']}/{options.seeds} learned, "
                f"{record['stuck']} stuck, {record['steps']} steps, {record['seconds']} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
