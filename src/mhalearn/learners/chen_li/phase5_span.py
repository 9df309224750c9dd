"""Phase 5: the span of the attention matrices, by queries to the body.

The paper's: membership queries alone tell the span (`span_by_membership`); how they are chosen, a
way of meeting facets, is ours. Beside it, by linear optimisation (`span_by_queries`), which is ours
too; the eigenvectors of `body_shape.py` are a third way.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

from mhalearn._runtime.seeds import Stream, generator
from mhalearn._runtime.types import Float64
from mhalearn.learners.chen_li.breakdown import Breakdown
from mhalearn.learners.chen_li.phase2_body import ConvexBody
from mhalearn.learners.chen_li.span import Span
from mhalearn.learners.options import Constants

_CHASES = 3
_DEFAULTS = Constants()
# A slightly turned ray ends this near to where the ray does, as a share.
_BRACKET = 0.02
# Rays for each facet that is wanted, at most: others end at a known facet, or near an edge.
_RAYS = 3
# A known facet is where a ray ends to within this share; a normal gives its ray's length to within
# this, or is none.
_SAME, _ONE_FACET = 1e-4, 1e-2
# Facets between two looks at which directions they leave open.
_FRESH = 16


@runtime_checkable
class MembershipOracle(Protocol):
    """A body that answers whether matrices (s, d, d) are in it."""

    def contains(self, thetas: Float64) -> np.ndarray: ...


@runtime_checkable
class OptimisationOracle(Protocol):
    """A body that tells its minimum-norm point and its farthest point in a direction."""

    def minimum_norm_point(self) -> Float64: ...

    def maximise(self, direction: Float64) -> Float64: ...


def span_by_queries(body: OptimisationOracle, n_heads: int, seed: int = 0) -> Span:
    """m well-spread points of the body span the attention matrices.

    The first point is the minimum-norm point (one quadratic programme). Then, m - 1 times, the body
    is stretched along a random direction orthogonal to what was found (two linear programmes): it
    is long only along the affine hull, so the chord found lies close to it, and stretching along
    the chord brings it closer. 1 + 6 (m - 1) queries in all.
    Source: phase 5 of Chen & Li, with linear optimisation in place of their membership queries.
    Trust: as good as the body is thin across the affine hull: with three heads and more, and tight
    budgets, it is not, and the chords stray from the hull.
    """
    rng = generator(seed, Stream.SPAN_QUERIES)
    proxy = body.minimum_norm_point()
    found = [proxy.ravel() / max(float(np.linalg.norm(proxy)), 1e-300)]
    for _ in range(n_heads - 1):
        direction = _orthogonal(rng.normal(size=proxy.size), found).reshape(proxy.shape)
        # A random direction is mostly across the hull; the chord it finds is less so, and the next
        # one less again.
        for _ in range(_CHASES):
            chord = body.maximise(direction) - body.maximise(-direction)
            direction = _orthogonal(chord.ravel(), found).reshape(proxy.shape)
        found.append(direction.ravel() / max(float(np.linalg.norm(direction)), 1e-300))
    wide = np.stack(found)[1:].reshape(-1, *proxy.shape)
    return Span(proxy, wide, queries=1 + 2 * _CHASES * (n_heads - 1))


def span_by_membership(
    body: MembershipOracle,
    inside: Float64,
    n_heads: int,
    seed: int = 0,
    *,
    proxy: Float64 | None = None,
    constants: Constants = _DEFAULTS,
) -> Span:
    """The directions along which the body is longest, found facet by facet.

    From a point inside a ray ends at a facet, found by bisection; where the facet is along slightly
    turned rays tells its normal. A ray that ends near an edge shows two facets, whose mixture is
    none: that does not give the ray's own length, and is dropped. The next ray is orthogonal to the
    normals so far and, once these fill half the space, within the half that meets them least. The
    body is long along the affine hull alone, so that in the end the m - 1 directions of least
    energy in the normals are the hull's.
    proxy: the point of the span beside them; the point inside unless given.
    Cost: `facets` d^2 normals of d^2 x `turned_bisections` membership queries; `ConvexBody` takes
        O(rows d^2) for the first of a ray and of all its turned ones, and O(1) for every other.
    Source: phase 5 of Chen & Li, by membership queries alone as there. How they are chosen is ours,
    after the reduction of separation to membership (Groetschel, Lovasz and Schrijver).
    Trust: as good as the body is thin across the affine hull and long along it.
    """
    rng = generator(seed, Stream.SPAN_QUERIES)
    size, free = inside.size, n_heads - 1
    farthest = 64 * max(float(np.linalg.norm(inside)), 1e-12)
    queries = 0

    def bisect(
        ray: Float64, low: Float64, high: Float64, times: int, turn: float | None = None
    ) -> Float64:
        """How far the body goes along a ray, or along each of those that it is turned to."""
        nonlocal queries
        contains = _along(body, inside, ray.reshape(1, *inside.shape), turn)
        for _ in range(times):
            middle = (low + high) / 2
            member = contains(middle)
            low, high = np.where(member, middle, low), np.where(member, high, middle)
            queries += len(middle)
        return (low + high) / 2

    wanted = round(constants.facets * size)
    normals, basis, open_, thin = np.zeros((0, size)), np.eye(size), size, farthest
    for _ in range(_RAYS * wanted):
        ray = rng.normal(size=open_) @ basis[:open_]
        ray /= np.linalg.norm(ray)
        start, end = np.zeros(1), np.full(1, farthest)
        reach = float(bisect(ray, start, end, constants.bisections)[0])
        # On the facet a (x - inside) = 1 a ray r ends at 1 / <a, r>.
        known = np.any(np.abs(reach * normals @ ray - 1) < _SAME)
        if not 0 < reach < 0.99 * farthest or known:
            continue
        thin = min(thin, reach)
        # A long ray meets its facet at a small angle, and is turned less.
        turn = constants.turn * thin / reach
        low, high = (np.full(size, reach * share) for share in (1 - _BRACKET, 1 + _BRACKET))
        ends = bisect(ray, low, high, constants.turned_bisections, turn)
        normal = (1 / ends - 1 / reach) / turn
        if abs(reach * normal @ ray - 1) > _ONE_FACET:
            continue
        normals = np.vstack([normals, normal])
        if len(normals) % _FRESH == 0:
            basis = np.linalg.eigh(normals.T @ normals)[1].T
            open_ = max(size - len(normals), size // 2, free)
        if len(normals) == wanted:
            break
    if len(normals) < size - free:
        raise Breakdown(
            "phase 5: span",
            f"rays met {len(normals)} facets of the body, {size - free} are needed to tell its "
            "long directions: more certified rows, or a smaller `turn`",
            facets=len(normals),
            needed=size - free,
        )
    wide = np.linalg.eigh(normals.T @ normals)[1].T[:free].reshape(-1, *inside.shape)
    return Span(inside if proxy is None else proxy, wide, queries=queries)


def _along(
    body: MembershipOracle, start: Float64, ways: Float64, turn: float | None
) -> Callable[[Float64], np.ndarray]:
    """Membership of the points start + length x way, asked by lengths; with `turn`, of a way that
    is turned towards each entry."""
    if isinstance(body, ConvexBody):
        return body.along(start, ways, turn)
    if turn is not None:
        ways = ways + turn * np.eye(start.size).reshape(-1, *start.shape)
    return lambda lengths: body.contains(start + lengths[:, None, None] * ways)


def _orthogonal(vector: Float64, found: list[Float64]) -> Float64:
    basis = np.linalg.qr(np.stack(found).T)[0]
    return vector - basis @ (basis.T @ vector)
