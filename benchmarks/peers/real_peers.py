"""Adam as people would write it for a layer of known head count and rank: in optax, in PyTorch.

Minibatches of the examples in single precision, a cosine schedule over as many steps as the seconds
allow, factors that begin at random with deviation 0.05.
"""

import time
from typing import Any

import numpy as np

from mhalearn import AttentionLayer

SIZE, BATCH, PROBE = 0.05, 1024, 50


def learn(
    name: str, x: Any, y: Any, n_heads: int, rank: int, rate: float, seconds: float, seed: int
) -> tuple[AttentionLayer, int]:
    """The layer Adam comes to in so many seconds, compilation included, and its steps."""
    rng = np.random.default_rng([seed, 0xADA])
    d, e = x.shape[2], y.shape[2]
    shapes = {
        "query": (n_heads, d, rank),
        "key": (n_heads, d, rank),
        "value": (n_heads, d, rank),
        "out": (n_heads, rank, e),
        "shift": (n_heads, rank),  # of the queries
        "bias": (e,),
    }
    start = {part: SIZE * rng.standard_normal(shape) for part, shape in shapes.items()}
    engine = {"optax": _optax, "torch": _torch}[name]
    parts, steps = engine(start, x, y, rate, seconds, rng)
    query, key, value, out, shift, bias = (np.asarray(parts[part], float) for part in shapes)
    vector = np.einsum("mdh,mh->md", key, shift)
    return AttentionLayer(query @ key.swapaxes(1, 2), value @ out, vector, bias), steps


def _optax(start: Any, x: Any, y: Any, rate: float, seconds: float, rng: Any) -> tuple[Any, int]:
    import jax
    import jax.numpy as jnp
    import optax

    began = time.monotonic()
    tokens, labels = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    parts = {name: jnp.asarray(part, jnp.float32) for name, part in start.items()}

    def loss(parts: Any, x: Any, y: Any) -> Any:
        queries = jnp.einsum("brd,mdh->bmrh", x, parts["query"]) + parts["shift"][:, None]
        keys = jnp.einsum("bjd,mdh->bmjh", x, parts["key"])
        p = jax.nn.softmax(jnp.einsum("bmrh,bmjh->bmrj", queries, keys))
        mixed = jnp.einsum("bmrj,bjd,mdh->bmrh", p, x, parts["value"])
        return jnp.mean((jnp.einsum("bmrh,mhe->bre", mixed, parts["out"]) + parts["bias"] - y) ** 2)

    adam = optax.inject_hyperparams(optax.adam)(learning_rate=rate)

    @jax.jit
    def advance(parts: Any, memory: Any, chosen: Any, rates: Any, tokens: Any, labels: Any) -> Any:
        def step(carry: Any, now: Any) -> Any:
            parts, memory = carry
            chosen, rate = now
            slope = jax.grad(loss)(parts, tokens[chosen], labels[chosen])
            memory.hyperparams["learning_rate"] = rate
            updates, memory = adam.update(slope, memory)
            return (optax.apply_updates(parts, updates), memory), None

        return jax.lax.scan(step, (parts, memory), (chosen, rates))[0]

    def run(parts: Any, memory: Any, rates: Any) -> Any:
        chosen = jnp.asarray(rng.integers(0, len(x), (PROBE, min(BATCH, len(x)))))
        rates = jnp.asarray(rates, jnp.float32)
        return jax.block_until_ready(advance(parts, memory, chosen, rates, tokens, labels))

    memory = adam.init(parts)
    parts, memory = run(parts, memory, np.full(PROBE, rate))
    probed = time.monotonic()
    parts, memory = run(parts, memory, np.full(PROBE, rate))
    each = (time.monotonic() - probed) / PROBE
    steps = max(PROBE, int((seconds - (time.monotonic() - began)) / each) // PROBE * PROBE)
    for first in range(0, steps, PROBE):
        parts, memory = run(parts, memory, _cosine(rate, first, steps))
        if time.monotonic() - began > seconds:
            break
    return parts, steps + 2 * PROBE


def _torch(start: Any, x: Any, y: Any, rate: float, seconds: float, rng: Any) -> tuple[Any, int]:
    import torch

    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.tensor(np.asarray(x, np.float32), device=device)
    labels = torch.tensor(np.asarray(y, np.float32), device=device)
    parts = {
        name: torch.tensor(part, dtype=torch.float32, device=device, requires_grad=True)
        for name, part in start.items()
    }
    adam = torch.optim.Adam(parts.values(), lr=rate)

    def step(rate: float) -> None:
        chosen = torch.as_tensor(rng.integers(0, len(x), min(BATCH, len(x))), device=device)
        x_now, y_now = tokens[chosen], labels[chosen]
        queries = torch.einsum("brd,mdh->bmrh", x_now, parts["query"]) + parts["shift"][:, None]
        keys = torch.einsum("bjd,mdh->bmjh", x_now, parts["key"])
        values = torch.einsum("bjd,mdh->bmjh", x_now, parts["value"])
        p = torch.softmax(queries @ keys.transpose(2, 3), dim=-1)
        found = torch.einsum("bmrh,mhe->bre", p @ values, parts["out"]) + parts["bias"]
        adam.param_groups[0]["lr"] = rate
        adam.zero_grad()
        torch.mean((found - y_now) ** 2).backward()
        adam.step()

    def run(rates: Any) -> None:
        for now in rates:
            step(float(now))
        if device == "cuda":
            torch.cuda.synchronize()

    run(np.full(PROBE, rate))
    probed = time.monotonic()
    run(np.full(PROBE, rate))
    each = (time.monotonic() - probed) / PROBE
    steps = max(PROBE, int((seconds - (time.monotonic() - began)) / each) // PROBE * PROBE)
    for first in range(0, steps, PROBE):
        run(_cosine(rate, first, steps))
        if time.monotonic() - began > seconds:
            break
    return {name: part.detach().cpu().numpy() for name, part in parts.items()}, steps + 2 * PROBE


def _cosine(rate: float, first: int, steps: int) -> Any:
    return rate * 0.5 * (1 + np.cos(np.pi * np.arange(first, first + PROBE) / steps))
