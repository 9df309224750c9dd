"""The algorithm of Chen & Li, one file a phase, and the learner that orders them."""

from mhalearn.sculpt.learner import Breakdown, Phases, learn, run_phases

__all__ = ["Breakdown", "Phases", "learn", "run_phases"]
