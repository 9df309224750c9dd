"""A teacher for every condition of non-degeneracy, and the phase that breaks on it.

    python benchmarks/studies/conditions.py  all teachers, three seeds each, appended to the JSON
        --teacher "flat attention" --seed 1  one run
        --table                              print what the JSON holds

A run that is already in the JSON is not repeated. A teacher is a generic layer (m = 2, d = 16,
k = 3) changed so that one condition fails and, as far as can be, no other; twice where a mild and a
severe violation end differently. The truth is used here, and only here, to say which phase broke:
the one that stopped the run or, if the layer it ended in is bad, the first to miss its bar.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.studies.phases import machine, mean_squared, measure_missing, relative
from mhalearn.data import Examples
from mhalearn.judge.nondegeneracy import Condition, check_nondegeneracy
from mhalearn.learners import chen_li
from mhalearn.learners.chen_li import PRACTICAL
from mhalearn.learners.chen_li.input_distribution import (
    recognise_inputs,
    to_whitened,
    whiten_tokens,
)
from mhalearn.learners.chen_li.phase2_certification import CertifiedRows
from mhalearn.run.run import Run

FILE = RESULTS / "conditions.json"
D, K, SCALE, N = 16, 3, 4.0, 200_000
SEEDS = range(3)


def uniform(n: int, k: int, d: int, rng: np.random.Generator) -> np.ndarray:
    """Of mean 0 and variance 1, as +-1 and Gaussian inputs are."""
    return rng.uniform(-np.sqrt(3), np.sqrt(3), (n, k, d))


def chained(n: int, k: int, d: int, rng: np.random.Generator) -> np.ndarray:
    """+-1, of mean 0; a feature equals the one before it nine times in ten."""
    kept = np.where(rng.random((n, k, d)) < 0.9, 1, -1)
    kept[..., 0] = rng.choice([-1, 1], size=(n, k))
    return np.cumprod(kept, axis=-1).astype(np.int8)


# The condition each teacher violates ("": a control), its heads and its inputs.
TEACHERS = {
    "generic": ("", 2, "boolean"),
    "generic, three heads": ("", 3, "boolean"),
    "Thetas at cosine 0.99": ("coherence of Theta", 2, "boolean"),
    "Thetas at cosine -0.99": ("coherence of Theta", 2, "boolean"),
    "Ws at cosine 0.99": ("coherence of W", 2, "boolean"),
    "equal Ws": ("coherence of W", 2, "boolean"),
    "Thetas of rank one": ("effective rank of Theta", 2, "boolean"),
    "Ws near rank one": ("effective rank of W", 2, "boolean"),
    "Ws of rank one": ("effective rank of W", 2, "boolean"),
    "one entry a row of Theta": ("density of Theta", 2, "boolean"),
    "four entries of Theta": ("density of Theta", 2, "boolean"),
    # Of two heads that cancel each is the other's negative, hence coherent: it takes three.
    "Ws cancel": ("size of the sum of W", 3, "boolean"),
    "sum of W loses a direction": ("conditioning of the sum of W", 2, "boolean"),
    "sum of W keeps two": ("conditioning of the sum of W", 2, "boolean"),
    "three outputs": ("heads and tokens against width", 2, "boolean"),
    "flat attention": ("matched sparse patterns", 2, "boolean"),
    "uniform inputs": ("inputs", 2, uniform),
    "correlated +-1 inputs": ("inputs", 2, chained),
}

# What a phase's result may miss by with two and with three heads: about ten times the generic
# control's median; for shares of rows and sines at least 0.05 and at most 0.9.
BARS = {
    "phase 1: crude sum error": (1.0, 1.0),
    "phase 2: share of false rows": (0.08, 0.9),
    "phase 3: refined sum error": (1e-4, 5e-3),
    "phase 4: share of false rows": (0.05, 0.9),
    "phase 5: span sine": (0.09, 0.9),
    "phase 6: mse of the net": (5e-4, 1e-1),
}
LAST = "phase 6: mse of the net"


def build(name: str, seed: int) -> mha.AttentionLayer:
    heads = TEACHERS[name][1]
    rng = np.random.default_rng([seed, 31])
    layer = mha.random_layer(n_heads=heads, d=D, scale=SCALE, seed=1000 + seed)
    theta, w = layer.theta.copy(), layer.w.copy()
    turned = np.linalg.qr(rng.normal(size=(2, 2, D, D)))[0]
    match name:
        case "Thetas at cosine 0.99":
            theta[1] = at_cosine(*theta, 0.99)
        case "Thetas at cosine -0.99":
            theta[1] = at_cosine(*theta, -0.99)
        case "Ws at cosine 0.99":
            w[1] = at_cosine(*w, 0.99)
        case "equal Ws":
            w[1] = w[0]
        case "Thetas of rank one":
            theta = SCALE * np.einsum("ma,mb->mab", *turned[..., 0])
        case "Ws near rank one":  # a tenth in the other directions: the sum keeps its rank
            w = turned[0] * np.where(np.arange(D) == 0, 1.0, 0.1) @ turned[1]
        case "Ws of rank one":
            w = np.einsum("ma,mb->mab", *turned[..., 0])
        case "one entry a row of Theta":  # off the diagonal, which would favour the query token
            entries = SCALE * turned[0, :, 0]
            theta = np.stack([np.roll(np.diag(row), 1 + i, 1) for i, row in enumerate(entries)])
        case "four entries of Theta":  # of size two: logits differ by multiples of four
            theta[:] = 0.0
            for one in theta:
                one[rng.permutation(D)[:4], rng.permutation(D)[:4]] = rng.choice([-2.0, 2.0], 4)
        case "Ws cancel":
            w[2] = 0.05 * w[2] - w[0] - w[1]
        case "sum of W loses a direction" | "sum of W keeps two":
            lost = turned[0, 0][:, : 1 if "loses" in name else D - 2]
            w[1] -= lost @ lost.T @ w.sum(axis=0)
        case "three outputs":  # orthonormal: Gaussian columns often fail effective rank
            w = turned[0, ..., :3]
        case "flat attention":
            theta /= 10
    return mha.AttentionLayer(theta, w)


def at_cosine(matrix: np.ndarray, other: np.ndarray, cosine: float) -> np.ndarray:
    """A matrix as large as the first, at this cosine to it."""
    across = other - matrix * np.sum(matrix * other) / np.sum(matrix**2)
    across *= np.linalg.norm(matrix) / np.linalg.norm(across)
    return cosine * matrix + np.sqrt(1 - cosine**2) * across


def inputs_condition(fresh: Examples) -> Condition:
    rows = fresh.arrays().x.reshape(-1, D).astype(float)
    covariance = np.abs(rows.T @ rows / len(rows) - np.eye(D)).max()
    fourth = np.abs(np.mean(rows**4) - np.array([1, 3])).min()
    what = "how far covariances and fourth moments are from those of +-1 and of Gaussian inputs"
    return Condition("inputs", float(max(covariance, fourth)), 0.1, True, what)


def false_rows(rows: CertifiedRows, truth: mha.AttentionLayer) -> float:
    """The share of certified rows on which some head attends otherwise, by 0.2 or more, than the
    weight on the pair says: that weight is what later phases use."""
    logits = np.einsum("cd,mde,cke->cmk", rows.query, truth.theta, rows.tokens)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    claimed = np.zeros(rows.attention.shape)
    np.put_along_axis(claimed, rows.pair, np.stack([rows.weight, 1 - rows.weight], 1), axis=1)
    apart = np.abs(p - claimed[:, None]).sum(axis=-1).max(axis=1) / 2
    return float(np.mean(apart >= 0.2))


def in_coordinates_of_phases(truth: mha.AttentionLayer, examples: Examples) -> mha.AttentionLayer:
    """The truth as the phases see it: whitened where they whiten the tokens."""
    few = examples.working_set
    if recognise_inputs(few).kind != "other":
        return truth
    return to_whitened(truth, whiten_tokens(few.arrays().x.astype(float)))


def watched_plan(truth: mha.AttentionLayer, found: list[float]) -> chen_li.Plan:
    """The practical plan, each step of which notes how good its result is: a run that stops does
    not hand its results back."""
    total, exact = truth.w.sum(axis=0), chen_li.exact_span(truth.theta)

    def watched(step: Callable[..., Any], quality: Callable[[Any], float]) -> Callable[..., Any]:
        def run_step(*given: Any) -> Any:
            result = step(*given)
            found.append(quality(result))
            return result

        return run_step

    def sum_error(result: Any) -> float:
        return relative(result.estimate, total)

    return replace(
        PRACTICAL,
        crude_sum=watched(PRACTICAL.crude_sum, sum_error),
        certify=watched(PRACTICAL.certify, lambda rows: false_rows(rows, truth)),
        refine_sum=watched(PRACTICAL.refine_sum, sum_error),
        span=watched(PRACTICAL.span, lambda span: chen_li.span_angle(span, exact)),
    )


def run(name: str, seed: int) -> dict[str, object]:
    condition, heads, inputs = TEACHERS[name]
    truth = build(name, seed)
    examples, fresh = (
        Examples.from_callable(truth, inputs, n=n, k=K, d=D, seed=first + seed)
        for n, first in ((N, 2000), (10_000, 3000))
    )
    items = [*check_nondegeneracy(truth, k=K).items, inputs_condition(fresh)]
    record: dict[str, object] = {"teacher": name, "seed": seed, "condition": condition}
    record |= {"shape": [heads, D, K], "scale": SCALE, "examples": N, "machine": machine()}
    record |= {"conditions": {item.name: [item.value, item.threshold] for item in items}}
    record |= {"violated": [item.name for item in items if not item.ok]}
    trace, measured = Run(seed=seed), []
    plan = watched_plan(in_coordinates_of_phases(truth, examples), measured)
    try:
        phases = chen_li.run_phases(examples, heads, trace, plan)
        measured.append(mean_squared(phases.layer, fresh))
    except chen_li.Breakdown as stop:
        record |= {"stop": stop.phase, "failure": str(stop), "numbers": stop.numbers}
    record |= {"seconds": trace.seconds}
    # A run that went through has a number for every phase, a stopped one for the first few.
    record |= {"qualities": dict(zip(BARS, measured, strict=False))}
    return record | judge(record)


def judge(record: dict[str, object]) -> dict[str, str]:
    """The phase that broke, the number that says so, and the first phase to miss its bar."""
    found, column = record["qualities"], record["shape"][0] - 2
    missed = [name for name, value in found.items() if value > BARS[name][column]]
    first = f"{missed[0]} {found[missed[0]]:.2g}" if missed else ""
    if "stop" in record:
        numbers = " ".join(f"{name} {value:.3g}" for name, value in record["numbers"].items())
        number = numbers or record["failure"].split(": ")[-1]
        return {"broke": f"stops in {record['stop']}", "number": number, "first_miss": first}
    if LAST not in missed:
        return {"broke": "none: it works all the same", "number": "", "first_miss": first}
    return {"broke": missed[0], "number": f"{found[missed[0]]:.2g}", "first_miss": first}


def table(records: list[dict[str, object]]) -> None:
    print(
        f"{'teacher':27} {'condition':31} {'value':>7} {'threshold':>9} | {'breaks (seeds)':40} | "
        f"{'number (first seed)':34} | {'mse':>7} | {'first to miss its bar':34} | also violated"
    )
    for name, (condition, *_) in TEACHERS.items():
        mine = [record for record in records if record["teacher"] == name]
        for broke, count in Counter(record["broke"] for record in mine).most_common():
            these = [record for record in mine if record["broke"] == broke]
            pairs = [record["conditions"].get(condition, [np.nan] * 2) for record in these]
            value, threshold = np.median(pairs, axis=0)
            mse = np.median([record["qualities"].get(LAST, np.nan) for record in these])
            also = sorted({o for record in these for o in record["violated"]} - {condition})
            phase, number = f"{broke} ({count}/{len(mine)})", these[0]["number"][:34]
            print(
                f"{name:27} {condition or '-':31} {value:7.2g} {threshold:9.2g} | {phase:40} | "
                f"{number:34} | {mse:7.1e} | {these[0]['first_miss']:34} | {', '.join(also)}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", choices=TEACHERS)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--results", type=Path, default=FILE)
    options = parser.parse_args()
    teachers = TEACHERS if options.teacher is None else [options.teacher]
    seeds = SEEDS if options.seed is None else [options.seed]
    cases = [{"teacher": name, "seed": seed} for seed in seeds for name in teachers]
    records = measure_missing(
        options.results, [] if options.table else cases, lambda case: run(*case.values())
    )
    table([record | judge(record) for record in records])


if __name__ == "__main__":
    main()
