"""The choice among starts, by examples that none of them was fitted to."""

import numpy as np

from mhalearn.devices import of_first
from mhalearn.examples import Examples
from mhalearn.layer import AttentionLayer
from mhalearn.outcome import Outcome, Solution, Trace
from mhalearn.polish import State
from mhalearn.problem import Problem


class Choice:
    """The best layer so far, judged on held-out examples."""

    def __init__(self, problem: Problem, held: Examples, trace: Trace) -> None:
        self._problem, self._trace = problem, trace
        self._x, self._y, self._lengths = held.arrays()
        self._inside = np.arange(held.k) < self._lengths[:, None]
        self._energy = float(np.sum(np.square(self._y[self._inside], dtype=np.float64))) or 1.0
        self.layer: AttentionLayer | None = None
        self.loss = np.inf

    def offer(self, layer: AttentionLayer) -> None:
        wrong = (layer(self._x, self._lengths) - self._y)[self._inside]
        loss = of_first(float(np.sum(wrong**2)) / self._energy)
        if loss < self.loss:
            self.layer, self.loss = layer, loss
            self._trace.keep(layer, loss)

    def offer_starts(self, state: State) -> None:
        for theta, w in zip(np.asarray(state.theta), np.asarray(state.w), strict=True):
            if np.isfinite(theta).all() and np.isfinite(w).all():
                self.offer(self._problem.layer(theta, w))

    def solution(self, outcome: Outcome) -> Solution:
        assert self.layer is not None
        self._trace.emit("choice", loss=self.loss, detail="error on held-out examples")
        return Solution(self.layer, outcome, self._trace.events)


def split_for_choice(
    examples: Examples, n_heads: int, *, bias: bool, head_dim: int | None, seed: int
) -> tuple[Examples, Examples]:
    """Examples to descend on and examples to choose by: a random tenth, if the rest suffices.

    Near the counting limit nothing can be spared, and the choice falls on the training error.
    """
    spare = int(examples.n - np.ceil(1.5 * examples.counting_limit(n_heads, bias, head_dim)))
    held = min(max(1, examples.n // 10), 256)
    if spare < held:
        return examples, examples
    order = np.random.default_rng([seed, 0xC401CE]).permutation(examples.n)
    return examples.subset(np.sort(order[held:])), examples.subset(np.sort(order[:held]))
