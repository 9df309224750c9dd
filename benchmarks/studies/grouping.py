"""How many fewer examples are needed where heads that share keys and values are known to?

    python benchmarks/studies/grouping.py           every number of examples, five seeds
        --seeds 0:1 --groups 1 --out part.json
        --merge part.json ...                       take such files over into the default one
        --table                                     print what the JSON holds

Layers of 4 causal rotary heads of 4 dimensions that share one set of keys and values, or two, d =
16, sequences of 8 Gaussian tokens. Each layer's labels are fitted twice from the same examples: as
heads that share, and as heads with keys and values of their own. Exact: all that the function
determines to 1e-10, and RECOVERED.
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

D, HEADS, HEAD_DIM, K, LIMIT = 16, 4, 4, 8, 600.0
GROUPS = (1, 2)
COUNTS = (16, 24, 36, 54)
ROPE = mha.Rope(100.0)


def asked(kv_heads: int | None) -> mha.Architecture:
    return mha.Architecture(D, HEADS, HEAD_DIM, causal=True, rope=ROPE, kv_heads=kv_heads)


def fit(groups: int, n: int, shares: bool, seed: int) -> Record:
    truth = mha.random_layer(
        HEADS, D, head_dim=HEAD_DIM, causal=True, rope=ROPE, kv_heads=groups, seed=seed
    )
    x = np.random.default_rng(500 + seed).standard_normal((max(COUNTS), K, D))[:n]
    began = time.process_time()
    found = mha.AttentionRegressor(
        HEADS,
        head_dim=HEAD_DIM,
        causal=True,
        rope=ROPE,
        kv_heads=groups if shares else None,
        random_state=seed,
        max_seconds=LIMIT,
    ).fit(x, truth(x))
    return {
        "ratio": round(n / asked(groups if shares else None).counting_limit(K), 2),
        "outcome": found.outcome_.name,
        "error": finite(mha.compare(found.layer_, truth).max_error),
        "reason": found.solution_.reason,
        "processor_seconds": round(time.process_time() - began, 1),
    }


def summarise(records: list[Record]) -> list[list[str]]:
    """A row for each number of sets and each class fitted: how often it was exact."""
    rows = []
    for groups in GROUPS:
        for shares in (True, False):
            of = [r for r in records if (r["groups"], r["shares"]) == (groups, shares)]
            if not of:
                continue
            limit = asked(groups if shares else None).counting_limit(K)
            counts = []
            for n in COUNTS:
                here = [record for record in of if record["n"] == n]
                counts.append(f"{sum(map(is_exact, here))} of {len(here)}" if here else "-")
            rows.append([str(groups), "yes" if shares else "no", f"{limit:.1f}", *counts])
    return rows


COLUMNS = (
    "sets of keys and values",
    "told",
    "counting limit",
    *(f"{n} examples" for n in COUNTS),
)


def main() -> None:
    parser = study(__doc__, "grouping", "0:5", "newton")
    parser.add_argument("--groups", type=int, nargs="+", default=GROUPS)
    options = parser.parse_args()
    ledger, anything = opened(options)
    for seed in options.seeds if anything else ():
        for groups in options.groups:
            for n in reversed(COUNTS):
                for shares in (True, False):
                    key = {"groups": groups, "n": n, "shares": shares, "seed": seed}
                    found = ledger.run(key, partial(fit, groups, n, shares, seed))
                    console.print(f"{key}: {found.get('outcome', found)}, {found.get('error')}")
    for row in summarise(ledger.records):
        console.print(" | ".join(row))
    wrong = [r for r in ledger.records if r.get("outcome") == "RECOVERED" and not is_exact(r)]
    say_bar("no layer is called RECOVERED that is not exact", not wrong)


if __name__ == "__main__":
    main()
