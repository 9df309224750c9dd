"""Is a decoder's layer that is taken for one of another kind ever called RECOVERED?

    python benchmarks/studies/decoder_traps.py      every kind taken for every other, three seeds
        --seeds 0:1 --asked rotary,plain --out part.json
        --merge part.json ...                       take such files over into the default one
        --table                                     print what the JSON holds

Layers of 2 causal heads of 4 dimensions, d = 8, sequences of 6 Gaussian tokens, 64 examples. Each
kind's labels are fitted as each kind that can be asked for. The bars: RECOVERED is said only of
layers that make the labels of fresh inputs to 1e-9, and no kind is named but the right one.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks.ledger import Record, console, names, opened, say_bar, study
from mhalearn.judge.kind_words import list_differences

D, HEADS, HEAD_DIM, K, N, LIMIT = 8, 2, 4, 6, 64, 300.0
SAME = 1e-9

KINDS = {
    "plain": {},
    "rotary": {"rope": mha.Rope(100.0)},
    "rotary, other base": {"rope": mha.Rope(50.0)},
    "rotary, interleaved": {"rope": mha.Rope(100.0, layout="interleaved")},
    "partial rotary": {"rope": mha.Rope(fraction=0.5)},
    "window": {"window": 4},
    "window, one longer": {"window": 5},
    "sinks": {"sinks": True},
    "soft-cap": {"softcap": 1.5},
    "ALiBi": {"position_bias": "alibi"},
    "one key head": {"kv_heads": 1},
}
# Kinds that labels have and that are not asked for.
ONLY_MADE = {
    "T5": {"position_bias": "t5"},
    "other logit scale": {"logit_scale": 1.0},
    "rotary, window, sinks": {"rope": mha.Rope(100.0), "window": 4, "sinks": True},
}
MADE = KINDS | ONLY_MADE


def fit(made: str, asked: str, seed: int) -> Record:
    truth = mha.random_layer(HEADS, D, head_dim=HEAD_DIM, causal=True, seed=seed, **MADE[made])
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
        "finding": found.solution_.findings[0].name,
        "reason": found.solution_.reason,
        "processor_seconds": round(time.process_time() - began, 1),
    }


def right_settings(made: str, asked: str) -> str:
    """What ought to be learned with; which dimensions are pairs is no part of the function."""
    sizes = {"d": D, "n_heads": HEADS, "head_dim": HEAD_DIM, "causal": True}
    wanted, had = (mha.Architecture(**sizes, **kind) for kind in (KINDS[asked], MADE[made]))
    if had.rope is not None:
        layout = "half" if wanted.rope is None else wanted.rope.layout
        had = replace(had, rope=replace(had.rope, layout=layout))
    return ", ".join(one.setting for one in list_differences(wanted, had))


def is_false(record: Record) -> bool:
    """Whether something is called recovered that it is not."""
    return record.get("outcome") == "RECOVERED" and record["off"] > SAME


def is_recovered(record: Record) -> bool:
    return record.get("outcome") == "RECOVERED" and not is_false(record)


def names_a_kind(record: Record) -> bool:
    return record.get("finding") == "another kind"


def is_named(record: Record) -> bool:
    """Whether the right kind is named."""
    settings = right_settings(record["truth"], record["asked"])
    return names_a_kind(record) and record["reason"].endswith(f"learn with {settings}")


def summarise(records: list[Record]) -> list[list[str]]:
    """A row for each kind that was asked for, and one for all."""
    rows = []
    for asked in (*KINDS, None):
        of = [record for record in records if asked in (None, record["asked"])]
        own = [record for record in of if record["truth"] == record["asked"]]
        others = [record for record in of if record["truth"] != record["asked"]]
        same = [record for record in others if is_recovered(record)]
        named = [record for record in others if is_named(record)]
        wrong = [record for record in of if names_a_kind(record) and not is_named(record)]
        if of:
            counts = (len(others), len(same), len(named), len(wrong))
            last = (sum(map(is_false, of)), sum("crashed" in record for record in of))
            right = f"{sum(map(is_recovered, own))} of {len(own)}"
            rows.append([asked or "all", right, *map(str, counts + last)])
    return rows


COLUMNS = (
    "asked for",
    "its own labels recovered",
    "labels of other kinds",
    "of these recovered, being the same function",
    "the right kind named",
    "a wrong kind named",
    "falsely RECOVERED",
    "crashes",
)


def main() -> None:
    parser = study(__doc__, "decoder_traps", "0:3", "newton")
    parser.add_argument("--asked", type=names, default=list(KINDS))
    options = parser.parse_args()
    ledger, anything = opened(options)
    for seed in options.seeds if anything else ():
        for asked in options.asked:
            for made in MADE:
                key = {"truth": made, "asked": asked, "seed": seed}
                record = ledger.run(key, lambda m=made, a=asked, s=seed: fit(m, a, s))
                said = record.get("outcome") or record["crashed"]
                console.print(
                    f"{made} as {asked}, seed {seed}: {said}, off by {record.get('off')}, "
                    f"{record.get('finding')}, {record.get('processor_seconds')} s"
                )
    for row in summarise(ledger.records):
        console.print(" | ".join(row))
    false = sum(map(is_false, ledger.records))
    wrong = sum(names_a_kind(record) and not is_named(record) for record in ledger.records)
    count = len(ledger.records)
    say_bar(f"0 of {count} fits falsely RECOVERED ({false})", not false)
    say_bar(f"0 of {count} fits told a wrong kind ({wrong})", not wrong)


if __name__ == "__main__":
    main()
