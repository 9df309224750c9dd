"""`extract`: what a caller may say of a box, checked before any of it is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mhalearn._runtime.validation import check_count, is_number
from mhalearn.extraction.result import Extraction
from mhalearn.extraction.search import Search
from mhalearn.extraction.settings import PLANS, Settings, Teller, check_kinds, list_kinds
from mhalearn.layer.latent import Latent
from mhalearn.layer.position_bias import PositionBias
from mhalearn.layer.qk_norm import QKNorm
from mhalearn.layer.rope import Rope
from mhalearn.learners.queries.domain import make_domain
from mhalearn.learners.queries.forms import AnyBox
from mhalearn.learners.queries.session import Budget, Session
from mhalearn.report.terminal import Progress
from mhalearn.run.events import Listener


def extract(
    box: Callable[[Any], Any],
    d: int,
    n_heads: int | str = "auto",
    *,
    max_calls: int | None = None,
    max_tokens: int | None = None,
    max_scalars: int | None = None,
    seed: int = 0,
    max_length: int = 8,
    inputs: Any = "any",
    one_by_one: bool = False,
    head_dim: int | None = None,
    bias: bool = False,
    causal: bool = False,
    kv_heads: int | str | None = None,
    rope: Rope | str | None = None,
    window: int | str | None = None,
    sinks: bool | str = False,
    softcap: float | int | str | None = None,
    qk_norm: QKNorm | bool | str = False,
    position_bias: PositionBias | str | None = None,
    latent: Latent | None = None,
    plan: str = "auto",
    keep: str | Path | None = None,
    timeout: float | None = None,
    max_seconds: float | None = None,
    progress: bool = False,
    on_event: Listener | None = None,
) -> Extraction:
    """Learn the attention layer inside a box by asking it about sequences of our choice.

    box: as `f` of `Examples.from_callable`; it may answer for the last row alone, (n, e), or with
        one number a sequence, (n,), and is then asked for each row on its own. one_by_one: it takes
        one sequence (k, d) a call.
    max_calls, max_tokens, max_scalars: what may be asked in all. A call is one sequence, whatever
        is sent together. Where a budget ends the search, the best layer is returned, and the reason
        says what the next call would have been for. How many numbers one call gives back is known
        only after the first: of max_scalars that allow no such answer, the first is all that is
        asked.
    max_length: tokens of the longest sequence that may be asked about.
    inputs: tokens that may be asked about: "any", "cube" (+-1), a number, the radius of a ball, or
        an array (v, d) of tokens.
    plan: "algebra" (see `learners.queries.algebra`), "random" (random sequences and the exact
        solver), or "auto": algebra where answers are exact, tokens free and outputs several.
    keep: a file that keeps every answer as it comes: another run with the same seed asks for none
        of them again, and goes on from there where it has a larger budget. A box that fails is
        called again three times, with longer and longer waits, and then BoxFailed, an OSError,
        ends the run.
    timeout: seconds after which a call of the box is given up, as one that fails.
    head_dim, bias, causal, max_seconds, progress, on_event: as of `AttentionRegressor`. Where heads
        of head_dim together write no more than the outputs hold, algebra asks for as many fewer
        sequences as their ranks are smaller.
    kv_heads, rope, window, sinks, softcap, qk_norm, position_bias, latent: as of
        `AttentionRegressor`, with n_heads and head_dim given; such heads are learned from random
        sequences, longer where max_length allows.

    Cost: at d = 8 with six heads and all outputs some 40 calls of eight tokens and a few seconds.
    Trust: that of `AttentionRegressor`: RECOVERED is said by the same judge, of sequences that were
    asked and not fitted; they are of one length, and one more of half of it must be met too.
    """
    d, length = check_count("d", d), check_count("max_length", max_length, least=2)
    if plan not in PLANS:
        raise ValueError(f"plan={plan!r}: choose one of {', '.join(PLANS)}")
    for name, limit in (("calls", max_calls), ("tokens", max_tokens), ("scalars", max_scalars)):
        if limit is not None:
            check_count(f"max_{name}", limit)
    if timeout is not None and not (is_number(timeout) and timeout > 0):
        raise ValueError(f"timeout={timeout!r}: give a positive number of seconds")
    if not callable(box):
        raise ValueError(f"box is a {type(box).__name__}: pass a callable from X to Y")
    kinds = list_kinds(
        kv_heads=kv_heads,
        rope=rope,
        window=window,
        sinks=sinks,
        softcap=softcap,
        qk_norm=qk_norm,
        position_bias=position_bias,
        latent=latent,
    )
    settings = Settings(n_heads, head_dim, bias, causal, seed, max_seconds, kinds)
    check_kinds(settings, d)
    with Progress(enabled=progress) as drawn:
        teller = Teller(drawn, on_event)
        domain = make_domain(inputs, d)
        about = {"version": 1, "asked by": "extract", "seed": seed, "d": d, "length": length}
        session = Session(
            AnyBox(box, one_by_one=bool(one_by_one), timeout=timeout),
            Budget(max_calls, max_tokens, max_scalars),
            keep,
            about | {"plan": plan},
            causal=causal,
            tell=teller.asked,
        )
        return Search(session, domain, settings, length, teller).run(plan)
