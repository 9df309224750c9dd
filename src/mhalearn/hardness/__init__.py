"""Layers that no efficient learner should learn: families, statistical queries, attacks, costs.

Source: the lower bounds of Chen & Li (Theorem 1.3). All have two tokens; what a head sees of them
is the halfspaces of b = x_1 * x_2, entry by entry.
"""

from mhalearn.hardness.families import hard_layer, load_secret
from mhalearn.hardness.queries import QueryOracle, learn_by_queries
from mhalearn.hardness.secret import Secret

__all__ = ["QueryOracle", "Secret", "hard_layer", "learn_by_queries", "load_secret"]
