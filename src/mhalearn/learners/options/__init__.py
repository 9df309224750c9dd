"""What can be set about each learner: frozen records whose defaults are documented with reasons.

Only the standard library is imported here, so that the command line knows the learners at once.
"""

from mhalearn.learners.options.baselines import AdamOptions, LbfgsOptions, LinearOptions
from mhalearn.learners.options.chen_li import PLANS, ChenLiOptions, Constants
from mhalearn.learners.options.choosing import describe_options, find_options, list_options
from mhalearn.learners.options.newton import BRIEF, PLENTY, SCARCE, SWEEP, NewtonOptions, Round

__all__ = [
    "BRIEF",
    "PLANS",
    "PLENTY",
    "SCARCE",
    "SWEEP",
    "AdamOptions",
    "ChenLiOptions",
    "Constants",
    "LbfgsOptions",
    "LinearOptions",
    "NewtonOptions",
    "Round",
    "describe_options",
    "find_options",
    "list_options",
]
