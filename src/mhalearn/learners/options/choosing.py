"""Options as a learner wants them: those given, or its own; and in words."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mhalearn.learners.protocol import Learner


def find_options(learner: Learner, given: Any, plan: Any = None) -> Any:
    """The options to learn with: those given, if they are this learner's, or its defaults.

    plan: in place of theirs, for learners that have one.
    """
    kind = learner.options
    if plan is not None:
        if kind is None or "plan" not in {field.name for field in fields(kind)}:
            raise ValueError(f"plan={plan!r}: method {learner.name!r} has none; leave it out")
        known = kind() if given is None else find_options(learner, given)
        if known.plan not in (kind().plan, plan):
            raise ValueError(f"plan={plan!r}, but options.plan={known.plan!r}: pass one of them")
        return replace(known, plan=plan)
    if given is None:
        return None if kind is None else kind()
    if kind is None:
        raise ValueError(f"options={given!r}: method {learner.name!r} has none; leave them out")
    if not isinstance(given, kind):
        said = repr(given) if isinstance(given, type) else f"of type {type(given).__name__}"
        raise ValueError(f"options {said}: method {learner.name!r} takes {kind.__name__}(...)")
    return given


def list_options(options: Any) -> dict[str, Any]:
    """All fields of some options by name; none where there are no options."""
    if options is None:
        return {}
    return {field.name: getattr(options, field.name) for field in fields(options)}


def describe_options(options: Any) -> str:
    """The call that makes these options; empty where there are none, or all have their defaults."""
    usual = {} if options is None else list_options(type(options)())
    said = [
        f"{name}={value!r}"
        for name, value in list_options(options).items()
        if repr(value) != repr(usual[name])
    ]
    return f"{type(options).__name__}({', '.join(said)})" if said else ""
