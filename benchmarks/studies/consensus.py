"""A trial: heads that independent starts agree on are kept, and the others are drawn anew.

    python benchmarks/studies/consensus.py [--seeds 7000:7001] [--passes 12]
        [--width told|estimated]
    python benchmarks/studies/consensus.py --table              print what the JSON holds

Eight sharp heads at 1.25 times the counting limit, where the search of `frontier.py` has recovered
none. Starts are relaxed under a ridge so strong (g = 2) that their minima hold a true head now and
then, and wrong ones that differ from start to start. In each pass all starts begin with the heads,
and what these write, that some starts of the pass before agreed on (cosine above 0.8), and are
relaxed with everything free. The prior's width on Theta is told, or estimated as the solver does.

A head counts as true where it is the truth's own head under the same ridge: where a descent from
the truth ends, again to a cosine of 0.8. Nothing but this count, and the width where it is told,
looks at the truth.
"""

import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks.cases import case_at
from benchmarks.ledger import Record, opened, study
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn.layer.dense import Dense
from mhalearn.learners.newton.continuation import ridge_at
from mhalearn.learners.newton.crossover import _relax
from mhalearn.learners.newton.starts import estimate_scales, random_starts
from mhalearn.run.run import Run
from mhalearn.solvers.scaled_problem import make_problem

CASE = case_at(1.25, (8, 16, 8), 6.0)
STARTS, STEPS, STRENGTH = 16, 2000, 2.0
ALIKE, OTHER = 0.8, 0.7  # cosines from which heads are one, and up to which they are two
# Other starts that must agree on a head: in the first pass, where all are new, and later.
FIRST, LATER = 1, 2


def directions(theta: np.ndarray) -> np.ndarray:
    flat = theta.reshape(-1, theta.shape[-1] * theta.shape[-2])
    return flat / np.linalg.norm(flat, axis=1, keepdims=True)


def choose(theta: np.ndarray, objective: np.ndarray, least: int) -> list[int]:
    """Numbers of heads, of all starts', that most starts agree on, each from the best of these."""
    s, m = theta.shape[:2]
    heads, start = directions(theta), np.repeat(np.arange(s), m)
    alike = heads @ heads.T
    agree = np.array([len(set(start[row > ALIKE])) - 1 for row in alike])
    chosen: list[int] = []
    for head in np.lexsort((objective[start], -agree)):
        if agree[head] < least or len(chosen) == m:
            break
        if all(alike[head, other] < OTHER for other in chosen):
            chosen.append(int(head))
    same = (np.flatnonzero(alike[head] > ALIKE) for head in chosen)
    return [int(heads[np.argmin(objective[start[heads]])]) for heads in same]


def search(width: str, passes: int, seed: int) -> Record:
    truth, x, y = CASE.draw(seed)
    problem = make_problem(mha.Examples(x, y), Dense(truth.architecture))
    scales = estimate_scales(problem)
    if width == "told":
        scales = scales._replace(theta=CASE.scale)
    ridge, run = ridge_at(STRENGTH, scales, problem), Run(seed=seed)
    m, d, e = truth.n_heads, truth.d, truth.out_dim

    def relax(theta: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        flat = w.reshape(len(w), m * d, e)
        theta, flat, objective = _relax(theta, flat, problem, run, ridge, STEPS, "consensus")
        return theta, flat.reshape(len(flat), m, d, e), objective

    with one_lapack_thread():
        there = relax(0.7 * problem.theta(truth)[None], problem.w(truth)[None])
        true, done = directions(there[0]), []
        kept = np.zeros((0, d, d)), np.zeros((0, d, e))
        began = time.process_time()
        for number in range(passes):
            theta = random_starts(problem, STARTS, seed, number) * (0.5 * scales.theta)
            w = np.zeros((STARTS, m, d, e))
            count = len(kept[0])
            theta[:, :count], w[:, :count] = kept
            theta, w, objective = relax(theta, w)
            chosen = choose(theta, objective, LATER if number else FIRST)
            kept = tuple(part.reshape(STARTS * m, d, -1)[chosen] for part in (theta, w))
            held = (directions(kept[0]) @ true.T).max(axis=1) if chosen else np.zeros(0)
            done.append(
                {
                    "worked": time.process_time() - began,
                    "objective": float(objective.min()),
                    "kept": len(chosen),
                    "true": int((held > ALIKE).sum()),
                }
            )
    return {"true_objective": float(there[2][0]), "passes": done}


def table(rows: list[Record]) -> None:
    for row in rows:
        if "crashed" in row:
            print(row["seed"], row["width"], row["crashed"])
            continue
        print(
            f"{row['case']} seed {row['seed']}, width {row['width']}: {row['true_objective']:.4f}"
        )
        for number, one in enumerate(row["passes"]):
            print(
                f"  pass {number + 1}: {one['kept']} kept, {one['true']} true, objective "
                f"{one['objective']:.4f}, {one['worked']:.0f} s"
            )


def main() -> None:
    parser = study(__doc__, "consensus", "7000:7001", "newton")
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--width", choices=["told", "estimated"], default="told")
    options = parser.parse_args()
    ledger, running = opened(options)
    if running:
        for seed in options.seeds:
            key = {"case": str(CASE), "seed": seed, "width": options.width}
            work = partial(search, options.width, options.passes, seed)
            ledger.run(key | {"asked": options.passes}, work)
    table(ledger.records)


if __name__ == "__main__":
    main()
