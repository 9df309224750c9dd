"""Bytes of files that have changed, as bad disks and memory change them."""

from contextlib import suppress

import numpy as np


def count_silent_changes(path, load, is_same, times=400):
    """How often other data are read without a word after one random byte has changed."""
    whole, rng, silent = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(times):
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
        with suppress(ValueError, OSError):
            silent += not is_same(load())
    path.write_bytes(whole)
    return silent
