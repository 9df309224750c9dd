"""mhalearn: learn a multi-head attention layer exactly from random labelled examples.

Names are imported when first used, so that `import mhalearn` costs nothing by itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mhalearn._version import __version__ as __version__

if TYPE_CHECKING:
    from mhalearn.certificate import Certificate, certify
    from mhalearn.estimator import AttentionRegressor
    from mhalearn.examples import Examples, load_examples
    from mhalearn.hardness import hard_layer
    from mhalearn.inputs import sample_inputs
    from mhalearn.interop import from_huggingface, from_torch, to_torch
    from mhalearn.jacobian import check_jacobian
    from mhalearn.layer import AttentionLayer, load_layer
    from mhalearn.matching import Comparison, compare
    from mhalearn.nondegeneracy import check_nondegeneracy
    from mhalearn.outcome import Event, Outcome, Solution
    from mhalearn.report import write_report
    from mhalearn.teachers import random_layer

_HOMES = {
    "AttentionLayer": "layer",
    "AttentionRegressor": "estimator",
    "Certificate": "certificate",
    "Comparison": "matching",
    "Event": "outcome",
    "Examples": "examples",
    "Outcome": "outcome",
    "Solution": "outcome",
    "certify": "certificate",
    "check_jacobian": "jacobian",
    "check_nondegeneracy": "nondegeneracy",
    "compare": "matching",
    "from_huggingface": "interop",
    "from_torch": "interop",
    "hard_layer": "hardness",
    "load_examples": "examples",
    "load_layer": "layer",
    "random_layer": "teachers",
    "sample_inputs": "inputs",
    "to_torch": "interop",
    "write_report": "report",
}

__all__ = [
    "AttentionLayer",
    "AttentionRegressor",
    "Certificate",
    "Comparison",
    "Event",
    "Examples",
    "Outcome",
    "Solution",
    "certify",
    "check_jacobian",
    "check_nondegeneracy",
    "compare",
    "from_huggingface",
    "from_torch",
    "hard_layer",
    "load_examples",
    "load_layer",
    "random_layer",
    "sample_inputs",
    "to_torch",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mhalearn' has no attribute {name!r}")
    value = getattr(import_module(f"mhalearn.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(__all__) | {"__version__"})
