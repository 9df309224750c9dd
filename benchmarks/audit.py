"""Does an audit name the fault that was planted, and nothing in a right box?

    python benchmarks/audit.py single      # every fault, layer, precision and kind of token
    python benchmarks/audit.py pairs       # two faults at once
    python benchmarks/audit.py clean       # right boxes
    python benchmarks/audit.py outside     # faults that the catalogue does not have
    python benchmarks/audit.py mixed       # one of them beside one that it has
    python benchmarks/audit.py large       # d = 576, 9 heads, 3 key heads
    python benchmarks/audit.py table       # what was measured, beside the bars
    python benchmarks/audit.py calibrate   # how often findings of a kind were right

`--fault NAME` leaves the other single faults out. Several studies take turns, so that one which is
stopped has some of each. Runs are kept in results/audit.json, and made once. Boxes are those of
`benchmarks.audited`, which share no code with what is audited. Seconds are of the processor, on
whatever else ran there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is a package there

import mhalearn as mha
from benchmarks import RESULTS
from benchmarks.audited.boxes import Box
from benchmarks.audited.calibration import fitted_shares
from benchmarks.audited.layers import NAMES, layer, tokens
from benchmarks.audited.outside import OUTSIDE
from benchmarks.audited.planted import PLANTED, Planted
from benchmarks.audited.right import box_of
from benchmarks.ledger import Ledger, Record, console, say_bar

PRECISIONS, KINDS = ("float32", "bfloat16"), ("random", "recorded")
SEQUENCES, PAIRS, CLEAN, MIXED, OUTSIDE_LAYERS = 32, 64, 200, 24, 3
# A fault that changes outputs by less than the box rounds them is no fault that can be seen.
_INVISIBLE = 0.5


def audited(
    subject: Any, box: Box, x: Any, lengths: Any = None, y: Any = None, **options: Any
) -> Record:
    """What an audit of a box says, in short; y: its answers, where they are there already."""
    y = box(x, lengths) if y is None else y
    if not np.isfinite(np.asarray(y, np.float64)).all():
        return {"skipped": "the box gives numbers that are not finite"}
    examples = mha.Examples(np.asarray(x, np.float32), y, lengths)
    began = time.process_time()
    found = mha.audit(subject, examples, **options)
    return {
        "ok": found.ok,
        "explained": found.explained,
        "error": found.error,
        "floor": found.floor,
        "cpu_seconds": round(time.process_time() - began, 2),
        "findings": [
            {
                "name": one.name,
                "heads": list(one.heads),
                "confidence": one.confidence,
                "kind": one.kind,
                "rivals": len(one.also),
                "sentence": one.sentence,
            }
            for one in found.findings
        ],
        "locus": None if found.locus is None else found.locus.to_dict(),
    }


def effect(fault: Box, right: Box, x: Any, lengths: Any) -> float:
    """What a fault changes, beside what the box rounds: exact boxes are compared."""
    exact = [np.asarray(b.with_(precision="float64")(x, lengths)) for b in (fault, right)]
    rounded = np.asarray(right(x, lengths), np.float64)
    noise = float(np.sqrt(np.mean((rounded - exact[1]) ** 2)))
    return float(np.sqrt(np.mean((exact[0] - exact[1]) ** 2))) / max(noise, 1e-300)


def is_named(record: Record, fault: Planted, *, first: bool) -> bool:
    """Whether a fault is named with its head: first or among equals; or anywhere."""
    findings = record["findings"]
    most = max((one["confidence"] for one in findings), default=0.0)
    return any(
        one["name"] == fault.name
        and tuple(one["heads"]) == fault.heads
        and fault.said in one["sentence"]
        and (not first or one["confidence"] == most)
        for one in findings
    )


def _sequences(name: str, fault: Planted, kind: str) -> tuple[Any, Any]:
    """Tokens, and lengths where the fault is one of padding."""
    x = tokens(name, kind, SEQUENCES)
    if fault.name != "padding-attended":
        return x, None
    return x, np.where(np.arange(len(x)) % 2, x.shape[1], x.shape[1] // 2)


def singles() -> Iterator[tuple[Record, Any]]:
    """Each fault on each layer: first in one precision on random tokens and in the other on
    recorded ones, in turn, then the other way round; in a random order, so that a part is a
    sample."""
    every = list(product(range(len(NAMES)), range(len(PLANTED)), range(2)))
    order = np.random.default_rng(0).permutation(len(every))
    for turned, at in product(range(2), order):
        layer_at, index, precision_at = every[at]
        name, fault = NAMES[layer_at], PLANTED[index]
        precision, kind = (
            PRECISIONS[precision_at],
            KINDS[(layer_at + index + precision_at + turned) % 2],
        )
        key = {"study": "single", "layer": name, "precision": precision}
        key |= {"tokens": kind, "fault": fault.name, "index": index}
        yield key, partial(one_fault, name, precision, kind, fault)


def one_fault(name: str, precision: str, kind: str, fault: Planted) -> Record:
    subject = layer(name)
    right = box_of(subject, precision)
    wrong = fault.make(right)
    if wrong is None:
        return {"skipped": "the layer has no place for it"}
    if fault.name == "padding-attended" and right.ahead is not None:
        return {"skipped": "causal rows see no padding behind them"}
    x, lengths = _sequences(name, fault, kind)
    size = effect(wrong, right, x, lengths)
    if size < _INVISIBLE:
        return {"skipped": "below rounding", "effect": size}
    found = audited(subject, wrong, x, lengths)
    return (
        found
        if "skipped" in found
        else found | {"effect": size, "named": is_named(found, fault, first=True)}
    )


def pairs() -> Iterator[tuple[Record, Any]]:
    """Pairs drawn without regard to what is easy, but for what one layer has no place for, and for
    two that both change the scale: any two numbers multiplied are one."""
    rng = np.random.default_rng(0)
    for index in range(PAIRS):
        name = NAMES[index % len(NAMES)]
        precision = PRECISIONS[index // len(NAMES) % 2]
        right = box_of(layer(name), precision)
        usable = [
            (a, b)
            for a, b in combinations(range(len(PLANTED)), 2)
            if PLANTED[a].name != PLANTED[b].name
            and not (PLANTED[a].is_scale and PLANTED[b].is_scale)
            and "padding-attended" not in (PLANTED[a].name, PLANTED[b].name)
            and (first := PLANTED[a].make(right)) is not None
            and PLANTED[b].make(first) is not None
        ]
        chosen = usable[int(rng.integers(len(usable)))]
        key = {"study": "pairs", "layer": name, "precision": precision, "tokens": "random"}
        key |= {"faults": [PLANTED[i].name for i in chosen], "index": index}
        yield key, lambda n=name, p=precision, c=chosen: two_faults(n, p, c)


def two_faults(name: str, precision: str, chosen: tuple[int, int]) -> Record:
    subject = layer(name)
    right = box_of(subject, precision)
    one, other = (PLANTED[i] for i in chosen)
    alone, also = one.make(right), other.make(right)
    both = None if alone is None else other.make(alone)
    assert alone is not None
    assert also is not None
    assert both is not None
    x = tokens(name, "random", SEQUENCES)
    sizes = [effect(both, without, x, None) for without in (alone, also)]
    if min(sizes) < _INVISIBLE:
        return {"skipped": "one of them is below rounding beside the other", "effect": min(sizes)}
    found = audited(subject, both, x)
    if "skipped" in found:
        return found
    named = [is_named(found, fault, first=False) for fault in (one, other)]
    return found | {"named": all(named), "named_each": named}


def clean() -> Iterator[tuple[Record, Any]]:
    for index, precision in product(range(CLEAN), PRECISIONS):
        name, kind = NAMES[index % len(NAMES)], KINDS[index // len(NAMES) % 2]
        key = {"study": "clean", "layer": name, "precision": precision, "tokens": kind}
        yield key | {"index": index}, partial(right_box, name, precision, kind, index)


def right_box(name: str, precision: str, kind: str, index: int) -> Record:
    """Another layer and other tokens each time; trained layers have other tokens alone."""
    subject = layer(name) if name.startswith("trained") else layer(name, seed=100 + index)
    return audited(subject, box_of(subject, precision), tokens(name, kind, SEQUENCES, seed=index))


def outside() -> Iterator[tuple[Record, Any]]:
    for turn in range(OUTSIDE_LAYERS):
        for index, fault in enumerate(OUTSIDE):
            name = NAMES[(index + turn) % len(NAMES)]
            key: Record = {
                "study": "outside",
                "layer": name,
                "precision": "float32",
                "tokens": "random",
            }
            key |= {"fault": fault.name, "index": index}
            yield key, lambda n=name, i=index: kept_apart(n, i)


def kept_apart(name: str, index: int) -> Record:
    subject, fault = layer(name), OUTSIDE[index]
    right = box_of(subject, "float32")
    x = tokens(name, "random", SEQUENCES)
    wrong = fault.make(right)
    size = effect(wrong, right, x, None)
    if size < _INVISIBLE:
        return {"skipped": "below rounding", "effect": size}
    found = audited(subject, wrong, x, max_seconds=10.0)
    if "skipped" in found or found["locus"] is None:
        return found | {"right_locus": False}
    locus, k = found["locus"], x.shape[1]
    rows = set() if fault.rows is None else set(range(fault.rows[0], min(k, fault.rows[1])))
    if rows:  # those that an exact box does otherwise
        exact = [b.with_(precision="float64")(x) for b in (wrong, right)]
        rows = set(np.flatnonzero(np.abs(exact[0] - exact[1]).max((0, 2)) > 1e-9).tolist())
    there = set(locus["rows"])
    is_right = (
        (not fault.heads or tuple(locus["heads"]) == fault.heads)
        and (len(rows) in (0, k) or (there <= rows and len(there) >= 0.8 * len(rows)))
        and (not fault.sequences or set(fault.sequences) <= set(locus["sequences"]))
        and (not fault.keys or tuple(locus["keys"]) == fault.keys)
        and (not fault.distances or tuple(locus["distances"]) == fault.distances)
    )
    return found | {"right_locus": bool(is_right)}


def mixed() -> Iterator[tuple[Record, Any]]:
    """A fault of the catalogue, drawn, beside one that it has not."""
    rng = np.random.default_rng(1)
    for index in range(MIXED):
        name = NAMES[index % len(NAMES)]
        right = box_of(layer(name), "float32")
        there = [i for i, one in enumerate(PLANTED) if one.make(right) is not None]
        chosen = there[int(rng.integers(len(there)))]
        beside = int(rng.integers(len(OUTSIDE)))
        key = {"study": "mixed", "layer": name, "precision": "float32", "tokens": "random"}
        key |= {"fault": PLANTED[chosen].name, "beside": OUTSIDE[beside].name, "index": index}
        yield key, partial(known_and_not, name, chosen, beside)


def known_and_not(name: str, chosen: int, beside: int) -> Record:
    subject, fault = layer(name), PLANTED[chosen]
    right, x = box_of(layer(name), "float32"), tokens(name, "random", SEQUENCES)
    alone, also = fault.make(right), OUTSIDE[beside].make(right)
    assert alone is not None
    hooks = {**alone.hooks, **also.hooks}
    both = fault.make(also)
    assert both is not None
    both = both.with_(hooks=hooks)
    if min(effect(both, without, x, None) for without in (alone, also)) < _INVISIBLE:
        return {"skipped": "one of them is below rounding beside the other"}
    found = audited(subject, both, x, max_seconds=10.0)
    return found if "skipped" in found else found | {"named": is_named(found, fault, first=False)}


def large() -> Iterator[tuple[Record, Any]]:
    """A layer as wide as SmolLM's, 256 sequences of 64 tokens."""
    wanted = ("rotary-layout", "rotary-base")
    subject = mha.random_layer(
        n_heads=9, d=576, head_dim=64, kv_heads=3, rope=mha.Rope(), causal=True, seed=0
    )
    x = np.random.default_rng(0).standard_normal((256, 64, 576))
    right = box_of(subject, "float32")
    boxes = {fault.name: fault.make(right) for fault in PLANTED if fault.name in wanted}
    boxes |= {"none": right, "rotary-layout and head-zeroed": None}
    for name, box in boxes.items():
        key = {"study": "large", "layer": "d = 576", "precision": "float32", "fault": name}
        if box is None:
            by_name = {fault.name: fault for fault in PLANTED}
            first = by_name["rotary-layout"].make(right)
            box = None if first is None else by_name["head-zeroed"].make(first)
        yield key, lambda b=box: timed(subject, b, x)


