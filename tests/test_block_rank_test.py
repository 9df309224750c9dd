"""The random direction that a large block's examples are asked about."""

import math

import pytest

import mhalearn as mha
from mhalearn.judge.block_rank_test import run_block_rank_test
from mhalearn.judge.randomised_rank_test import NULL_TOLERANCE


@pytest.mark.slow
def test_too_few_examples_leave_a_direction_open_and_many_leave_none():
    block = mha.random_block(n_heads=1, d=4, hidden=4, activation="gelu", norm=None, seed=2)
    limit = block.architecture.counting_limit(3)
    found = []
    for ratio in (0.6, 12.0):
        X = mha.sample_inputs("gaussian", math.ceil(ratio * limit), 3, 4, seed=0)
        found.append(run_block_rank_test(block, mha.Examples(X, block(X))))
    assert found[0].null_component > 100 * NULL_TOLERANCE
    assert math.isinf(found[0].error_amplification)
    assert found[1].null_component < NULL_TOLERANCE
    assert math.isfinite(found[1].error_amplification)
