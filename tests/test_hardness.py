"""Hard layers: closed forms, exact correlations, attacks, and how their cost is told."""

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import mhalearn as mha
from mhalearn.cli import run
from mhalearn.hardness import (
    LwrSecret,
    QueryOracle,
    curve,
    hard_layer,
    learn_by_queries,
    load_secret,
)
from mhalearn.hardness.attacks import (
    break_lwr_by_elimination,
    break_lwr_by_integers,
    break_lwr_by_search,
    break_parity,
    break_rounding_by_integers,
    break_rounding_by_search,
    count_products,
    eliminate,
    read_bits,
)
from mhalearn.hardness.curve import (
    Cell,
    Cost,
    Line,
    growth,
    measure_cost,
    read_coordinates,
    record_of,
    summarise,
)
from mhalearn.hardness.dimension import by_degree, generic_dimension, parity_dimension, walsh
from mhalearn.hardness.families import sharp_layer
from mhalearn.hardness.lwr import count_heads, spread
from mhalearn.hardness.plot import draw_curve
from mhalearn.hardness.queries import _correlation, cube
from mhalearn.hardness.secret import is_shown

FAMILIES = ("parity", "rounding")


def inputs(n, d, seed=0):
    return mha.sample_inputs("boolean", n, 2, d, seed=seed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("heads", "d"), [(2, 5), (4, 9), (6, 12)])
@pytest.mark.parametrize("sharpness", [4.0, 12.0])
def test_the_layer_is_its_closed_form_up_to_the_sharpness(family, heads, d, sharpness):
    layer, secret = hard_layer(family, n_heads=heads, d=d, sharpness=sharpness, seed=heads)
    x = inputs(3000, d)
    off = np.linalg.norm(layer(x) - secret.labels(x), axis=2)
    size = np.linalg.norm((x[:, 1] - x[:, 0]).astype(float) @ secret.projection, axis=1)
    assert np.all(off <= 4 * math.exp(-sharpness) * size[:, None] + 1e-12)
    assert np.abs(secret.labels(x)).max() > 1  # there is something to be near to


@pytest.mark.parametrize("heads", [2, 4, 6])
def test_m_heads_carry_a_parity_of_m_bits(heads):
    layer, secret = hard_layer("parity", n_heads=heads, d=heads + 2, sharpness=20.0)
    assert len(secret.coordinates) == heads
    assert 0 not in secret.coordinates
    x = inputs(500, heads + 2)
    b = x[:, 0] * x[:, 1]
    chi = b[:, list(secret.coordinates)].prod(axis=1)
    along = (x[:, 1] - x[:, 0]).astype(float) @ secret.projection
    expected = ((b[:, 0] == -1) * (chi - 1.0))[:, None] * along
    assert np.allclose(layer(x)[:, 0], expected, atol=1e-6)
    assert np.allclose(layer(x)[:, 1], -expected, atol=1e-6)


