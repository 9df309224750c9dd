"""Is a decoder's layer that is taken for one of another kind ever called RECOVERED?

    python benchmarks/studies/decoder_traps.py      every kind taken for every other, three seeds
        --seeds 0:1 --kinds rotary,plain --out part.json
        --merge part.json ...                       take such files over into the default one
        --table                                     print what the JSON holds

Layers of 2 causal heads of 4 dimensions, d = 8, sequences of 6 Gaussian tokens, 64 examples. Each
kind's labels are fitted as each kind. The bar: RECOVERED is said only of layers that make the
labels of fresh inputs to 1e-9.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks.ledger import Record, console, names, opened, say_bar, study

D, HEADS, HEAD_DIM, K, N, LIMIT = 8, 2, 4, 6, 64, 60.0
SAME = 1e-9

KINDS = {
    "plain": {},
    "rotary": {"rope": mha.Rope(100.0)},
    "rotary, other base": {"rope": mha.Rope(50.0)},
    "partial rotary": {"rope": mha.Rope(100.0, fraction=0.5)},
    "window": {"window": 4},
    "window, one longer": {"window": 5},
    "sinks": {"sinks": True},
    "soft-cap": {"softcap": 1.5},
    "ALiBi": {"position_bias": "alibi"},
    "one key head": {"kv_heads": 1},
}


def fit(truth_kind: str, asked: str, seed: int) -> Record:
    truth = mha.random_layer(
        HEADS, D, head_dim=HEAD_DIM, causal=True, seed=seed, **KINDS[truth_kind]
    )
    rng = np.random.default_rng(1000 + seed)
    x, fresh = rng.standard_normal((N, K, D)), rng.standard_normal((100, K, D))
    began = time.process_time()
    found = mha.AttentionRegressor(
        HEADS, head_dim=HEAD_DIM, causal=True, max_seconds=LIMIT, random_state=seed, **KINDS[asked]
    ).fit(x, truth(x))
    labels = truth(fresh)
    off = float(np.linalg.norm(found.predict(fresh) - labels) / np.linalg.norm(labels))
    return {
        "outcome": found.outcome_.name,
        "off": off,
        "reason": found.solution_.reason,
        "processor_seconds": round(time.process_time() - began, 1),
    }


def is_false(record: Record) -> bool:
    """Whether something is called recovered that it is not."""
    return record.get("outcome") == "RECOVERED" and record["off"] > SAME


def summarise(records: list[Record]) -> list[list[str]]:
    """A row for each kind that was asked for: fits, RECOVERED rightly and falsely, crashes."""
    rows = []
    for asked in KINDS:
        of = [record for record in records if record["asked"] == asked]
        own = [record for record in of if record["truth"] == asked]
        others = [record for record in of if record["truth"] != asked]
        right = [r for r in own if r.get("outcome") == "RECOVERED" and not is_false(r)]
        same = [r for r in others if r.get("outcome") == "RECOVERED" and not is_false(r)]
        if of:
            rows.append(
                [
                    asked,
                    f"{len(right)} of {len(own)}",
                    str(len(others)),
                    str(len(same)),
                    str(sum(map(is_false, of))),
                    str(sum("crashed" in record for record in of)),
                ]
            )
    return rows


COLUMNS = (
    "asked for",
    "its own labels recovered",
    "labels of other kinds",
    "of these recovered, being the same function",
    "falsely RECOVERED",
    "crashes",
)


def main() -> None:
    parser = study(__doc__, "decoder_traps", "0:3", "newton")
    parser.add_argument("--kinds", type=names, default=list(KINDS))
    options = parser.parse_args()
    ledger, anything = opened(options)
    for asked in options.kinds if anything else ():  # programs are those of what is asked for
        for seed in options.seeds:
            for truth in KINDS:
                key = {"truth": truth, "asked": asked, "seed": seed}
                record = ledger.run(key, lambda t=truth, a=asked, s=seed: fit(t, a, s))
                said = record.get("outcome") or record["crashed"]
                console.print(f"{truth} as {asked}, seed {seed}: {said} {record.get('off')}")
    for row in summarise(ledger.records):
        console.print(" | ".join(row))
    wrong = [record for record in ledger.records if is_false(record)]
    say_bar(f"0 of {len(ledger.records)} fits falsely RECOVERED ({len(wrong)})", not wrong)


if __name__ == "__main__":
    main()
