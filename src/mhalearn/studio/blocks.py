"""One run that learns a whole block, from examples of a residual stream."""

from __future__ import annotations

import math
from typing import Any

import mhalearn as mha
from mhalearn.layer.architecture import Architecture
from mhalearn.studio.block_pictures import draw_block, draw_truth, put_beside
from mhalearn.studio.counting import block_architecture
from mhalearn.studio.request import norm_of
from mhalearn.studio.watcher import LayerWatcher, Tell
from mhalearn.studio.worker import Learning


class LearningBlock(Learning):
    """As `mhalearn.BlockRegressor`: activation and norm are told, sizes where the wish says so."""

    def _draw(self) -> mha.Block:
        wish = self._wish
        sizes = wish.heads, wish.dim, wish.neurons
        return mha.random_block(
            *sizes, wish.activation, norm_of(wish), seed=wish.seed, scale=wish.scale
        )

    def _choose(self) -> dict[str, Any]:
        wish = self._wish
        return {
            "n_heads": "auto" if wish.count_heads else wish.heads,
            "hidden": "auto" if wish.count_heads else wish.neurons,
            "activation": wish.activation,
            "norm": norm_of(wish),
            "random_state": wish.seed,
            "max_seconds": wish.seconds,
        }

    def _make_estimator(self, settings: dict[str, Any]) -> mha.BlockRegressor:
        return mha.BlockRegressor(**settings)

    def _watch(self) -> BlockWatcher:
        return BlockWatcher(self._truth.canonical(), self._estimator, self._say)

    def _architecture(self) -> Architecture:
        return block_architecture(self._wish)

    def _show_truth(self) -> dict[str, Any]:
        return draw_truth(self._truth.canonical())

    def _best_layer(self) -> mha.Block | None:
        assert isinstance(self._watcher, BlockWatcher)
        return self._watcher.best


class BlockWatcher(LayerWatcher):
    """Tells how a block comes about beside the hidden one, which is in its canonical form."""

    def __init__(self, truth: mha.Block, estimator: Any, tell: Tell) -> None:
        super().__init__(None, estimator, tell)
        self._hidden = truth
        self.best: mha.Block | None = None  # by what the learner says of its examples
        self._lowest = math.inf

    def on_event(self, event: mha.Event) -> None:
        block = self._look()
        if block is not None and event.loss < self._lowest:
            self.best, self._lowest = block, event.loss
        super().on_event(event)

    def show(self, layer: Any) -> None:
        drawn = draw_block(layer, self._hidden)
        self._tell({"kind": "heads", "at": self.moment, "count": layer.n_heads, **drawn})

    def _look(self) -> mha.Block | None:
        try:
            block: mha.Block | None = self._estimator.layer_at_hand()
            return block
        except ValueError:  # a student that diverged is no block
            return None

    def _error(self, layer: Any) -> float | None:
        return put_beside(layer, self._hidden).worst