@pytest.mark.parametrize("modulus", [2, 4, 8, 12])
def test_the_rounding_label_is_the_square_wave_of_the_secret_inner_product(modulus):
    layer, secret = hard_layer("rounding", n_heads=4, d=9, modulus=modulus, sharpness=20.0)
    x = inputs(2000, 9)
    h = ((x[:, 0] * x[:, 1]) < 0) @ secret.weights
    wave = np.where((h % modulus) < modulus // 2, 1, -1)  # periodic everywhere: no cap is met
    assert np.array_equal(secret.signs(x), wave)
    assert np.abs(layer(x) - secret.labels(x)).max() < 1e-6
    assert secret.weights[0] == 0
    assert 0 < secret.weights.sum() <= 5 * modulus // 2 - 1


def rounded(a, secret):
    """floor(2 <a, s> / q) mod 2, in Python's own integers."""
    inner = [sum(int(u) * int(v) for u, v in zip(row, secret.vector, strict=True)) for row in a]
    return np.array([2 * h // secret.modulus % 2 for h in inner])


@pytest.mark.parametrize("sharpness", [None, 1.1])
@pytest.mark.parametrize(("n", "q"), [(1, 2), (2, 2), (5, 2), (3, 4), (2, 8), (3, 8), (2, 16)])
def test_an_lwr_layer_shows_the_rounding_of_every_integer_vector(n, q, sharpness):
    """All of Z_q^n, down to the softest layers that are allowed."""
    for seed in range(3):
        layer, secret = hard_layer("lwr", dimension=n, modulus=q, seed=seed, sharpness=sharpness)
        a = np.array(list(itertools.product(range(q), repeat=n)))
        x = secret.encode(a, seed=seed)
        assert np.array_equal(secret.read(x, layer(x)), rounded(a, secret))
        assert rounded(a, secret).mean() == 0.5  # an odd entry makes <a, s> uniform


@pytest.mark.parametrize(("n", "q"), [(6, 64), (4, 4096)])
def test_a_large_lwr_layer_shows_the_rounding(n, q):
    layer, secret = hard_layer("lwr", dimension=n, modulus=q, seed=3)
    a = np.random.default_rng(0).integers(-(10**6), 10**6, (500, n))
    x = secret.encode(a)
    assert secret.vector.shape == (n,)
    assert secret.modulus == q
    assert np.array_equal(secret.read(x, layer(x)), rounded(a, secret))
    assert np.abs(layer(x) - secret.labels(x)).max() < 1e-11
    assert np.array_equal(x, secret.encode(a % q))  # integers are taken modulo q
    assert np.array_equal(x, secret.encode((a % q).astype(np.uint64) + np.uint64(q)))


def test_softer_than_log_3_a_bit_is_misread():
    _, secret = hard_layer("lwr", dimension=2, modulus=2)
    a = np.array(list(itertools.product(range(2), repeat=2)))
    x = secret.encode(a)
    wrong = [
        np.sum(secret.read(x, sharp_layer(secret, s)(x)) != rounded(a, secret))
        for s in (math.log(3) - 0.01, math.log(3) + 0.01)
    ]
    assert wrong[0] > 0
    assert wrong[1] == 0


def test_the_number_of_lwr_heads_is_the_least_that_any_secret_needs():
    for n, q in itertools.product((1, 2, 3), (2, 4, 8, 16)):
        heads = count_heads(n, q)
        largest = max(spread(np.array(s), q).sum() for s in itertools.product(range(q), repeat=n))
        assert heads % 2 == 0
        assert largest <= (heads + 1) * q // 2 - 1
        assert heads == 2 or largest > (heads - 1) * q // 2 - 1
        assert {hard_layer("lwr", dimension=n, modulus=q, seed=s)[0].n_heads for s in range(5)} == {
            heads
        }


def test_encoded_integers_make_every_input_that_shows_its_bit_as_likely():
    """Each a has 2^d inputs, one a first token: together all inputs of b_0 = -1, each once."""
    _, secret = hard_layer("lwr", dimension=1, modulus=4)
    found = set()
    for a, seed in itertools.product(range(4), range(200)):
        x = secret.encode([[a]], seed=seed)
        assert np.array_equal(is_shown(x), [1])
        found.add((a, x.tobytes()))
    assert len(found) == 4 * 2**3
    assert len({x for _, x in found}) == 4 * 2**3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s, x: s.encode(np.zeros((3, 4), int)), "the secret has dimension 2"),
        (lambda s, x: s.encode(np.zeros((3, 2))), "taken modulo 8"),
        (lambda s, x: s.encode(np.zeros(2, int)), r"pass a\[None\]"),
        (lambda s, x: s.read(x, np.zeros((1, 2, 7))), "pass labels of X"),
        (lambda s, x: s.read(x[:, :, :3], x), "X has 3 features"),
        (lambda s, x: s.read(np.ones_like(x), x), "b_0 = [+]1"),
        (lambda s, x: dataclasses.replace(s, modulus=6), "power of two"),
        (lambda s, x: dataclasses.replace(s, weights=s.weights[::-1] * 0 + [0, 1, 1, 1, 1, 1, 1]),
         "these are not"),
        (lambda s, x: dataclasses.replace(s, family="parity"), "family lwr"),
    ],
)  # fmt: skip
def test_what_an_lwr_secret_cannot_take_is_refused_in_a_line(call, said):
    _, secret = hard_layer("lwr", dimension=2)
    with pytest.raises(ValueError, match=said):
        call(secret, secret.encode(np.zeros((3, 2), int)))


