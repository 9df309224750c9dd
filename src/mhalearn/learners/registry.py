"""Which learners there are: the only list of their names.

The estimator, the command line, the studio, the cost curve and the benchmarks all read it. Modules
named in the environment variable MHALEARN_LEARNERS (between commas) are imported when it is first
read, so that learners which they register are known to commands and to the studio's workers too.
"""

from __future__ import annotations

import dataclasses
import os
from importlib import import_module
from typing import Any

from mhalearn.learners.builtin import Adam, ChenLi, Lbfgs, Linear, Newton
from mhalearn.learners.protocol import Learner

BUILTIN: tuple[Learner, ...] = (Newton(), ChenLi(), Adam(), Lbfgs(), Linear())
# What "auto" means.
DEFAULT = BUILTIN[0]
AUTO = "auto"
MODULES = "MHALEARN_LEARNERS"

_registered: dict[str, Learner] = {learner.name: learner for learner in BUILTIN}
_imported: set[str] = set()


def register(learner: Learner) -> Learner:
    """Make a learner available by its name, in this process; returns it.

    The same name again replaces what was there, as when a module is loaded anew; the names of the
    learners that come with the package are refused.
    """
    check_learner(learner)
    if learner.name == AUTO or learner.name in [known.name for known in BUILTIN]:
        raise ValueError(f"name={learner.name!r}: this name is taken; choose another")
    _registered[learner.name] = learner
    return learner


def unregister(name: str) -> None:
    """Undo `register`."""
    if name in [known.name for known in BUILTIN]:
        raise ValueError(f"name={name!r}: this learner comes with the package")
    _registered.pop(name, None)


def list_learners() -> tuple[Learner, ...]:
    """All learners: those of the package in their order, then the registered ones."""
    for module in filter(None, map(str.strip, os.environ.get(MODULES, "").split(","))):
        if module not in _imported:
            _imported.add(module)  # first: it imports this one
            try:
                import_module(module)
            except ImportError as error:
                _imported.discard(module)
                raise ValueError(
                    f"{MODULES}={module}: {error}; put the folder of the module on PYTHONPATH"
                ) from None
    return tuple(_registered.values())


def find_learner(method: Any) -> Learner:
    """The learner of a name, "auto" being the default; a learner itself is returned as it is."""
    if isinstance(method, Learner):
        check_learner(method)
        return method
    if method == AUTO:
        return DEFAULT
    known = {learner.name: learner for learner in list_learners()}
    if not isinstance(method, str) or method not in known:
        raise ValueError(
            f"method={method!r}: choose one of {', '.join((AUTO, *known))}, or pass a Learner"
        )
    return known[method]


def check_learner(learner: Any) -> None:
    """Reject what cannot be asked for, or be set, as learners are."""
    if not isinstance(learner, Learner):
        raise ValueError(f"{learner!r}: pass an object of a class that subclasses Learner")
    name, kind = learner.name, learner.options
    if not (isinstance(name, str) and name and not set(name) & set(" ,:")):
        raise ValueError(f"name={name!r}: give {type(learner).__name__} a name of one word")
    if kind is not None and not _is_frozen_with_defaults(kind):
        raise ValueError(
            f"options={kind!r}: the options of {name!r} are a frozen dataclass with defaults"
        )


def _is_frozen_with_defaults(kind: Any) -> bool:
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return False
    missing = dataclasses.MISSING
    return getattr(kind, "__dataclass_params__").frozen and not any(  # noqa: B009
        field.init and field.default is missing and field.default_factory is missing
        for field in dataclasses.fields(kind)
    )
