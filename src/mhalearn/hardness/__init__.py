"""Layers made to be hard to learn: families, statistical queries, attacks, costs.

Source: ours, in the spirit of the lower bounds of Chen & Li (Theorem 1.3). All have two tokens;
what a head sees of them is the halfspaces of b = x_1 * x_2, entry by entry.
"""

from mhalearn.hardness.families import hard_layer, load_secret
from mhalearn.hardness.lwr import LwrSecret
from mhalearn.hardness.queries import QueryOracle, learn_by_queries
from mhalearn.hardness.secret import Secret

__all__ = [
    "LwrSecret",
    "QueryOracle",
    "Secret",
    "hard_layer",
    "learn_by_queries",
    "load_secret",
]
