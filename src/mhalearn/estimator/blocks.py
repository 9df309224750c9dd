"""BlockRegressor: the settings of a fit of a whole block, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.threads import one_lapack_thread
from mhalearn._runtime.types import Float64
from mhalearn._runtime.validation import check_count
from mhalearn.data import Examples, as_examples
from mhalearn.judge.block_verdict import Asked, judge_block
from mhalearn.judge.certificate import Certificate
from mhalearn.judge.score import determination
from mhalearn.judge.solution import Solution
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.layer.block.block import Block
from mhalearn.layer.block.design import BlockDesign
from mhalearn.layer.block.norms import KINDS, PLACES
from mhalearn.learners.blocks.learner import learn_block, try_class
from mhalearn.learners.blocks.options import BlockClass, BlockOptions
from mhalearn.learners.blocks.subsets import exact_error
from mhalearn.run.events import Event
from mhalearn.run.outcome import Candidate, Outcome
from mhalearn.run.run import Run

# What activation="auto" tries.
CANDIDATES = ("gelu", "relu", "silu", "gelu_tanh", "swiglu", "glu", "geglu", "reglu")
# An eighth of the examples certifies, and no more than this.
_MOST_CERTIFY = 512


class BlockRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Learn a whole transformer block from examples (X, Y) of its residual stream.

    n_heads, hidden: the numbers of heads and neurons, or "auto" to find them.
    head_dim: rank of every Theta_i and of every W_i, where it is known to be less than d.
    activation: as in `random_block`, or "auto" to find it among relu, gelu, gelu_tanh, silu and
        the gated ones: a short descent in each says which to search first.
    norm: None, "pre" or "post"; norm_kind: "layer" or "rms"; each may be "auto", likewise.
        epsilon: of the norms, which is taken for known.
    bias: biases of heads, neurons and LayerNorms. causal: tokens see no later token.
    options: a `learners.blocks.options.BlockOptions`.
    random_state: seed of all randomness. max_seconds: when to stop with the best block so far.
    on_event: called with every Event.

    After `fit`: block_, outcome_, certificate_, solution_, trace_, n_features_in_.
    Heads with positions, shared keys or norms of their own are not learned inside a block yet.
    """

    def __init__(
        self,
        n_heads: int | str = "auto",
        head_dim: int | None = None,
        hidden: int | str = "auto",
        activation: str = "gelu",
        norm: str | None = None,
        bias: bool = True,
        random_state: int = 0,
        max_seconds: float | None = None,
        *,
        norm_kind: str = "layer",
        epsilon: float = 1e-5,
        causal: bool = False,
        options: BlockOptions | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.n_heads = n_heads
        self.head_dim = head_dim
        self.hidden = hidden
        self.activation = activation
        self.norm = norm
        self.bias = bias
        self.random_state = random_state
        self.max_seconds = max_seconds
        self.norm_kind = norm_kind
        self.epsilon = epsilon
        self.causal = causal
        self.options = options
        self.on_event = on_event

    def fit(
        self, X: ArrayLike | Examples, Y: ArrayLike | None = None, lengths: ArrayLike | None = None
    ) -> BlockRegressor:
        """Learn from X (n, k, d) and Y (n, k, d), or from an Examples."""
        examples = as_examples(X, Y, lengths)
        if examples.out_dim != examples.d:
            raise ValueError(
                f"outputs of {examples.out_dim} features beside {examples.d}: a block's residual "
                "path needs as many"
            )
        examples = examples if examples.in_memory else examples.subset(slice(None))
        asked = Asked(_number("n_heads", self.n_heads), _number("hidden", self.hidden))
        classes = self._classes(examples.d, asked)
        run = Run(
            self.max_seconds,
            self.on_event,
            seed=check_count("random_state", self.random_state, least=0),
        )
        self._run = run
        train, certify = _split(examples, run.seed)
        with one_lapack_thread():
            candidate = self._search(train, classes, run)
            run.begin_judging()
            verdict = judge_block(candidate, train, certify, asked, run)
        run.emit("outcome", detail=f"{verdict.outcome.name}: {verdict.reason}")
        block = candidate.layer.replace(
            seen=examples.survey().remembered,
            metadata={"method": "block", "seed": str(run.seed), "n_examples": str(train.n)},
        )
        assert isinstance(block, Block)
        self.block_ = block
        self.outcome_: Outcome = verdict.outcome
        self.certificate_: Certificate | None = verdict.certificate
        self.trace_: list[Event] = run.events
        self.n_features_in_ = examples.d
        self.solution_ = Solution(
            block,
            verdict.outcome,
            run.events,
            verdict.reason,
            verdict.certificate,
            settings=self._settings(examples),
        )
        return self

    def predict(self, X: ArrayLike, lengths: ArrayLike | None = None) -> Float64:
        """The learned block's outputs (n, k, d)."""
        check_is_fitted(self)
        return self.block_(X, lengths)

    def score(self, X: ArrayLike, Y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Coefficient of determination over all outputs."""
        check_is_fitted(self)
        return determination(self.predict, Examples(X, Y), sample_weight)

    def layer_at_hand(self) -> Layer | None:
        """The block an event speaks of, asked for inside `on_event`; None where it has none.

        Not the best so far, and nothing is promised about it: it is there to be looked at.
        """
        run: Run | None = getattr(self, "_run", None)
        return None if run is None or run.layer_at_hand is None else run.layer_at_hand()

    def _classes(self, d: int, asked: Asked) -> list[BlockClass]:
        """One for each activation that is considered."""
        head_dim = None if self.head_dim is None else check_count("head_dim", self.head_dim)
        heads = Architecture(
            d, asked.n_heads, head_dim, bias=bool(self.bias), causal=bool(self.causal)
        )
        names = CANDIDATES if self.activation == "auto" else (self.activation,)
        places = (None, *PLACES) if self.norm == "auto" else (self.norm,)
        kinds = KINDS if self.norm_kind == "auto" else (self.norm_kind,)
        norms = [(place, kind) for place in places for kind in (kinds if place else kinds[:1])]
        return [
            BlockClass(
                BlockDesign(
                    heads,
                    asked.hidden or 1,
                    name,
                    bool(self.bias),
                    norm=place,
                    norm_kind=kind,
                    epsilon=self.epsilon,
                    norm_bias=bool(self.bias),
                ),
                asked.n_heads,
                asked.hidden,
            )
            for place, kind in norms
            for name in names
        ]

    def _search(self, train: Examples, classes: list[BlockClass], run: Run) -> Candidate:
        """The best candidate of all classes, the likeliest first, until one is exact."""
        options = self.options or BlockOptions()
        if len(classes) > 1:
            tried = [try_class(train, one, run, options) for one in classes if not run.is_over()]
            classes = [classes[i] for i in np.argsort(tried)] or classes
            # A wrong class is not worth more attempts.
            options = replace(options, strengths=options.strengths[:2])
        best, exact = None, exact_error(train)
        for one in classes:
            if best is not None and (best.loss < exact or run.is_over()):
                break
            found = learn_block(train, one, run, options)
            if best is None or found.loss < best.loss:
                best = found
        assert best is not None
        return best

    def _settings(self, examples: Examples) -> dict[str, Any]:
        chosen = self.get_params(deep=False)
        chosen.pop("on_event")
        return chosen | {"n": examples.n, "k": examples.k, "d": examples.d}

    def __getstate__(self) -> dict[str, Any]:
        """The running trace belongs to the process; callbacks are the caller's to restore."""
        state = dict(super().__getstate__())
        state.pop("_run", None)
        state["on_event"] = None
        return state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.target_tags.multi_output = True
        return tags


def _number(name: str, said: int | str) -> int | None:
    if said == "auto":
        return None
    if isinstance(said, str):
        raise ValueError(f"{name}={said!r}: pass a number, or 'auto'")
    return check_count(name, said)


def _split(examples: Examples, seed: int) -> tuple[Examples, Examples | None]:
    """Examples to learn from, and those with other inputs to certify with."""
    held = min(examples.n // 8, _MOST_CERTIFY)
    if not held:
        return examples, None
    order = generator(seed, Stream.CERTIFY_SPLIT).permutation(examples.n)
    train = examples.subset(np.sort(order[held:]))
    apart = examples.subset(np.sort(order[:held]))
    new = ~np.isin(apart.survey().input_hashes, train.survey().input_hashes)
    return train, apart.subset(np.flatnonzero(new)) if new.any() else None
