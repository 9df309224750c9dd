"""LAPACK's threads, which would fight XLA's for the same cores."""

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import scipy.linalg  # noqa: F401  # a library that is not loaded yet would not be limited
from threadpoolctl import ThreadpoolController


def one_lapack_thread() -> AbstractContextManager[Any]:
    """A context in which LAPACK runs on the caller's thread alone."""
    limited: AbstractContextManager[Any] = _controller().limit(limits=1, user_api="blas")
    return limited


@cache
def _controller() -> ThreadpoolController:
    """Looking for the loaded libraries takes longer than many a small fit."""
    return ThreadpoolController()
