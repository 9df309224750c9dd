"""Never fooled: small fits on data made to mislead, and not one false RECOVERED.

    python benchmarks/studies/fails_safely.py --seeds 0:25  all traps, appended to the JSON
        --traps "mirror images,noise" --seeds 0:3 --methods adam,lbfgs
        --seeds 4:5 --out part4.json                        a file of its own
        --merge part*.json                                  merged into the default file
        --table                                             print what the JSON holds

A trap draws inputs, labels and settings from a seed, and knows what is true. A few resume from a
checkpoint that is all but right: the verdict must be honest however good the start. The judge
shares no code with the library but the layer itself and the comparison of two.

RECOVERED is right only where the truth is an attention layer, the inputs determine it, and the
learned layer is that one: every parameter of the canonical form within 1e-6, or within what
rounding allows (of the labels, or 1e-12 of them for doubles; its norm times the sensitivity of the
worst parameter, from the Jacobian at the truth), but never beyond 1e-2. Heads may be dropped or
merged where the function on fresh inputs stays the same to the last place of the labels; for
doubles to 1e-12, what computing a layer loses. With two
tokens other layers are the same function, and that is compared instead.
Labels in float16 or float32 of something that is no layer may be those of a layer all the same:
it must meet them, as they were before rounding, to less than a unit in the last place.

Where labels are exact doubles and the Jacobian at the truth, taken by complex steps, has null
directions, a family of layers fits: NOT_IDENTIFIED is due (below the counting limit
TOO_FEW_EXAMPLES will do), with its dimension. That is checked twice: against the Jacobian at the
layer returned, and against the truth with as many heads as were asked for. Only clear ranks count,
on which thresholds of 1e-6 and 1e-13 agree.
"""

import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from rich.table import Table

import mhalearn as mha
from benchmarks.ledger import Record, console, names, opened, say_bar, study
from benchmarks.trap_judge import judge
from benchmarks.traps import SHAPES, TRAPS, Draw

LIMIT = 20.0  # seconds a fit, compilation included


def fit(name: str, method: str, seed: int) -> Record:
    trap = TRAPS[name](Draw(name, seed))
    if method != "newton" and trap.heads == "auto":
        m = trap.truth.canonical().n_heads if trap.truth else SHAPES[seed % len(SHAPES)][0]
        trap = replace(trap, heads=m)
    found: Record = {"heads": trap.heads, "dtype": str(trap.y.dtype), "shape": list(trap.x.shape)}
    settings = {"max_seconds": LIMIT, "random_state": seed} | trap.settings
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if trap.start is not None and method == "newton":
            settings |= {"checkpoint": Path(folder) / "start.safetensors", "resume": True}
            trap.start.save(settings["checkpoint"])
        learner = mha.AttentionRegressor(trap.heads, method, **settings)
        try:
            learner.fit(trap.x, trap.y, trap.lengths)
        except ValueError as refusal:
            if "rescale it" not in str(refusal):
                raise  # the data are valid: this is a crash
            return found | {"outcome": "REFUSED", "reason": str(refusal), "false": False}
    found |= {"seconds": time.perf_counter() - began, "heads_found": learner.n_heads_}
    return found | judge(trap, learner)


# The table


def table(records: list[Record]) -> None:
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record["method"], record["trap"]].append(record)
    shown = Table(title=f"Data made to mislead: {len(records)} fits")
    for column in ("method", "trap", "fits", "outcomes", "false RECOVERED", "family said / due"):
        shown.add_column(column)
    shown.add_column("dimension right: layer returned, heads asked for")
    for (method, name), mine in groups.items():
        outcomes = Counter(r.get("outcome", "CRASHED") for r in mine)
        listed = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
        due = [r for r in mine if r.get("family")]
        said = [r for r in due if r["outcome"] in ("NOT_IDENTIFIED", "TOO_FEW_EXAMPLES")]
        false = sum(r.get("false", False) for r in mine)
        right = [rights(mine, "of_layer"), rights(mine, "of_asked")]
        family = f"{len(said)} / {len(due)}" if due else ""
        shown.add_row(method, name, str(len(mine)), listed, str(false), family, ", ".join(right))
    console.print(shown)
    false, crashed = (sum(bool(r.get(name)) for r in records) for name in ("false", "crashed"))
    say_bar(f"at least 1,000 fits: {len(records)}", len(records) >= 1000)
    say_bar(f"no false RECOVERED: {false}", false == 0)
    say_bar(f"no crash: {crashed}", crashed == 0)


def rights(records: list[Record], name: str) -> str:
    clear = [r for r in records if r.get(name) is not None]
    return f"{sum(r[name] == r['stated'] for r in clear)} of {len(clear)}" if clear else "-"


def main() -> None:
    parser = study(__doc__, "fails_safely", "0:25", "newton")
    parser.add_argument("--traps", type=names, default=list(TRAPS), help="names between commas")
    options = parser.parse_args()
    ledger, running = opened(options)
    for seed in options.seeds if running else ():
        for name in options.traps:
            for method in options.methods:
                key = {"trap": name, "method": method, "seed": seed}
                ledger.run(key, partial(fit, name, method, seed))
    table(ledger.records)


if __name__ == "__main__":
    main()
