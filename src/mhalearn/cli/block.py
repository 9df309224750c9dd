"""learn --block: from examples of a residual stream to a whole block."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mhalearn.cli.exit_codes import Exit
from mhalearn.cli.output import print_json, print_verdict, say_heads, times

if TYPE_CHECKING:
    from mhalearn.data import Examples


class BlockAsked(NamedTuple):
    """What the command line says of a block."""

    n_heads: int | str
    hidden: str
    head_dim: int | None
    activation: str
    norm: str
    causal: bool
    seed: int
    max_seconds: float | None

    def settings(self) -> dict[str, Any]:
        """As BlockRegressor takes them."""
        hidden: int | str = self.hidden
        if self.hidden != "auto":
            try:
                hidden = int(self.hidden)
            except ValueError:
                raise ValueError(f"--hidden {self.hidden}: give a number, or auto") from None
        if self.norm not in ("none", "pre", "post", "auto"):
            raise ValueError(f"--norm {self.norm}: give none, pre, post or auto")
        return {
            "n_heads": self.n_heads,
            "hidden": hidden,
            "head_dim": self.head_dim,
            "activation": self.activation,
            "norm": None if self.norm == "none" else self.norm,
            "causal": self.causal,
            "random_state": self.seed,
            "max_seconds": self.max_seconds,
        }


def learn_block(
    examples: Examples, asked: BlockAsked, out: Path | None, report: Path | None, as_json: bool
) -> int:
    """Learn, save and tell; the exit code."""
    import mhalearn as mha

    began = time.monotonic()
    estimator = mha.BlockRegressor(**asked.settings()).fit(examples)
    block, solution = estimator.block_, estimator.solution_
    if out is not None:
        block.save(out)
    if report is not None:
        mha.write_report(estimator, report)
    certificate, seconds = estimator.certificate_, time.monotonic() - began
    if as_json:
        print_json(
            {
                "outcome": solution.outcome.name,
                "reason": solution.reason,
                "recovered": solution.outcome.name == "RECOVERED",
                "n_heads": block.n_heads,
                "hidden": block.hidden,
                "activation": block.design.activation,
                "norm": block.norm,
                "examples": {name: getattr(examples, name) for name in ("n", "k", "d")},
                "relative_mse": None if certificate is None else certificate.relative_mse,
                "certificate": None if certificate is None else certificate.to_dict(),
                "layer": out,
                "report": report,
                "seconds": seconds,
            }
        )
    else:
        limit = examples.counting_limit(block.architecture)
        sizes = f"{say_heads(block.n_heads)}, {block.hidden} neurons, d = {block.d}"
        saved = str(out) if out is not None else "not saved (add --out block.safetensors)"
        facts = {
            "block": f"{sizes}: {saved}",
            "examples": f"{examples.n}: {times(examples.n, limit)}",
        }
        if report is not None:
            facts["report"] = str(report)
        if certificate is not None:
            facts["held-out error"] = f"{certificate.relative_mse:.1e} relative squared"
        print_verdict(solution.outcome.name, solution.reason, facts | {"seconds": f"{seconds:.1f}"})
    return Exit.DONE if solution.outcome is mha.Outcome.RECOVERED else Exit.NOT_RECOVERED
