"""How layers are learned: each learner is an object of one protocol, with options of its own."""

from mhalearn.learners.builtin import Adam, ChenLi, Lbfgs, Linear, Newton
from mhalearn.learners.options import (
    AdamOptions,
    ChenLiOptions,
    Constants,
    LbfgsOptions,
    LinearOptions,
    NewtonOptions,
    Round,
)
from mhalearn.learners.own_optimiser import OwnOptimiser, OwnOptions
from mhalearn.learners.protocol import Learner
from mhalearn.learners.registry import find_learner, list_learners, register, unregister

__all__ = [
    "Adam",
    "AdamOptions",
    "ChenLi",
    "ChenLiOptions",
    "Constants",
    "Lbfgs",
    "LbfgsOptions",
    "Learner",
    "Linear",
    "LinearOptions",
    "Newton",
    "NewtonOptions",
    "OwnOptimiser",
    "OwnOptions",
    "Round",
    "find_learner",
    "list_learners",
    "register",
    "unregister",
]
