"""LAPACK's threads, which would fight XLA's for the same cores."""

from contextlib import AbstractContextManager
from typing import Any

import scipy.linalg  # noqa: F401  # a library that is not loaded yet would not be limited
from threadpoolctl import threadpool_limits


def one_lapack_thread() -> AbstractContextManager[Any]:
    """A context in which LAPACK runs on the caller's thread alone."""
    limited: AbstractContextManager[Any] = threadpool_limits(1, user_api="blas")
    return limited
