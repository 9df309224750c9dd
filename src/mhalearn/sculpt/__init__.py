"""The algorithm of Chen & Li, one file a phase, and the learner that orders them."""

from mhalearn.sculpt.feasibility import Breakdown
from mhalearn.sculpt.learner import Phases, learn, run_phases

__all__ = ["Breakdown", "Phases", "learn", "run_phases"]
