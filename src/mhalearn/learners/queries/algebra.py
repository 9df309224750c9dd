"""A layer from chosen calls by algebra: a plane, its extension, and attention with W known.

No random starts, so no local minima to be caught in: a search in two dimensions that a grid
settles, a linear problem, and a descent from its solution. Wants answers of double precision, with
more outputs than one, at all rows, and tokens that may be moved freely.
"""

import numpy as np

from mhalearn._runtime.seeds import Stream, generator
from mhalearn.learners.queries.by_turns import find_by_turns
from mhalearn.learners.queries.domain import Domain, draw_direction
from mhalearn.learners.queries.extension import (
    AlgebraFound,
    count_extension_calls,
    design_extension,
    extend,
    find_row_spaces,
    solve_moves,
)
from mhalearn.learners.queries.plane import HOPELESS, design_plane, find_heads_in_plane
from mhalearn.learners.queries.session import Session

ROW_SPACES = "spaces that heads write to"
PLANE, EXTENSION = "heads on a plane", "heads on all features, to first order"
# Calls of a plane; what its heads may leave of exact answers; and planes that are tried.
_PLANE_CALLS, _EXACT, _PLANES = 4, 1e-9, 3
# Where logits rise by this much from token to token, patterns of heads differ most.
_SLOPE = 4.0
# How far tokens go off the plane: errors grow as this does, and rounding as its inverse.
_OFF = 1e-6
# The same where spaces are looked for: what is wrong with them does not go away by itself.
_OFF_TO_ROW_SPACES = 3e-8


def find_by_algebra(
    session: Session,
    domain: Domain,
    k: int,
    seed: int,
    n_heads: int | None,
    head_dim: int | None = None,
    *,
    causal: bool = False,
) -> AlgebraFound | None:
    """Ask about planes until one shows the heads, then about tokens off it; None where none does.

    Raises BudgetSpent. Cost: 4 calls a plane and 1.4 (m + 3) r / k off it, of k tokens each, where
    r is d, or the rank of heads that together write no more than the outputs hold.
    """
    rng = generator(seed, Stream.QUERIES)
    for planes in range(1, _PLANES + 1):  # noqa: B007
        u, v = (draw_direction(rng, domain.d) for _ in range(2))
        calls = design_plane(u, v, k, _PLANE_CALLS, causal=causal)
        scale = domain.fit(calls.tokens)
        calls = calls._replace(gain=calls.gain * scale)
        answers = session.ask(calls.tokens, PLANE).astype(np.float64)
        if not answers.any():
            return None
        heads = find_heads_in_plane(calls, answers, 1e-16, n_heads)
        if heads is not None and heads.residual < _EXACT:
            break
        if heads is None or heads.residual > HOPELESS:
            if causal:  # turns are looked for without a mask
                return None
            return find_by_turns(session, domain, k, rng, n_heads)
    else:
        return None
    slope = float(np.sqrt(np.mean(heads.p**2 + heads.s**2)))
    narrow = head_dim is not None and heads.n_heads * head_dim <= heads.images.shape[1]
    rank = head_dim if narrow and head_dim is not None and head_dim < domain.d else None
    count = count_extension_calls(heads.n_heads, rank or domain.d, k)
    basis = None if rank is None else np.linalg.qr(rng.standard_normal((domain.d, rank)))[0].T
    eps = _OFF if rank is None else _OFF_TO_ROW_SPACES
    off = design_extension(calls, np.sqrt(_SLOPE / slope), count, eps, rng, basis)
    gain = off.plane.gain * domain.fit(off.tokens)
    off = off._replace(plane=off.plane._replace(gain=gain))
    purpose = EXTENSION if rank is None else ROW_SPACES
    moves = solve_moves(heads, off, session.ask(off.tokens, purpose).astype(np.float64))
    size = moves.size(domain.d)
    if rank is None:
        return AlgebraFound(heads, extend(off, moves), size, planes)
    rows = find_row_spaces(heads, moves, rank)
    return AlgebraFound(heads, None, size, planes, rows=rows)
