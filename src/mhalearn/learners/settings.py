"""The estimator's settings, checked before any work is done."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mhalearn._runtime import storage
from mhalearn._runtime.validation import is_integer, is_number
from mhalearn.data import Examples
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.base import Layer
from mhalearn.learners.options import find_options
from mhalearn.learners.protocol import Learner
from mhalearn.learners.registry import DEFAULT, find_learner
from mhalearn.run.checkpoint import holds_something
from mhalearn.run.outcome import Candidate, Outcome

# What may be said of fields of an architecture that are to be found, and which may.
OPEN = "auto"
_MAY_BE_OPEN = ("kv_heads", "rope", "window", "sinks", "softcap", "position_bias")
# Heads times features up to which a square matrix of doubles has at most 8 GiB.
_WIDEST = 2**15


@runtime_checkable
class Settings(Protocol):
    """What a caller may set; `AttentionRegressor` says what each means."""

    n_heads: int | str
    method: str | Learner
    plan: Any
    options: Any
    head_dim: int | None
    bias: bool
    causal: bool
    residual: bool
    kv_heads: int | str | None
    rope: Any
    window: int | str | None
    sinks: bool | str
    softcap: float | int | str | None
    qk_norm: Any
    position_bias: Any
    latent: Any
    attention: Callable[..., Any] | None
    polish: bool
    random_state: int
    max_seconds: float | None
    checkpoint: str | Path | None
    resume: bool
    progress: bool | None
    on_event: Callable[[Any], None] | None


def check_settings(settings: Settings, examples: Examples) -> None:
    """Reject what cannot work before any work is done."""
    learner = find_learner(settings.method)
    find_options(learner, settings.options, settings.plan)
    _check_heads(settings, learner, examples.d)
    if settings.head_dim is not None and not (
        is_integer(settings.head_dim) and 1 <= settings.head_dim <= examples.d
    ):
        raise ValueError(f"head_dim={settings.head_dim!r}: pass a rank from 1 to d = {examples.d}")
    for name in ("bias", "causal", "residual", "polish", "resume"):
        if not isinstance(getattr(settings, name), bool | np.bool_):
            raise ValueError(f"{name}={getattr(settings, name)!r}: pass True or False")
    if settings.residual and examples.d != examples.out_dim:
        raise ValueError(
            f"residual=True: y = x + F(x) has outputs as wide as tokens, the examples have "
            f"e = {examples.out_dim} beside d = {examples.d}"
        )
    if settings.on_event is not None and not callable(settings.on_event):
        raise ValueError(f"on_event={settings.on_event!r}: pass a function of an Event")
    if not is_integer(settings.random_state):
        raise ValueError(f"random_state={settings.random_state!r}: pass an integer seed")
    if settings.random_state < 0:
        raise ValueError(f"random_state={settings.random_state}: pass a seed of at least 0")
    if settings.max_seconds is not None and not (
        is_number(settings.max_seconds) and settings.max_seconds > 0
    ):
        raise ValueError(f"max_seconds={settings.max_seconds!r}: pass a positive number or None")
    if not isinstance(settings.checkpoint, str | Path | None):
        raise ValueError(f"checkpoint={settings.checkpoint!r}: pass a path")
    _check_checkpoint(settings)


def check_supported(learner: Learner, architecture: Architecture) -> None:
    """Reject classes of layers that a learner does not know, in its own words."""
    if (reason := learner.supports(architecture)) is not None:
        raise ValueError(reason)


def list_open_fields(settings: Settings) -> frozenset[str]:
    """Fields of an architecture that a caller left to be found."""
    return frozenset(
        name
        for name in _MAY_BE_OPEN
        if isinstance(said := getattr(settings, name), str) and said == OPEN
    )


def given_fields(settings: Settings) -> dict[str, Any]:
    """The others, and nothing where they are open."""
    nothing = dict.fromkeys(_MAY_BE_OPEN) | {"sinks": False}
    given = {name: getattr(settings, name) for name in _MAY_BE_OPEN}
    return given | {name: nothing[name] for name in list_open_fields(settings)}


def check_open(
    settings: Settings, learner: Learner, architecture: Architecture, examples: Examples
) -> None:
    """Reject fields to be found that cannot be, or not in such a run."""
    if (reason := learner.supports_open(architecture, examples)) is not None:
        raise ValueError(reason)
    if settings.checkpoint is not None:
        raise ValueError("a checkpoint is of one kind of heads: leave it out beside 'auto'")


def check_candidate(found: Any, learner: Learner, architecture: Architecture) -> Candidate:
    """What a learner returned, if it is a layer of these sizes and no verdict."""
    said = f"method {learner.name!r} returned"
    if not isinstance(found, Candidate):
        raise ValueError(f"{said} a {type(found).__name__}: a learner returns a Candidate")
    if found.outcome in (Outcome.RECOVERED, Outcome.RECOVERED_ON_SPAN):
        raise ValueError(
            f"{said} the outcome {found.outcome.name}, which is the judge's word: say FITTED"
        )
    sizes, asked = (found.layer.d, found.layer.out_dim), (architecture.d, architecture.outputs)
    if sizes != asked:
        raise ValueError(f"{said} a layer of (d, out_dim) = {sizes}, the examples have {asked}")
    return found


def _check_heads(settings: Settings, learner: Learner, d: int) -> None:
    heads = settings.n_heads
    if not (heads == "auto" if isinstance(heads, str) else is_integer(heads)):
        raise ValueError(f"n_heads={heads!r}: pass an integer or 'auto'")
    if settings.attention is not None and not callable(settings.attention):
        raise ValueError(f"attention={settings.attention!r}: pass a class of Parametrisation")
    if isinstance(heads, str):
        if settings.attention is not None:
            raise ValueError("attention: only softmax heads can be counted; give n_heads a number")
        if not learner.counts_heads:
            raise ValueError(f"method={learner.name!r} needs n_heads as a number")
    elif heads < 1:
        raise ValueError(f"n_heads={heads}: a layer has at least one head")
    elif heads * d > _WIDEST:
        raise ValueError(
            f"n_heads={heads}: more than {_WIDEST // d} heads of {d} features do not fit into "
            "memory; ask for fewer"
        )


def _check_checkpoint(settings: Settings) -> None:
    if settings.resume and settings.checkpoint is None:
        raise ValueError("resume=True needs checkpoint, the file to go on from")
    if settings.checkpoint is None:
        return
    storage.check_writable(settings.checkpoint)
    if not settings.resume and holds_something(settings.checkpoint):
        raise ValueError(
            f"{storage.show(settings.checkpoint)}: this checkpoint is there already; go on from it "
            "with resume, or remove the file to start anew"
        )


def check_start(start: Layer, settings: Settings, examples: Examples) -> None:
    """Reject a plain layer to start from that cannot be one."""
    said = f"{storage.show(settings.checkpoint or '')}: the checkpoint"
    learner = find_learner(settings.method)
    if not learner.accepts_start:
        raise ValueError(
            f"{said} is a layer and no state of a run, which method={learner.name!r} cannot go on "
            f"from: use {DEFAULT.name!r}, or remove the file"
        )
    if (start.d, start.out_dim) != (examples.d, examples.out_dim):
        raise ValueError(
            f"{said} maps {start.d} features to {start.out_dim}, the examples {examples.d} to "
            f"{examples.out_dim}"
        )
    if not isinstance(settings.n_heads, str) and start.n_heads != settings.n_heads:
        raise ValueError(
            f"{said} has {start.n_heads} heads, n_heads={settings.n_heads}: ask for as many"
        )
    if start.causal != settings.causal or start.architecture.bias != settings.bias:
        raise ValueError(f"{said} was made with other settings of bias or causal: ask for the same")
