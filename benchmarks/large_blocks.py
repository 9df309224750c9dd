"""Blocks too large for a normal matrix: d = 16 by the dozen, d = 64, and blocks of trained models.

    python benchmarks/large_blocks.py --part d16|d64|trained|toy [--seeds 0:5] [--norms pre,post]
        [--layers 0,1] [--model FILE] [--config FILE] [--jobs 1] [--minutes 10] --out DIR

Each run is a row of DIR/PART-NAME-SEED.json, with its stages, as soon as it ends, failures
included; progress is printed. --gather takes the rows of DIR over into
benchmarks/results/large_blocks.json. Numbers of heads and neurons are found, not told. With --jobs,
runs are processes of one thread each, side by side on the CPU. Tokens are Gaussian; labels are
those of the block in double precision. --model: a safetensors file with the names of Hugging Face,
and beside it, or by --config, its config.json.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is a package there

from benchmarks import RESULTS, describe_code

_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
# Events of a descent by Adam between two that are printed.
_EVERY = 10
# Streams of tokens: of examples, and of those that only the benchmark sees.
_FRESH = 7000


class Case(NamedTuple):
    """A block to learn, and how."""

    name: str
    seed: int
    n: int
    k: int
    d: int
    n_heads: int
    hidden: int
    head_dim: int | None = None
    norm: str | None = "pre"
    layer: int | None = None  # of a trained model
    steps: int = 20_000
    surplus: float = 1.5


def cases(asked: argparse.Namespace) -> Iterator[Case]:
    for seed in asked.seeds:
        for norm in asked.norms:
            if asked.part == "d16":
                yield Case(f"d16-{norm}", seed, 20_000, 4, 16, 4, 64, norm=norm)
            elif asked.part == "d64":
                sizes = (64, 8, 256, 8)
                yield Case(f"d64-{norm}", seed, 40_000, 12, *sizes, norm, None, 40_000, 1.25)
            elif asked.part == "toy":
                sizes = (24, 3, 96, 8)
                yield Case(f"toy-{norm}", seed, 10_000, 4, *sizes, norm, None, 20_000, 1.25)
    if asked.part == "trained":
        for layer in asked.layers:
            yield Case(
                f"trained-{layer}", 0, 16_000, 16, 0, 0, 0, None, "post", layer, 24_000, 1.17
            )


def teacher_of(case: Case, asked: argparse.Namespace) -> Any:
    import mhalearn as mha

    if case.layer is None:
        sizes = case.n_heads, case.d, case.hidden
        return mha.random_block(*sizes, "gelu", case.norm, head_dim=case.head_dim, seed=case.seed)
    config = None if asked.config is None else json.loads(asked.config.read_text())
    return mha.block_from_huggingface(asked.model, case.layer, config=config)


def measure(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    """One fit, and how far its block is from the truth."""
    import jax
    import numpy as np

    import mhalearn as mha
    from mhalearn.learners.blocks.options import BlockOptions

    began = time.monotonic()
    teacher = teacher_of(case, asked)
    design = teacher.design
    n = asked.examples or case.n
    x = mha.sample_inputs("gaussian", n, case.k, teacher.d, seed=case.seed)
    y = teacher(x)
    say(case, began, f"{teacher!r}: labels made on {jax.devices()[0].device_kind}")
    stages: list[dict[str, Any]] = []

    def tell(event: Any) -> None:
        seconds = time.monotonic() - fitting
        row = {"stage": event.stage, "step": event.step, "seconds": round(seconds, 2)}
        row |= {"loss": event.loss if np.isfinite(event.loss) else None, "detail": event.detail}
        is_adam = event.stage.startswith("student ")
        if not is_adam or event.step % (500 * _EVERY) == 0 or event.step == 500:
            stages.append(row)
            say(case, began, f"{event.stage} {event.step}: {event.loss:.3g} {event.detail}")

    options = BlockOptions(
        steps=asked.steps or case.steps,
        batch=asked.batch,
        surplus=case.surplus,
        examples=asked.gauss_newton,
    )
    settings: dict[str, Any] = {"norm": design.norm, "head_dim": design.attention.head_dim}
    settings |= {"activation": design.activation, "norm_kind": design.norm_kind}
    settings |= {"epsilon": design.epsilon, "options": options}
    fitting, used = time.monotonic(), time.process_time()
    found = mha.BlockRegressor(
        **settings, random_state=case.seed, max_seconds=60 * asked.minutes, on_event=tell
    ).fit(x, y)
    seconds, processor = time.monotonic() - fitting, time.process_time() - used
    fresh = mha.sample_inputs("gaussian", 500, case.k, teacher.d, seed=_FRESH + case.seed)
    truth = teacher(fresh)
    held_out = float(np.sum((found.predict(fresh) - truth) ** 2) / np.sum(truth**2))
    row = {
        "n": n,
        "k": case.k,
        "ratio": n / teacher.architecture.counting_limit(case.k),
        "seconds": seconds,
        "processor_seconds": processor,
        "outcome": found.outcome_.name,
        "reason": found.solution_.reason,
        "heads": found.block_.n_heads,
        "neurons": found.block_.hidden,
        "held_out": held_out,
        "device": jax.devices()[0].device_kind,
        "stages": stages,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    found.block_.save(asked.out / f"{case.name}-{case.seed}.safetensors")
    row |= distance(found.block_, teacher)
    shown = {name: value for name, value in row.items() if name != "stages"}
    say(case, began, json.dumps(shown))
    return row


def distance(block: Any, teacher: Any) -> dict[str, Any]:
    """How many heads and neurons of the truth are there, to 1e-4, and the largest error."""
    import numpy as np

    import mhalearn as mha

    compared = mha.compare(block, teacher)
    mine, theirs = (one.canonical().feed_forward for one in (block, teacher))
    rows = [np.vstack([ff.up, ff.up_bias[None]]).T for ff in (mine, theirs)]
    ours, true = (np.hstack([r, ff.down]) for r, ff in zip(rows, (mine, theirs), strict=True))
    error = compared.max_error
    found: dict[str, Any] = {"max_error": error if np.isfinite(error) else None}
    found["why"] = compared.why
    if compared.attention is not None:
        heads = np.maximum(compared.attention.theta_errors, compared.attention.w_errors)
        found["heads_within_1e-4"] = int(np.sum(heads < 1e-4))
        found["worst_head"] = float(np.max(heads))
    apart = np.stack([np.linalg.norm(ours - one, axis=1).min() for one in true])
    sizes = np.linalg.norm(true, axis=1)
    found["neurons_within_1e-4"] = int(np.sum(apart < 1e-4 * np.maximum(sizes, sizes.mean())))
    found["true_neurons"] = len(true)
    return found


def say(case: Case, began: float, text: str) -> None:
    print(f"[{case.name} {case.seed} {time.monotonic() - began:6.1f}] {text}", flush=True)


def run(case: Case, asked: argparse.Namespace) -> None:
    """One run, as a row of its own file."""
    key = {"part": asked.part, "case": case.name, "seed": case.seed}
    about = {"minutes": asked.minutes, "code": describe_code()}
    try:
        found = measure(case, asked)
    except Exception as error:  # a crash is a result too
        import traceback

        traceback.print_exc()
        found = {"crashed": f"{type(error).__name__}: {error}"[:300]}
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{case.name}-{case.seed}.json"
    path.write_text(json.dumps(key | about | found, indent=1) + "\n")


def gather(folder: Path) -> None:
    """The rows of a folder into large_blocks.json, where they are not yet."""
    path = RESULTS / "large_blocks.json"
    rows = json.loads(path.read_text())["runs"]
    what = ("part", "case", "seed", "minutes", "code")
    known = {tuple(row.get(name) for name in what) for row in rows}
    for one in sorted(folder.glob("*.json")):
        row = json.loads(one.read_text())
        if tuple(row.get(name) for name in what) not in known:
            rows.append(row)
    path.write_text(json.dumps({"runs": rows}, indent=1) + "\n")


def run_side_by_side(todo: list[Case], asked: argparse.Namespace) -> None:
    """Each case in a process of one thread, so many at a time."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = os.environ | threads | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _ONE_THREAD}
    # Without its seeds, norms, layers and jobs, which each process gets anew.
    said = ["--part", asked.part, "--minutes", str(asked.minutes), "--out", str(asked.out)]
    said += ["--batch", str(asked.batch), "--gauss-newton", str(asked.gauss_newton)]
    for name in ("steps", "examples", "model", "config"):
        if getattr(asked, name) is not None:
            said += [f"--{name}", str(getattr(asked, name))]
    going: list[subprocess.Popen[bytes]] = []
    for case in todo:
        while len([one for one in going if one.poll() is None]) >= asked.jobs:
            time.sleep(0.2)
        own = ["--seeds", f"{case.seed}:{case.seed + 1}", "--norms", str(case.norm)]
        if case.layer is not None:
            own += ["--layers", str(case.layer)]
        going.append(subprocess.Popen([sys.executable, __file__, *said, *own], env=environment))
    for one in going:
        one.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("d16", "d64", "trained", "toy"), required=True)
    parser.add_argument(
        "--seeds", type=lambda text: range(*map(int, text.split(":"))), default="0:5"
    )
    parser.add_argument("--norms", type=lambda text: text.split(","), default="pre")
    parser.add_argument("--layers", type=lambda text: list(map(int, text.split(","))), default="0")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, on the CPU")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each run")
    parser.add_argument("--steps", type=int, help="of Adam")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--examples", type=int)
    parser.add_argument("--gauss-newton", type=float, default=8.0, help="examples over the limit")
    parser.add_argument("--gather", action="store_true", help="the rows of DIR, and run nothing")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if asked.gather:
        gather(asked.out)
        return
    todo = list(cases(asked))
    if asked.jobs > 1:
        run_side_by_side(todo, asked)
        return
    for case in todo:
        run(case, asked)


if __name__ == "__main__":
    main()
