"""Adam as people would write it for a layer of known head count and rank: in optax, in PyTorch.

Minibatches of the examples in single precision, a cosine schedule over as many steps as the seconds
allow, factors that begin at random with deviation 0.05. Seconds are those of the clock or, with
`clock=time.process_time`, of the process on all its cores, which other work does not lengthen.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mhalearn import AttentionLayer

SIZE, BATCH, PROBE = 0.05, 1024, 50


@dataclass(frozen=True)
class Given:
    """Examples as Adam gets them: float32 tokens and labels, and masks where lengths differ."""

    x: Any
    y: Any
    allowed: Any = None  # (n, k, k): keys that a query sees; None: all
    counts: Any = None  # (n, k): 1 where a row counts; None: everywhere
    batch: int = BATCH

    @classmethod
    def of(cls, x: Any, y: Any, lengths: Any, causal: bool, batch: int) -> "Given":
        """Of sequences that end early, and see no later token where they are causal."""
        n, k = x.shape[:2]
        inside = np.arange(k) < np.asarray(lengths)[:, None]
        allowed = np.broadcast_to(inside[:, None, :], (n, k, k))
        allowed = (allowed & np.tri(k, dtype=bool) if causal else allowed) | np.eye(k, dtype=bool)
        x, y = (np.where(inside[..., None], part, 0) for part in (x, y))
        return cls(x, y, allowed, inside.astype(np.float32), batch)

    @property
    def mean_square(self) -> float:
        """Of the labels of rows that count."""
        squares = np.square(np.asarray(self.y, np.float64))
        if self.counts is None:
            return float(squares.mean())
        return float((squares * self.counts[..., None]).sum() / self.counts.sum() / self.y.shape[2])

    @property
    def arrays(self) -> list[Any]:
        """What a step picks its examples from."""
        wide = [np.asarray(part, np.float32) for part in (self.x, self.y)]
        return wide if self.allowed is None else [*wide, self.allowed, self.counts]


def learn(
    name: str, x: Any, y: Any, n_heads: int, rank: int, rate: float, seconds: float, seed: int
) -> tuple[AttentionLayer, int]:
    """The layer Adam comes to in so many seconds, compilation included, and its steps."""
    return learn_given(name, Given(x, y), n_heads, rank, rate, seconds, seed)


def learn_given(
    name: str,
    given: Given,
    n_heads: int,
    rank: int,
    rate: float,
    seconds: float,
    seed: int,
    causal: bool = False,
    *,
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[float, float], None] = lambda seconds, error: None,
) -> tuple[AttentionLayer, int]:
    """tell: hears of the seconds and the mean relative squared error of every fifty steps."""
    x, y = given.x, given.y
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
    watch = _Watch(clock, seconds, given.mean_square, tell)
    parts, steps = engine(start, given, rate, watch, rng)
    query, key, value, out, shift, bias = (np.asarray(parts[part], float) for part in shapes)
    vector = np.einsum("mdh,mh->md", key, shift)
    theta = query @ key.swapaxes(1, 2)
    return AttentionLayer(theta, value @ out, vector, bias, causal), steps


class _Watch:
    """Seconds since it was made, and what is told."""

    def __init__(self, clock: Any, seconds: float, mean_square: float, tell: Any) -> None:
        self.clock, self.seconds, self.mean_square, self.hear = clock, seconds, mean_square, tell
        self.began = clock()

    def taken(self) -> float:
        return float(self.clock() - self.began)

    def steps_left(self, each: float) -> int:
        return max(PROBE, int((self.seconds - self.taken()) / each) // PROBE * PROBE)

    def tell(self, loss: Any) -> bool:
        """Whether time is up."""
        self.hear(self.taken(), float(loss) / self.mean_square)
        return self.taken() > self.seconds


def _optax(start: Any, given: Given, rate: float, watch: _Watch, rng: Any) -> tuple[Any, int]:
    import jax
    import jax.numpy as jnp
    import optax

    arrays, n = [jnp.asarray(part) for part in given.arrays], len(given.x)
    parts = {name: jnp.asarray(part, jnp.float32) for name, part in start.items()}

    def loss(parts: Any, x: Any, y: Any, allowed: Any = None, counts: Any = None) -> Any:
        queries = jnp.einsum("brd,mdh->bmrh", x, parts["query"]) + parts["shift"][:, None]
        keys = jnp.einsum("bjd,mdh->bmjh", x, parts["key"])
        scores = jnp.einsum("bmrh,bmjh->bmrj", queries, keys)
        if allowed is not None:
            scores = jnp.where(allowed[:, None], scores, -jnp.inf)
        p = jax.nn.softmax(scores)
        mixed = jnp.einsum("bmrj,bjd,mdh->bmrh", p, x, parts["value"])
        wrong = (jnp.einsum("bmrh,mhe->bre", mixed, parts["out"]) + parts["bias"] - y) ** 2
        if counts is not None:
            wrong = wrong * counts[..., None] * (counts.size / jnp.sum(counts))
        return jnp.mean(wrong)

    adam = optax.inject_hyperparams(optax.adam)(learning_rate=rate)

    @jax.jit
    def advance(parts: Any, memory: Any, chosen: Any, rates: Any, arrays: Any) -> Any:
        def step(carry: Any, now: Any) -> Any:
            parts, memory = carry
            chosen, rate = now
            wrong, slope = jax.value_and_grad(loss)(parts, *(part[chosen] for part in arrays))
            memory.hyperparams["learning_rate"] = rate
            updates, memory = adam.update(slope, memory)
            return (optax.apply_updates(parts, updates), memory), wrong

        (parts, memory), wrong = jax.lax.scan(step, (parts, memory), (chosen, rates))
        return parts, memory, wrong.mean()

    def run(parts: Any, memory: Any, rates: Any) -> Any:
        chosen = jnp.asarray(rng.integers(0, n, (PROBE, min(given.batch, n))))
        rates = jnp.asarray(rates, jnp.float32)
        return jax.block_until_ready(advance(parts, memory, chosen, rates, arrays))

    memory = adam.init(parts)
    parts, memory, _ = run(parts, memory, np.full(PROBE, rate))
    probed = watch.taken()
    parts, memory, _ = run(parts, memory, np.full(PROBE, rate))
    steps = watch.steps_left((watch.taken() - probed) / PROBE)
    for first in range(0, steps, PROBE):
        parts, memory, wrong = run(parts, memory, _cosine(rate, first, steps))
        if watch.tell(wrong):
            break
    return parts, steps + 2 * PROBE


def _torch(start: Any, given: Given, rate: float, watch: _Watch, rng: Any) -> tuple[Any, int]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if watch.clock is time.process_time:
        torch.set_num_threads(1)  # of more, some wait busily for others, which would count
    arrays, n = [torch.tensor(part, device=device) for part in given.arrays], len(given.x)
    parts = {
        name: torch.tensor(part, dtype=torch.float32, device=device, requires_grad=True)
        for name, part in start.items()
    }
    adam = torch.optim.Adam(parts.values(), lr=rate)

    def step(rate: float) -> Any:
        chosen = torch.as_tensor(rng.integers(0, n, min(given.batch, n)), device=device)
        x_now, y_now, *masks = (part[chosen] for part in arrays)
        queries = torch.einsum("brd,mdh->bmrh", x_now, parts["query"]) + parts["shift"][:, None]
        keys = torch.einsum("bjd,mdh->bmjh", x_now, parts["key"])
        values = torch.einsum("bjd,mdh->bmjh", x_now, parts["value"])
        scores = queries @ keys.transpose(2, 3)
        if masks:
            scores = torch.where(masks[0][:, None], scores, -torch.inf)
        p = torch.softmax(scores, dim=-1)
        found = torch.einsum("bmrh,mhe->bre", p @ values, parts["out"]) + parts["bias"]
        adam.param_groups[0]["lr"] = rate
        adam.zero_grad()
        wrong = (found - y_now) ** 2
        if masks:
            wrong = wrong * masks[1][..., None] * (masks[1].numel() / masks[1].sum())
        mean = torch.mean(wrong)
        mean.backward()
        adam.step()
        return mean.detach()

    def run(rates: Any) -> float:
        return sum(step(float(now)) for now in rates).item() / len(rates)

    run(np.full(PROBE, rate))
    probed = watch.taken()
    run(np.full(PROBE, rate))
    steps = watch.steps_left((watch.taken() - probed) / PROBE)
    for first in range(0, steps, PROBE):
        if watch.tell(run(_cosine(rate, first, steps))):
            break
    return {name: part.detach().cpu().numpy() for name, part in parts.items()}, steps + 2 * PROBE


def _cosine(rate: float, first: int, steps: int) -> Any:
    return rate * 0.5 * (1 + np.cos(np.pi * np.arange(first, first + PROBE) / steps))
