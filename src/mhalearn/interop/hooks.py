"""Forward hooks: what goes into a module of a torch model and what comes out of it."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.arrays import is_tensor, to_numpy
from mhalearn.interop.backend import require_torch
from mhalearn.interop.masks import read_masks
from mhalearn.interop.modules import find_module, refuse_blocks

# Names under which a module gets its tokens, where they do not come first.
_TOKENS = ("hidden_states", "x", "query", "inputs", "input", "src")
# Tokens of another sequence.
_OTHER_TOKENS = ("encoder_hidden_states", "key_value_states")
_PAST = ("past_key_values", "past_key_value", "layer_past")


class Recorded(NamedTuple):
    """One call of a module: X (n, k, d), Y (n, k, e), padding where it was."""

    x: NDArray[Any]
    y: NDArray[Any]
    real: NDArray[np.bool_] | None  # (n, k); None where no mask was found
    causal: bool | None


class Recorder:
    """Runs a model and keeps what one of its modules gets and gives.

    output: the name of another module whose output is taken instead.
    mask: the argument of the model that is one for real tokens, where it is not attention_mask.
    """

    def __init__(self, model: Any, name: str, output: str | None, mask: str | None) -> None:
        # torch.compile wraps a model in one that keeps the original, and runs none of its hooks.
        self.model = getattr(model, "_orig_mod", model)
        self._name, self._mask = name, mask
        self._module = find_module(self.model, name)
        refuse_blocks(self.model, name, self._module)
        self._last = self._module if output is None else find_module(self.model, output)
        self._last_name = name if output is None else output
        torch = require_torch()
        self._is_torch = isinstance(self._module, torch.nn.MultiheadAttention)
        self._calls: list[Mapping[str, Any]] = []
        self._outputs: list[Any] = []

    @contextmanager
    def hooked(self) -> Iterator["Recorder"]:
        """In eval mode; everything is as before afterwards."""
        modes = [(part, part.training) for part in self.model.modules()]
        hooks = [
            self._module.register_forward_pre_hook(self._keep_call, with_kwargs=True),
            self._last.register_forward_hook(self._keep_output),
        ]
        try:
            self.model.eval()
            yield self
        finally:
            for hook in hooks:
                hook.remove()
            for part, training in modes:
                part.training = training

    def run(self, batch: Any) -> Recorded:
        """What the module makes of a batch: a tensor, a tuple of arguments, or a dict of them."""
        args, kwargs = self._arguments(batch)
        given = _bound(self.model, args, kwargs)
        if given is None:
            raise ValueError(
                f"it does not fit the arguments of {type(self.model).__name__}.forward"
                f"{inspect.signature(self.model.forward)}: pass a tensor, a tuple or a dict of them"
            )
        if any(_has_past(given.get(name)) for name in _PAST):
            raise ValueError("it goes on from cached keys and values: pass whole sequences")
        self._calls, self._outputs = [], []
        with require_torch().no_grad():
            self.model(*args, **kwargs)
        _check_once(self._name, len(self._calls))
        _check_once(self._last_name, len(self._outputs))
        call, output = self._calls[0], self._outputs[0]
        x = self._check_tokens(call)
        y = self._check_output(output, x)
        if self._is_torch and not self._module.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        seen = read_masks(
            given, call, tuple(x.shape[:2]), named=self._mask, true_blocks=self._is_torch
        )
        _check_positions(given.get("position_ids", call.get("position_ids")), seen.real, x)
        tokens, labels = (np.asarray(to_numpy(part)) for part in (x, y))
        return Recorded(tokens, labels, seen.real, seen.causal)

    def _arguments(self, batch: Any) -> tuple[list[Any], dict[str, Any]]:
        place = next(
            (one.device for one in (*self.model.parameters(), *self.model.buffers())), None
        )
        if isinstance(batch, Mapping):
            return [], {str(name): _move(value, place) for name, value in batch.items()}
        parts = batch if isinstance(batch, tuple | list) else (batch,)
        return [_move(part, place) for part in parts], {}

    def _keep_call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = _bound(module, args, kwargs) or dict(kwargs)
        tokens = args[0] if args else next((kwargs[one] for one in _TOKENS if one in kwargs), None)
        if self._calls:  # of a second call only the fact is needed
            self._calls.append({})
            return
        others = [
            name
            for name in _OTHER_TOKENS
            if named.get(name) is not None and named[name] is not tokens
        ]
        if self._is_torch:
            others += [name for name in ("key", "value") if not _same(named.get(name), tokens)]
        # Copies: what follows may work in place.
        kept = {name: value for name, value in named.items() if "mask" in name or "causal" in name}
        kept |= {name: named[name] for name in ("position_ids",) if name in named}
        self._calls.append(kept | {"tokens": _copied(tokens), "others": others})

    def _keep_output(self, module: Any, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and len(output) else output
        if not self._outputs and isinstance(output, tuple | list):
            _refuse_hidden_states(self._last_name, output)
        self._outputs.append(_copied(first) if not self._outputs else None)

    def _check_tokens(self, call: Mapping[str, Any]) -> Any:
        tokens = call["tokens"]
        if call["others"]:
            raise ValueError(
                f"{self._name!r} is cross-attention: its {call['others'][0]} are not its own "
                "tokens, which no layer here models"
            )
        if not is_tensor(tokens) or not tokens.is_floating_point() or tokens.ndim != 3:
            raise ValueError(
                f"{self._name!r} gets {_described(tokens)} and not tokens, floats of shape (n, k, "
                "d): name the module that does"
            )
        return tokens

    def _check_output(self, output: Any, x: Any) -> Any:
        floats = is_tensor(output) and output.is_floating_point()
        if not floats or output.ndim != 3 or output.shape[:2] != x.shape[:2]:
            n, k, _ = x.shape
            raise ValueError(
                f"{self._last_name!r} returns {_described(output)} and not floats of shape "
                f"({n}, {k}, e): name a module that does"
            )
        return output


def _bound(module: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments of a module by their names; None where they do not fit."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    named = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


def _move(value: Any, device: Any) -> Any:
    """A tensor, an array, or what holds them, on the model's device; anything else as it is."""
    if isinstance(value, np.ndarray):
        value = require_torch().as_tensor(value)
    if is_tensor(value):
        return value if device is None else value.to(device)
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_move(part, device) for part in value)
    return value