def test_without_the_secret_half_of_the_energy_of_an_lwr_layer_is_left():
    layer, secret = hard_layer("lwr", dimension=4, modulus=8)
    x = inputs(20_000, layer.d)
    labels = layer(x)
    assert np.sum((secret.free_part(x) - labels) ** 2) == pytest.approx(
        np.sum(labels**2) / 2, rel=0.03
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_conditions_that_are_violated_are_named(family):
    layer, _ = hard_layer(family, n_heads=4, d=12)
    broken = {item.name for item in mha.check_nondegeneracy(layer, k=2).items if not item.ok}
    assert {"size of the sum of W", "effective rank of Theta", "density of Theta"} <= broken
    generic = {
        item.name
        for item in mha.check_nondegeneracy(mha.random_layer(4, 12), k=2).items
        if not item.ok
    }
    assert not broken & generic


def test_without_the_secret_half_of_the_energy_is_left():
    layer, secret = hard_layer("parity", n_heads=4, d=12)
    x = inputs(20_000, 12)
    labels = layer(x)
    left = np.sum((secret.free_part(x) - labels) ** 2) / np.sum(labels**2)
    assert left == pytest.approx(0.5, abs=0.02)


def test_mix_leads_from_hard_to_random():
    hard, _ = hard_layer("parity", n_heads=2, d=6, seed=3)
    half, _ = hard_layer("parity", n_heads=2, d=6, seed=3, mix=0.5)
    end, _ = hard_layer("parity", n_heads=2, d=6, seed=3, mix=1.0)
    assert np.allclose(half.theta, (hard.theta + end.theta) / 2)
    assert np.array_equal(end.theta, mha.random_layer(2, 6, seed=3).theta)


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("parity", {"n_heads": 3, "d": 8}, "even"),
        ("parity", {"n_heads": 8, "d": 8}, "at least 9"),
        ("parity", {"n_heads": 2, "d": 8, "modulus": 4}, "leave it out"),
        ("rounding", {"n_heads": 2, "d": 8, "modulus": 3}, "even"),
        ("lattice", {"n_heads": 2, "d": 8}, "parity"),
        ("parity", {"n_heads": 2, "d": 8, "sharpness": 0.0}, "positive"),
        ("parity", {"n_heads": 2, "d": 8, "sharpness": math.nan}, "positive"),
        ("rounding", {"n_heads": 2, "d": 8, "sharpness": 1e308}, "up to 1000"),
        ("parity", {"n_heads": 2, "d": 8, "mix": 1.5}, "from 0"),
        ("rounding", {"n_heads": 2, "d": 8, "modulus": 10**12}, "at most 4096"),
        ("rounding", {"n_heads": 2, "d": 8, "dimension": 4}, "only 'lwr' has one"),
        ("parity", {"n_heads": 2}, "d=None"),
        ("lwr", {}, "dimension=None"),
        ("lwr", {"dimension": 0}, "at least 1"),
        ("lwr", {"dimension": 4, "modulus": 1}, "at least 2"),
        ("lwr", {"dimension": 4, "modulus": 12}, "power of two"),
        ("lwr", {"dimension": 4, "modulus": 8192}, "at most 4096"),
        ("lwr", {"dimension": 10**6, "modulus": 256}, "GiB"),
        ("lwr", {"dimension": 4, "n_heads": 18}, "leave it out"),
        ("lwr", {"dimension": 4, "d": 13}, "leave it out"),
        ("lwr", {"dimension": 4, "mix": 0.5}, "leave it out"),
        ("lwr", {"dimension": 4, "sharpness": 1.0}, "above log 3"),
    ],
)
def test_bad_recipes_are_refused_in_a_line(family, options, said):
    with pytest.raises(ValueError, match=said):
        hard_layer(family, **options)


WRONG_TYPES = """
import numpy as np
from mhalearn import random_layer
from mhalearn.hardness import QueryOracle, hard_layer
from mhalearn.hardness.queries import cube

_, secret = hard_layer("parity", n_heads=2, d=4)
x, y = cube(3), np.zeros((64, 2, 3))
for call in (
    lambda: hard_layer("parity", n_heads=2, d=8, sharpness="8"),
    lambda: hard_layer("parity", n_heads=2, d=8, sharpness=[8.0]),
    lambda: hard_layer("parity", n_heads=2, d=8, sharpness=10**400),
    lambda: hard_layer("parity", n_heads=2, d=8, mix="a"),
    lambda: random_layer(n_heads=2, d=8, scale="2"),
    lambda: secret.labels(np.full((3, 2, 4), "a")),
    lambda: type(secret)("parity", secret.weights, secret.projection, "2", 2),
    lambda: type(secret)("parity", secret.weights, [["a"]], 2, 2),
    lambda: QueryOracle(x, y, "a"),
    lambda: QueryOracle(None, y, 0.1),
    lambda: cube(3.5),
    lambda: cube("3"),
    lambda: hard_layer("lwr", dimension="4"),
    lambda: hard_layer("lwr", dimension=4, sharpness="40"),
    lambda: hard_layer("lwr", dimension=4)[1].encode([["a"] * 4]),
    lambda: QueryOracle(x, y, vstat="a"),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""


def test_wrong_types_are_refused_in_a_line():
    """As users meet it, in a process without the type checker of the tests."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", WRONG_TYPES]
    said = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    names = ["sharpness"] * 3 + ["mix", "scale", "X", "n_heads", "projection", "tolerance", "X"]
    lines = said.stdout.splitlines()
    assert [re.match(r"\w+", line)[0] for line in lines] == [
        *names,
        "d",
        "d",
        "dimension",
        "sharpness",
        "a",
        "vstat",
    ]
    assert all(": pass" in line or ": expected" in line for line in lines)


