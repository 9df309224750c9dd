"""The part of docs/queries.md on scalars against rank, and the powers with which they grow."""

from collections.abc import Sequence

import numpy as np

from benchmarks.ledger import Record
from benchmarks.pages.prose import reflow
from benchmarks.queries import RANKS
from mhalearn.layer.architecture import Architecture


def write_ranks(runs: list[Record]) -> str:
    """The table of the rank lines, and the powers fitted to their medians."""
    lines = [
        "**Scalars against rank.** Four heads of rank r, a box that answers with the 4 r numbers",
        "that they write; medians and ranges, and all that was asked. Where a box answers with all",
        "d outputs, they",
        "lie in those 4 r dimensions, and as many more numbers come back for the same calls.",
        "",
        "![scalars against rank times features](images/query_ranks.svg)",
        "",
        "| r | d | recovered | worst error | random starts | unknowns | scalars | range "
        "| over 4 r d | code |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    medians, unknowns = [], []
    for r, d in RANKS:
        mine = [run for run in runs if run["line"] == f"4 heads of rank {r}, d = {d}"]
        asked = [run["scalars"] for run in mine if "scalars" in run]
        medians.append(float(np.median(asked)))
        unknowns.append(Architecture(d, 4, r, 4 * r).count())
        recovered = sum(run.get("outcome") == "RECOVERED" for run in mine)
        code = ", ".join(sorted({run["code"] for run in mine}))
        worst = max(np.inf if run.get("error") is None else run["error"] for run in mine)
        starts = sum(bool(run.get("random_starts")) for run in mine)
        lines.append(
            f"| {r} | {d} | {recovered}/{len(mine)} | {worst:.0e} | {starts}/{len(mine)} "
            f"| {unknowns[-1]} | {medians[-1]:.0f} | {min(asked)} to {max(asked)} "
            f"| {medians[-1] / (4 * r * d):.1f} | {code} |"
        )
    return reflow("\n".join([*lines, "", _say_powers(medians, unknowns)]) + "\n")


def _say_powers(medians: list[float], unknowns: list[int]) -> str:
    (rank, features, off), (rank_of, features_of, _) = map(fit_powers, (medians, unknowns))
    return (
        f"Least squares on the logarithms of these {len(RANKS)} medians: scalars grow as "
        f"r^{rank:.2f} d^{features:.2f}, a law that none of them is off by more than a factor of "
        f"{off:.2f}. Proportion to r d would be powers of one; by the same fit unknowns grow as "
        f"r^{rank_of:.2f} d^{features_of:.2f}."
    )


def fit_powers(values: Sequence[float]) -> tuple[float, float, float]:
    """Powers of r and of d with which values of RANKS grow, and the worst factor off that law."""
    known = np.log(np.array(RANKS, np.float64))
    design = np.column_stack([known, np.ones(len(known))])
    logs = np.log(np.array(values, np.float64))
    found = np.linalg.lstsq(design, logs, rcond=None)[0]
    return float(found[0]), float(found[1]), float(np.exp(np.max(np.abs(design @ found - logs))))
