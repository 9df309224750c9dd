"""The algorithm of Chen & Li, one file a phase, and the learner that orders them."""

from mhalearn.learners.chen_li.body_shape import fit_shape
from mhalearn.learners.chen_li.breakdown import Breakdown
from mhalearn.learners.chen_li.learner import Phases, certify_and_confirm, learn_chen_li, run_phases
from mhalearn.learners.chen_li.phase1_crude_sum import estimate_projection_sum
from mhalearn.learners.chen_li.phase2_body import ConvexBody, sculpt_body
from mhalearn.learners.chen_li.phase2_certification import certify_rows, screen_pairs
from mhalearn.learners.chen_li.phase3_refined_sum import large_margin_rows, refine_projection_sum
from mhalearn.learners.chen_li.phase5_span import span_by_queries
from mhalearn.learners.chen_li.phase6_net import literal_net, search_net

__all__ = [
    "Breakdown",
    "ConvexBody",
    "Phases",
    "certify_and_confirm",
    "certify_rows",
    "estimate_projection_sum",
    "fit_shape",
    "large_margin_rows",
    "learn_chen_li",
    "literal_net",
    "refine_projection_sum",
    "run_phases",
    "screen_pairs",
    "sculpt_body",
    "search_net",
    "span_by_queries",
]