def test_secrets_round_trip_and_other_files_are_refused(tmp_path):
    layer, secret = hard_layer("rounding", n_heads=4, d=8)
    path = tmp_path / "secret.safetensors"
    secret.save(path)
    again = load_secret(path)
    assert np.array_equal(again.weights, secret.weights)
    assert np.array_equal(again.projection, secret.projection)
    assert (again.family, again.n_heads, again.modulus) == ("rounding", 4, 8)
    layer.save(tmp_path / "layer.safetensors")
    with pytest.raises(ValueError, match="layer"):
        load_secret(tmp_path / "layer.safetensors")
    with pytest.raises(ValueError, match="periodic"):
        dataclasses.replace(secret, weights=20 * secret.weights)
    with pytest.raises(ValueError, match="first is 0"):
        dataclasses.replace(secret, weights=secret.weights + 1)
    with pytest.raises(ValueError, match="two tokens"):
        secret.labels(np.ones((3, 5, 8)))
    for ask in (secret.labels, secret.free_part, secret.signs):
        with pytest.raises(ValueError, match="X has 5 features a token, the layer has d = 8"):
            ask(np.ones((3, 2, 5)))
    with pytest.raises(ValueError, match="pass d integers"):
        dataclasses.replace(secret, weights=np.zeros(0, int), projection=np.zeros((0, 0)))


def test_lwr_secrets_round_trip_with_what_they_can_do(tmp_path):
    layer, secret = hard_layer("lwr", dimension=3, modulus=4)
    secret.save(tmp_path / "secret.safetensors")
    again = load_secret(tmp_path / "secret.safetensors")
    assert isinstance(again, LwrSecret)
    assert np.array_equal(again.vector, secret.vector)
    x = again.encode([[1, 2, 3]])
    assert np.array_equal(again.read(x, layer(x)), secret.read(x, layer(x)))


def test_the_transform_is_the_sum_over_all_inputs():
    values = np.random.default_rng(0).normal(size=(16, 2))
    bits = 1 - 2 * ((np.arange(16)[:, None] >> np.arange(4)) & 1)
    for chosen in itertools.product((0, 1), repeat=4):
        product = bits[:, np.array(chosen, bool)].prod(axis=1)
        index = sum(c << a for a, c in enumerate(chosen))
        assert np.allclose(walsh(values)[index], (product[:, None] * values).mean(axis=0))


@pytest.mark.parametrize(("heads", "d"), [(2, 5), (4, 6)])
def test_correlations_with_few_bits_vanish(heads, d):
    hard = parity_dimension(heads, d, sharpness=20.0)
    assert max(hard.by_degree[: heads - 1]) < 1e-7
    assert hard.by_degree[heads - 1] > 0.05
    assert hard.largest < 1e-7
    assert hard.size == math.comb(d - 1, heads) == hard.dimension
    generic = generic_dimension(heads, d, hard.size)
    assert min(generic.by_degree[:2]) > 0.05
    assert generic.largest > 0.05


def test_a_correlation_is_found_where_it_is():
    x = cube(3)
    b = x[:, 0] * x[:, 1]
    labels = (b[:, 0] * b[:, 2] * x[:, 0, 1]).astype(float)[:, None]
    assert by_degree(labels) == pytest.approx((0, 0, 1, 0), abs=1e-12)


def test_queries_find_the_secret_and_their_number_grows_with_the_heads():
    asked = {}
    for heads in (2, 4):
        layer, secret = hard_layer("parity", n_heads=heads, d=6, seed=1)
        x = cube(6)
        oracle = QueryOracle(x, layer(x), tolerance=0.1)
        assert learn_by_queries(oracle, secret) == secret.coordinates
        asked[heads] = oracle.asked
    assert asked[4] > 5 * asked[2]
    oracle = QueryOracle(x, layer(x), tolerance=0.1)
    assert learn_by_queries(oracle, secret, max_queries=20) is None
    assert oracle.asked == 20
    assert learn_by_queries(QueryOracle(x, layer(x), tolerance=0.3), secret) is None


