"""Phases 2 and 4, second half: the convex body around the affine hull of the attention matrices.

The paper's: the body of all certified constraints, membership in it, its minimum-norm point (a
quadratic programme). Ours: a price on the violation of a constraint in place of a hard one, because
a false row among thousands would leave nothing, the box, and the tolerances of the practical plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import clarabel
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sparse

from mhalearn._runtime.programs import in_float64
from mhalearn._runtime.types import Array, Float64
from mhalearn.learners.chen_li.phase2_certification import CertifiedRows
from mhalearn.learners.options import Constants

_DEFAULTS = Constants()


@jax.jit
def _ends_of_rays(
    start: tuple[Array, Array], ways: tuple[Array, Array], limits: tuple[Array, ...]
) -> tuple[Array, Array]:
    """Between which lengths the points start + length x way are members: where the entries are
    within the box and the rows within their tolerances. The first is above the second on a ray
    that misses the body."""
    offsets, tolerances, box = limits
    low, high = jnp.asarray(-jnp.inf), jnp.asarray(jnp.inf)
    for place, way, middle, room in (
        (start[0], ways[0], 0.0, box),
        (start[1], ways[1], offsets, tolerances),
    ):
        apart = middle - place
        moves = way != 0
        step = jnp.where(moves, jnp.abs(way), 1.0)
        near, reach = jnp.sign(way) * apart / step, room / step
        never = ~moves & (jnp.abs(apart) > room)
        first = jnp.where(moves, near - reach, jnp.where(never, jnp.inf, -jnp.inf))
        last = jnp.where(moves, near + reach, jnp.inf)
        low = jnp.maximum(low, jnp.max(first, axis=1))
        high = jnp.minimum(high, jnp.min(last, axis=1))
    return low, high


@dataclass(frozen=True)
class Membership:
    inside: bool
    violation: float  # largest excess over a row's tolerance, or over the box
    violated: float = 0.0  # share of the rows


@dataclass(frozen=True)
class ConvexBody:
    """{Theta : |<A_i, Theta> - b_i| <= tolerance_i + slack_i, |Theta| <= box}, slack penalised.

    A_i = query_i difference_i^T. False positives among the rows can make hard constraints
    infeasible, so every row may be violated at a price; the box makes the widths along the affine
    hull finite.
    """

    query: Float64  # (c, d), x_r
    difference: Float64  # (c, d), x_a - x_b
    offsets: Float64  # (c,), log-odds
    tolerances: Float64  # (c,)
    box: float
    penalty: float = _DEFAULTS.penalty

    @property
    def d(self) -> int:
        return self.query.shape[1]

    @property
    def normals(self) -> Float64:
        """(c, d^2): the matrices A_i as rows."""
        products = self.query[:, :, None] * self.difference[:, None, :]
        return products.reshape(len(products), -1)

    def errors(self, theta: Float64) -> Float64:
        """<A_i, Theta> - b_i for matrices (..., d, d): (..., c)."""
        applied = np.einsum("cd,...de,ce->...c", self.query, theta, self.difference, optimize=True)
        return applied - self.offsets

    def membership(self, theta: Float64) -> Membership:
        """Whether Theta satisfies every row within its tolerance, and by how much it does not."""
        excess = np.abs(self.errors(theta)) - self.tolerances
        worst = float(max(excess.max(), np.abs(theta).max() - self.box))
        return Membership(worst <= 1e-9, max(worst, 0.0), float(np.mean(excess > 1e-9)))

    def contains(self, thetas: Float64) -> np.ndarray:
        """Which of some matrices (s, d, d) are members."""
        return self.along(np.zeros((self.d, self.d)), thetas)(np.ones(len(thetas)))

    @in_float64
    def along(
        self, start: Float64, ways: Float64, turn: float | None = None
    ) -> Callable[[Float64], np.ndarray]:
        """Membership of the points start + length x way, for ways (s, d, d), asked by lengths (s,).

        The body is convex, so that its members on a ray are between two lengths, which are worked
        out once, however often it is asked.
        turn: of a single way, turned by so much towards each entry in its turn: d^2 ways.
        """
        normals, *limits = self._on_device
        flat = [jnp.asarray(one.reshape(-1, self.d**2)) for one in (start, ways)]
        known = [(one, one @ normals) for one in flat]
        if turn is not None:
            entries, rows = known[1]
            known[1] = (entries + turn * jnp.eye(self.d**2), rows + turn * normals)
        low, high = map(np.asarray, _ends_of_rays(*known, tuple(limits)))
        return lambda lengths: (lengths >= low) & (lengths <= high)

    @cached_property
    def _on_device(self) -> tuple[Array, ...]:
        rows = (self.normals.T.copy(), self.offsets, self.tolerances, np.asarray(self.box))
        return in_float64(lambda: tuple(map(jnp.asarray, rows)))()

    @cached_property
    def proxy(self) -> Float64:
        return self.minimum_norm_point()

    def minimum_norm_point(self) -> Float64:
        """argmin |Theta|^2 / 2 + penalty * slack over the body: a quadratic programme (Clarabel).

        Source: phase 3 of Chen & Li, whose proxy it is. Trust: exact for this body; that its inner
        products with all Theta_i agree needs the body to be close to the affine hull.
        """
        return self._solve(1.0, np.zeros((self.d, self.d)), self.penalty)

    def stretch(self, theta: Float64) -> float:
        """The factor at which a matrix shows the rows' log-odds, by least squares.

        The minimum-norm point is the body's nearest to zero, shorter than that of the affine hull
        by what the tolerances allow.
        """
        shown = self.errors(theta) + self.offsets
        return float(shown @ self.offsets) / max(float(shown @ shown), 1e-300)

    def maximise(self, direction: Float64) -> Float64:
        """argmax <direction, Theta> - penalty |direction| slack: a linear programme (Clarabel)."""
        return self._solve(0.0, -direction, self.penalty * float(np.linalg.norm(direction)))

    def _solve(self, curvature: float, slope: Float64, price: float) -> Float64:
        """argmin curvature |Theta|^2 / 2 + <slope, Theta> + price * slack over the body."""
        c, size = len(self.offsets), self.d**2
        eye, entries = sparse.identity(c), sparse.identity(size)
        # Unknowns: Theta, what the rows say of it beyond their offsets, and slack. Every row of A
        # enters once; that errors are within tolerance and slack costs next to nothing.
        blocks = [
            [sparse.csc_matrix(self.normals), -eye, None],
            [None, eye, -eye],
            [None, -eye, -eye],
            [None, None, -eye],
            [entries, None, None],
            [-entries, None, None],
        ]
        within = [self.offsets, self.tolerances, self.tolerances, np.zeros(c)]
        bound = np.concatenate([*within, np.full(2 * size, self.box)])
        cones = [clarabel.ZeroConeT(c), clarabel.NonnegativeConeT(len(bound) - c)]
        quadratic = sparse.diags([curvature] * size + [0.0] * 2 * c, format="csc")
        linear = np.concatenate([slope.ravel(), np.zeros(c), np.full(c, price)])
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        matrix = sparse.bmat(blocks, format="csc")
        solved = clarabel.DefaultSolver(quadratic, linear, matrix, bound, cones, settings).solve()
        return np.array(solved.x)[:size].reshape(self.d, self.d)

    def width(self, direction: Float64) -> float:
        unit = direction / np.linalg.norm(direction)
        return float(np.sum(unit * (self.maximise(unit) - self.maximise(-unit))))

    def without_violated(self, point: Float64, stretch: float) -> "ConvexBody":
        """The body of the rows that a point satisfies, with tolerances stretched: the point is in
        its interior."""
        kept = np.abs(self.errors(point)) <= (1 + 1e-6) * self.tolerances + 1e-9
        return replace(
            self,
            query=self.query[kept],
            difference=self.difference[kept],
            offsets=self.offsets[kept],
            tolerances=stretch * self.tolerances[kept],
        )


@dataclass(frozen=True)
class HullBody:
    """The affine hull itself as a body, cut to a ball: what phases 2 and 4 come near to."""

    proxy: Float64  # the point nearest to zero
    wide: Float64  # (m - 1, d, d), orthonormal directions
    radius: float
    thickness: float = 1e-9

    @property
    def d(self) -> int:
        return self.proxy.shape[0]

    def minimum_norm_point(self) -> Float64:
        return self.proxy

    def contains(self, thetas: Float64) -> np.ndarray:
        flat = (thetas - self.proxy).reshape(len(thetas), -1)
        basis = self.wide.reshape(len(self.wide), -1)
        along = flat @ basis.T
        across = np.linalg.norm(flat - along @ basis, axis=1)
        return (np.linalg.norm(along, axis=1) <= self.radius) & (across <= self.thickness)

    def maximise(self, direction: Float64) -> Float64:
        along = np.einsum("wde,de->w", self.wide, direction)
        along *= self.radius / max(float(np.linalg.norm(along)), 1e-300)
        return self.proxy + np.einsum("w,wde->de", along, self.wide)


def sculpt_body(
    rows: CertifiedRows, centre: Float64, constants: Constants = _DEFAULTS
) -> ConvexBody:
    """The body cut out by certified rows, around a point known to be near its middle.

    A row's tolerance is in proportion to its score, the error of its log-odds; the factor is
    estimated, as the one at which nearly all rows hold at the centre.
    Source: phases 2 and 4 of Chen & Li; the tolerances are ours.
    Trust: contains the affine hull (inside the box) when every row is a true positive and the
    tolerances cover the errors of the sum. Measured, they do not: true heads violate some rows.
    """
    body = ConvexBody(
        query=rows.query,
        difference=rows.difference,
        offsets=rows.log_odds,
        tolerances=rows.score,
        box=constants.box * float(np.abs(centre).max()),
        penalty=constants.penalty,
    )
    errors = np.abs(body.errors(centre))
    factor = float(np.quantile(errors / np.maximum(rows.score, 1e-300), constants.true_rows))
    return replace(body, tolerances=factor * rows.score)


def sculpt_within(rows: CertifiedRows, constants: Constants = _DEFAULTS) -> ConvexBody:
    """The body of all certified constraints, each within the error that epsilon allows.

    The box is `box` times the entry that the constraints ask for on average.
    Source: phases 2 and 4 of Chen & Li. Trust: contains every Theta_i whose log-odds the certified
    rows show within their tolerances.
    """
    sizes = np.linalg.norm(rows.query, axis=1) * np.linalg.norm(rows.difference, axis=1)
    typical = float(np.median(np.abs(rows.log_odds) / np.maximum(sizes, 1e-300)))
    return ConvexBody(
        query=rows.query,
        difference=rows.difference,
        offsets=rows.log_odds,
        tolerances=rows.score,
        box=constants.box * max(typical, 1e-300) * rows.query.shape[1],
        penalty=constants.penalty,
    )
