"""Sequences of different lengths, tokens of a language, and steps that eliminate W."""

import jax
import numpy as np
import pytest
from oracles import narrow_layer

from benchmarks.recorded.recording import pad, split_tokens
from benchmarks.recorded.wordpiece import WordPiece
from mhalearn import AttentionLayer, compare
from mhalearn._runtime.programs import in_float64
from mhalearn.data import Examples
from mhalearn.layer.batches import pack_sequences
from mhalearn.layer.factored import Factored
from mhalearn.run.run import Run
from mhalearn.solvers.gauss_newton import loss_of
from mhalearn.solvers.polish import may_eliminate, minimise
from mhalearn.solvers.scaled_problem import make_problem

D, H, M, K = 16, 2, 3, 12


def zipf_examples(layer, n, seed=0, longest=K):
    """Sentences of a vocabulary with a Zipf law, with positions, of 3 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    words = rng.normal(size=(60, layer.d)) * np.exp(0.5 * rng.normal(size=layer.d))
    law = 1 / np.arange(1, 61)
    x = words[rng.choice(60, size=(n, longest), p=law / law.sum())]
    x = x + 0.3 * rng.normal(size=(longest, layer.d))
    lengths = rng.integers(3, longest + 1, n)
    return Examples(x, layer(x, lengths), lengths)


def problem_of(examples, layer, bias=True):
    architecture = examples.architecture(layer.n_heads, head_dim=H, bias=bias, causal=layer.causal)
    return make_problem(examples, Factored(architecture))


@pytest.mark.parametrize("k", [5, 12])
def test_packed_sequences_lie_beside_each_other_and_nothing_is_lost(k):
    lengths = np.random.default_rng(k).integers(1, k + 1, 200)
    packing = pack_sequences(lengths, k)
    taken = np.zeros((packing.rows, k), int)
    for row, start, length in zip(packing.row, packing.start, lengths, strict=True):
        assert start + length <= k
        taken[row, start : start + length] += 1
    assert taken.max() == 1
    assert taken.sum() == lengths.sum()
    used = packing.used(lengths)
    np.testing.assert_array_equal(taken, np.arange(k) < used[:, None])
    assert packing.rows <= np.ceil(11 / 9 * lengths.sum() / k) + 1


@pytest.mark.parametrize("causal", [False, True])
@in_float64
def test_a_layer_meets_its_labels_on_packed_sequences_alone_and_no_other_does(causal):
    layer = narrow_layer(M, D, H, bias=True, causal=causal)
    examples = zipf_examples(layer, 40)
    problem = problem_of(examples, layer)
    assert problem.rows == examples.lengths.sum()
    assert problem.count_sequences() < 0.8 * examples.n
    heads = problem.parametrisation.from_layer(layer, problem.units)
    assert loss_of(heads, problem) < 1e-28
    # Sequences that saw each other would move the labels; and the loss is that of plain NumPy.
    other = layer.replace(theta=1.1 * layer.theta)
    x, y, lengths = examples.arrays()
    inside = np.arange(examples.k) < lengths[:, None]
    wrong = (other(x, lengths) - y)[inside]
    moved = problem.parametrisation.from_layer(other, problem.units)
    expected = np.sum(wrong**2) / np.sum(y[inside] ** 2)
    assert expected > 1e-6
    assert loss_of(moved, problem) == pytest.approx(expected, rel=1e-9)


def descend(layer, examples, monkeypatch, cg_steps):
    from dataclasses import replace

    from mhalearn.solvers import gauss_newton, polish

    short = replace(gauss_newton.CUT_SHORT, cg_steps=cg_steps)
    monkeypatch.setattr(polish, "CUT_SHORT", short)
    problem, run = problem_of(examples, layer), Run()
    assert may_eliminate(problem)
    rng = np.random.default_rng(1)
    near = layer.replace(theta=layer.theta * (1 + 0.02 * rng.standard_normal(layer.theta.shape)))
    start = problem.parametrisation.from_layer(near, problem.units)
    found = minimise(start, problem, run, stage="descent")
    return problem, found, [event for event in run.events if "eliminated" in event.stage]


def test_where_steps_in_all_factors_are_not_solved_for_w_is_eliminated(monkeypatch):
    layer = narrow_layer(M, D, H, bias=True)
    problem, found, steps = descend(layer, zipf_examples(layer, 60), monkeypatch, 4)
    assert 2 <= len(steps) <= 10
    assert found.converged
    assert found.loss < 1e-27
    learned = problem.to_layer(found.params)
    assert compare(learned, layer).max_error < 1e-10
    assert all(np.linalg.matrix_rank(w, tol=1e-9) == H for w in learned.w)


def test_under_noise_what_was_eliminated_is_cut_to_its_rank_and_descends_on(monkeypatch):
    layer = narrow_layer(M, D, H, bias=True)
    clean = zipf_examples(layer, 60)
    x, y, lengths = clean.arrays()
    rng = np.random.default_rng(2)
    noisy = Examples(x, y + 1e-3 * np.std(y) * rng.standard_normal(y.shape), lengths)
    problem, found, steps = descend(layer, noisy, monkeypatch, 4)
    assert steps
    assert found.converged
    learned = problem.to_layer(found.params)
    assert all(np.linalg.matrix_rank(w, tol=1e-9) == H for w in learned.w)
    truth = problem.parametrisation.from_layer(layer, problem.units)
    assert found.loss < loss_of(truth, problem)  # lower than the truth's: it is the best fit
    assert compare(learned, layer).max_error < 0.05


def test_without_rows_to_spare_nothing_is_eliminated():
    layer = narrow_layer(M, D, H, bias=True)
    columns = M * D + 1
    few, many = (zipf_examples(layer, n) for n in (20, 40))
    assert few.lengths.sum() < 4 * columns <= many.lengths.sum()
    assert not may_eliminate(problem_of(few, layer))
    assert may_eliminate(problem_of(many, layer))


def test_words_are_split_into_the_longest_pieces_of_the_vocabulary(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "token", "##ize", "##izer", "un", ".", "cafe", "_"]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(words) + "\n", encoding="utf-8")
    tokenize = WordPiece(path)
    pieces = [words[number] for number in tokenize("Un_tokenizer xyz Café.")]
    assert pieces == ["[CLS]", "un", "_", "token", "##izer", "[UNK]", "cafe", ".", "[SEP]"]


def test_sequences_to_fit_and_others_are_apart_and_hold_the_tokens_asked_for():
    numbers, lengths = pad([[5] * n for n in (3, 9, 4, 8, 2, 7, 6)], longest=8)
    assert numbers.shape == (7, 8)
    np.testing.assert_array_equal(lengths, [3, 8, 4, 8, 2, 7, 6])
    np.testing.assert_array_equal((numbers > 0).sum(axis=1), lengths)
    fit, other = split_tokens(lengths, 16, 11)
    assert (fit, other) == (slice(0, 3), slice(3, 5))
    with pytest.raises(SystemExit, match="too few"):
        split_tokens(lengths, 37, 4)


def test_patterns_are_compared_head_by_head_in_whatever_order():
    from benchmarks.recorded.recording import Recording
    from benchmarks.text import share_within

    layer = narrow_layer(M, D, H, bias=True)
    x, y, lengths = zipf_examples(layer, 10).arrays()
    given = Recording(x, y, lengths, layer, H)
    turned = AttentionLayer(
        layer.theta[::-1], layer.w[::-1], layer.key_vector[::-1], layer.out_bias
    )
    assert share_within(turned, given) == 1.0
    assert share_within(layer.replace(theta=0 * layer.theta), given) < 0.7
    one = AttentionLayer(layer.theta[:1], layer.w[:1], layer.key_vector[:1], layer.out_bias)
    assert share_within(one, given) == pytest.approx(1 / M)
    assert given.error_of(layer) < 1e-28
    assert jax.config.jax_enable_x64 is False
