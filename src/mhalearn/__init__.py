"""mhalearn: learn a multi-head attention layer exactly from random labelled examples.

Names are imported when first used, so that `import mhalearn` costs nothing by itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mhalearn._runtime.version import __version__ as __version__

if TYPE_CHECKING:
    from mhalearn import tails
    from mhalearn.auditing.audit import audit
    from mhalearn.auditing.result import Audit
    from mhalearn.data import Examples, load_examples
    from mhalearn.data.inputs import sample_inputs
    from mhalearn.data.recordings import record
    from mhalearn.estimator import AttentionRegressor
    from mhalearn.estimator.blocks import BlockRegressor
    from mhalearn.extraction import Extraction, extract
    from mhalearn.hardness import hard_layer
    from mhalearn.interop import block_from_huggingface, from_huggingface, from_torch, to_torch
    from mhalearn.judge.certificate import Certificate
    from mhalearn.judge.certify import certify
    from mhalearn.judge.jacobian_check import check_jacobian
    from mhalearn.judge.nondegeneracy import check_nondegeneracy
    from mhalearn.judge.sample_plan import SamplePlan, plan
    from mhalearn.judge.solution import Solution
    from mhalearn.layer.architecture import Architecture
    from mhalearn.layer.block.block import Block
    from mhalearn.layer.block.comparison import BlockComparison
    from mhalearn.layer.block.feed_forward import FeedForward
    from mhalearn.layer.block.norms import Norm
    from mhalearn.layer.block.random_blocks import random_block
    from mhalearn.layer.comparison import Comparison, compare
    from mhalearn.layer.latent import Latent
    from mhalearn.layer.layer import AttentionLayer, load_layer
    from mhalearn.layer.projected_layer import ProjectedLayer
    from mhalearn.layer.random_layers import random_layer
    from mhalearn.layer.rope import Rope
    from mhalearn.report import plot
    from mhalearn.report.page import write_report
    from mhalearn.run.events import Event
    from mhalearn.run.outcome import Outcome

_HOMES = {
    "Architecture": "layer.architecture",
    "AttentionLayer": "layer.layer",
    "AttentionRegressor": "estimator",
    "Audit": "auditing.result",
    "Block": "layer.block.block",
    "BlockComparison": "layer.block.comparison",
    "BlockRegressor": "estimator.blocks",
    "Certificate": "judge.certificate",
    "Comparison": "layer.comparison",
    "Event": "run.events",
    "Examples": "data",
    "Extraction": "extraction",
    "FeedForward": "layer.block.feed_forward",
    "Latent": "layer.latent",
    "Norm": "layer.block.norms",
    "Outcome": "run.outcome",
    "ProjectedLayer": "layer.projected_layer",
    "Rope": "layer.rope",
    "SamplePlan": "judge.sample_plan",
    "Solution": "judge.solution",
    "audit": "auditing.audit",
    "block_from_huggingface": "interop",
    "certify": "judge.certify",
    "check_jacobian": "judge.jacobian_check",
    "check_nondegeneracy": "judge.nondegeneracy",
    "compare": "layer.comparison",
    "extract": "extraction",
    "from_huggingface": "interop",
    "from_torch": "interop",
    "hard_layer": "hardness",
    "load_examples": "data",
    "load_layer": "layer.layer",
    "plan": "judge.sample_plan",
    "random_block": "layer.block.random_blocks",
    "random_layer": "layer.random_layers",
    "record": "data.recordings",
    "sample_inputs": "data.inputs",
    "to_torch": "interop",
    "write_report": "report.page",
}

# Modules that are used by their own name: `mhalearn.tails.table(layer, k=4)`.
_MODULES = {"plot": "report.plot", "tails": "tails"}

__all__ = [
    "Architecture",
    "AttentionLayer",
    "AttentionRegressor",
    "Audit",
    "Block",
    "BlockComparison",
    "BlockRegressor",
    "Certificate",
    "Comparison",
    "Event",
    "Examples",
    "Extraction",
    "FeedForward",
    "Latent",
    "Norm",
    "Outcome",
    "ProjectedLayer",
    "Rope",
    "SamplePlan",
    "Solution",
    "audit",
    "block_from_huggingface",
    "certify",
    "check_jacobian",
    "check_nondegeneracy",
    "compare",
    "extract",
    "from_huggingface",
    "from_torch",
    "hard_layer",
    "load_examples",
    "load_layer",
    "plan",
    "plot",
    "random_block",
    "random_layer",
    "record",
    "sample_inputs",
    "tails",
    "to_torch",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"mhalearn.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module 'mhalearn' has no attribute {name!r}")
    value = getattr(import_module(f"mhalearn.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(__all__) | {"__version__"})