def test_the_oracle_keeps_to_its_tolerance_and_its_range():
    x = cube(3)
    oracle = QueryOracle(x, np.zeros((64, 2, 3)), tolerance=0.05)
    means = np.linspace(-1, 1, 41)
    answers = [oracle.ask(lambda x, y, m=m: np.full(len(x), m)) for m in means]
    off = np.abs(np.array(answers) - means)
    assert 0.04 < off.max() <= 0.05 + 1e-12
    with pytest.raises(ValueError, match="as many"):
        QueryOracle(x, np.zeros((3, 2, 3)), tolerance=0.05)
    with pytest.raises(ValueError, match="scale it"):
        oracle.ask(lambda x, y: np.full(len(x), 2.0))
    with pytest.raises(ValueError, match="one number an example"):
        oracle.ask(lambda x, y: np.ones(3))
    with pytest.raises(ValueError, match="tolerance"):
        QueryOracle(x, np.zeros((64, 2, 3)), tolerance=-1.0)
    _, family = hard_layer("parity", n_heads=2, d=4)
    with pytest.raises(ValueError, match="the oracle maps 3 features to 3, the family 4 to 4"):
        learn_by_queries(oracle, family)


def all_queries(d, secret):
    """Correlations of the label with every product of bits; a nonlinear one; one of inputs only."""
    correlations = [
        _correlation(secret, entry, others)
        for size in range(d - 1)
        for others in itertools.combinations(range(1, d), size)
        for entry in range(1, d)
        if entry not in others
    ]
    return [
        *correlations,
        *(lambda x, y, q=query: 0.6 * q(x, y) for query in correlations),
        lambda x, y: (np.abs(y[:, 0]).max(axis=1) > 0.5).astype(float),
        lambda x, y: (x[:, 0, 0] + 1) / 2.0,
    ]


def parities(heads, d):
    """Two parities of one projection, of different sets of bits."""
    _, first = hard_layer("parity", n_heads=heads, d=d, seed=0)
    other = np.concatenate([[0], first.weights[:0:-1]])
    assert not np.array_equal(other, first.weights)
    return first, dataclasses.replace(first, weights=other)


def test_adversarial_answers_are_legal_and_hide_the_secret_up_to_the_tolerance():
    x = cube(5)
    told = []
    for secret in parities(2, 5):
        y, free = secret.labels(x), secret.reference_labels(x)
        queries = all_queries(5, secret)
        coarse = QueryOracle(x, y, 0.3, answers="adversarial", reference=free)
        told.append([coarse.ask(query) for query in queries])
        fine = QueryOracle(x, y, 0.1, answers="adversarial", reference=free)
        truth = np.array([QueryOracle(x, y, 0.0).ask(query) for query in queries])
        without = np.array([np.mean([query(x, part).mean() for part in free]) for query in queries])
        assert np.all(np.abs(told[-1] - truth) <= 0.3 + 1e-12)
        answers = np.array([fine.ask(query) for query in queries])
        near = np.abs(truth - without) <= 0.1
        assert np.array_equal(answers[near], without[near])
        assert 0 < np.sum(~near) < len(queries)
        assert np.all(np.abs(answers - truth) <= 0.1 + 1e-12)
        assert (fine.asked, fine.withheld) == (len(queries), near.sum())
        assert learn_by_queries(fine, secret) == secret.coordinates
        for t in (4, 20, 40, 200):
            vague = QueryOracle(x, y, vstat=t, answers="adversarial", reference=free)
            means = (truth + 1) / 2
            off = np.array([vague.ask_signed(query) for query in queries]) - truth
            allowed = np.maximum(1 / t, np.sqrt(means * (1 - means) / t))
            assert np.all(np.abs(off) <= 2 * allowed + 1e-9)
            assert (vague.withheld == len(queries)) == (t == 4)
    assert told[0] == told[1]
    rounded = [QueryOracle(x, s.labels(x), 0.1) for s in parities(2, 5)]
    first, second = ([oracle.ask(query) for query in queries] for oracle in rounded)
    assert first != second


def test_the_reference_is_a_coin_and_not_the_mean_label():
    """Of a query that is not linear in the label the two differ."""
    _, secret = hard_layer("parity", n_heads=2, d=4)
    x = cube(4)
    reference = secret.reference_labels(x)
    assert np.allclose(reference.mean(axis=0), secret.free_part(x))
    oracle = QueryOracle(x, secret.labels(x), 0.01, answers="adversarial", reference=reference)
    assert oracle.ask(lambda x, y: (np.abs(y).max(axis=(1, 2)) > 0) * 1.0) == 0.25


