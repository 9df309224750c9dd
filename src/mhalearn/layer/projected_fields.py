"""What heads of projections may have together, asked when an architecture is made."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mhalearn._runtime.validation import check_count, is_number
from mhalearn.layer.latent import Latent
from mhalearn.layer.rope import Rope

if TYPE_CHECKING:
    from mhalearn.layer.architecture import Architecture


def check_projections(a: Architecture) -> None:
    """Refuse what no heads of projections have; numbers become floats."""
    named = ", ".join(a.extras())
    if a.attention is not None:
        raise ValueError(f"attention is a class of your own, which has no {named}: leave it out")
    if a.head_dim is None:
        raise ValueError(f"head_dim is missing: heads with {named} have a number of dimensions")
    if not isinstance(a.rope, Rope | None):
        raise ValueError(f"rope={a.rope!r}: pass an mhalearn.Rope")
    if a.rope is not None:
        a.rope.rotated(a.head_dim)
    for name in ("window", "value_dim", "memory"):
        if getattr(a, name) is not None:
            check_count(name, getattr(a, name))
    for name in ("softcap", "logit_scale"):
        value = getattr(a, name)
        if value is not None and not (is_number(value) and 0 < value < math.inf):
            raise ValueError(f"{name}={value!r}: pass a positive number")
        object.__setattr__(a, name, None if value is None else float(value))
    if a.norm is not None and a.norm.across_heads and not a.norm.has_gains:
        raise ValueError("qk_norm across heads is of kind 'rms'")
    if a.kv_heads is not None:
        groups = check_count("kv_heads", a.kv_heads)
        if a.n_heads is not None and a.n_heads % groups:
            raise ValueError(
                f"kv_heads={groups}: {a.n_heads} heads do not share keys in equal groups"
            )
    if a.memory is not None:
        _check_memory(a)
    if a.latent is not None:
        _check_latent(a)


def _check_memory(a: Architecture) -> None:
    """Tokens of two sequences have no distance."""
    beside = [name for name in ("causal", "rope", "window", "position_bias") if getattr(a, name)]
    if beside:
        raise ValueError(
            f"{', '.join(beside)}: tokens of a second sequence are neither before nor after those "
            "of the first; leave it out beside memory"
        )


def _check_latent(a: Architecture) -> None:
    if not isinstance(a.latent, Latent):
        raise ValueError(f"latent={a.latent!r}: pass an mhalearn.Latent")
    beside = [name for name in ("bias", "kv_heads", "qk_norm") if getattr(a, name)]
    if beside:
        raise ValueError(f"{', '.join(beside)}: heads with a latent have no such; leave it out")
    if a.latent.rank > a.key_features or (a.latent.query_rank or 0) > a.d:
        raise ValueError(
            f"{a.latent}: a latent is narrower than the tokens, which have {a.d} features"
        )