def timed(subject: Any, box: Box, x: Any) -> Record:
    y = box(x)
    began = time.monotonic()
    found = audited(subject, box, x, y=y)
    return found | {"seconds": round(time.monotonic() - began, 1)}


# Cases of each study before the next one has its turn.
TURNS = {"single": 12, "pairs": 2, "clean": 6, "outside": 1, "mixed": 1, "large": 1}
STUDIES = {
    "single": singles,
    "pairs": pairs,
    "clean": clean,
    "outside": outside,
    "mixed": mixed,
    "large": large,
}


def summarise(runs: list[Record]) -> None:
    for study in STUDIES:
        made = [one for one in runs if one["study"] == study and "skipped" not in one]
        if not made:
            continue
        if study in ("single", "pairs"):
            named = sum(one.get("named", False) for one in made)
            bar = 0.95 if study == "single" else 0.8
            say_bar(f"{study}: {named} of {len(made)} named", named >= bar * len(made))
            for one in made:
                if not one.get("named"):
                    what = one.get("fault") or one.get("faults")
                    first = one["findings"][0]["sentence"] if one.get("findings") else one
                    console.print(f"  {one['layer']}, {one['precision']}, {what}: {first}")
        elif study == "clean":
            alarms = sum(not one["ok"] for one in made)
            say_bar(f"clean: {alarms} false alarms in {len(made)}", alarms == 0)
        elif study == "outside":
            wrong = sum(not one["right_locus"] for one in made)
            sure = sum(
                any(f["name"] != "unexplained" and f["confidence"] > 0.5 for f in one["findings"])
                for one in made
            )
            say_bar(f"outside: {sure} misnamed, {wrong} of {len(made)} at a wrong place", sure == 0)
        elif study == "mixed":
            named = sum(one.get("named", False) for one in made)
            console.print(f"mixed: {named} of {len(made)} named beside what is unexplained")
        else:
            slowest = max(one["seconds"] for one in made)
            say_bar(f"large: at most {slowest} s", slowest <= 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=(*STUDIES, "table", "calibrate"), nargs="+")
    parser.add_argument("--fault", help="of single faults, this one alone")
    parser.add_argument("--out", type=Path, default=RESULTS / "audit.json")
    options = parser.parse_args()
    ledger = Ledger(options.out)
    waiting = {study: STUDIES[study]() for study in options.study if study in STUDIES}
    while waiting:
        for study in list(waiting):
            turn = list(islice(waiting[study], TURNS[study]))
            for key, measure in turn:
                if options.fault in (None, key.get("fault")):
                    ledger.run(key, measure)
            if not turn:
                del waiting[study]
    summarise(ledger.records)
    if "calibrate" in options.study:
        for kind, (share, cases) in fitted_shares(ledger.records).items():
            console.print(f"{kind}: {share:.3f} ({cases} findings)")


if __name__ == "__main__":
    main()
