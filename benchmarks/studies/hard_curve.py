"""The cost of hard layers: seconds and examples each learner needs for parities of m bits.

For each number of heads and width, ten secrets, the learners newton, sculpt, Adam and L-BFGS with
a budget of seconds a fit and ever more examples, and random layers of the same shape beside them.
Failures are kept, as costs known to be larger.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from rich.table import Table

from benchmarks.ledger import console, opened, study
from mhalearn.hardness.curve import (
    Cell,
    asdict,
    growth,
    list_curve_methods,
    measure_cost,
    summarise,
)

SHAPES = "2x8,4x8,6x8,2x16,4x16,6x16,8x16,2x32,4x32,6x32"
# Its layer compiles what the others run.
_FIRST = 1000


def main() -> None:
    parser = study(__doc__ or "", "hard_curve", "0:10", ",".join(list_curve_methods()))
    parser.add_argument("--budget", type=float, default=5.0, help="seconds a fit, d = 32: fourfold")
    parser.add_argument("--families", default="parity,generic")
    parser.add_argument("--shapes", default=SHAPES, help="heads x width, between commas")
    options = parser.parse_args()
    ledger, running = opened(options)
    cells = [
        Cell(family, m, d, method)
        for family in options.families.split(",")
        for m, d in (map(int, shape.split("x")) for shape in options.shapes.split(","))
        for method in options.methods
    ]
    for cell in cells if running else ():
        budget = options.budget * max(1, cell.d // 16) ** 2
        keys = [asdict(cell) | {"seed": seed, "budget": budget} for seed in options.seeds]
        if all(map(ledger.find, keys)):
            continue
        measure_cost(cell, _FIRST, options.budget)
        for seed, key in zip(options.seeds, keys, strict=True):
            row = ledger.run(key, lambda c=cell, s=seed, b=budget: asdict(measure_cost(c, s, b)))
            console.print(key | {name: row.get(name) for name in ("learned", "seconds")})
    table = Table("family", "heads", "d", "learner", "learned", "seconds a success", "examples")
    lines = summarise(ledger.records)
    for line in lines:
        cell = line.cell
        table.add_row(
            cell.family, str(cell.n_heads), str(cell.d), cell.method,
            f"{line.learned}/{line.secrets}", f"{'> ' * line.at_least}{line.seconds:.1f}",
            "-" if line.examples is None else f"{line.examples:.0f}",
        )  # fmt: skip
    console.print(table)
    for rate in growth(lines):
        more = "more than " * rate.at_least
        console.print(f"{rate.family}, d = {rate.d}, {rate.method}: {more}{rate.factor:.1f} a head")


if __name__ == "__main__":
    main()
