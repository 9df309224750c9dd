"""An architecture as JSON has it, for files; what a file says is checked field by field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields
from typing import Any

from mhalearn.layer.architecture import Architecture
from mhalearn.layer.latent import Latent
from mhalearn.layer.position_bias import Alibi, PositionBias, T5Bias
from mhalearn.layer.qk_norm import QKNorm
from mhalearn.layer.rope import Rope
from mhalearn.layer.rope_scaling import SCALINGS, Scaling

_BIASES: dict[str, type[PositionBias]] = {kind.name: kind for kind in (Alibi, T5Bias)}
# What each field of these records may hold, by what its annotation begins with.
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "bool": (bool,),
    "str": (str,),
    "float": (int, float),
}
# A record of an architecture has some hundred characters.
_LONGEST = 10_000


def write_architecture(architecture: Architecture) -> str:
    """As one line of JSON; `read_architecture` reads it."""
    a = architecture
    said = {one.name: getattr(a, one.name) for one in fields(a) if one.name != "attention"}
    if a.rope is not None:
        scaling = a.rope.scaling
        rope = {name: getattr(a.rope, name) for name in ("base", "fraction", "layout")}
        rope["scaling"] = scaling.describe() if isinstance(scaling, Scaling) else None
        said["rope"] = rope
    if a.norm is not None:
        said["qk_norm"] = asdict(a.norm)
    if a.latent is not None:
        said["latent"] = asdict(a.latent)
    if a.distance_bias is not None:
        bias = a.distance_bias
        numbers = asdict(bias) if isinstance(bias, T5Bias) else {}
        said["position_bias"] = {"name": bias.name} | numbers
    return json.dumps(said)


def read_architecture(text: str) -> Architecture:
    """The architecture of a file, or a ValueError that names what is wrong in it."""
    said = None
    if len(text) <= _LONGEST:
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            said = None
    if not isinstance(said, dict):
        raise ValueError("the architecture in its metadata is not readable: save the layer again")
    nested: dict[str, Any] = {"rope": _read_rope, "qk_norm": _read_norm}
    nested |= {"position_bias": _read_bias, "latent": _read_latent}
    made: dict[str, Any] = {}
    for name, read in nested.items():
        if isinstance(told := said.pop(name, None), dict):
            made[name] = read(told)
        elif told not in (None, False):
            raise ValueError(f"{name}={told!r} in the architecture: expected a record")
    return Architecture(**_checked(Architecture, said), **made)


def _read_rope(told: dict[str, Any]) -> Rope:
    scaling, made = told.pop("scaling", None), None
    if scaling is not None:
        name = scaling.pop("rope_type", None) if isinstance(scaling, dict) else None
        if not isinstance(name, str) or name not in SCALINGS:
            raise ValueError(f"rope_type={name!r}: rotary scalings are {', '.join(SCALINGS)}")
        made = SCALINGS[name](**_checked(SCALINGS[name], scaling))
    return Rope(**_checked(Rope, told), scaling=made)


def _read_norm(told: dict[str, Any]) -> QKNorm:
    return QKNorm(**_checked(QKNorm, told))


def _read_latent(told: dict[str, Any]) -> Latent:
    return Latent(**_checked(Latent, told))


def _read_bias(told: dict[str, Any]) -> PositionBias:
    name = told.pop("name", None)
    if not isinstance(name, str) or name not in _BIASES:
        raise ValueError(f"position_bias={name!r}: position biases are {', '.join(_BIASES)}")
    return _BIASES[name](**_checked(_BIASES[name], told))


def _checked(kind: type[Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a record, of the types it has; missing ones are an error where it needs them."""
    known = {one.name: one for one in fields(kind)}
    for name, value in told.items():
        annotation = str(known[name].type) if name in known else ""
        types = _TYPES.get(annotation.split(" ")[0])
        if types is None:
            raise ValueError(
                f"{name[:40]!r} is no field of a {kind.__name__}: save the layer again"
            )
        absent = value is None and "None" in annotation
        if not absent and (type(value) not in types or not math.isfinite(_number(value))):
            raise ValueError(f"{name}={str(value)[:40]} in the architecture: pass {annotation}")
    missing = [name for name, one in known.items() if _is_required(one) and name not in told]
    if missing:
        raise ValueError(f"{missing[0]} is missing in the {kind.__name__}: save the layer again")
    return dict(told)


def _number(value: Any) -> float:
    """A text counts as one; a whole number beyond the doubles as infinite."""
    try:
        return 0.0 if isinstance(value, str) else float(value)
    except OverflowError:
        return math.inf


def _is_required(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING
