"""How programs are compiled: in which precision, with which options, in how much memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

_P = ParamSpec("_P")


_R = TypeVar("_R")


def float64() -> AbstractContextManager[None]:
    """A context in which JAX computes in double precision; its global flag is untouched."""
    return jax.enable_x64(True)


def in_float64(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function inside `float64()`."""

    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with float64():
            return function(*args, **kwargs)

    return wrapper


def in_single(tree: Any) -> Any:
    """The same arrays in single precision: enough for a step that is checked afterwards."""
    return jax.tree.map(
        lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
    )


# For programs of many matrix products. To choose among Triton's kernels for them takes a GPU half a
# minute and gains nothing here; on a CPU the option is without effect.
compiled = partial(jax.jit, compiler_options={"xla_gpu_enable_triton_gemm": False})


def on_device(doubles: int) -> int:
    """A workspace fit for a CPU, made larger where an accelerator would idle on small chunks."""
    return doubles if jax.default_backend() == "cpu" else 16 * doubles