@pytest.mark.parametrize("t", [1, 4, 30, 1000])
def test_vstat_tells_a_mean_as_t_examples_would(t):
    oracle = QueryOracle(cube(3), np.zeros((64, 2, 3)), vstat=t)
    means = np.linspace(0, 1, 2001)
    answers = np.array([oracle.ask(lambda x, y, p=p: np.full(len(x), p)) for p in means])
    allowed = np.maximum(1 / t, np.sqrt(means * (1 - means) / t))
    off = np.abs(answers - means)
    assert np.all(off <= allowed + 1e-9)
    assert np.all((answers >= 0) & (answers <= 1))
    assert len(set(answers)) < 4 * math.sqrt(t)  # a grid: asking again tells no more
    if t >= 30:
        assert off[1000 - 100 : 1000 + 100].max() > 0.5 * allowed[1000]
        assert off[:5].max() < off[900:1100].max()  # rare events are told more precisely
    with pytest.raises(ValueError, match=r"leaves \[0, 1\]"):
        oracle.ask(lambda x, y: np.full(len(x), -0.5))


@pytest.mark.parametrize("answers", ["rounded", "adversarial"])
def test_queries_of_vstat_find_the_secret_if_t_is_large_enough(answers):
    _, secret = hard_layer("parity", n_heads=2, d=5, seed=1)
    x = cube(5)
    reference = secret.reference_labels(x) if answers == "adversarial" else None
    found = {
        t: learn_by_queries(
            QueryOracle(x, secret.labels(x), vstat=t, answers=answers, reference=reference), secret
        )
        for t in (50, 100)
    }
    assert found == {50: None, 100: secret.coordinates}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "tolerance=None"),
        ({"tolerance": 0.1, "vstat": 100}, "leave one out"),
        ({"vstat": 0}, "vstat=0"),
        ({"tolerance": 0.1, "answers": "kind"}, "'adversarial'"),
        ({"tolerance": 0.1, "answers": "adversarial"}, "reference"),
        ({"tolerance": 0.1, "reference": np.zeros((1, 64, 2, 3))}, "leave both out"),
        (
            {"vstat": 9, "answers": "adversarial", "reference": np.zeros((2, 64, 2, 4))},
            "stack of labels",
        ),
    ],
)
def test_oracles_that_conflict_with_themselves_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        QueryOracle(cube(3), np.zeros((64, 2, 3)), **options)


@pytest.mark.parametrize("d", [0, 11])
def test_only_small_cubes_are_listed(d):
    with pytest.raises(ValueError, match="d="):
        cube(d)


def test_elimination_agrees_with_trying_all():
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows = rng.integers(0, 2, (rng.integers(3, 8), 4)).astype(np.uint8)
        right = rng.integers(0, 2, len(rows)).astype(np.uint8)
        all_ = np.array(list(itertools.product((0, 1), repeat=4)), np.uint8)
        solutions = all_[np.all((all_ @ rows.T) % 2 == right, axis=1)]
        found = eliminate(rows, right)
        assert (found is not None) == (len(solutions) == 1)
        if found is not None:
            assert np.array_equal(found, solutions[0])


def with_wrong_bits(d, n, share, seed):
    """Examples of a parity, some of which show the other bit."""
    layer, secret = hard_layer("parity", n_heads=4, d=d, seed=seed)
    x = inputs(n, d, seed)
    labels = layer(x)
    wrong = np.random.default_rng(seed).random(n) < share
    labels[wrong] = 2 * secret.free_part(x[wrong]) - labels[wrong]
    return mha.Examples(x, labels), secret


def test_elimination_breaks_a_parity():
    examples, secret = with_wrong_bits(24, 96, 0.0, 0)
    found = break_parity(examples, secret.projection)
    assert np.array_equal(found.weights, secret.weights)
    assert found.work == 1


def test_subsets_break_a_parity_of_which_some_bits_are_wrong():
    examples, secret = with_wrong_bits(12, 200, 0.05, 1)
    assert eliminate(*read_bits(examples, secret.projection)) is None
    found = break_parity(examples, secret.projection, tries=100)
    assert np.array_equal(found.weights, secret.weights)


def test_no_secret_is_found_in_random_bits():
    for seed in range(20):
        examples, secret = with_wrong_bits(12, 60, 0.5, seed)
        assert break_parity(examples, secret.projection, tries=100, seed=seed).weights is None


