"""A black box that is asked: checked answers, and a call that fails is made again."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.validation import check_array
from mhalearn.interop import as_function
from mhalearn.layer.base import Layer

# Seconds before a call that failed is made again; after the last of them it is given up.
WAITS = (0.2, 1.0, 5.0)
# What the same call would raise again.
_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    NotImplementedError,
    TypeError,
    ValueError,
)
_ONE_ROW = (
    "; one row a sequence is not enough here: to learn from random examples takes the outputs at "
    "every token, but mha.extract takes a box that answers for the last"
)


class BoxFailed(OSError):
    """A box gave no answer, however often it was called."""


class Box:
    """f as a function from inputs (n, k, d) to labels (n, k, e), and how often it was called.

    one_by_one: f takes one sequence (k, d) a call and returns (k, e).
    repeated: how far a second answer to one question was from the first, relative to it; above
    zero, it answers at random.
    """

    def __init__(self, f: Callable[[Any], Any], *, one_by_one: bool = False) -> None:
        self._f, self.one_by_one = as_function(f), one_by_one
        self.costs = not isinstance(f, Layer)  # a layer of ours is computed as fast as it is read
        self.calls = self.sequences = 0
        self.repeated = 0.0

    def __call__(self, x: NDArray[Any]) -> NDArray[Any]:
        """The answer to some sequences, in one call, or in one call each."""
        if not self.one_by_one:
            return self._ask(x)
        return np.concatenate([self._ask(x[i : i + 1]) for i in range(len(x))])

    def behind(self, ask: Callable[[NDArray[Any]], NDArray[Any]]) -> "Box":
        """A box that asks this one, in other words: as random as this one is."""
        other = Box(ask)
        other.repeated = self.repeated
        return other

    def _ask(self, x: NDArray[Any]) -> NDArray[Any]:
        """f gets a copy, in case it works in place."""
        given = x[0] if self.one_by_one else x
        answer = self._call(given)
        self.calls, self.sequences = self.calls + 1, self.sequences + len(x)
        shape = np.shape(answer)
        if shape and len(shape) != given.ndim:
            raise ValueError(_say_shape(shape, given.shape))
        labels = check_array(
            "the output of f",
            np.asarray(answer)[None] if self.one_by_one else answer,
            3,
            narrow=True,
        )
        if shape[:-1] != given.shape[:-1] or shape[-1] == 0:
            raise ValueError(_say_shape(shape, given.shape))
        return labels

    def _call(self, given: NDArray[Any]) -> Any:
        for wait in (*WAITS, None):
            try:
                return self._f(given.copy())
            except Exception as error:
                if isinstance(error, _MISTAKES) and not self._may_pass(given):
                    raise
                if wait is None:
                    raise BoxFailed(
                        f"the box gave no answer in {len(WAITS) + 1} calls "
                        f"({type(error).__name__}: {error})"
                    ) from error
                time.sleep(wait)
        raise AssertionError

    def _may_pass(self, given: NDArray[Any]) -> bool:
        """Whether what looks like a caller's mistake may be none."""
        return False


def _say_shape(shape: tuple[int, ...], given: tuple[int, ...]) -> str:
    expected = ", ".join(map(str, given[:-1]))
    said = f"f returned shape {shape} for X of shape {given}: expected ({expected}, e)"
    return said + (_ONE_ROW if shape[:-1] == given[:-2] else "")
