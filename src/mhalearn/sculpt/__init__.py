"""The algorithm of Chen & Li, one file a phase, and the learner that orders them."""

from mhalearn.sculpt.body import ConvexBody, sculpt_body
from mhalearn.sculpt.certification import certify_rows, screen_pairs
from mhalearn.sculpt.crude_sum import estimate_projection_sum
from mhalearn.sculpt.feasibility import Breakdown
from mhalearn.sculpt.learner import Phases, certify, learn, run_phases
from mhalearn.sculpt.net import literal_net, search_net
from mhalearn.sculpt.refined_sum import large_margin_rows, refine_projection_sum
from mhalearn.sculpt.shape import fit_shape
from mhalearn.sculpt.span import span_by_queries

__all__ = [
    "Breakdown",
    "ConvexBody",
    "Phases",
    "certify",
    "certify_rows",
    "estimate_projection_sum",
    "fit_shape",
    "large_margin_rows",
    "learn",
    "literal_net",
    "refine_projection_sum",
    "run_phases",
    "screen_pairs",
    "sculpt_body",
    "search_net",
    "span_by_queries",
]
