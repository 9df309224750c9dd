"""Naive loops that say what the library should compute, written to be read, not to be fast."""

import math

import numpy as np

from mhalearn.layer.layer import AttentionLayer


def attention_layer(
    x, theta, w, key_vector=None, out_bias=None, *, causal=False, lengths=None
) -> np.ndarray:
    """F(X)_r = sum_i sum_j p_ij(r) x_j W_i + c, in loops; rows past a length are zero."""
    x = np.asarray(x, dtype=np.float64)
    n, k, _ = x.shape
    heads, d, e = w.shape
    outputs = np.zeros((n, k, e))
    for example in range(n):
        length = k if lengths is None else int(lengths[example])
        for r in range(length):
            keys = range(r + 1) if causal else range(length)
            for i in range(heads):
                logits = []
                for j in keys:
                    logit = 0.0
                    for a in range(d):
                        for b in range(d):
                            logit += x[example, r, a] * theta[i, a, b] * x[example, j, b]
                        if key_vector is not None:
                            logit += key_vector[i, a] * x[example, j, a]
                    logits.append(logit)
                highest = max(logits)
                weights = [math.exp(logit - highest) for logit in logits]
                for j, weight in zip(keys, weights, strict=True):
                    outputs[example, r] += weight / sum(weights) * (x[example, j] @ w[i])
            if out_bias is not None:
                outputs[example, r] += out_bias
    return outputs


def attention_patterns(x, theta, key_vector=None, *, causal=False, lengths=None) -> np.ndarray:
    """p_i(r) for every example, head, row and key, in loops; rows past a length are zero."""
    x = np.asarray(x, dtype=np.float64)
    n, k, _ = x.shape
    weights = np.zeros((n, len(theta), k, k))
    for example in range(n):
        length = k if lengths is None else int(lengths[example])
        for i in range(len(theta)):
            for r in range(length):
                keys = range(r + 1) if causal else range(length)
                for j in keys:
                    logit = x[example, r] @ theta[i] @ x[example, j]
                    if key_vector is not None:
                        logit += key_vector[i] @ x[example, j]
                    weights[example, i, r, j] = math.exp(logit)
                weights[example, i, r] /= weights[example, i, r].sum()
    return weights


def counting_limit(lengths, d, e, heads, *, bias=False, head_dim=None, causal=False) -> float:
    """N_min by counting, one head, one example and one row at a time."""
    ranks = [min(d if head_dim is None else head_dim, e) for _ in range(heads)]
    inside = min(e, sum(ranks))

    theta, v = (d * d, d) if head_dim is None else (head_dim * (2 * d - head_dim), head_dim)

    def unknowns(width: int) -> int:
        """What is left to learn when outputs are known to lie in a space of that dimension."""
        count = width if bias else 0
        for rank in ranks:
            count += theta + rank * (d + width - rank) + (v if bias else 0)
        return count

    def told_by_one_token(width: int) -> int:
        """The sum of all W, and c: rows that see one token say nothing else."""
        rank = min(d, width, sum(ranks))
        return rank * (d + width - rank) + (width if bias else 0)

    rows = mixing = about_attention = 0
    for n in lengths:
        for r in range(n):
            others = r if causal else n - 1
            rows += 1
            mixing += others > 0
            about_attention += min(inside, heads * others)
    limits = [heads * (theta + (v if bias else 0)) / about_attention]
    for width in (e, inside):
        limits.append(unknowns(width) / (rows * width))
        limits.append((unknowns(width) - told_by_one_token(width)) / (mixing * width))
    return len(lengths) * max(limits)


def narrow_layer(n_heads, d=64, rank=8, *, bias=False, causal=False, seed=1, out_dim=None):
    """Theta and W of low rank, key vectors in the heads' own dimensions, as projections make."""
    rng = np.random.default_rng(seed)
    e = d if out_dim is None else out_dim
    left, right = (rng.standard_normal((n_heads, d, rank)) / d**0.5 for _ in range(2))
    theta = 3.0 * left @ right.swapaxes(1, 2) / rank**0.5
    w = rng.standard_normal((n_heads, d, rank)) @ rng.standard_normal((n_heads, rank, e))
    vector = np.einsum("mdh,mh->md", right, rng.standard_normal((n_heads, rank))) if bias else None
    return AttentionLayer(
        theta, w / (d * rank) ** 0.5, vector, rng.standard_normal(e) if bias else None, causal
    )
