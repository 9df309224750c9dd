"""Do labels hold a residual path, y = x + F(x)? Asked of the labels, and of heads."""

from typing import NamedTuple

import numpy as np

from mhalearn._runtime.types import Float64
from mhalearn.data import Examples
from mhalearn.judge.fitted_attention import FittedAttention

# A head that gives its own token this share of its weight passes it on; less will do where W is a
# multiple of the identity, up to this much, which is no accident.
_OWN, _MOSTLY_OWN, _IDENTITY = 0.9, 0.5, 0.15
# Rows to regress on, for each feature, and at most; the share of the tokens' energy up to which a
# linear map of a row's own token is called the identity; and a ridge, for directions not seen.
_ROWS_EACH, _MOST_ROWS = 8, 20_000
_NEAR_IDENTITY, _RIDGE = 0.25, 1e-9


class OwnTokenHead(NamedTuple):
    """A head that passes tokens on."""

    head: int
    share: float  # of its weight on the row's own token
    scale: float | None  # s where its W is s I, nearly

    def describe(self) -> str:
        """In words that follow a sentence."""
        told = ""
        if self.scale is not None:
            told = " with W = I" if self.is_identity else f" with W = {self.scale:.2g} I"
        own = f"({self.share:.0%} of its weight)"
        return f"; head {self.head + 1} attends to its own token {own}{told}"

    @property
    def is_identity(self) -> bool:
        return self.scale is not None and abs(self.scale - 1) < _IDENTITY


def find_own_token_head(fitted: FittedAttention | None) -> OwnTokenHead | None:
    """The first head that passes tokens on; None where none does."""
    if fitted is None:
        return None
    own = np.einsum("nmrr->nmr", fitted.patterns)
    weights = fitted.inside[:, None] / fitted.inside.sum()
    for head, share in enumerate(np.sum(own * weights, axis=(0, 2)).tolist()):
        scale = _multiple_of_identity(fitted.layer.w[head])
        if share > (_OWN if scale is None else _MOSTLY_OWN):
            return OwnTokenHead(head, share, scale)
    return None


def _multiple_of_identity(w: Float64) -> float | None:
    """The multiple that W is, nearly; None where it is none."""
    if w.shape[0] != w.shape[1] or not w.any():
        return None
    scale = float(np.trace(w)) / len(w)
    off = float(np.linalg.norm(w - scale * np.eye(len(w))) / np.linalg.norm(w))
    return None if off > _IDENTITY else scale


def advise_residual(examples: Examples, residual: bool) -> str:
    """What to learn with, in words that follow a reason to believe in a residual path; nothing
    where widths exclude one. residual: tokens were taken off the labels."""
    if examples.d != examples.out_dim:
        return ""
    if residual:
        return "; X was taken off the labels: if they hold no such path, learn without residual"
    return "; then learn with residual=True"


def hint_at_residual_path(examples: Examples, residual: bool) -> str:
    """That labels look as if they held a residual path, in words that end a sentence; or nothing.

    Rows are regressed on their own tokens. Beside a residual path that map is the identity and
    what attention adds to it; of an attention layer alone it is a mean of its W, which nothing
    makes the identity. residual: tokens were taken off the labels; then it is minus the identity
    where that was wrong.
    Cost: a regression on at most 20,000 rows. Trust: a heuristic; a hint, and no finding.
    """
    if examples.d != examples.out_dim:
        return ""
    most = max(2, _MOST_ROWS // examples.k)
    part = examples if examples.n <= most else examples.sample(most, seed=0)
    x, y, lengths = part.arrays()
    inside = np.arange(part.k) < lengths[:, None]
    tokens, labels = x[inside].astype(np.float64), y[inside].astype(np.float64)
    if len(tokens) < _ROWS_EACH * part.d:
        return ""
    tokens, labels = tokens - tokens.mean(axis=0), labels - labels.mean(axis=0)
    moment = tokens.T @ tokens
    energy = float(np.trace(moment))
    if energy == 0:
        return ""
    eye = np.eye(part.d)
    path = -eye if residual else eye
    own = np.linalg.solve(moment + _RIDGE * energy * eye, tokens.T @ labels)
    off = float(np.trace((own - path).T @ moment @ (own - path))) / energy
    if off > _NEAR_IDENTITY:
        return ""
    if residual:
        return "; the labels look as if they held no residual path: if so, learn without residual"
    return (
        "; the labels look as if they held a residual path y = x + F(x): if they do, learn with "
        "residual=True"
    )
