"""What tells two kinds of heads apart, in words, and the settings that ask for the second."""

from __future__ import annotations

from typing import NamedTuple

from mhalearn.layer.architecture import Architecture
from mhalearn.layer.position_bias import PositionBias
from mhalearn.layer.rope import Rope
from mhalearn.layer.rope_scaling import Scaling


class Difference(NamedTuple):
    """said: to follow "heads with". setting: of a learner, as Python writes it."""

    said: str
    setting: str


def list_differences(asked: Architecture, found: Architecture) -> list[Difference]:
    """Every field of heads in which a class that was found is another than the one asked for."""
    named = [
        _tell_rope(asked.rope, found.rope),
        _tell_bias(asked, found),
        _tell_window(asked, found),
        _tell_flag("sinks", "a sink beside their keys", asked.sinks, found.sinks),
        _tell_cap(asked.softcap, found.softcap),
        _tell_sharing(asked, found),
        _tell_flag("causal", "a causal mask", asked.causal, found.causal),
    ]
    return [one for one in named if one is not None]


def _tell_flag(name: str, words: str, asked: bool, found: bool) -> Difference | None:
    if asked == found:
        return None
    said = words if found else f"no {words.removeprefix('a ')}"
    return Difference(said, write_setting(name, found))


def write_rope(rope: Rope) -> str:
    """As Python makes it, defaults left out."""
    said = [f"base={rope.base:.9g}"]
    if rope.fraction != 1:
        said.append(f"fraction={rope.fraction:.6g}")
    if rope.layout != "half":
        said.append(f"layout={rope.layout!r}")
    if isinstance(rope.scaling, Scaling) and rope.scaling.name == "linear":
        said.append(f"scaling={{'rope_type': 'linear', 'factor': {rope.scaling.factor:.9g}}}")
    return f"Rope({', '.join(said)})"


def write_setting(name: str, value: object) -> str:
    """A setting of a learner, as Python writes it."""
    if isinstance(value, Rope):
        return f"{name}={write_rope(value)}"
    if isinstance(value, PositionBias):
        return f"{name}={value.name!r}"
    number = isinstance(value, float)
    return f"{name}={value:.9g}" if number else f"{name}={value}"


def _tell_rope(asked: Rope | None, found: Rope | None) -> Difference | None:
    if asked == found:
        return None
    if found is None:
        return Difference("no rotary positions", "rope=None")
    setting = write_setting("rope", found)
    if asked is None:
        return Difference("rotary positions", setting)
    told = []
    if asked.fraction != found.fraction:
        told.append(f"{found.fraction:.3g} of their dimensions rotated in place of {_share(asked)}")
    if asked.base != found.base and asked.fraction == found.fraction:
        told.append(f"a rotary base of {found.base:.9g} in place of {asked.base:.9g}")
    if asked.scaling != found.scaling:
        told.append("rotary frequencies scaled otherwise")
    return Difference(" and ".join(told) or "other rotary positions", setting)


def _share(rope: Rope) -> str:
    return f"{rope.fraction:.3g}"


def _tell_bias(asked: Architecture, found: Architecture) -> Difference | None:
    one, other = asked.distance_bias, found.distance_bias
    if one == other:
        return None
    if other is None:
        return Difference("no bias by distance", "position_bias=None")
    words = "ALiBi's slopes by distance" if other.name == "alibi" else "T5's biases by distance"
    return Difference(words, write_setting("position_bias", other))


def _tell_window(asked: Architecture, found: Architecture) -> Difference | None:
    if asked.window == found.window:
        return None
    if found.window is None:
        return Difference(f"no window of {asked.window} tokens", "window=None")
    instead = "" if asked.window is None else f" in place of {asked.window}"
    return Difference(f"a window of {found.window} tokens{instead}", f"window={found.window}")


def _tell_cap(asked: float | None, found: float | None) -> Difference | None:
    if asked == found:
        return None
    if found is None:
        return Difference("no cap on their logits", "softcap=None")
    instead = "" if asked is None else f" in place of {asked:.9g}"
    return Difference(f"logits capped at {found:.9g}{instead}", write_setting("softcap", found))


def _tell_sharing(asked: Architecture, found: Architecture) -> Difference | None:
    if asked.kv_heads is None or asked.groups == found.groups:
        return None
    if found.groups == found.heads:
        return Difference("keys and values of their own", "kv_heads=None")
    words = f"{found.groups} sets of keys and values in place of {asked.groups}"
    return Difference(words, f"kv_heads={found.groups}")
