"""Phases 2 and 4, second half: the convex body around the affine hull of the attention matrices."""

from dataclasses import dataclass

import clarabel
import numpy as np
import scipy.sparse as sparse
from scipy.optimize import linprog

from mhalearn._runtime.types import Float64
from mhalearn.learners.chen_li.phase2_certification import CertifiedRows

_PENALTY = 10.0
# Share of the rows that the body's centre satisfies without slack: the others count as false.
_TRUE_ROWS = 0.95
# Half the box's edge, in units of the centre's largest entry: it must not cut the chords short.
_BOX = 8


@dataclass(frozen=True)
class Membership:
    inside: bool
    violation: float  # largest excess over a row's tolerance, or over the box


@dataclass(frozen=True)
class ConvexBody:
    """{Theta : |<A_i, Theta> - b_i| <= tolerance_i + slack_i, |Theta| <= box}, slack penalised.

    False positives among the rows can make hard constraints infeasible, so every row may be
    violated at a price; the box makes the widths along the affine hull finite.
    """

    normals: Float64  # (c, d^2), rows x_r (x_a - x_b)^T
    offsets: Float64  # (c,), log-odds
    tolerances: Float64  # (c,)
    box: float
    penalty: float = _PENALTY

    @property
    def d(self) -> int:
        return int(np.sqrt(self.normals.shape[1]))

    def membership(self, theta: Float64) -> Membership:
        """Whether Theta satisfies every row within its tolerance, and by how much it does not."""
        errors = np.abs(self.normals @ theta.ravel() - self.offsets) - self.tolerances
        excess = float(max(errors.max(), np.abs(theta).max() - self.box))
        return Membership(excess <= 1e-9, max(excess, 0.0))

    def minimum_norm_point(self) -> Float64:
        """argmin |Theta|^2 / 2 + penalty * slack over the body: a quadratic programme (Clarabel).

        Source: phase 3 of Chen & Li, whose proxy it is. Trust: exact for this body; that its inner
        products with all Theta_i agree needs the body to be close to the affine hull.
        """
        c, size = self.normals.shape
        matrix, right = self._inequalities()
        quadratic = sparse.diags([1.0] * size + [0.0] * c, format="csc")
        linear = np.concatenate([np.zeros(size), np.full(c, self.penalty)])
        limits = sparse.hstack(
            [
                sparse.vstack([sparse.identity(size), -sparse.identity(size)]),
                sparse.csc_matrix((2 * size, c)),
            ]
        )
        positive = sparse.hstack([sparse.csc_matrix((c, size)), -sparse.identity(c)])
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        stacked = sparse.vstack([matrix, limits, positive], format="csc")
        bound = np.concatenate([right, np.full(2 * size, self.box), np.zeros(c)])
        cones = [clarabel.NonnegativeConeT(len(bound))]
        solved = clarabel.DefaultSolver(quadratic, linear, stacked, bound, cones, settings).solve()
        return np.array(solved.x)[:size].reshape(self.d, self.d)

    def maximise(self, direction: Float64) -> Float64:
        """argmax <direction, Theta> - penalty |direction| slack: a linear programme (HiGHS)."""
        c, size = self.normals.shape
        matrix, right = self._inequalities()
        price = self.penalty * float(np.linalg.norm(direction))
        objective = np.concatenate([-direction.ravel(), np.full(c, price)])
        bounds = [(-self.box, self.box)] * size + [(0, None)] * c
        solved = linprog(objective, A_ub=matrix, b_ub=right, bounds=bounds, method="highs")
        assert solved.status == 0, solved.message
        return solved.x[:size].reshape(self.d, self.d)

    def width(self, direction: Float64) -> float:
        unit = direction / np.linalg.norm(direction)
        return float(np.sum(unit * (self.maximise(unit) - self.maximise(-unit))))

    def _inequalities(self) -> tuple[sparse.csc_matrix, Float64]:
        normals, slack = sparse.csc_matrix(self.normals), sparse.identity(len(self.offsets))
        matrix = sparse.bmat([[normals, -slack], [-normals, -slack]], format="csc")
        return matrix, np.concatenate(
            [self.offsets + self.tolerances, -self.offsets + self.tolerances]
        )


def sculpt_body(rows: CertifiedRows, centre: Float64) -> ConvexBody:
    """The body cut out by certified rows, around a point known to be near its middle.

    A row's tolerance is in proportion to its score, the error of its log-odds; the factor is
    estimated, as the one at which nearly all rows hold at the centre.
    Source: phases 2 and 4 of Chen & Li. Trust: contains the affine hull (inside the box) when every
    row is a true positive and the tolerances cover the errors of the sum, which is an estimate.
    """
    c, d = rows.query.shape
    normals = (rows.query[:, :, None] * rows.difference[:, None, :]).reshape(c, d * d)
    errors = np.abs(normals @ centre.ravel() - rows.log_odds)
    factor = float(np.quantile(errors / np.maximum(rows.score, 1e-300), _TRUE_ROWS))
    box = _BOX * float(np.abs(centre).max())
    return ConvexBody(normals, rows.log_odds, factor * rows.score, box)
