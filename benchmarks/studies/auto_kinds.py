"""Is the kind of heads found from examples at the size of docs/positions.md, all fields "auto"?

    python benchmarks/studies/auto_kinds.py         every kind, three seeds
        --seeds 0:1 --kinds rotary --out part.json
        --merge part.json ...                       take such files over into the default one
        --table                                     print what the JSON holds

Layers as in `decoders.py` (4 causal heads of 8 dimensions, d = 32, 16 Gaussian tokens, 20 times the
counting limit of examples), learned with rope, window, kv_heads, softcap, sinks and position_bias
"auto". Right: all of these as they were, a base to 1e-6, and the layer to 1e-10 and RECOVERED.
"""

import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks.ledger import Record, console, finite, names, opened, say_bar, study
from benchmarks.studies.decoders import HEAD_DIM, HEADS, RATIO, D, K, is_exact
from mhalearn.layer.position_bias import T5Bias

LIMIT, BASE = 1800.0, 1e-6
FIELDS = ("rope", "window", "kv_heads", "softcap", "sinks", "position_bias")
KINDS = {
    "rotary": {"rope": mha.Rope(12345.678)},
    "rotary, grouped, window": {"rope": mha.Rope(500.0), "kv_heads": 2, "window": 9},
    "partial rotary": {"rope": mha.Rope(200.0, fraction=0.5)},
    "soft-cap, sinks": {"softcap": 4.5, "sinks": True},
    "sinks, window": {"sinks": True, "window": 6},
    "ALiBi": {"position_bias": "alibi"},
    "T5": {"position_bias": T5Bias(bidirectional=False)},
    "plain": {},
}


def fit(kind: str, seed: int) -> Record:
    truth = mha.random_layer(HEADS, D, head_dim=HEAD_DIM, causal=True, seed=seed, **KINDS[kind])
    n = round(RATIO * truth.architecture.counting_limit(K))
    x = np.random.default_rng(300 + seed).standard_normal((n, K, D))
    began, spent = time.monotonic(), time.process_time()
    found = mha.AttentionRegressor(
        HEADS,
        head_dim=HEAD_DIM,
        causal=True,
        random_state=seed,
        max_seconds=LIMIT,
        **dict.fromkeys(FIELDS, "auto"),
    ).fit(x, truth(x))
    spent = time.process_time() - spent
    seen, had = found.layer_.architecture, truth.architecture
    right = [name for name in FIELDS[1:] if getattr(seen, name) == getattr(had, name)]
    off = None if seen.rope is None or had.rope is None else abs(seen.rope.base / had.rope.base - 1)
    if (off is None and seen.rope is had.rope) or (off is not None and off <= BASE):
        right.append("rope")
    return {
        "n": n,
        "outcome": found.outcome_.name,
        "error": finite(mha.compare(found.layer_, truth).max_error),
        "right": right,
        "base_off": off,
        "reason": found.solution_.reason,
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(spent, 1),
    }


def is_right(record: Record) -> bool:
    return is_exact(record) and len(record["right"]) == len(FIELDS)


def summarise(records: list[Record]) -> list[list[str]]:
    rows = []
    for kind in KINDS:
        of = [record for record in records if record["kind"] == kind]
        if of:
            off = [record["base_off"] for record in of if record.get("base_off") is not None]
            spent = [record["processor_seconds"] for record in of if "processor_seconds" in record]
            errors = [record["error"] for record in of if is_right(record)]
            rows.append(
                [
                    kind,
                    f"{sum(map(is_right, of))} of {len(of)}",
                    f"{max(errors):.0e}" if errors else "-",
                    f"{max(off):.0e}" if off else "-",
                    f"{max(spent):.0f}" if spent else "-",
                ]
            )
    return rows


COLUMNS = (
    "kind",
    "found and exact",
    "largest error of these",
    "base off by at most",
    "processor seconds, most",
)


def main() -> None:
    parser = study(__doc__, "auto_kinds", "0:3", "newton")
    parser.add_argument("--kinds", type=names, default=list(KINDS))
    options = parser.parse_args()
    ledger, anything = opened(options)
    for seed in options.seeds if anything else ():
        for kind in options.kinds:
            found = ledger.run({"kind": kind, "seed": seed}, partial(fit, kind, seed))
            console.print(f"{kind}, seed {seed}: {found.get('outcome', found)}", found)
    for row in summarise(ledger.records):
        console.print(" | ".join(row))
    wrong = [r for r in ledger.records if r.get("outcome") == "RECOVERED" and not is_exact(r)]
    say_bar("no layer is called RECOVERED that is not exact", not wrong)


if __name__ == "__main__":
    main()
