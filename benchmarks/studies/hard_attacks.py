"""Attacks that know the family.

Elimination over GF(2) against parities, with more and more noise; a search through all secrets and
an integer program against roundings, with larger and larger moduli; these and elimination of a
linearised system against learning with rounding, with larger and larger secrets.
"""

import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

import numpy as np

from benchmarks.ledger import console, opened, study
from mhalearn import Examples, sample_inputs
from mhalearn.hardness import Secret, hard_layer
from mhalearn.hardness.attacks import (
    break_lwr_by_elimination,
    break_lwr_by_integers,
    break_lwr_by_search,
    break_parity,
    break_rounding_by_integers,
    break_rounding_by_search,
    count_products,
    read_bits,
)

PARITY = ((4, 16), (6, 32), (8, 64))
MULTIPLES = (1.0, 2.0, 2.5, 3.0, 4.0)  # examples over d; half of them show the secret
NOISES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # over the labels' root mean square
TRIES = 200
HEADS, LIMIT = 4, 20.0
# Width and moduli at which each attack on a rounding costs something and ends.
ATTACKS = {"search": (8, (2, 4, 6, 8, 10, 12)), "integers": (16, (4, 8, 12, 16, 24, 32))}
EXAMPLES = {"search": 300, "integers": 600}
# Dimensions and moduli at which each attack on learning with rounding costs something.
LWR = {
    "elimination": (
        *((8, 2), (16, 2), (32, 2), (64, 2), (8, 4), (16, 4), (32, 4), (64, 4)),
        *((4, 8), (8, 8), (12, 8), (4, 16), (6, 16)),
    ),
    "integers": ((4, 8), (6, 8), (8, 8), (3, 16), (4, 16), (5, 16), (3, 64)),
    "search": ((4, 8), (6, 8), (3, 16), (4, 16), (5, 16), (3, 64)),
}
# Examples, half of which show a bit: as many as there are unknowns and some, or enough to leave
# one secret.
SPARE, ENOUGH = 100, 120


def examples_of(layer, n: int, seed: int, noise: float = 0.0) -> Examples:
    x = sample_inputs("boolean", n, 2, layer.d, seed=seed)
    y = layer(x)
    rng = np.random.default_rng([seed, 0x401])
    return Examples(x, y + noise * np.sqrt(np.mean(y**2)) * rng.normal(size=y.shape))


def eliminated(m: int, d: int, multiple: float, noise: float, seed: int) -> dict:
    layer, secret = hard_layer("parity", n_heads=m, d=d, seed=seed)
    n = math.ceil(multiple * d)
    exact, noisy = examples_of(layer, n, seed), examples_of(layer, n, seed, noise)
    wrong = read_bits(exact, secret.projection)[1] != read_bits(noisy, secret.projection)[1]
    found = break_parity(noisy, secret.projection, tries=TRIES, seed=seed)
    broken = found.weights is not None and np.array_equal(found.weights, secret.weights)
    return {"broken": broken, "work": found.work, "examples": n, "wrong_bits": float(wrong.mean())}


def rounded(attack: str, d: int, modulus: int, seed: int) -> dict:
    layer, secret = hard_layer("rounding", n_heads=HEADS, d=d, modulus=modulus, seed=seed)
    examples = examples_of(layer, EXAMPLES[attack], seed)
    began = time.monotonic()
    if attack == "search":
        found = break_rounding_by_search(examples, secret.projection, HEADS, modulus)
    else:
        found = break_rounding_by_integers(
            examples, secret.projection, HEADS, modulus, seconds=LIMIT
        )
    seconds = time.monotonic() - began
    fresh = sample_inputs("boolean", 2000, 2, d, seed=seed + 1000)
    broken = False
    if found.weights is not None:
        guess = Secret("rounding", found.weights, secret.projection, HEADS, modulus)
        broken = bool(np.mean(guess.signs(fresh) == secret.signs(fresh)) > 0.99)
    return {"broken": broken, "work": found.work, "taken": seconds}


def with_rounding(attack: str, dimension: int, modulus: int, seed: int) -> dict:
    layer, secret = hard_layer("lwr", dimension=dimension, modulus=modulus, seed=seed)
    eliminates = attack == "elimination"
    n = math.ceil(2.5 * count_products(dimension, modulus)) + SPARE if eliminates else ENOUGH
    examples = examples_of(layer, n, seed)
    began = time.monotonic()
    if eliminates:
        found = break_lwr_by_elimination(examples, secret.projection, modulus)
    elif attack == "integers":
        found = break_lwr_by_integers(examples, secret.projection, modulus, seconds=LIMIT)
    else:
        found = break_lwr_by_search(examples, secret.projection, modulus)
    seconds = time.monotonic() - began
    broken = found.weights is not None and np.array_equal(found.weights, secret.weights)
    shape = {"n_heads": layer.n_heads, "d": layer.d, "examples": n}
    return {"broken": broken, "work": found.work, "taken": seconds} | shape


def main() -> None:
    options = study(__doc__ or "", "hard_attacks", "0:10", "").parse_args()
    ledger, running = opened(options)
    if not running:
        return
    for seed in options.seeds:
        for m, d in PARITY:
            for multiple, noise in [(m_, 0.0) for m_ in MULTIPLES] + [(4.0, s) for s in NOISES]:
                key = {"part": "parity", "n_heads": m, "d": d, "multiple": multiple, "noise": noise}
                ledger.run(
                    key | {"seed": seed},
                    lambda k=key, s=seed: eliminated(*list(k.values())[1:], s),
                )
        for attack, (d, moduli) in ATTACKS.items():
            for modulus in moduli:
                key = {"part": "rounding", "attack": attack, "d": d, "modulus": modulus}
                row = ledger.run(
                    key | {"seed": seed}, lambda k=key, s=seed: rounded(*list(k.values())[1:], s)
                )
                console.print(key | {name: row.get(name) for name in ("broken", "work", "taken")})
        for attack, sizes in LWR.items():
            for n, modulus in sizes:
                key = {"part": "lwr", "attack": attack, "dimension": n, "modulus": modulus}
                row = ledger.run(
                    key | {"seed": seed},
                    lambda k=key, s=seed: with_rounding(*list(k.values())[1:], s),
                )
                console.print(key | {name: row.get(name) for name in ("broken", "work", "taken")})


if __name__ == "__main__":
    main()
