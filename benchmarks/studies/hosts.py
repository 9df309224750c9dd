"""Many devices: scaling as far as this machine shows it, and the arithmetic for 64 GPUs.

    python benchmarks/studies/hosts.py  measure what results/hosts.json lacks, write the tables
        --table                         write the tables of docs/many_hosts.md from the JSON

Two things are timed, each the best of five, with the machine's load beside it: a Gauss-Newton step
of dense heads, and a gradient over all examples of many narrow heads. Forced devices share the
cores of one process, so they show what spreading costs; two processes show what a second one gains.
"summed" is what the compiled gradient exchanges, counted in its HLO, beside the size of the
factors, which is what it should be.
"""

import argparse
import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import jax
import jax.numpy as jnp
import numpy as np

import mhalearn as mha
from benchmarks import DOCS, RESULTS
from benchmarks.ledger import Ledger, Record
from mhalearn._runtime import devices
from mhalearn._runtime.programs import float64
from mhalearn.layer.batches import Chunk, sum_over_chunks
from mhalearn.layer.dense import Dense
from mhalearn.layer.factored import Factored, Factors
from mhalearn.layer.parametrisation import Parametrisation
from mhalearn.solvers.gauss_newton import init_dense, take_step
from mhalearn.solvers.scaled_problem import Problem, make_problem

DOC = DOCS / "many_hosts.md"
# (processes, devices of each)
PLACES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1)]
REPEATS = 5
EXAMPLES = {"dense": 128, "narrow": 64}  # strong scaling; weak has as many a device
# Heads, features, rank of the heads; tokens and examples of a run on paper.
LAYERS = {"384 wide": (12, 384, 32), "4096 wide": (32, 4096, 128)}
GPUS, TOKENS, ON_PAPER = 64, 16, 65_536
# Bytes a second in and out of one GPU: 400 Gbit/s of InfiniBand.
LINK = 50e9
WORKSPACE = 16 * 8 * 2**24  # bytes of intermediates on a GPU (`attention.on_device`)


def dense_step(n: int) -> Record:
    layer = mha.random_layer(4, 16, seed=0)
    problem = problem_of(layer, n, 8, Dense(layer.architecture))
    state = init_dense(np.random.default_rng(1).standard_normal((1, 4, 16, 16)) / 16, problem)
    return timed(lambda: jax.block_until_ready(take_step(state, problem)))


def narrow_gradient(n: int) -> Record:
    layer = mha.random_layer(8, 64, rank=16, seed=0)
    problem = problem_of(layer, n, 16, Factored(mha.Architecture(64, 8, 16)))
    with float64():
        kind = problem.parametrisation
        heads = kind.init(np.random.default_rng(1))

        @jax.jit
        def gradient(heads: Factors, data: Chunk) -> Factors:
            def wrong(heads: Factors, chunk: Chunk) -> jax.Array:
                return jnp.sum((kind.outputs(heads, chunk) - chunk.labels) ** 2)

            return sum_over_chunks(
                lambda chunk: jax.grad(wrong)(heads, chunk), data, problem.devices
            )

        program = gradient.lower(heads, problem.data).compile().as_text()
        found = timed(lambda: jax.block_until_ready(gradient(heads, problem.data)))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in problem.data)
    return found | {
        "summed_bytes": summed_bytes(program),
        "factor_bytes": sum(leaf.nbytes for leaf in heads),
        "held_bytes": held,
        "all_bytes": sum(leaf.nbytes for leaf in problem.data),
    }


def problem_of(layer: mha.AttentionLayer, n: int, k: int, kind: Parametrisation) -> Problem:
    devices.WORTH = 0.0
    x = mha.sample_inputs("boolean", n, k, layer.d, seed=2)
    examples = mha.Examples(x, layer(x))
    return make_problem(examples, kind)


def timed(step: object) -> Record:
    assert callable(step)
    step()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return {
        "seconds": min(seconds),
        "median": statistics.median(seconds),
        "load": os.getloadavg()[0],
    }


def summed_bytes(program: str) -> int:
    """Bytes that all-reduces of a compiled program have as results, once each."""
    count = 0
    for line in program.splitlines():
        if re.search(r" all-reduce(-start)?\(", line):
            result = line.split(" all-reduce")[0]
            for kind, shape in re.findall(r"\b([fus]\d+|pred)\[([\d,]*)\]", result):
                size = int(kind[1:]) // 8 if kind != "pred" else 1
                count += size * math.prod(int(side) for side in shape.split(",") if side)
    return count


CHILDREN = {"dense": dense_step, "narrow": narrow_gradient}


def measure(what: str, n: int, processes: int, each: int) -> Record:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={each}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--child", what, str(n), str(processes), address]
    children = [
        subprocess.Popen([*command, str(number)], env=environment, stdout=subprocess.PIPE)
        for number in range(processes)
    ]
    said = [child.communicate()[0].decode() for child in children]
    assert not any(child.returncode for child in children), "a child failed"
    return json.loads(said[0].strip().splitlines()[-1])


