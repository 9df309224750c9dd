"""The choice among starts, by examples that none of them was fitted to."""

from collections.abc import Iterator

import jax
import numpy as np

from mhalearn._runtime.devices import broadcast_from_first
from mhalearn._runtime.seeds import Stream, generator
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.comparison import compare
from mhalearn.layer.layer import AttentionLayer
from mhalearn.run.checkpoint import to_arrays
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run
from mhalearn.solvers.gauss_newton import State, layer_of
from mhalearn.solvers.scaled_problem import Problem

# Relative squared error from which on a start has ended at a layer that may be exact.
_ENDED = 1e-10
# Scalars that tell one start from another, and examples at least that hold them.
_TELLING, _SOME = 100_000, 32
# Heads that differ by more than this are others. So many layers are kept.
_APART, _KEPT = 0.1, 3


class ModelSelection:
    """The best layer so far, judged on held-out examples."""

    def __init__(self, problem: Problem, held: Examples, run: Run) -> None:
        self._problem, self._run = problem, run
        self._x, self._y, self._lengths = held.arrays()
        self._inside = np.arange(held.k) < self._lengths[:, None]
        self._energy = float(np.sum(np.square(self._y[self._inside], dtype=np.float64))) or 1.0
        self.layer: Layer | None = None
        self.loss = np.inf
        self._ends: list[AttentionLayer] = []
        self._note = run.checkpoint.noter("choice")
        found = run.checkpoint.recall_layer("choice", "loss")
        if found is not None:
            self.layer, self.loss = found[0], found[1]["loss"]

    def offer(self, layer: Layer) -> None:
        loss = self._error(layer)
        if loss < _ENDED and isinstance(layer, AttentionLayer):
            self._keep_end(layer)
        if loss < self.loss:
            self.layer, self.loss = layer, loss
            self._note(to_arrays(layer) | {"loss": np.array(loss)})
            self._run.keep(layer, loss)

    def offer_starts(self, state: State) -> None:
        for layer in self._layers(state):
            self.offer(layer)

    def show_starts(self, state: State) -> None:
        """Let the run know of starts on their way. It decides nothing: when to is the clock's."""
        for layer in self._layers(state):
            self._run.keep(layer, self._error(layer))

    def candidate(self, outcome: Outcome) -> Candidate:
        assert self.layer is not None
        self._run.emit("model selection", loss=self.loss, detail="error on held-out examples")
        others = tuple(end for end in self._ends if _differ(end, self.layer))
        return Candidate(self.layer, outcome, loss=self.loss, others=others)

    def _keep_end(self, layer: AttentionLayer) -> None:
        if len(self._ends) < _KEPT and all(_differ(layer, end) for end in self._ends):
            self._ends.append(layer)

    def _error(self, layer: Layer) -> float:
        wrong = (layer(self._x, self._lengths) - self._y)[self._inside]
        return broadcast_from_first(float(np.sum(wrong**2)) / self._energy)

    def _layers(self, state: State) -> Iterator[Layer]:
        finite = np.isfinite(np.asarray(state.loss))
        for leaf in jax.tree.leaves(state.params):
            finite &= np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1)
        for start in np.flatnonzero(finite):
            yield layer_of(state, int(start), self._problem)


def _differ(one: AttentionLayer, other: Layer) -> bool:
    """Whether two layers of as many heads have other heads."""
    if one is other:
        return False
    if not isinstance(other, AttentionLayer) or one.n_heads != other.n_heads:
        return False
    return compare(one, other).max_error > _APART


def split_for_selection(
    examples: Examples, architecture: Architecture, seed: int
) -> tuple[Examples, Examples]:
    """Examples to descend on and examples to choose by: a random tenth, if the rest suffices.

    Near the counting limit nothing can be spared, and the choice falls on the training error.
    """
    spare = int(examples.n - np.ceil(1.5 * examples.counting_limit(architecture)))
    held = min(max(1, examples.n // 10), 256, _enough(examples))
    if spare < held:
        return examples, examples
    order = generator(seed, Stream.SELECT_SPLIT).permutation(examples.n)
    return examples.subset(np.sort(order[held:])), examples.subset(np.sort(order[:held]))


def _enough(examples: Examples) -> int:
    """Examples that hold enough scalars to choose by: what they hold more is worth more in fits."""
    return max(_SOME, -(-_TELLING // (examples.k * examples.out_dim)))
