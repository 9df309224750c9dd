"""The attention modules inside a torch model: found by name, and told from what is more than one.

torch does not say what a module computes. Names and classes do, as the libraries that people use
choose them; a module that says nothing of itself is taken at the caller's word.
"""

import difflib
import re
from collections.abc import Iterator
from typing import Any

from mhalearn.interop.backend import require_torch

_ATTENTION_CLASS = re.compile(r"attention|attn", re.IGNORECASE)
_ATTENTION_NAME = re.compile(r"self|(self_?)?(attn|attention)|mha", re.IGNORECASE)
# Normalised queries and keys are part of an attention layer; a norm of its tokens is not.
_NORM_OF_HEADS = re.compile(
    r"(q|k|query|key)_?(layer)?_?(norm|ln)|(norm|ln)_?(q|k|query|key)", re.IGNORECASE
)
_MLP_CLASS = re.compile(r"mlp|feed_?forward|ffn", re.IGNORECASE)
_MLP_NAME = re.compile(
    r"mlp|ffn?|feed_?forward|intermediate|linear[12]|fc[12]|experts|moe", re.IGNORECASE
)
_SHOWN = 4


def find_module(model: Any, name: str) -> Any:
    """The module of this name, or a ValueError that names near ones."""
    torch = require_torch()
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    named = dict(model.named_modules())
    if name in named:
        return named[name]
    near = difflib.get_close_matches(name, list(named), n=_SHOWN, cutoff=0.6)
    known = near or [one for one in list_attention(model) if one]
    said = f"; near are {_listed(known)}" if near else f"; its attention: {_listed(known)}"
    raise ValueError(
        f"{type(model).__name__} has no module {name!r}{said if known else ''}: "
        "model.named_modules() lists all"
    )


def list_attention(module: Any) -> list[str]:
    """Names, relative to a module, of what looks like one attention layer and nothing more."""
    found: list[str] = []
    for name, part in module.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not inside and _is_attention(name, part) and next(_others(part), None) is None:
            found.append(name)
    return found


def refuse_blocks(model: Any, name: str, module: Any) -> None:
    """Refuse a module that holds more than one attention layer, or an attention layer and more."""
    kind = type(module).__name__
    said = f"{name!r} ({kind})" if name else f"the whole model ({kind})"
    candidates = [".".join(filter(None, (name, one))) for one in list_attention(module)]
    if len(candidates) > 1:
        raise ValueError(
            f"{said} holds {len(candidates)} attention layers, and what goes in and comes out of "
            f"all of them together is no attention layer: name one, {_listed(candidates)}"
        )
    other = next(_others(module), None)
    if other is not None:
        remedy = "record the attention inside it"
        if candidates:
            remedy = f"record {_call(model, candidates[0])}"
        raise ValueError(
            f"{said} is a whole block and not one attention layer: it holds {other!r} too; {remedy}"
        )
    torch = require_torch()
    plain = type(module).__module__.startswith("torch.nn.")
    if plain and not isinstance(module, torch.nn.MultiheadAttention):
        near = _listed([one for one in list_attention(model) if one])
        raise ValueError(
            f"{said} is no attention layer: name the module around it"
            + (f", of these: {near}" if near else "")
        )


def _is_attention(name: str, module: Any) -> bool:
    torch = require_torch()
    if isinstance(module, torch.nn.MultiheadAttention):
        return True
    if type(module).__module__.startswith("torch.nn."):
        return False
    named = _ATTENTION_NAME.fullmatch(name.rpartition(".")[2]) is not None
    return named or _ATTENTION_CLASS.search(type(module).__name__) is not None


def _others(module: Any) -> Iterator[str]:
    """Parts of a module that no attention layer has: norms of tokens, and perceptrons."""
    for name, part in module.named_modules():
        kind, last = type(part).__name__, name.rpartition(".")[2]
        if not name or "parametrizations" in name:
            continue
        is_norm = "norm" in kind.lower() and _NORM_OF_HEADS.fullmatch(last) is None
        if is_norm or _MLP_NAME.fullmatch(last) or _MLP_CLASS.search(kind):
            yield name


def _call(model: Any, name: str) -> str:
    """What to name instead; BERT's modules part the heads from what brings them together."""
    outer, _, last = name.rpartition(".")
    dense = f"{outer}.output.dense" if outer else "output.dense"
    if last == "self" and dense in dict(model.named_modules()):
        return f"{name!r} with output={dense!r}, the attention before its residual path and norm"
    return repr(name)


def _listed(names: list[str]) -> str:
    more = " and others" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