def be_child(what: str, n: int, processes: int, address: str, number: int) -> None:
    if processes > 1:
        jax.distributed.initialize(address, processes, number)
    print(json.dumps(CHILDREN[what](n)))


def on_paper(m: int, d: int, h: int) -> Record:
    """Bytes and seconds of a step on 64 GPUs, with labels as wide as tokens and no bias.

    A ring of P devices sends and receives 2 (P - 1) / P times what is summed. Adam's student has a
    quarter of surplus heads; it and the products of conjugate gradients work in single precision. A
    device holds its examples (tokens, queries, labels, weights, masks; tokens and queries in single
    precision too, and what attention makes of them), the factors with Adam's two moments and the
    gradient, or five vectors of conjugate gradients beside factors, gradient and trial in double,
    and a workspace.
    """
    student = m + max(2, m // 4)
    adam, product = 4 * 4 * student * d * h, 4 * 4 * m * d * h
    ring = 2 * (GPUS - 1) / GPUS
    example = TOKENS * (8 * 3 * d + 8 + TOKENS + 4 * (2 * d + m * (4 * h + TOKENS)))
    return {
        "adam_bytes": adam,
        "adam_moved": ring * adam,
        "adam_seconds": ring * adam / LINK,
        "product_bytes": product,
        "product_moved": ring * product,
        "product_seconds": ring * product / LINK,
        "examples_held": ON_PAPER // GPUS * example,
        "examples_alone": ON_PAPER * example,
        "state_held": max(4 * adam, 5 * product + 3 * 2 * product),
        "workspace": WORKSPACE,
    }


def run(ledger: Ledger) -> None:
    for what, base in EXAMPLES.items():
        for processes, each in PLACES:
            for scaling, n in (("strong", 8 * base), ("weak", base * processes * each)):
                key = {"part": scaling, "what": what, "processes": processes, "devices": each}
                ledger.run(
                    key | {"n": n}, lambda w=what, n=n, p=processes, e=each: measure(w, n, p, e)
                )
    for name, sizes in LAYERS.items():
        key = {"part": "paper", "layer": name, "heads": sizes[0], "d": sizes[1], "h": sizes[2]}
        ledger.run(key | {"gpus": GPUS, "n": ON_PAPER}, lambda sizes=sizes: on_paper(*sizes))


def write_tables(records: list[Record]) -> None:
    text = DOC.read_text()
    for name, table in (("scaling", scaling(records)), ("paper", paper(records))):
        begin_, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin_)
        text = before + begin_ + table + end + rest.split(end)[1]
    DOC.write_text(text)


def scaling(records: list[Record]) -> str:
    rows = [
        "| | processes x devices | examples | s a step, strong | examples | s a step, weak | "
        "held by a device | summed / factors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for what in EXAMPLES:
        for processes, each in PLACES:
            here = {"what": what, "processes": processes, "devices": each}
            strong, weak = (
                next(r for r in records if r["part"] == part and here.items() <= r.items())
                for part in ("strong", "weak")
            )
            held = summed = "-"
            if "held_bytes" in strong:
                held = f"1/{strong['all_bytes'] / strong['held_bytes']:g}"
                summed = f"{strong['summed_bytes'] / strong['factor_bytes']:.3g}"
            cells = [what, f"{processes} x {each}", strong["n"], f"{strong['seconds']:.3f}"]
            cells += [weak["n"], f"{weak['seconds']:.3f}", held, summed]
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    measured = [r for r in records if "load" in r]
    loads = [r["load"] for r in measured]
    return "\n".join(rows) + (
        f"\n\nMachine: {measured[0]['machine']}; its load average while it measured: "
        f"{min(loads):.1f} to {max(loads):.1f}.\n"
    )


def paper(records: list[Record]) -> str:
    names = {
        "adam_bytes": "summed in an Adam step (factors, single precision)",
        "adam_moved": "moved in and out of each GPU for it",
        "adam_seconds": "time of that at 50 GB/s",
        "product_bytes": "summed in a product of conjugate gradients (single precision)",
        "product_moved": "moved in and out of each GPU for it",
        "product_seconds": "time of that at 50 GB/s",
        "examples_alone": f"all {ON_PAPER:,} examples of {TOKENS} tokens",
        "examples_held": "held of them by a GPU",
        "state_held": "factors and optimiser on each GPU",
        "workspace": "workspace of a chunk on each GPU",
    }
    found = [r for r in records if r["part"] == "paper"]
    head = [f"d = {r['d']}, {r['heads']} heads of {r['h']}" for r in found]
    rows = ["| | " + " | ".join(head) + " |", "|---" * (len(found) + 1) + "|"]
    for name, said in names.items():
        shown = [_time(r[name]) if "seconds" in name else _bytes(r[name]) for r in found]
        rows.append(f"| {said} | " + " | ".join(shown) + " |")
    return "\n".join(rows) + "\n"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, n, processes, address, number = options.child
        return be_child(what, int(n), int(processes), address, int(number))
    ledger = Ledger(RESULTS / "hosts.json")
    if not options.table:
        run(ledger)
    write_tables(ledger.records)


if __name__ == "__main__":
    main()
