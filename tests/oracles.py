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


def rope_angle(rope, f, size, position, length) -> float:
    """The angle of pair f of `size` rotated dimensions, written out for every scaling."""
    base, said = rope.base, None if rope.scaling is None else rope.scaling.describe()
    kind = None if said is None else said["rope_type"]
    if kind == "dynamic":
        factor, most = said["factor"], said["max_position_embeddings"]
        grown = factor * max(length, most) / most - (factor - 1)
        base = base * grown ** (size / (size - 2))
    frequency = 1.0 / base ** (2 * f / size)
    if kind == "linear":
        frequency /= said["factor"]
    if kind == "llama3":
        trained = said["original_max_position_embeddings"]
        wavelength = 2 * math.pi / frequency
        if wavelength > trained / said["low_freq_factor"]:
            frequency /= said["factor"]
        elif wavelength >= trained / said["high_freq_factor"]:
            low, high = said["low_freq_factor"], said["high_freq_factor"]
            smooth = (trained / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / said["factor"] + smooth * frequency
    if kind == "yarn":

        def place(turns):
            trained = said["original_max_position_embeddings"]
            return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = place(said["beta_fast"]), place(said["beta_slow"])
        if said["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = min(max((f - low) / (high - low if high != low else 0.001), 0.0), 1.0)
        frequency = frequency / said["factor"] * ramp + frequency * (1 - ramp)
    return position * frequency


def _rotated(vector, rope, position, length) -> np.ndarray:
    """Pair by pair."""
    size = int(len(vector) * rope.fraction)
    turned = vector.copy()
    for f in range(size // 2):
        a, b = (2 * f, 2 * f + 1) if rope.layout == "interleaved" else (f, f + size // 2)
        angle = rope_angle(rope, f, size, position, length)
        turned[a] = vector[a] * math.cos(angle) - vector[b] * math.sin(angle)
        turned[b] = vector[b] * math.cos(angle) + vector[a] * math.sin(angle)
    if rope.scaling is not None and rope.scaling.describe()["rope_type"] == "yarn":
        factor = 0.1 * math.log(rope.scaling.factor) + 1
        turned[:size] *= rope.scaling.attention_factor or factor
    return turned


def _normalised(vectors, norm, gains) -> np.ndarray:
    """(heads, h), by the entries of a head or of all heads."""
    done = np.zeros_like(vectors)
    for i, vector in enumerate(vectors):
        entries = vectors.ravel() if norm.across_heads else vector
        square = sum(entry**2 for entry in entries)
        square = square / len(entries) if norm.kind == "rms" else square
        for a in range(len(vector)):
            done[i, a] = vector[a] / math.sqrt(square + norm.epsilon)
            if gains is not None:
                done[i, a] *= gains[i, a] if norm.across_heads else gains[a]
    return done


def _t5_bucket(bias, distance) -> int:
    """As T5 writes it, in whole numbers as far as they go."""
    side, first = bias.buckets, 0
    if bias.bidirectional:
        side //= 2
        first = side if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    near = side // 2
    if distance < near:
        return first + distance
    place = math.log(distance / near) / math.log(bias.max_distance / near) * (side - near)
    return first + min(near + int(place + 1e-9), side - 1)


def _position_bias(bias, table, distance, i, heads) -> float:
    if bias.name == "t5":
        return table[_t5_bucket(bias, distance), i]
    whole = 1
    while 2 * whole <= heads:
        whole *= 2
    if i < whole:
        return -abs(distance) * 2 ** (-8 * (i + 1) / whole)
    return -abs(distance) * 2 ** (-4 * (2 * (i - whole) + 1) / whole)


def _latents(tokens, a, params, name) -> np.ndarray:
    """(k, d) -> (k, r), a token after the other."""
    found = []
    for token in tokens:
        latent = token @ params[name]
        if a.latent.norm:
            square = sum(entry**2 for entry in latent) / len(latent)
            latent = latent / math.sqrt(square + a.latent.epsilon) * params[f"{name}_gain"]
        found.append(latent)
    return np.stack(found)


def _read(tokens, weights, biases) -> list[np.ndarray]:
    """Of each token (heads, h)."""
    made = []
    for token in tokens:
        heads = [token @ weight for weight in weights]
        if biases is not None:
            heads = [vector + bias for vector, bias in zip(heads, biases, strict=True)]
        made.append(np.stack(heads))
    return made


def projected_layer(
    x, a, params, *, lengths=None, positions=None, memory=None, memory_lengths=None
):
    """Outputs and attention weights of projected heads, one number after the other."""
    n, k, _ = x.shape
    m, h = params["query"].shape[0], params["query"].shape[2]
    groups = params["key"].shape[0]
    seen = k if memory is None else memory.shape[1]
    outputs, weights = np.zeros((n, k, a.outputs)), np.zeros((n, m, k, seen))
    for example in range(n):
        length = k if lengths is None else int(lengths[example])
        where = list(range(k)) if positions is None else [int(p) for p in positions[example]]
        longest = max(where[:length]) + 1
        sources = {"query": x[example, :length]}
        sources["key"] = sources["query"]
        if memory is not None:
            last = seen if memory_lengths is None else int(memory_lengths[example])
            sources["key"] = memory[example, :last]
        sources["value"] = tokens = sources["key"]
        if a.latent is not None:
            sources["key"] = sources["value"] = _latents(tokens, a, params, "latent")
            if a.latent.query_rank is not None:
                sources["query"] = _latents(sources["query"], a, params, "query_latent")
        made = {
            side: _read(source, params[side], params.get(f"{side}_bias"))
            for side, source in sources.items()
        }
        if "rotary_key" in params:
            for j, token in enumerate(tokens):
                shared = token @ params["rotary_key"]
                made["key"][j] = np.stack([np.append(shared, one) for one in made["key"][j]])
        for side in ("query", "key"):
            for r, vectors in enumerate(made[side]):
                if a.norm is not None:
                    vectors = _normalised(vectors, a.norm, params.get(f"{side}_gain"))
                if a.rope is not None:
                    vectors = np.stack([_rotated(v, a.rope, where[r], longest) for v in vectors])
                made[side][r] = vectors
        for r in range(length):
            for i in range(m):
                g = i * groups // m
                logits = {}
                for j in range(len(made["key"])):
                    if a.causal and j > r:
                        continue
                    if a.window is not None and abs(r - j) >= a.window:
                        continue
                    logit = sum(made["query"][r][i] * made["key"][j][g])
                    logit *= 1 / math.sqrt(h) if a.logit_scale is None else a.logit_scale
                    if a.softcap is not None:
                        logit = a.softcap * math.tanh(logit / a.softcap)
                    if a.position_bias is not None:
                        table, distance = params.get("position_table"), where[j] - where[r]
                        logit += _position_bias(a.position_bias, table, distance, i, m)
                    logits[j] = logit
                total = sum(math.exp(logit) for logit in logits.values())
                if a.sinks:
                    total += math.exp(params["sink"][i])
                for j, logit in logits.items():
                    weights[example, i, r, j] = math.exp(logit) / total
                    value = made["value"][j][g] @ params["out"][i]
                    outputs[example, r] += math.exp(logit) / total * value
            outputs[example, r] += params.get("out_bias", 0.0)
    return outputs, weights


def _activated(name, z) -> float:
    """One number through an activation, or the gate of a gated one."""
    name = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}.get(name, name)
    if name == "relu":
        return max(z, 0.0)
    if name == "gelu":
        return z * 0.5 * (1 + math.erf(z / math.sqrt(2)))
    if name in ("gelu_tanh", "geglu_tanh"):
        return 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    logistic = 1 / (1 + math.exp(-z))
    return logistic if name == "glu" else z * logistic


def _layer_norm(token, norm) -> np.ndarray:
    mean = sum(token) / len(token) if norm.kind == "layer" else 0.0
    size = math.sqrt(sum((a - mean) ** 2 for a in token) / len(token) + norm.epsilon)
    bias = np.zeros(len(token)) if norm.bias is None else norm.bias
    return np.array([norm.gain[i] * (token[i] - mean) / size + bias[i] for i in range(len(token))])


def _feed_forward(token, ff) -> np.ndarray:
    total = np.zeros(ff.d) if ff.down_bias is None else np.array(ff.down_bias)
    for j in range(ff.hidden):
        value = token @ ff.up[:, j] + (0.0 if ff.up_bias is None else ff.up_bias[j])
        if ff.gate is None:
            value = _activated(ff.activation, value)
        else:
            gate = token @ ff.gate[:, j] + (0.0 if ff.gate_bias is None else ff.gate_bias[j])
            value *= _activated(ff.activation, gate)
        total = total + value * ff.down[j]
    return total


def transformer_block(x, block, *, lengths=None) -> np.ndarray:
    """h = x + attention, y = h + feed-forward, with norms where the block has them; token by
    token, neuron by neuron; rows past a length are zero."""
    x = np.asarray(x, np.float64)
    heads, norms = block.attention, block.norms

    def attend(tokens):
        if isinstance(heads, AttentionLayer):
            biases = heads.key_vector, heads.out_bias
            said = {"causal": heads.causal, "lengths": lengths}
            return attention_layer(tokens, heads.theta, heads.w, *biases, **said)
        return projected_layer(tokens, heads.architecture, heads.params, lengths=lengths)[0]

    def each(function, tokens, *given):
        return np.array([[function(token, *given) for token in one] for one in tokens])

    if block.norm == "pre":
        h = x + attend(each(_layer_norm, x, norms[0]))
        y = h + each(_feed_forward, each(_layer_norm, h, norms[1]), block.feed_forward)
    elif block.norm == "post":
        h = each(_layer_norm, x + attend(x), norms[0])
        y = each(_layer_norm, h + each(_feed_forward, h, block.feed_forward), norms[1])
    else:
        h = x + attend(x)
        y = h + each(_feed_forward, h, block.feed_forward)
    if lengths is not None:
        y[np.arange(x.shape[1]) >= np.asarray(lengths)[:, None]] = 0.0
    return y
