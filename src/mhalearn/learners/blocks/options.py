"""What can be set about the search for a block."""

from __future__ import annotations

from dataclasses import dataclass

from mhalearn._runtime.validation import check_count, is_number
from mhalearn.layer.block.design import BlockDesign


@dataclass(frozen=True)
class BlockOptions:
    """surplus: heads and neurons of the student over those asked for. A student of the exact width
        gets stuck.
    steps: of Adam in the first attempt; each further attempt takes as many more.
    batch: examples a step sees. rate: the first learning rate, which falls to zero by a cosine.
    strengths: of the penalty on the squares of all parameters, at the first step of each attempt;
        it falls by five powers of ten. It makes surplus neurons vanish; without it many stay as
        groups that cancel.
    examples: that Gauss-Newton sees, over the counting limit.
    """

    surplus: float = 1.5
    steps: int = 20_000
    batch: int = 64
    rate: float = 0.01
    strengths: tuple[float, ...] = (1e-4, 3e-4, 3e-5, 1e-4, 3e-4, 1e-5)
    examples: float = 8.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            check_count(name, getattr(self, name))
        for name in ("surplus", "examples"):
            if not (is_number(getattr(self, name)) and getattr(self, name) >= 1):
                raise ValueError(f"{name}={getattr(self, name)!r}: pass a number of at least 1")


@dataclass(frozen=True)
class BlockClass:
    """The class of blocks that is searched: a design whose numbers of heads and neurons may be
    open.

    design: with any numbers. n_heads, hidden: None where they are to be found.
    """

    design: BlockDesign
    n_heads: int | None = None
    hidden: int | None = None
