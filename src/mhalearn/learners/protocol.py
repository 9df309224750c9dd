"""What a learner is: a name, what it can do, and `learn`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mhalearn.data import Examples
    from mhalearn.layer.architecture import Architecture
    from mhalearn.run.outcome import Candidate
    from mhalearn.run.run import Run


class Learner(ABC):
    """A way from examples to a layer: subclass it, give it a name, and write `learn`.

    A learner holds no settings and no state: what can be set about it is its options, so that a
    run is told by its name and its options, and a checkpoint of other ones is refused.

    name: one word, by which it is asked for.
    title: the words shown for it; what precedes a colon is its short form. The name unless given.
    color: of its curves, as matplotlib writes colours.
    options: a frozen dataclass whose fields all have defaults, or None where nothing can be set.
    streams: it walks over all examples in passes. The others are given a working set, in memory.
    counts_heads: the number of heads may be left open.
    accepts_start: it can go on from `run.start`, a layer.
    needs_polish: its layer is near a best fit and not at one, by design. What such a layer leaves
        over says nothing of missing heads, so without polish it is judged by its error alone.
    whitens: tokens of uneven spread may be given to it in whitened coordinates. Where tokens do not
        span the features, every learner is given those of the span.
    consistent: with ever more exact examples it comes to the layer. What it costs to learn a layer
        is asked of these learners only.
    """

    name: str = ""
    title: str = ""
    color: str = "#8a8a8a"
    options: type[Any] | None = None
    streams: bool = False
    counts_heads: bool = False
    accepts_start: bool = False
    needs_polish: bool = False
    whitens: bool = False
    consistent: bool = True

    def supports(self, architecture: Architecture) -> str | None:
        """Why layers of this class cannot be learned, in words that name a remedy; None if they
        can."""
        return None

    def supports_open(self, architecture: Architecture, examples: Examples) -> str | None:
        """Why fields of this class cannot be found, in such words; None if `find_kind` can."""
        return f"method {self.name!r} finds no kinds of heads: say what is 'auto', or use newton"

    def find_kind(
        self,
        examples: Examples,
        architecture: Architecture,
        fields: frozenset[str],
        run: Run,
        options: Any,
    ) -> tuple[Architecture, Candidate | None] | None:
        """The class with these fields as examples show them, and its layer where that is known by
        then; None where no class explains them."""
        return None

    @abstractmethod
    def learn(
        self, examples: Examples, architecture: Architecture, run: Run, options: Any
    ) -> Candidate:
        """The best layer of the class that these examples lead to, and how the search ended.

        examples: all that may be used; none of them certifies the layer. Of examples that a learner
        streams, `examples.working_set` are random ones in memory, for what needs few.
        architecture: its `n_heads` is None where the number is to be found.
        run: seed, clock, events, checkpoint. Ask `run.is_over()` now and then, and return the best
        layer so far when it is; tell progress by `run.emit`, better layers by `run.keep`.
        options: an instance of `self.options`, the defaults where the caller gave none.
        The outcome is FITTED where the search ended by itself, and never RECOVERED: whether the
        layer is exact is for the judge to say.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
