"""The checks a verdict is made of, in order: the first finding decides.

Each looks at the evidence and returns a finding, or None where it has nothing to say. What it says
is true by itself; the order says which finding weighs most. A new check is a function of the
evidence with `check` above it, and a place here.
"""

from mhalearn.judge.consistency_checks import (
    all_examples,
    contradiction,
    near_the_precision,
    others_not_explained,
)
from mhalearn.judge.finding import Check
from mhalearn.judge.identifiability_checks import (
    central_symmetry,
    family_of_layers,
    family_without_certificate,
    parameter_not_resolved,
    rank_not_certain,
    rival_layer,
    sign_symmetry,
    surplus_heads,
    too_few_equations,
)
from mhalearn.judge.kind_check import another_kind
from mhalearn.judge.position_checks import (
    causal_mask,
    no_causal_mask,
    order_of_tokens,
    positions,
)
from mhalearn.judge.search_checks import (
    not_finite,
    not_polished,
    nothing_to_certify_with,
    search_stuck,
    time_limit,
    too_few_examples,
)
from mhalearn.judge.structure_checks import (
    coarse_departure,
    departure,
    held_out_off,
    hopeless,
    missing_head,
    more_than_computing,
    no_test_for_a_head,
    no_time_for_tests,
    noise,
    not_converged,
    not_explained,
    overfitted,
    recovered,
    residual_dependence,
    residual_path,
    rounding,
)

CHECKS: tuple[Check, ...] = (
    too_few_examples,
    causal_mask,
    another_kind,
    time_limit,
    not_finite,
    search_stuck,
    not_polished,
    family_without_certificate,
    nothing_to_certify_with,
    surplus_heads,
    too_few_equations,
    central_symmetry,
    rank_not_certain,
    sign_symmetry,
    rival_layer,
    family_of_layers,
    contradiction,
    others_not_explained,
    no_causal_mask,
    order_of_tokens,
    hopeless,
    positions,
    not_converged,
    departure,
    residual_path,
    missing_head,
    residual_dependence,
    coarse_departure,
    held_out_off,
    more_than_computing,
    no_time_for_tests,
    parameter_not_resolved,
    overfitted,
    rounding,
    near_the_precision,
    no_test_for_a_head,
    noise,
    not_explained,
    recovered,
)
# What all examples say against a layer that the working set speaks for. Asked only where the first
# finding is RECOVERED or FITTED, since it costs a pass over all, and then it comes before that.
OBJECTIONS: tuple[Check, ...] = (all_examples,)
