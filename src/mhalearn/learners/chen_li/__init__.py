"""The algorithm of Chen & Li, one file a phase, and the learner that orders them.

`run(examples, n_heads, plan=LITERAL)` runs the phases alone; `Plan` says which function is which
phase, `Constants` has every number, `exact(layer)` is where a phase can be begun from the truth.
"""

from mhalearn.learners.chen_li.body_shape import BodyShape, fit_shape
from mhalearn.learners.chen_li.breakdown import Breakdown
from mhalearn.learners.chen_li.decode import decode_patterns, decode_rows
from mhalearn.learners.chen_li.epsilon_net import bound_error, literal_net
from mhalearn.learners.chen_li.input_distribution import from_whitened, to_whitened
from mhalearn.learners.chen_li.learner import learn_chen_li, run, run_phases
from mhalearn.learners.chen_li.phase1_crude_sum import estimate_projection_sum, paper_sum
from mhalearn.learners.chen_li.phase2_body import ConvexBody, HullBody, sculpt_body, sculpt_within
from mhalearn.learners.chen_li.phase2_certification import certify_rows, fit_simplex, screen_pairs
from mhalearn.learners.chen_li.phase2_every_row import certify_every_row
from mhalearn.learners.chen_li.phase3_refined_sum import large_margin_rows, refine_projection_sum
from mhalearn.learners.chen_li.phase5_span import span_by_membership, span_by_queries
from mhalearn.learners.chen_li.phase6_net import search_net
from mhalearn.learners.chen_li.phases import Phases, exact, load_phases
from mhalearn.learners.chen_li.plans import DECODE, LITERAL, PRACTICAL, Plan
from mhalearn.learners.chen_li.plot import plot
from mhalearn.learners.chen_li.span import Span, exact_span, span_angle
from mhalearn.learners.chen_li.task import Task
from mhalearn.learners.chen_li.vertex_sum import refine_by_vertices
from mhalearn.learners.options import Constants

__all__ = [
    "DECODE",
    "LITERAL",
    "PRACTICAL",
    "BodyShape",
    "Breakdown",
    "Constants",
    "ConvexBody",
    "HullBody",
    "Phases",
    "Plan",
    "Span",
    "Task",
    "bound_error",
    "certify_every_row",
    "certify_rows",
    "decode_patterns",
    "decode_rows",
    "estimate_projection_sum",
    "exact",
    "exact_span",
    "fit_shape",
    "fit_simplex",
    "from_whitened",
    "large_margin_rows",
    "learn_chen_li",
    "literal_net",
    "load_phases",
    "paper_sum",
    "plot",
    "refine_by_vertices",
    "refine_projection_sum",
    "run",
    "run_phases",
    "screen_pairs",
    "sculpt_body",
    "sculpt_within",
    "search_net",
    "span_angle",
    "span_by_membership",
    "span_by_queries",
    "to_whitened",
]
