"""The choice among starts, by examples that none of them was fitted to."""

from collections.abc import Iterator

import numpy as np

from mhalearn.devices import of_first
from mhalearn.examples import Examples
from mhalearn.journal import to_arrays
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
        self._note = trace.journal.noter("choice")
        found = trace.journal.recall_layer("choice", "loss")
        if found is not None:
            self.layer, self.loss = found[0], found[1]["loss"]

    def offer(self, layer: AttentionLayer) -> None:
        loss = self._error(layer)
        if loss < self.loss:
            self.layer, self.loss = layer, loss
            self._note(to_arrays(layer) | {"loss": np.array(loss)})
            self._trace.keep(layer, loss)

    def offer_starts(self, state: State) -> None:
        for layer in self._layers(state):
            self.offer(layer)

    def show_starts(self, state: State) -> None:
        """Let the trace know of starts on their way. It decides nothing: when to is the clock's."""
        for layer in self._layers(state):
            self._trace.keep(layer, self._error(layer))

    def solution(self, outcome: Outcome) -> Solution:
        assert self.layer is not None
        self._trace.emit("choice", loss=self.loss, detail="error on held-out examples")
        return Solution(self.layer, outcome, self._trace.events, loss=self.loss)

    def _error(self, layer: AttentionLayer) -> float:
        wrong = (layer(self._x, self._lengths) - self._y)[self._inside]
        return of_first(float(np.sum(wrong**2)) / self._energy)

    def _layers(self, state: State) -> Iterator[AttentionLayer]:
        for theta, w in zip(np.asarray(state.theta), np.asarray(state.w), strict=True):
            if np.isfinite(theta).all() and np.isfinite(w).all():
                yield self._problem.layer(theta, w)


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
