"""The exact solver: random starts, ridge continuation, descent, choice on held-out examples."""

from mhalearn.learners.newton.learner import learn_newton

__all__ = ["learn_newton"]
