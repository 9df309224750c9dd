"""Boxes of any form as one: all rows, the last row alone, or one number, of one sequence or many.

A box that answers for the last token alone is asked once for each token, with that token last:
without a mask attention does not see the order of the others. Under a causal mask row r is the last
row of the first r + 1 tokens.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_array
from mhalearn.data.box import Box, BoxFailed
from mhalearn.data.within import within


class AnyBox(Box):
    """A box that answers (n, k, e), (n, e) or (n,), or without n where it takes one sequence a
    call; its answers are (n, k, e) or, where they are of the last row alone, (n, 1, e).

    timeout: seconds after which a call is given up, and made again.
    """

    def __init__(
        self, f: Callable[[Any], Any], *, one_by_one: bool = False, timeout: float | None = None
    ) -> None:
        super().__init__(f, one_by_one=one_by_one)
        self._f = self._f if timeout is None else within(self._f, timeout)
        self._answered: set[tuple[int, bool]] = set()

    def _may_pass(self, given: NDArray[Any]) -> bool:
        """Whether such a question was answered before, so that the box fails for now: what a
        service sends when it is out of order is often no answer that a client can read."""
        return self._form(given) in self._answered

    def _form(self, given: NDArray[Any]) -> tuple[int, bool]:
        """The length of a question, and whether it is several sequences."""
        return given.shape[-2], not self.one_by_one and len(given) > 1

    def _call(self, given: NDArray[Any]) -> Any:
        try:
            return super()._call(given)
        except BoxFailed:
            raise
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            raise ValueError(
                f"the box fails on X of shape {given.shape} ({type(error).__name__}: {said}): does "
                f"it take tokens of d = {given.shape[-1]}, and "
                f"{'one sequence' if self.one_by_one else 'many sequences'} a call?"
            ) from error

    def _ask(self, x: NDArray[Any]) -> NDArray[Any]:
        given = x[0] if self.one_by_one else x
        answer = self._call(given)
        self.calls, self.sequences = self.calls + 1, self.sequences + len(x)
        shape = np.shape(answer)
        n, k = x.shape[:2]
        lead = () if self.one_by_one else (n,)
        rows = (*lead, k)
        known = (
            (len(shape) == given.ndim and shape[:-1] == rows)
            or (len(shape) == given.ndim - 1 and shape[:-1] == lead)
            or (len(shape) == given.ndim - 2 and shape == lead)
        )
        if not known or 0 in shape:
            said = ", ".join(map(str, rows))
            last = ", ".join(map(str, (*lead, "e")))
            raise ValueError(
                f"the box returned shape {shape} for X of shape {given.shape}: expected "
                f"({said}, e), or of the last row alone ({last}) or one number a sequence"
            )
        full = len(shape) == given.ndim
        _check_finite(answer)
        self._answered.add(self._form(given))
        labels = np.asarray(answer).reshape(n, k if full else 1, -1)
        return check_array("the answer of the box", labels, 3, narrow=True)


def _check_finite(answer: Any) -> None:
    """A box has no entries to remove."""
    numbers = np.asarray(answer)
    if numbers.dtype.kind != "f" or np.isfinite(numbers).all():
        return
    count = int(np.sum(~np.isfinite(numbers)))
    raise ValueError(
        f"the box answered {count} of {numbers.size} numbers NaN or infinite: mend it, or keep its "
        "tokens smaller by inputs=RADIUS"
    )


def questions_for_rows(x: Float64, *, causal: bool) -> list[Float64]:
    """The sequences whose last rows are the rows of x (k, d), in order."""
    k = len(x)
    if causal:
        return [x[: r + 1] for r in range(k)]
    return [np.concatenate([x[:r], x[r + 1 :], x[r : r + 1]]) for r in range(k)]