@pytest.mark.parametrize("attack", [break_rounding_by_search, break_rounding_by_integers])
def test_small_roundings_are_broken(attack):
    layer, secret = hard_layer("rounding", n_heads=4, d=7, modulus=4, seed=2)
    x = inputs(300, 7)
    found = attack(mha.Examples(x, layer(x)), secret.projection, 4, 4)
    fresh = inputs(1000, 7, seed=9)
    guess = mha.hardness.Secret("rounding", found.weights, secret.projection, 4, 4)
    assert np.array_equal(guess.signs(fresh), secret.signs(fresh))


@pytest.mark.parametrize(
    ("attack", "n", "q", "examples"),
    [
        (break_lwr_by_elimination, 12, 2, 100),
        (break_lwr_by_elimination, 10, 4, 250),
        (break_lwr_by_elimination, 5, 8, 350),
        (break_lwr_by_elimination, 3, 16, 450),
        (break_lwr_by_search, 3, 8, 100),
        (break_lwr_by_integers, 3, 8, 100),
    ],
)
def test_small_secrets_of_learning_with_rounding_are_broken(attack, n, q, examples):
    layer, secret = hard_layer("lwr", dimension=n, modulus=q, seed=4)
    x = inputs(examples, layer.d)
    found = attack(mha.Examples(x, layer(x)), secret.projection, q)
    assert np.array_equal(found.weights, secret.weights)


def test_elimination_of_too_few_or_wrong_bits_says_nothing():
    layer, secret = hard_layer("lwr", dimension=5, modulus=4)
    x = inputs(200, layer.d)
    labels = layer(x)
    few = mha.Examples(x[:30], labels[:30])
    assert break_lwr_by_elimination(few, secret.projection, 4).weights is None
    coins = np.random.default_rng(0).integers(0, 2, len(x))
    other = mha.Examples(x, 2.0 * coins[:, None, None] * secret.free_part(x))
    assert break_lwr_by_elimination(other, secret.projection, 4).weights is None


