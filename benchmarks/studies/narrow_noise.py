"""Is the noise level right where many narrow heads are learned from noisy labels?

    python benchmarks/studies/narrow_noise.py            ten seeds at 4 and 10 times the limit
    python benchmarks/studies/narrow_noise.py --seeds 0:3 --times 10 --out part.json
    python benchmarks/studies/narrow_noise.py --table    print what the JSON holds

Layers of 8 heads of rank 8 with d = 64 and tokens of +-1, eight a sequence; Gaussian noise of 1 %
of the labels' root mean square. The bar: wherever a fit is called FITTED, its certificate's noise
level is within 5 % of the truth. Fits that do not find the layer may say so by any other outcome.
"""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mhalearn as mha

RESULTS = Path(__file__).resolve().parents[1] / "results"
HEADS, D, RANK, K, SCALE, LEVEL = 8, 64, 8, 8, 6.0, 0.01
ALLOWED = 0.05


def fit(times: float, seed: int) -> dict[str, Any]:
    truth = mha.random_layer(HEADS, D, scale=SCALE, rank=RANK, seed=seed)
    limit = mha.Architecture(D, HEADS, RANK).counting_limit(K)
    n = round(times * limit)
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


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return float(value) if np.isfinite(value) else None


def is_right(record: dict[str, Any]) -> bool:
    """Whether the noise level is within what is allowed, or is not spoken of."""
    ratio = record["noise_ratio"]
    return record["outcome"] != "FITTED" or ratio is None or abs(ratio - 1) <= ALLOWED


def describe(record: dict[str, Any]) -> str:
    ratio = record["noise_ratio"]
    said = "no certificate" if ratio is None else f"{ratio:8.3f}"
    error = record["error"]
    return (
        f"{record['times']:4g} x limit, seed {record['seed']}: {record['outcome']:16} "
        f"noise {said} of the truth, largest error {'inf' if error is None else f'{error:.1e}'}, "
        f"{record['seconds']:6.1f} s  {record['finding']}{'' if is_right(record) else '  WRONG'}"
    )


def summarise(records: list[dict[str, Any]]) -> bool:
    """Print the worst noise level of each size; whether the bar is held."""
    for times in sorted({record["times"] for record in records}):
        of_size = [record for record in records if record["times"] == times]
        fitted = [record for record in of_size if record["outcome"] == "FITTED"]
        ratios = [record["noise_ratio"] for record in fitted if record["noise_ratio"] is not None]
        worst = max((abs(np.log(ratio)) for ratio in ratios), default=0.0)
        print(
            f"{times:g} times the limit: {len(fitted)} of {len(of_size)} FITTED, worst noise level "
            f"off by a factor {np.exp(worst):.3f}"
        )
    held = all(map(is_right, records))
    print(f"{'holds' if held else 'MISSED'}: FITTED noise levels within {ALLOWED:.0%}")
    return held


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"runs": records}, indent=1, allow_nan=False) + "\n")
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:10", help="start:stop")
    parser.add_argument("--times", default="4,10", help="times the counting limit, between commas")
    parser.add_argument("--out", type=Path, default=RESULTS / "narrow_noise.json")
    parser.add_argument("--table", action="store_true", help="run nothing")
    asked = parser.parse_args()
    records = json.loads(asked.out.read_text())["runs"] if asked.out.exists() else []
    machine = f"{os.cpu_count()} cores, {jax.default_backend()}, jax {jax.__version__}, Python "
    machine += platform.python_version()
    for times in () if asked.table else map(float, asked.times.split(",")):
        for seed in range(*map(int, asked.seeds.split(":"))):
            key = {"times": times, "seed": seed, "machine": machine}
            if any(key.items() <= record.items() for record in records):
                continue
            records.append(key | fit(times, seed))
            write(asked.out, records)
            print(describe(records[-1]), flush=True)
    if asked.table:
        print("\n".join(map(describe, records)))
    sys.exit(not summarise(records))


if __name__ == "__main__":
    main()