def _copied(value: Any) -> Any:
    if not is_tensor(value) or value.is_nested:
        return value
    return value.detach().to("cpu", copy=True)


def _same(value: Any, tokens: Any) -> bool:
    if value is tokens:
        return True
    alike = is_tensor(value) and is_tensor(tokens) and value.shape == tokens.shape
    return alike and bool((value == tokens).all())


def _has_past(value: Any) -> bool:
    """Whether a cache holds something: transformers gives an empty one to every call."""
    length = getattr(value, "get_seq_length", None)
    return length() > 0 if callable(length) else bool(value is not None and len(value))


def _check_once(name: str, calls: int) -> None:
    if calls == 0:
        raise ValueError(
            f"{name!r} was not called by the model on this batch: name a module that is"
        )
    if calls > 1:
        raise ValueError(
            f"{name!r} was called {calls} times in one pass (layers that share it, or a loop): "
            "which inputs belong to which outputs is not told; name a module that is called once"
        )


def _refuse_hidden_states(name: str, output: Any) -> None:
    """Refuse what several layers return together."""

    def is_tokens(value: Any) -> bool:
        return is_tensor(value) and value.ndim == 3 and value.is_floating_point()

    flat = [part for part in output if is_tokens(part) and part.shape == output[0].shape]
    nested = [part for part in output if isinstance(part, tuple | list)]
    several = any(len(part) > 1 and all(map(is_tokens, part)) for part in nested)
    if is_tokens(output[0]) and (len(flat) > 2 or several):
        raise ValueError(
            f"{name!r} returns hidden states of several layers: what lies between two of them is a "
            "whole block, with norms and a perceptron; name the attention module of one layer"
        )


def _check_positions(position_ids: Any, real: NDArray[np.bool_] | None, x: Any) -> None:
    """Refuse rows that hold several sequences: positions go up by one from token to token."""
    if not is_tensor(position_ids) or position_ids.ndim != 2:
        return
    places = np.asarray(to_numpy(position_ids))
    n, k = x.shape[:2]
    if places.shape[1] != k or len(places) not in (1, n):
        return
    steps = np.broadcast_to(np.diff(places, axis=1), (n, k - 1))
    between = np.ones((n, k - 1), bool) if real is None else real[:, 1:] & real[:, :-1]
    if np.any(steps[between] != 1):
        row = int(np.flatnonzero(((steps != 1) & between).any(axis=1))[0])
        raise ValueError(
            f"position_ids of row {row} do not go up by one: where a row holds several sequences, "
            "each must be a row of its own"
        )


def _described(value: Any) -> str:
    if not is_tensor(value):
        return f"a {type(value).__name__}" if value is not None else "no tensor"
    if value.is_nested:
        return "a nested tensor (build the encoder with enable_nested_tensor=False)"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
