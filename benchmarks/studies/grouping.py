"""Do heads that share keys and values need fewer examples where that is used?

    python benchmarks/studies/grouping.py           every number of examples, six seeds
        --seeds 0:2 --groups 1 --ratios 4 8 --out part.json
        --merge part.json ...                       take such files over into the default one
        --table                                     print what the JSON holds

Rotary layers of 4 causal heads of 4 dimensions, d = 16, sequences of 12 Gaussian tokens, whose
heads share one set of keys and values, or two; learned as they are, and as heads with keys and
values of their own, which is right too and has more unknowns. Numbers of examples are multiples of
the counting limit of the former. Exact: all that the function determines to 1e-10, and RECOVERED.
"""

import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks.ledger import Record, console, finite, opened, say_bar, study
from benchmarks.studies.decoders import is_exact

D, HEADS, HEAD_DIM, K, LIMIT = 16, 4, 4, 12, 60.0
RATIOS = (3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
GROUPS = (1, 2)
ROPE = mha.Rope(100.0)


def fit(groups: int, used: bool, ratio: float, seed: int) -> Record:
    truth = mha.random_layer(
        HEADS, D, head_dim=HEAD_DIM, causal=True, rope=ROPE, kv_heads=groups, seed=seed
    )
    n = round(ratio * truth.architecture.counting_limit(K))
    x = np.random.default_rng(400 + seed).standard_normal((n, K, D))
    examples = mha.Examples(x, truth(x))
    began, spent = time.monotonic(), time.process_time()
    found = mha.AttentionRegressor(
        HEADS,
        head_dim=HEAD_DIM,
        causal=True,
        rope=ROPE,
        kv_heads=groups if used else None,
        random_state=seed,
        max_seconds=LIMIT,
    ).fit(examples)
    spent = time.process_time() - spent
    return {
        "n": n,
        "own_ratio": round(n / examples.counting_limit(found.layer_.architecture), 2),
        "outcome": found.outcome_.name,
        "error": finite(mha.compare(found.layer_, truth).max_error),
        "reason": found.solution_.reason,
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(spent, 1),
    }


COLUMNS = ("heads", "examples", "over the limit", "exact, sharing used", "exact, sharing not used")


def summarise(records: list[Record]) -> list[list[str]]:
    """A row for each number of examples."""
    rows = []
    for groups in GROUPS:
        for ratio in RATIOS:
            here = [r for r in records if (r["groups"], r["ratio"]) == (groups, ratio)]
            if not here:
                continue
            counts = []
            for used in (True, False):
                of = [record for record in here if record["used"] == used]
                late = sum(record.get("outcome") == "TIME_LIMIT" for record in of)
                late_too = f", {late} out of time" if late else ""
                counts.append(f"{sum(map(is_exact, of))} of {len(of)}{late_too}")
            sizes = ", ".join(sorted({str(record["n"]) for record in here if "n" in record}))
            shared = f"{HEADS} that share {'one key' if groups == 1 else f'{groups} keys'}"
            rows.append([shared, sizes, f"{ratio:g}", *counts])
    return rows


def main() -> None:
    parser = study(__doc__, "grouping", "0:6", "newton")
    parser.add_argument("--groups", type=int, nargs="+", default=list(GROUPS))
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    options = parser.parse_args()
    ledger, anything = opened(options)
    for seed in options.seeds if anything else ():
        for groups in options.groups:
            for ratio in options.ratios:
                for used in (True, False):
                    key = {"groups": groups, "ratio": ratio, "used": used, "seed": seed}
                    found = ledger.run(key, partial(fit, **key))
                    console.print(key, found.get("outcome", found))
    for row in summarise(ledger.records):
        console.print(" | ".join(row))
    wrong = [r for r in ledger.records if r.get("outcome") == "RECOVERED" and not is_exact(r)]
    say_bar("no layer is called RECOVERED that is not exact", not wrong)


if __name__ == "__main__":
    main()
