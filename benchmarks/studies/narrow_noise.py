"""Is the noise level right where many narrow heads are learned from noisy labels?

    python benchmarks/studies/narrow_noise.py   ten seeds at 4 and 10 times the counting limit
        --seeds 0:3 --times 10 --out part.json
        --merge part.json ...                   take such files over into the default one
        --table                                 print what the JSON holds

Layers of 8 heads of rank 8 with d = 64 and tokens of +-1, eight a sequence; Gaussian noise of 1 %
of the labels' root mean square. The bar: wherever a fit is called FITTED, its certificate's noise
level is within 5 % of the truth. Fits that do not find the layer may say so by any other outcome.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks.ledger import Record, console, finite, opened, say_bar, study

HEADS, D, RANK, K, SCALE, LEVEL = 8, 64, 8, 8, 6.0, 0.01
ALLOWED = 0.05


def fit(times: float, seed: int) -> Record:
    truth = mha.random_layer(HEADS, D, scale=SCALE, rank=RANK, seed=seed)
    n = round(times * mha.Architecture(D, HEADS, RANK).counting_limit(K))
    x = mha.sample_inputs("boolean", n, K, D, seed=100 + seed)
    clean = truth(x)
    sigma = LEVEL * float(np.sqrt(np.mean(clean**2)))
    y = clean + sigma * np.random.default_rng(1000 + seed).standard_normal(clean.shape)
    began = time.monotonic()
    found = mha.AttentionRegressor(HEADS, head_dim=RANK, random_state=0).fit(x, y)
    certificate = found.certificate_
    return {
        "n": n,
        "outcome": found.outcome_.name,
        "finding": found.solution_.findings[0].name,
        "heads": found.n_heads_,
        "noise_ratio": None if certificate is None else certificate.noise_level / sigma,
        "refitted": certificate is not None and certificate.refitted,
        "error": finite(mha.compare(found.layer_, truth).max_error),
        "reason": found.solution_.reason,
        "seconds": round(time.monotonic() - began, 1),
    }


def is_right(record: Record) -> bool:
    """Whether the noise level is within what is allowed, or is not spoken of."""
    ratio = record["noise_ratio"]
    return record["outcome"] != "FITTED" or ratio is None or abs(ratio - 1) <= ALLOWED


def describe(record: Record) -> str:
    head = f"{record['times']:4g} x limit, seed {record['seed']}: "
    if "crashed" in record:
        return head + record["crashed"]
    ratio, error = record["noise_ratio"], record["error"]
    said = "no certificate" if ratio is None else f"{ratio:8.3f}"
    return (
        f"{head}{record['outcome']:16} noise {said} of the truth, largest error "
        f"{'inf' if error is None else f'{error:.1e}'}, {record['seconds']:6.1f} s, by the check "
        f"'{record['finding']}'{'' if is_right(record) else '  WRONG'}"
    )


def summarise(records: list[Record]) -> bool:
    """Print the worst noise level of each size; whether the bar is held."""
    ended = [record for record in records if "crashed" not in record]
    for times in sorted({record["times"] for record in ended}):
        of_size = [record for record in ended if record["times"] == times]
        fitted = [record for record in of_size if record["outcome"] == "FITTED"]
        ratios = [record["noise_ratio"] for record in fitted if record["noise_ratio"] is not None]
        worst = max((abs(np.log(ratio)) for ratio in ratios), default=0.0)
        console.print(
            f"{times:g} times the limit: {len(fitted)} of {len(of_size)} FITTED, worst noise level "
            f"off by a factor {np.exp(worst):.3f}"
        )
    held = len(ended) == len(records) and all(map(is_right, ended))
    say_bar(f"FITTED noise levels within {ALLOWED:.0%} of the truth", held)
    return held


def main() -> None:
    parser = study(__doc__ or "", "narrow_noise", "0:10", "newton")
    parser.add_argument("--times", default="4,10", help="times the counting limit, between commas")
    asked = parser.parse_args()
    ledger, to_run = opened(asked)
    for times in map(float, asked.times.split(",")) if to_run else ():
        for seed in asked.seeds:
            record = ledger.run({"times": times, "seed": seed}, lambda t=times, s=seed: fit(t, s))
            console.print(describe(record))
    if not to_run:
        for record in ledger.records:
            console.print(describe(record))
    sys.exit(not summarise(ledger.records))


if __name__ == "__main__":
    main()