def test_the_unknowns_of_elimination_are_the_products_that_can_occur():
    for n, q in ((3, 2), (4, 4), (2, 8), (3, 8)):
        places = [2**bit for bit in range(q.bit_length() - 1)] * n
        sums = [sum(c) for r in range(len(places) + 1) for c in itertools.combinations(places, r)]
        assert count_products(n, q) == sum(0 < total <= q // 2 for total in sums)


def test_a_layer_tells_its_secret_by_what_changes_its_outputs():
    layer, secret = hard_layer("parity", n_heads=4, d=10)
    assert read_coordinates(layer, 4) == secret.coordinates
    other, _ = hard_layer("parity", n_heads=4, d=10, seed=1)
    assert read_coordinates(other, 4) != secret.coordinates


def test_a_cost_is_what_it_takes_to_learn_the_function():
    cost = measure_cost(Cell("generic", 2, 4, "newton"), seed=0, budget=60.0, ratios=(8.0,))
    assert cost.learned
    assert cost.knows_secret is None
    assert cost.examples == 64
    assert cost.relative_mse < 1e-20
    assert cost.seconds > 0
    with pytest.raises(ValueError, match="at least one"):
        measure_cost(Cell("generic", 2, 4, "newton"), seed=0, budget=60.0, ratios=())


@pytest.mark.parametrize("learns_at", [128, math.inf])
def test_examples_grow_until_the_layer_is_learned(monkeypatch, learns_at):
    truth, _ = hard_layer("parity", n_heads=2, d=4, seed=3)
    other = mha.random_layer(n_heads=2, d=4)

    def learn(cell, examples, seed, budget):
        found = truth if examples.n >= learns_at else other
        return found, mha.Outcome.FITTED

    monkeypatch.setattr(curve, "_learn", learn)
    cost = measure_cost(Cell("parity", 2, 4, "adam"), seed=3, budget=1.0, ratios=(8.0, 16.0, 32.0))
    assert cost.examples == min(learns_at, 256)
    assert cost.learned == cost.knows_secret == (learns_at < 256)


def test_costs_that_were_not_paid_are_lower_bounds():
    def records(heads, learned, seconds):
        cell = Cell("parity", heads, 8, "adam")
        costs = [Cost(i, i < learned, True, 100 + i, seconds, 0.0, "") for i in range(4)]
        return [record_of(cell, 5.0, cost) for cost in costs]

    lines = summarise([*records(2, 4, 1.0), *records(4, 2, 8.0), *records(6, 0, 10.0)])
    assert [line.learned for line in lines] == [4, 2, 0]
    unlikely = 1 - 0.05**0.25
    assert [line.seconds for line in lines] == pytest.approx([1.0, 16.0, 10.0 / unlikely])
    assert [line.at_least for line in lines] == [False, False, True]
    assert lines[2].examples is None
    assert growth(summarise([*records(2, 0, 1.0), *records(4, 0, 1.0)])) == []
    assert growth(summarise([*records(2, 0, 1.0), *records(4, 4, 1.0)])) == []


@pytest.mark.parametrize(
    ("costs", "factor"),
    [
        ([(2, 1.0, False), (4, 4.0, False), (6, 16.0, False)], 2.0),
        ([(2, 1.0, False), (4, 4.0, False), (6, 5.0, True)], 2.0),  # says no more than the others
        ([(2, 1.0, False), (4, 9.0, True), (6, 9.0, True)], 3.0),  # the flattest line that fits
        ([(2, 1.0, False), (4, 2.0, True), (6, 16.0, True)], 2.0),
        ([(2, 8.0, False), (4, 2.0, True)], 0.5),
    ],
)
def test_growth_is_that_of_known_costs_or_the_flattest_that_bounds_allow(costs, factor):
    lines = [
        Line(Cell("parity", heads, 8, "adam"), int(not bound), 1, seconds, None)
        for heads, seconds, bound in costs
    ]
    (rate,) = growth(lines)
    assert rate.factor == pytest.approx(factor, rel=1e-3)
    decided = costs[-1][2] and costs[-1][1] != 5.0
    assert rate.at_least == decided


def test_costs_are_drawn_with_the_line_of_the_trivial_predictor(tmp_path):
    cells = [
        Cell(family, m, d, "adam")
        for family in ("parity", "generic")
        for m in (2, 4)
        for d in (8, 16)
    ]
    records = [
        record_of(cell, 5.0, Cost(0, cell.n_heads == 2, True, 100, 2.0, 0.1, "")) for cell in cells
    ]
    path = tmp_path / "curve.svg"
    draw_curve([*records, {**records[0], "seed": 1, "relative_mse": 0.0}], path)
    text = path.read_text()
    assert "<svg" in text
    assert text.count("stroke-dasharray: 6,3") >= 2  # one in each lower panel


def test_the_command_writes_layer_secret_and_examples(tmp_path, capsys):
    for family in FAMILIES:
        out = tmp_path / family
        arguments = ["--heads", "4", "--dim", "9", "--examples", "50", "--out", str(out)]
        assert run(["hard", family, *arguments, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        secret = load_secret(out / "secret.safetensors")
        assert told["weights"] == secret.weights.tolist()
        x, y, _ = mha.load_examples(out / "examples.safetensors").arrays()
        assert np.abs(y - secret.labels(x)).max() < 0.02
        assert np.array_equal(mha.load_layer(out / "layer.safetensors")(x), y)
    sizes = ["--dimension", "3", "--modulus", "4", "--examples", "50"]
    assert run(["hard", "lwr", *sizes, "--out", str(tmp_path / "lwr"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    secret = load_secret(tmp_path / "lwr" / "secret.safetensors")
    assert told["vector"] == secret.vector.tolist()
    x, y, _ = mha.load_examples(tmp_path / "lwr" / "examples.safetensors").arrays()
    shown = is_shown(x) == 1
    assert 10 < shown.sum() < 40
    assert np.array_equal(1 - 2 * secret.read(x[shown], y[shown]), secret.signs(x[shown]))
    assert run(["hard", "lwr", *sizes, "--out", str(tmp_path / "lwr")]) == 0
    assert f"{told['vector']} modulo 4" in capsys.readouterr().out
    assert run(["hard", "lwr", "--dimension", "99999", "--out", str(tmp_path / "large")]) == 2
    assert "GiB" in capsys.readouterr().err
    assert run(["hard", "parity", "--heads", "3", "--out", str(tmp_path)]) == 2
    assert "even" in capsys.readouterr().err
    assert run(["hard", "curve", "--heads", "3"]) == 2
    assert run(["hard", "curve", "--methods", "guess"]) == 2
    assert run(["hard", "curve", "--heads", "two"]) == 2


@pytest.mark.slow
def test_the_cost_of_parities_grows_and_that_of_random_layers_hardly(tmp_path, capsys):
    out = tmp_path / "curve.json"
    options = ["--heads", "2,4", "--dims", "8", "--methods", "lbfgs", "--secrets", "2"]
    assert run(["hard", "curve", *options, "--budget", "10", "--out", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    learned = {
        (family, heads): sum(
            run["learned"] for run in runs if (run["family"], run["n_heads"]) == (family, heads)
        )
        for family in ("parity", "generic")
        for heads in (2, 4)
    }
    assert learned["generic", 2] == learned["generic", 4] == 2
    assert learned["parity", 4] == 0
    assert "generic" in capsys.readouterr().out
