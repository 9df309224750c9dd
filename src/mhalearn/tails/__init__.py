"""The lemmas that the proof stands on, measured beside their bounds.

Each function takes a layer (or its attention matrices) and a law of tokens ("boolean", "gaussian",
a vocabulary (v, d), or a sampler), draws n times, and returns a `Tail`: shares with Clopper-Pearson
intervals and the bounds at the same abscissas, with their constants, and whether they are proved.
Source: the tail bounds that Chen & Li name (Hanson-Wright, Berry-Esseen, lower tails of sums of
signs, concentration of the softmax given a Hamming weight), in forms with explicit constants.
"""

from mhalearn.tails.bilinear_form import hanson_wright
from mhalearn.tails.certified import certified_share
from mhalearn.tails.drawing import plot
from mhalearn.tails.joint_log_odds import joint_small_ball
from mhalearn.tails.log_odds import berry_esseen, large_log_odds, small_ball
from mhalearn.tails.margin import margin_tail
from mhalearn.tails.proxy_agreement import agreement, find_proxy
from mhalearn.tails.record import Bound, Tail, clopper_pearson, read_tail
from mhalearn.tails.softmax import softmax_concentration
from mhalearn.tails.summary import Row, row, table, to_markdown

__all__ = [
    "Bound",
    "Row",
    "Tail",
    "agreement",
    "berry_esseen",
    "certified_share",
    "clopper_pearson",
    "find_proxy",
    "hanson_wright",
    "joint_small_ball",
    "large_log_odds",
    "margin_tail",
    "plot",
    "read_tail",
    "row",
    "small_ball",
    "softmax_concentration",
    "table",
    "to_markdown",
]
