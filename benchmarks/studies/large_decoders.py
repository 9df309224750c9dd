"""Are large heads as trained decoders have them recovered exactly, on a CPU?

    python benchmarks/studies/large_decoders.py                 every case, one seed
        --cases "128x8x4x16" --seeds 0:3 --limit 600 --out part.json
        --merge part.json ...                                   take such files over
        --table                                                 print what the JSON holds

A case is features x heads x groups x dimensions: causal rotary heads, and groups that share keys
and values; "sinks" has sinks too, and "biases" biases. Norms of heads are spread as those of
trained ones, singular values decay fourfold. Sequences of 16 Gaussian tokens, 25 times the counting
limit of examples. Exact: all that the function determines to 1e-10, and RECOVERED. Seconds are of
the processor, compilation included; the limit is of the clock. Each state of the code is measured
anew.
"""

import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks import describe_code
from benchmarks.ledger import Record, console, finite, names, opened, say_bar, study
from benchmarks.studies.decoders import is_exact

K, RATIO, LIMIT = 16, 25.0, 1800.0
# What trained heads were seen to have: norms of Theta, and the decay of singular values.
NORMS, DECAY = (1.6, 12.0), 4.0
CASES = ("96x6x2x16", "128x8x4x16", "128x8x8x16", "96x6x3x16 biases", "96x6x6x16 sinks")


def teach(case: str, seed: int) -> mha.ProjectedLayer:
    """Values, keys and their outputs along random orthogonal directions, of sizes that decay."""
    sizes, _, extra = case.partition(" ")
    d, m, groups, h = map(int, sizes.split("x"))
    bias, sinks = extra == "biases", extra == "sinks"
    shared = None if groups == m else groups
    a = mha.Architecture(
        d, m, h, causal=True, kv_heads=shared, rope=mha.Rope(), bias=bias, sinks=sinks
    )
    rng = np.random.default_rng([seed, 0xDEC2])

    def directions(count: int, rows: int) -> np.ndarray:
        return np.linalg.qr(rng.normal(size=(count, rows, h))).Q

    decay = np.exp(-np.linspace(0, np.log(DECAY), h))
    decay /= np.linalg.norm(decay)
    norms = np.exp(rng.uniform(*np.log(NORMS), size=m))[:, None, None]
    params = {
        "query": h**0.5 * norms * directions(m, d) @ (decay[:, None] * directions(m, h)),
        "key": directions(groups, d),
        "value": directions(groups, d),
        "out": rng.uniform(1, 3, size=(m, 1, 1)) * decay[:, None] * directions(m, d).swapaxes(1, 2),
    }
    if bias:
        params |= {"query_bias": 0.3 * rng.normal(size=(m, h))}
        params |= {f"{side}_bias": 0.1 * rng.normal(size=(groups, h)) for side in ("key", "value")}
        params |= {"out_bias": 0.1 * rng.normal(size=d)}
    if sinks:
        params |= {"sink": rng.normal(size=m)}
    return mha.ProjectedLayer(a, params)


def fit(case: str, seed: int, limit: float) -> Record:
    truth = teach(case, seed)
    a = truth.architecture
    n = int(RATIO * a.counting_limit(K))
    x = np.random.default_rng(seed).standard_normal((n, K, a.d))
    examples, stages = mha.Examples(x, truth(x)), {}
    began, spent = time.monotonic(), time.process_time()

    def listen(event: mha.Event) -> None:
        stages[event.stage] = {
            "processor_seconds": round(time.process_time() - spent, 1),
            "loss": finite(event.loss),
        }

    found = mha.AttentionRegressor(
        a.heads,
        head_dim=a.head_dim,
        causal=True,
        bias=a.bias,
        kv_heads=a.kv_heads,
        rope=a.rope,
        sinks=a.sinks,
        random_state=seed,
        max_seconds=limit,
        on_event=listen,
    ).fit(examples)
    return {
        "n": n,
        "unknowns": a.count(),
        "outcome": found.outcome_.name,
        "error": finite(mha.compare(found.layer_, truth).max_error),
        "reason": found.solution_.reason,
        "processor_seconds": round(time.process_time() - spent, 1),
        "seconds": round(time.monotonic() - began, 1),
        "stages": stages,
    }


COLUMNS = (
    "case",
    "seed",
    "code",
    "examples",
    "outcome",
    "error",
    "processor seconds",
    "of the clock",
)


def summarise(records: list[Record]) -> list[list[str]]:
    """A row a fit."""
    return [
        [
            record["case"],
            str(record["seed"]),
            str(record.get("code", "-"))[:7],
            str(record["n"]),
            record["outcome"],
            "-" if record["error"] is None else f"{record['error']:.0e}",
            f"{record['processor_seconds']:.0f}",
            f"{record['seconds']:.0f}",
        ]
        for record in records
        if "outcome" in record
    ]


def main() -> None:
    parser = study(__doc__, "large_decoders", "0:1", "newton")
    parser.add_argument("--cases", type=names, default=list(CASES))
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of the clock of a fit")
    options = parser.parse_args()
    ledger, anything = opened(options)
    for seed in options.seeds if anything else ():
        for case in options.cases:
            key = {"case": case, "seed": seed, "limit": options.limit, "state": describe_code()}
            ours = ledger.run(key, partial(fit, case, seed, options.limit))
            console.print(f"{case}, seed {seed}: {ours.get('outcome', ours)}", ours)
    for row in summarise(ledger.records):
        console.print(" | ".join(row))
    wrong = [r for r in ledger.records if r.get("outcome") == "RECOVERED" and not is_exact(r)]
    say_bar("no layer is called RECOVERED that is not exact", not wrong)


if __name__ == "__main__":
    main()
