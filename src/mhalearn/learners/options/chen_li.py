"""What can be set about the phases of Chen & Li: a plan, and every number they use."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mhalearn.learners.options.checks import check_counts, check_positive


@dataclass(frozen=True)
class Constants:
    """Every number that the phases of Chen & Li use. Rows are a query token's of one example.

    Phase 1
    scales: of the regression on the other tokens, whose own is biased; the one is chosen whose
        images are nearest to labels. compared: examples on which candidates are compared.
    vertex_rows: rows near one token's image that refine the sum, in units of d; vertex_rounds: how
        often; vertex_examples: searched for them, which is plenty up to six heads.
    least_beyond_linear: share of the labels that no linear map of the tokens explains, below which
        attention is too flat for rows at one token.
    least_strength: share of the labels that a sum must explain; flat: singular values of a sum
        below this share of the largest tell no tokens apart.

    Phases 2 and 4
    trusted_rows: that a body needs, in units of d^2, the unknowns of one head.
    first_rows: kept by the first screen, in the same units: the crude sum confirms only a part of
        what it screens.
    later_rows: the same with a refined sum, for up to two heads and for more: of more heads fewer
        rows are exact.
    least_weight: on a token of a screened pair: below, and above one less it, log-odds are noise.
    worst_score: of the screen, above which a row is not worth certifying.
    on_pair: weight that the linear programme must leave on the screened pair for a row to count.
    reweightings: of the rows by how far they disagree with the body's shape.
    largest_dense: features up to which the constraints' Gram matrix is formed, and screened rows
        are confirmed by linear programmes; beyond, by least squares over the simplex.
    epsilon: of the literal plan, with the crude sum and with a refined one: the residual, as a
        share of the label, that certifies a row; somewhat more than the sum's own error.
        tolerance: the error of its weights that the body allows for, in the same rounds: enough
        that the heads are in it but for false rows.
    support: least weight of a token that takes part in a certified row's constraints.
    most_rows: of the literal body, in units of d^2, in the same rounds; the best are taken. With
        the crude sum most are false and only many tell the proxy; later the best are true.
    penalty: of a constraint's slack; box: half the body's edge, over the centre's largest entry: it
        must not cut the chords short. true_rows: share of the rows that the practical body's centre
        satisfies without slack.

    Phase 3
    margin_rows: that refine the sum, in units of d, its unknowns a column: of fewer, one on which
        heads disagree already spoils the plain fit. margin_repeats: of one token among them, up to
        sign.
    robust_steps: of the robust fit; robust_shrink: of its scale in each.
    rounds: of refined sum and new certification.

    Phase 5
    queried_rows: of the practical body that is queried, in units of d^2. largest_queried: features
        up to which it is, as a check of the eigenvectors that are used.
    widest_angle: sine between the two above which the run warns.
    facets: met by rays in the span by membership, in units of d^2. bisections: membership queries
        for the end of a ray. turn: how far a ray is turned to see its facet from the side;
        turned_bisections: queries for the end of a turned one.

    Phase 6
    net_ratios: examples for the net and for its refinement, over the counting limit. net_most: and
        so many at most, for few tell the m^2 numbers that a span leaves open.
    net_starts: points of the random net; net_steps: Gauss-Newton steps from each, at most.
    net_radius: of the literal net, over the norm of orthogonal heads of one size; net_spacing: of
        its points, for two, three and four heads.
    select: examples that choose among them, and at most a quarter of all.
    delta: probability with which the literal plan's statement about its choice may fail.
    worst_error: relative squared error on these above which the result is no layer but STUCK.

    Decoding
    decoded: examples that are decoded, in units of d^2. decoded_least: and so many at least.
        decoded_most: and so many at most, for regressions on more take longer than they tell.
    decode_steps: at most. decode_goal: relative squared error on the examples that select at which
        it ends; unless set, that of rounding.
    usable: least weight of a token whose log-odds are used, and the largest that three standard
        errors of the weight may ask for; outside: how far a row's weights may leave the simplex,
        and the most that two standard errors allow.
    decode_reweightings: of the rows in one regression; decode_products: of its conjugate gradients.

    The number of heads
    most_heads: where it is open. one_head_rows: rows tried for a single head; one_head: the share
        of a label that a single head may leave with a crude sum.
    """

    scales: tuple[float, ...] = (0.8, 0.9, 1.0, 1.1, 1.2)
    compared: int = 100_000
    vertex_rows: int = 30
    vertex_rounds: int = 3
    vertex_examples: int = 200_000
    least_beyond_linear: float = 0.01
    least_strength: float = 0.05
    flat: float = 0.05
    first_rows: int = 8
    later_rows: tuple[int, int] = (5, 10)
    trusted_rows: int = 2
    least_weight: float = 0.1
    worst_score: float = 1.0
    on_pair: float = 0.9
    reweightings: int = 8
    largest_dense: int = 32
    epsilon: tuple[float, float] = (0.15, 0.12)
    tolerance: tuple[float, float] = (0.15, 0.12)
    support: float = 0.1
    most_rows: tuple[int, int] = (20, 5)
    penalty: float = 10.0
    box: float = 8.0
    true_rows: float = 0.95
    margin_rows: int = 60
    margin_repeats: int = 4
    robust_steps: int = 60
    robust_shrink: float = 0.8
    rounds: int = 1
    queried_rows: int = 2
    largest_queried: int = 16
    widest_angle: float = 0.5
    facets: float = 1.5
    bisections: int = 50
    turn: float = 0.003
    turned_bisections: int = 20
    net_ratios: tuple[float, float] = (20, 200)
    net_most: tuple[int, int] = (2_048, 20_480)
    net_starts: int = 12
    net_steps: int = 40
    net_radius: float = 1.3
    net_spacing: tuple[float, float, float] = (0.1, 0.4, 0.65)
    select: int = 4000
    delta: float = 0.05
    worst_error: float = 0.1
    decoded: int = 16
    decoded_least: int = 4000
    decoded_most: int = 2**15
    decode_steps: int = 25
    decode_goal: float = 1e-28
    usable: tuple[float, float] = (0.1, 0.25)
    outside: tuple[float, float] = (0.02, 0.1)
    decode_reweightings: int = 3
    decode_products: int = 60
    most_heads: int = 6
    one_head_rows: int = 64
    one_head: float = 0.02

    def __post_init__(self) -> None:
        for field in fields(self):
            usual = field.default[0] if isinstance(field.default, tuple) else field.default
            if isinstance(usual, float) or field.name == "net_ratios":
                check_positive(self, field.name)
            elif field.name in ("largest_queried", "largest_dense", "vertex_rounds"):
                check_counts(self, field.name, least=0)
            else:
                check_counts(self, field.name)
        if self.delta >= 1:
            raise ValueError(f"delta={self.delta!r}: pass a probability below 1")


@dataclass(frozen=True)
class ChenLiOptions:
    """Of method "sculpt", the phases of Chen & Li.

    plan: "practical" (robust least squares, eigenvectors and random starts in place of programmes,
        queries and a net), "decode" (the same, after which every row is decoded), "literal" (the
        paper's algorithm as its sources state it), or a `chen_li.Plan` of your own.
    constants: every number they use.
    """

    plan: Any = "practical"
    constants: Constants = Constants()

    def __post_init__(self) -> None:
        if isinstance(self.plan, str) and self.plan not in PLANS:
            raise ValueError(f"plan={self.plan!r}: pass one of {', '.join(PLANS)}, or a Plan")
        if not isinstance(self.constants, Constants):
            raise ValueError(f"constants={self.constants!r}: pass Constants(...)")


PLANS = ("practical", "literal", "decode")
