"""The cost of hard layers: seconds and examples each learner needs for parities of m bits.

For each number of heads and width, ten secrets, the learners newton, sculpt, Adam and L-BFGS with
a budget of seconds a fit and ever more examples, and random layers of the same shape beside them.
Failures are kept, as costs known to be larger.
"""

from ledger import console, opened, study
from rich.table import Table

from mhalearn.hardness.curve import LEARNERS, Cell, asdict, growth, measure_cost, summarise

SHAPES = ((2, 8), (2, 16), (2, 32), (4, 8), (4, 16), (6, 8))


def main() -> None:
    parser = study(__doc__ or "", "hard_curve", "0:10", ",".join(LEARNERS))
    parser.add_argument("--budget", type=float, default=5.0, help="seconds a fit")
    parser.add_argument("--families", default="parity,generic")
    options = parser.parse_args()
    ledger, running = opened(options)
    cells = [
        Cell(family, m, d, method)
        for family in options.families.split(",")
        for m, d in SHAPES
        for method in options.methods
    ]
    for seed in options.seeds if running else ():
        for cell in cells:
            key = asdict(cell) | {"seed": seed, "budget": options.budget}
            row = ledger.run(key, lambda c=cell, s=seed: asdict(measure_cost(c, s, options.budget)))
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
