"""The studies of decoders' heads in parts, one processor each, side by side.

    python benchmarks/studies/decoders_in_parallel.py --out FOLDER --first 3 --seconds 540

Each part writes a file of its own to the folder, for `--merge`. Processors before `--first` are
left to others. A part that has not ended after so many seconds is ended; what it measured is kept.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# What Adam was not yet run beside, on ten seeds; kinds that are found, and sharing.
ADAM = ("rotary", "partial rotary", "sinks, window", "soft-cap", "T5", "cross-attention")
FOUND = ("rotary", "rotary, grouped, window", "soft-cap, sinks", "ALiBi", "plain")
SEEDS, FOUND_SEEDS, SHARED_SEEDS = 10, 3, 6


def list_parts() -> list[tuple[str, list[str]]]:
    """A study and its arguments; what is asked for most first."""
    parts = []
    for variant in ("QK-norm, rotary", *ADAM):
        # Two seeds a part share programs; of normalised heads the one that was not learned.
        seeds = [(5, 6)] if variant not in ADAM else [(s, s + 2) for s in range(0, SEEDS, 2)]
        for first, last in seeds:
            parts.append(("decoders", ["--seeds", f"{first}:{last}", "--variants", variant]))
    for seed in range(FOUND_SEEDS):
        for kind in FOUND:
            parts.append(("auto_kinds", ["--seeds", f"{seed}:{seed + 1}", "--kinds", kind]))
    for seed in range(SHARED_SEEDS):
        for groups in ("1", "2"):
            parts.append(("grouping", ["--seeds", f"{seed}:{seed + 1}", "--groups", groups]))
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0, help="processor to begin at")
    parser.add_argument("--seconds", type=float, default=540.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    free = sorted(os.sched_getaffinity(0))[options.first :]
    until, waiting = time.monotonic() + options.seconds, list(enumerate(list_parts()))
    running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    while (waiting or running) and time.monotonic() < until:
        for core, (name, process) in list(running.items()):
            if process.poll() is not None:
                print(f"{name} ended: {process.returncode}, {len(waiting)} wait", flush=True)
                del running[core]
        for core in free:
            if core not in running and waiting:
                running[core] = start(core, *waiting.pop(0), options.out)
        time.sleep(0.5)
    for name, process in running.values():
        process.terminate()
        print(f"{name} was not done in time", flush=True)


def start(
    core: int, number: int, part: tuple[str, list[str]], out: Path
) -> tuple[str, subprocess.Popen[bytes]]:
    study, arguments = part
    name = f"{study}_{number}"
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, HERE / f"{study}.py", *arguments, "--out", out / f"{name}.json"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    return name, process


if __name__ == "__main__":
    main()
