"""Random streams: one enumeration of what random numbers are for, and the generators of a seed."""

import enum

import numpy as np

from mhalearn._runtime.validation import check_count


class Stream(enum.IntEnum):
    """What random numbers are for. Streams of one seed are independent of each other.

    The first four make data, and a seed means the same data in every version. The others belong to
    learners and tests; learners have streams of their own, so that a start never coincides with a
    teacher of the same seed.
    """

    INPUTS = 1
    TEACHER = 2
    NOISE = 3
    SECRET = 4

    INFORMATION = 0x1F0
    PROBE_LAYER = 0x1F0F
    GENERIC_RANK = 0x6E2
    PARAMETRISED_STARTS = 0x9A2
    RANK_TEST = 0x09E4
    MISSING_HEAD = 0x0E4D
    RESIDUAL_DEPENDENCE = 0x1EF7
    HEAD_EXCHANGE = 0x2E71
    NET = 0x4E7
    SPAN_QUERIES = 0x59A4
    ATTACK = 0x6F2
    FACTORED_STARTS = 0x3A27
    PROJECTED_STARTS = 0x9207
    BASELINES = 0xBA5E
    JACOBIAN_CHECK = 0x51093
    STARTS = 0x57A27
    CERTIFY_SPLIT = 0x5B117
    SELECT_SPLIT = 0xC401CE
    WORKING_SET = 0x3A3B1E
    BOX_ORDER = 0xB0C5
    POSITIONS = 0x9051
    CONSTANTS = 0xC057
    BODY_EIGENVECTORS = 0xB0D1
    TAILS = 0x7A115
    QUERIES = 0x90E5
    GENERIC_QUERIES = 0x90E6
    PLANNING = 0x91A4
    BLOCK_STARTS = 0xB10C
    OPEN_STARTS = 0x09E5


def generator(seed: int, stream: Stream, *place: int) -> np.random.Generator:
    """The random generator of a seed for one purpose, and one place in it (a block, say)."""
    seed = check_count("seed", seed, least=0)
    if stream <= Stream.SECRET:
        return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(stream), *place)))
    return np.random.default_rng([seed, int(stream), *place])
