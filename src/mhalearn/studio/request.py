"""What a visitor of the page may ask for, and the limits that keep a tab within bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mhalearn.learners.registry import DEFAULT, list_learners

INPUTS = {"boolean": "random signs", "gaussian": "Gaussian"}
# Of blocks, with the words shown for them.
ACTIVATIONS = {
    "gelu": "GELU",
    "gelu_tanh": "GELU, by tanh",
    "relu": "ReLU",
    "silu": "SiLU",
    "glu": "GLU",
    "swiglu": "SwiGLU",
    "geglu": "GEGLU",
    "reglu": "ReGLU",
}
NORMS = {"none": "none", "pre": "before each part", "post": "after each part"}


# What a file of one's own decides.
_SIZES = ("dim", "tokens", "examples", "scale", "noise")


@dataclass(frozen=True)
class Sizes:
    """Of examples: how many, their tokens, features and outputs; lengths where they differ."""

    n: int
    k: int
    d: int
    out_dim: int
    lengths: tuple[int, ...] = ()


def _no_file(number: int) -> Sizes | None:
    return None


@dataclass(frozen=True)
class Limits:
    """The largest layer, data and effort of one run, and of all runs together."""

    heads: int = 8
    dim: int = 32
    tokens: int = 16
    examples: int = 50_000
    numbers: int = 10_000_000  # examples times tokens times features
    seconds: float = 300.0
    grace: float = 60.0  # seconds after its time limit at which a run is ended from outside
    running: int = 2  # runs at a time
    kept: int = 40  # runs whose events and reports are kept
    file_bytes: int = 64_000_000  # of what is dropped on the page, and of what it unpacks to
    file_dim: int = 128  # features and outputs of own data
    block_heads: int = 4
    block_dim: int = 16
    neurons: int = 32
    files: int = 4  # own data kept, the newest


@dataclass(frozen=True)
class Wish:
    """One run: a random layer and examples of it, or examples of one's own, and how to learn.

    data: the number of a file that was dropped on the page; 0 for a random layer. With a file its
    sizes stand for dim, tokens and examples, and scale, noise and inputs mean nothing; causal, bias
    and residual are said of the layer that made it.

    block: a whole block is hidden, of so many neurons with their activation, with norms where
    `norm` says so, and biases everywhere; count_heads then leaves the number of neurons open, too.
    """

    heads: int = 3
    dim: int = 16
    tokens: int = 8
    scale: float = 2.0
    noise: float = 0.0
    examples: int = 200
    inputs: str = "boolean"
    method: str = DEFAULT.name
    count_heads: bool = False  # the learner is not told how many heads there are
    ask: bool = False  # the learner chooses what the layer is asked; examples: at most so many
    seed: int = 0
    seconds: float = 60.0
    data: int = 0
    causal: bool = False
    bias: bool = False
    residual: bool = False
    block: bool = False
    neurons: int = 16
    activation: str = "gelu"
    norm: str = "none"


# Where to begin: each shows something else in seconds.
PRESETS = {
    "Three heads": Wish(),
    "The paper's phases": Wish(2, 8, 3, 4.0, examples=20_000, method="sculpt", seconds=120.0),
    "Adam instead": Wish(method="adam"),
    "How many heads?": Wish(heads=2, dim=8, examples=300, count_heads=True),
    "Ask a box": Wish(6, 8, examples=40, inputs="gaussian", count_heads=True, ask=True),
    "A whole block": Wish(
        2, 8, 4, examples=3000, inputs="gaussian", count_heads=True, seconds=120.0, block=True
    ),
    "Noisy labels": Wish(heads=2, dim=8, noise=0.05, examples=200, seconds=120.0),
    "Too few examples": Wish(examples=10),
}


def norm_of(wish: Wish) -> str | None:
    """Where a block has its norms, as `mhalearn.random_block` takes it."""
    return None if wish.norm == "none" else wish.norm


def list_methods() -> dict[str, str]:
    """The names of the learners, and the words shown for them."""
    return {learner.name: learner.title or learner.name for learner in list_learners()}


def bounds(limits: Limits, block: bool = False) -> dict[str, tuple[int | float, int | float]]:
    """The smallest and largest value of each number, of a layer or of a whole block."""
    narrower = {"heads": (1, limits.block_heads), "dim": (4, limits.block_dim)} if block else {}
    return {
        "heads": (1, limits.heads),
        "dim": (2, limits.dim),
        "tokens": (2, limits.tokens),
        "scale": (0.1, 20.0),
        "noise": (0.0, 1.0),
        "examples": (1, limits.examples),
        "seed": (0, 2**31 - 1),
        "seconds": (1, limits.seconds),
        "neurons": (1, limits.neurons),
    } | narrower


def read_wish(asked: Any, limits: Limits, find: Callable[[int], Sizes | None] = _no_file) -> Wish:
    """A wish from decoded JSON; what is left out has its default. ValueError: one line.

    find: the sizes of own data by its number, None where there is none.
    """
    if not isinstance(asked, Mapping):
        raise ValueError('a run is one JSON object, such as {"heads": 3}')
    fields = {field.name: field.type for field in dataclasses.fields(Wish)}
    unknown = [name for name in asked if name not in fields]
    if unknown:
        raise ValueError(f"{str(unknown[0])[:40]!r} is no setting; there are {', '.join(fields)}")
    wish = Wish(**{name: _read(name, fields[name], value) for name, value in asked.items()})
    if wish.data:
        sizes = find(wish.data)
        if sizes is None:
            raise ValueError("that file is not here any more: drop it on the page once more")
        wish = replace(wish, dim=sizes.d, tokens=sizes.k, examples=sizes.n)
    given = [name for name in ("causal", "bias", "residual") if getattr(wish, name)]
    if given and not wish.data:
        raise ValueError(f"{given[0]} is for a file of your own: random layers here have none")
    for name, (least, most) in bounds(limits, wish.block).items():
        value = getattr(wish, name)
        if wish.data and name in _SIZES:  # checked when it was dropped
            continue
        if not least <= value <= most:
            raise ValueError(f"{name} is {value:.7g}: choose from {least:.10g} to {most:.10g}")
    numbers = wish.examples * wish.tokens * wish.dim
    if numbers > limits.numbers and not wish.data:
        most = limits.numbers // (wish.tokens * wish.dim)
        raise ValueError(
            f"{wish.examples} examples of {wish.tokens} tokens with {wish.dim} features are too "
            f"much for this page: choose at most {most} examples"
        )
    _check_choice("method", wish.method, list_methods())
    _check_choice("inputs", wish.inputs, INPUTS)
    _check_choice("activation", wish.activation, ACTIVATIONS)
    _check_choice("norm", wish.norm, NORMS)
    if wish.block and (wish.data or wish.ask or wish.method != DEFAULT.name):
        why = "a file" if wish.data else "ask" if wish.ask else f"method {wish.method}"
        raise ValueError(f"block is for a hidden block and examples of it: leave {why} out")
    if wish.ask and (wish.data or wish.method != DEFAULT.name):
        why = "a file answers nothing" if wish.data else f"{wish.method} cannot choose examples"
        raise ValueError(f"ask is for a hidden layer and method {DEFAULT.name}: {why}")
    counting = [learner.name for learner in list_learners() if learner.counts_heads]
    if wish.count_heads and wish.method not in counting:
        raise ValueError(
            f"{wish.method} must be told the number of heads; {' and '.join(counting)} can find it"
        )
    return wish


def _read(name: str, kind: Any, value: Any) -> Any:
    """A JSON value as the field's own type, without guessing."""
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "float" and number and abs(value) < 1e300:  # an int may be larger than any float
        return float(value)
    # Integers beyond what a double holds exactly would not come back as they were sent.
    if kind == "int" and number and abs(value) < 2**53 and value == int(value):
        return int(value)
    kinds = {"bool": "true or false", "str": "a word", "float": "a number", "int": "a whole number"}
    raise ValueError(f"{name} is {str(value)[:40]!r}: give {kinds[kind]}")


def _check_choice(name: str, value: str, choices: Mapping[str, str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value[:40]!r}: choose one of {', '.join(choices)}")
