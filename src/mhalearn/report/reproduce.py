"""How to run it again: the command, the call, the settings, versions and hashes of a run."""

from __future__ import annotations

import hashlib
import platform
import shlex
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax
import numpy as np

from mhalearn._runtime.version import __version__
from mhalearn.layer.base import Layer, parameters_hash
from mhalearn.layer.rope import Rope
from mhalearn.learners.options import describe_options
from mhalearn.learners.registry import AUTO, list_learners

# Settings that are arguments of the estimator, in its order, and what they are unless given.
ARGUMENTS: dict[str, Any] = {
    "n_heads": "auto",
    "method": "auto",
    "plan": None,
    "options": None,
    "head_dim": None,
    "bias": False,
    "causal": False,
    "residual": False,
    "kv_heads": None,
    "rope": None,
    "window": None,
    "sinks": False,
    "softcap": None,
    "qk_norm": False,
    "position_bias": None,
    "latent": None,
    "attention": None,
    "polish": True,
    "random_state": 0,
    "max_seconds": None,
}
# Those that are told whatever they are: two runs differ by them most.
_ALWAYS = ("n_heads", "random_state")
# Those that `mhalearn learn` takes with a value, and those that are flags with the value they set.
_OPTIONS = {
    "n_heads": "--heads",
    "method": "--method",
    "plan": "--plan",
    "head_dim": "--head-dim",
    "kv_heads": "--kv-heads",
    "window": "--window",
    "softcap": "--softcap",
    "random_state": "--seed",
    "max_seconds": "--max-seconds",
}
_FLAGS = {
    "bias": ("--bias", True),
    "causal": ("--causal", True),
    "residual": ("--residual", True),
    "sinks": ("--sinks", True),
    "polish": ("--no-polish", False),
}
_LONGEST = 400

Rows = list[tuple[str, str]]


class Again(NamedTuple):
    """What repeats a run, and what tells whether it was the same one."""

    command: str  # empty where no command does it: with options, or a learner it does not know
    call: str  # both are empty where the run's settings are not recorded
    settings: Rows
    hashes: Rows
    versions: Rows


def describe_again(settings: Mapping[str, Any], layer: Layer) -> Again:
    """From a solution's settings. The command is theirs where they have one (`demo`)."""
    known = any(name in settings for name in ARGUMENTS)
    options = describe_options(settings.get("options"))
    command = _command(settings) if known and not options and _is_named(settings) else ""
    shown = dict(settings) | {"options": options or "defaults"}
    return Again(
        command=str(settings.get("command", command)),
        call=_call(settings, options) if known else "",
        settings=[(str(name), _said(shown[name])) for name in settings if name != "command"],
        hashes=[
            ("Examples learned from", _examples_hash(layer)),
            ("Parameters of the layer", parameters_hash(layer)),
        ],
        versions=_versions(),
    )


def _command(settings: Mapping[str, Any]) -> str:
    words = ["mhalearn", "learn", str(settings.get("examples", "EXAMPLES"))]
    for name, option in _OPTIONS.items():
        left_out = (None, AUTO) if name == "method" else (None,)
        if settings.get(name) not in left_out or name == "n_heads":
            words += [option, str(settings.get(name, AUTO))]
    rope = settings.get("rope")
    if rope is not None:
        words += ["--rope-base", rope if isinstance(rope, str) else f"{rope.base:g}"]
    words += [flag for name, (flag, when) in _FLAGS.items() if settings.get(name) is when]
    return shlex.join(words)


def _is_named(settings: Mapping[str, Any]) -> bool:
    """Whether the command line knows the method, its plan, and the heads asked for, by their
    names."""
    rope = settings.get("rope")
    if any(settings.get(name) for name in ("qk_norm", "position_bias", "latent")):
        return False
    if settings.get("sinks") == AUTO:
        return False
    if isinstance(rope, Rope) and rope != Rope(rope.base):
        return False
    if not isinstance(settings.get("plan"), str | None):
        return False
    return settings.get("method", AUTO) in (AUTO, *(learner.name for learner in list_learners()))


def _call(settings: Mapping[str, Any], options: str) -> str:
    said = {
        name: repr(settings[name])
        for name, usual in ARGUMENTS.items()
        if name in settings and (name in _ALWAYS or settings[name] != usual)
    }
    said["options"] = options
    known = [f"{name}={said[name]}" for name in ARGUMENTS if said.get(name)]
    return f"mha.AttentionRegressor({', '.join(known)}).fit(examples)"


def _said(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _examples_hash(layer: Layer) -> str:
    """Of the hashes of the examples learned from, whatever their order."""
    seen = np.sort(layer.seen)
    return hashlib.sha256(seen.astype("<u8").tobytes()).hexdigest() if seen.size else "not recorded"


def _versions() -> Rows:
    found = [("mhalearn", __version__), ("Python", platform.python_version())]
    for package in ("jax", "jaxlib", "numpy", "scipy"):
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            found.append((package, "unknown"))
    found.append(("System", f"{platform.system()} {platform.machine()}"))
    return [*found, ("JAX computes on", jax.default_backend())]
