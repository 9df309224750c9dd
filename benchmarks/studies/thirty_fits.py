"""Thirty fits of every kind, with their layers and outcomes: did a change of the code change them?

    python benchmarks/studies/thirty_fits.py record FOLDER    # before the change
    python benchmarks/studies/thirty_fits.py check FOLDER     # after it; fails where they differ

Only public names are used, so that two versions of the package run the same script. Fits to exact
labels must come to the same parameters within 1e-9; under noise and for layers a descent ends short
of, within 1e-5, since rounding moves where it stops. Where no example was left to certify with, the
examples do not determine the layer, and only the outcome is compared.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mhalearn as mha

Fit = Callable[[Path], Any]


def data(layer, n, k, *, inputs="boolean", seed=1, noise=0.0, lengths=None):
    x = mha.sample_inputs(inputs, n, k, layer.d, seed=seed)
    y = layer(x, lengths)
    if noise:
        size = np.sqrt(np.mean(y**2))
        y = y + noise * size * np.random.default_rng(seed + 77).standard_normal(y.shape)
    return mha.Examples(x, y, lengths)


def plain(layer, n, k, *, given=None, dtype=None, **settings) -> Fit:
    def fit(folder: Path) -> Any:
        examples = data(layer, n, k, **(given or {}))
        if dtype is not None:
            x, y, _ = examples.arrays()
            examples = mha.Examples(x, y.astype(dtype))
        return mha.AttentionRegressor(random_state=0, **settings).fit(examples)

    return fit


def streamed(layer, n, k, *, noise=0.0, inputs="boolean", **settings) -> Fit:
    def fit(folder: Path) -> Any:
        examples = mha.Examples.from_callable(
            layer, inputs, n=n, k=k, d=layer.d, seed=1, noise=noise
        )
        return mha.AttentionRegressor(random_state=0, **settings).fit(examples)

    return fit


def resumed(layer, n, k, events, **settings) -> Fit:
    """Interrupted after some events, and given again with the checkpoint it left."""

    def fit(folder: Path) -> Any:
        examples, left = data(layer, n, k), [events]

        def count(event: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

        path = folder / "run.safetensors"
        settings_of_run = {"random_state": 0, "checkpoint": path, **settings}
        with contextlib.suppress(KeyboardInterrupt):
            mha.AttentionRegressor(on_event=count, **settings_of_run).fit(examples)
        assert path.exists(), "nothing was recorded before the interruption"
        return mha.AttentionRegressor(resume=True, **settings_of_run).fit(examples)

    return fit


class Ended:
    """What a command leaves of a fit."""

    def __init__(self, said: dict[str, Any], layer: Any) -> None:
        self.outcome_, self.layer_, self.certificate_ = mha.Outcome[said["outcome"]], layer, None


def together(layer, n, k, *options, noise=0.0) -> Fit:
    """Two processes of one run."""

    def fit(folder: Path) -> Any:
        data(layer, n, k, noise=noise).save(folder / "shards", shard_size=n // 5)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        program = "import sys; from mhalearn.cli import main; main(sys.argv[1:])"
        asked = ["learn", str(folder / "shards"), "--distributed", "--json", *options]
        processes = []
        for number in range(2):
            place = {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(number),
                "JAX_PLATFORMS": "cpu",
            }
            out = ["--out", str(folder / f"{number}.safetensors")]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", program, *asked, *out],
                    env=os.environ | place,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        said = [process.communicate()[0] for process in processes]
        return Ended(json.loads(said[0]), mha.load_layer(folder / "0.safetensors"))

    return fit


def twice(layer):
    """The same function with one head split into two."""
    theta = np.concatenate([layer.theta, layer.theta[:1]])
    w = np.concatenate([0.5 * layer.w[:1], layer.w[1:], 0.5 * layer.w[:1]])
    return mha.AttentionLayer(theta, w)


def fits() -> dict[str, Fit]:
    small, three = mha.random_layer(2, 8, seed=1), mha.random_layer(3, 16, seed=0)
    narrow = mha.random_layer(8, 64, scale=6.0, rank=8, seed=2)
    lengths = np.random.default_rng(3).integers(2, 7, 120)
    both = mha.random_layer(2, 8, key_vector=True, out_bias=True, seed=4)
    low = mha.random_layer(2, 8, rank=3, seed=6)
    four = mha.random_layer(2, 8, scale=4.0, seed=0)
    return {
        "newton": plain(small, 100, 6, n_heads=2),
        "newton, three heads": plain(three, 200, 8, n_heads=3),
        "newton, one head": plain(mha.random_layer(1, 8, seed=9), 80, 5, n_heads=1),
        "newton, gaussian": plain(small, 100, 6, given={"inputs": "gaussian"}, n_heads=2),
        "newton, bias": plain(both, 160, 6, n_heads=2, bias=True),
        "newton, causal": plain(
            mha.random_layer(2, 8, causal=True, seed=5), 120, 6, n_heads=2, causal=True
        ),
        "newton, lengths": plain(small, 120, 6, given={"lengths": lengths}, n_heads=2),
        "newton, rank 3": plain(low, 100, 6, n_heads=2, head_dim=3),
        "newton, fewer outputs": plain(
            mha.random_layer(2, 8, out_dim=5, seed=7), 160, 6, n_heads=2
        ),
        "newton, more outputs": plain(
            mha.random_layer(2, 8, out_dim=12, seed=7), 100, 6, n_heads=2
        ),
        "newton, sharp heads": plain(mha.random_layer(3, 8, scale=6.0, seed=8), 160, 5, n_heads=3),
        "newton, scarce": plain(mha.random_layer(2, 6, seed=10), 18, 5, n_heads=2),
        "newton, float32 labels": plain(small, 160, 6, dtype=np.float32, n_heads=2),
        "newton, heads not told": plain(three, 260, 8, n_heads="auto"),
        "newton, a head too many": plain(small, 160, 6, n_heads=3),
        "newton, a head too few": plain(three, 200, 8, n_heads=2),
        "newton, equal heads": plain(twice(small), 160, 6, n_heads="auto"),
        "newton, at the limit": plain(three, 12, 8, n_heads=3),
        "newton, noise": plain(small, 300, 6, given={"noise": 0.01}, n_heads=2),
        "newton, noise and bias": plain(both, 400, 6, given={"noise": 0.01}, n_heads=2, bias=True),
        "newton, streamed": streamed(small, 40_000, 6, n_heads=2),
        "newton, streamed noise": streamed(small, 40_000, 6, noise=0.01, n_heads=2),
        "newton, resumed": resumed(three, 200, 8, 7, n_heads=3),
        "newton, two processes": together(small, 100, 6, "--heads", "2"),
        "narrow": plain(narrow, 500, 8, n_heads=8, head_dim=8),
        "narrow, heads not told": plain(narrow, 500, 8, n_heads="auto", head_dim=8),
        "narrow, noise": plain(narrow, 500, 8, given={"noise": 0.01}, n_heads=8, head_dim=8),
        "sculpt": plain(four, 20_000, 3, n_heads=2, method="sculpt"),
        "sculpt, phases alone": streamed(four, 20_000, 3, n_heads=2, method="sculpt", polish=False),
        "adam": plain(small, 100, 6, n_heads=2, method="adam"),
        "lbfgs": plain(small, 100, 6, n_heads=2, method="lbfgs"),
        "linear": plain(small, 100, 6, n_heads=2, method="linear"),
    }


def run(name: str, fit: Fit) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        found = fit(Path(folder))
    certificate = found.certificate_
    return {
        "name": name,
        "outcome": found.outcome_.name,
        "heads": found.layer_.n_heads,
        "determined": certificate is not None or isinstance(found, Ended),
        "noise_level": None if certificate is None else certificate.noise_level,
        "seconds": round(time.monotonic() - began, 1),
        "layer": found.layer_,
    }


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(',', '').replace(' ', '_')}.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("record", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="fits whose name holds this")
    parser.add_argument("--exactly", action="store_true", help="--only is the whole name")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    known = {}
    if asked.mode == "check":
        known = {row["name"]: row for row in json.loads((asked.folder / "fits.json").read_text())}
    rows, different = [], 0
    for name, fit in fits().items():
        if asked.only not in name or (asked.exactly and asked.only != name):
            continue
        row = run(name, fit)
        layer = row.pop("layer")
        line = f"{name:28} {row['outcome']:16} {row['heads']:2} heads {row['seconds']:6.1f} s"
        if asked.mode == "record":
            layer.save(file_of(asked.folder, name))
        else:
            before = known[name]
            row["difference"] = mha.compare(
                layer, mha.load_layer(file_of(asked.folder, name))
            ).max_error
            exact = before["outcome"] == "RECOVERED"
            same = row["difference"] <= (1e-9 if exact else 1e-5) or not row["determined"]
            same = same and row["outcome"] == before["outcome"]
            different += not same
            line += (
                f"  {row['difference']:.1e} {'' if same else 'DIFFERS from ' + before['outcome']}"
            )
        rows.append(row)
        print(line, flush=True)
    if asked.mode == "record" and not asked.only:
        (asked.folder / "fits.json").write_text(json.dumps(rows, indent=1) + "\n")
    if asked.mode == "check":
        print(f"{len(rows) - different} of {len(rows)} as before")
        sys.exit(different > 0)


if __name__ == "__main__":
    main()
