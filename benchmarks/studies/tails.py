"""The lemmas of the proof on some layers and laws of tokens, beside their bounds.

python benchmarks/studies/tails.py            all of them, to benchmarks/results/tails.json
python benchmarks/pages/write_tails.py        docs/tails.md and its figures
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

import mhalearn as mha
from benchmarks import RESULTS
from mhalearn import tails
from mhalearn.tails.tokens import Inputs

FILE = RESULTS / "tails.json"
DRAWS = 400_000
SHORT = 4


def sparse_layer() -> mha.AttentionLayer:
    """Four entries a head, where the dense layer has 256, of the same norm."""
    layer = mha.random_layer(2, 16, scale=4.0)
    theta = np.zeros_like(layer.theta)
    theta[0, :2, :2] = [[1, 1], [1, -1]]
    theta[1, 2:4, 2:4] = [[1, 1], [1, -1]]
    return layer.replace(theta=2 * theta)


def vocabulary() -> np.ndarray:
    """64 token embeddings, random ones: any text over few words looks so to a layer."""
    return np.random.default_rng(0).standard_normal((64, 16))


def cases() -> dict[str, tuple[mha.AttentionLayer, int, Inputs]]:
    """A name, a layer, its tokens, their law."""
    dense = mha.random_layer(2, 16, scale=4.0)
    wide = mha.random_layer(3, 128, scale=1.0)
    return {
        "dense": (dense, 3, "boolean"),
        "dense, Gaussian": (dense, 3, "gaussian"),
        "dense, 64 tokens": (dense, 3, vocabulary()),
        "wide and flat": (wide, 4, "boolean"),
        "sparse": (sparse_layer(), 3, "boolean"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    lines = []
    for name, (layer, k, inputs) in cases().items():
        records = tails.table(layer, k, inputs, n=options.draws)
        if name == "wide and flat":  # a shorter substring, of which the bound says something
            short = tails.softmax_concentration(layer, k, length=SHORT, n=options.draws)
            records = tuple(short if one.name == short.name else one for one in records)
        print(f"{name}\n{tails.to_markdown(records)}", flush=True)
        shape = {"layer": name, "m": layer.n_heads, "d": layer.d, "k": k}
        shape |= {"scale": float(np.linalg.norm(layer.theta[0]))}
        lines += [json.dumps(shape | {"tail": record.to_json()}) for record in records]
    options.out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
