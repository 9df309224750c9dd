"""A gentle slope: from a random layer to a hard one, where do the learners begin to fail?

Two dials for layers of four heads: `mix`, from the hard layer (0) to a random one (1), and the
sharpness of the hard layer's heads. The function decides: relative squared error on fresh inputs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from benchmarks.ledger import console, opened, study
from mhalearn.hardness.curve import Cell, asdict, measure_cost

HEADS, WIDTH, RATIO = 4, 8, 16.0
MIXES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
SHARPNESSES = (0.5, 1.0, 2.0, 4.0, 8.0)
DIALS = [{"mix": mix, "sharpness": 8.0} for mix in MIXES]
DIALS += [{"mix": 0.0, "sharpness": sharpness} for sharpness in SHARPNESSES[:-1]]


def main() -> None:
    parser = study(__doc__ or "", "hard_dial", "0:5", "newton,adam")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds a fit")
    options = parser.parse_args()
    ledger, running = opened(options)
    for seed in options.seeds if running else ():
        for method in options.methods:
            cell = Cell("parity", HEADS, WIDTH, method)
            for dial in DIALS:
                key = asdict(cell) | dial | {"seed": seed, "budget": options.budget}
                row = ledger.run(
                    key,
                    lambda c=cell, s=seed, k=dial: asdict(
                        measure_cost(c, s, options.budget, (RATIO,), **k)
                    ),
                )
                console.print(key | {"relative_mse": row.get("relative_mse")})


if __name__ == "__main__":
    main()
