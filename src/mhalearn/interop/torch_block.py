"""A block as a PyTorch module that says each of its steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from mhalearn._runtime.programs import float64
from mhalearn._runtime.types import Float64
from mhalearn.interop.backend import require_torch
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.block.block import Block
from mhalearn.layer.block.parametrisation import holds_matrices, split
from mhalearn.layer.position_bias import Alibi, T5Bias
from mhalearn.layer.rope import Rope
from mhalearn.layer.rope_scaling import DynamicNTK


def block_to_torch(block: Block, dtype: Any = None) -> Any:
    """A torch.nn.Module, in eval mode on the CPU, with `module(x, positions=None)` the block.

    Its parameters have the names of the block's file. dtype: a torch dtype, float64 unless given.
    """
    torch = require_torch()
    module = _block_class()(block, torch.float64 if dtype is None else dtype)
    return module.eval()


@cache
def _block_class() -> Any:
    """Made when it is first asked for: torch is not a dependency."""
    torch = require_torch()

    class TransformerBlock(torch.nn.Module):  # type: ignore[misc, name-defined]
        """One transformer block: attention, residual paths, norms, feed-forward part."""

        def __init__(self, block: Block, dtype: Any) -> None:
            super().__init__()
            self.design = block.design
            for part, named in split(block.params).items():
                tensors = {
                    name: torch.nn.Parameter(torch.tensor(np.array(leaf), dtype=dtype))
                    for name, leaf in named.items()
                }
                setattr(self, part, torch.nn.ParameterDict(tensors))

        def forward(self, x: Any, positions: Any = None) -> Any:
            """x (n, k, d) -> (n, k, d)."""
            place = self.design.norm
            first = self._norm(self.norm_1, x) if place == "pre" else x
            h = x + attend(torch, self.design.attention, self.attention, first, positions)
            if place == "post":
                h = self._norm(self.norm_1, h)
            z = self._norm(self.norm_2, h) if place == "pre" else h
            y = h + self._neurons(z)
            return self._norm(self.norm_2, y) if place == "post" else y

        def _norm(self, norm: Any, z: Any) -> Any:
            if self.design.norm_kind == "layer":
                z = z - z.mean(dim=-1, keepdim=True)
            z = z * torch.rsqrt((z**2).mean(dim=-1, keepdim=True) + self.design.epsilon)
            return z * norm["gain"] + norm.get("bias", 0.0)

        def _neurons(self, z: Any) -> Any:
            ff, act = self.feed_forward, self.design.act
            up = z @ ff["up"] + ff.get("up_bias", 0.0)
            gate = z @ ff["gate"] + ff.get("gate_bias", 0.0) if act.is_gated else up
            active = activate(torch, act.function_name, gate)
            outputs = (active * up if act.is_gated else active) @ ff["down"] + ff.get(
                "down_bias", 0.0
            )
            return outputs + z @ ff["linear"] if "linear" in ff else outputs

    return TransformerBlock


def activate(torch: Any, name: str, z: Any) -> Any:
    """An activation, by the name of its function."""
    functional = torch.nn.functional
    if name == "gelu_tanh":
        return functional.gelu(z, approximate="tanh")
    if name == "sigmoid":
        return torch.sigmoid(z)
    return getattr(functional, name)(z)


def attend(torch: Any, a: Architecture, params: Any, z: Any, positions: Any) -> Any:
    """What heads make of tokens (n, k, d)."""
    if holds_matrices(a):
        logits = torch.einsum("brd,mde,bje->bmrj", z, params["theta"], z)
        if "key_vector" in params:
            logits = logits + torch.einsum("md,bjd->bmj", params["key_vector"], z)[:, :, None]
        p = _masked(torch, a, logits).softmax(dim=-1)
        return torch.einsum("bmrj,bjd,mde->bre", p, z, params["w"]) + params.get("out_bias", 0.0)
    query, key, value = (_project(torch, a, params, side, z) for side in ("query", "key", "value"))
    query, key = (
        _turn(torch, a, _normalise(torch, a, part, params, side), positions)
        for side, part in (("query", query), ("key", key))
    )
    each = a.heads // a.groups
    key, value = (part.repeat_interleave(each, dim=2) for part in (key, value))
    scale = a.qk_rank**-0.5 if a.logit_scale is None else a.logit_scale
    logits = torch.einsum("brmh,bjmh->bmrj", query, key) * scale
    if a.softcap is not None:
        logits = a.softcap * torch.tanh(logits / a.softcap)
    if a.distance_bias is not None:
        logits = logits + _by_distance(torch, a, params, _positions(torch, z, positions))
    logits = _masked(torch, a, logits)
    if a.sinks:
        sinks = params["sink"][:, None, None].expand(*logits.shape[:3], 1)
        p = torch.cat([logits, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        p = logits.softmax(dim=-1)
    mixed = torch.einsum("bmrj,bjmh->brmh", p, value)
    return torch.einsum("brmh,mhe->bre", mixed, params["out"]) + params.get("out_bias", 0.0)


def _project(torch: Any, a: Architecture, params: Any, side: str, z: Any) -> Any:
    return torch.einsum("bjd,gdh->bjgh", z, params[side]) + params.get(f"{side}_bias", 0.0)


def _normalise(torch: Any, a: Architecture, vectors: Any, params: Any, side: str) -> Any:
    """By a norm of queries and keys, where there is one."""
    norm = a.norm
    if norm is None:
        return vectors
    axes = (-2, -1) if norm.across_heads else (-1,)
    over = torch.mean if norm.kind == "rms" else torch.sum
    scaled = vectors * torch.rsqrt(over(vectors**2, dim=axes, keepdim=True) + norm.epsilon)
    return scaled * params[f"{side}_gain"] if f"{side}_gain" in params else scaled


def _turn(torch: Any, a: Architecture, vectors: Any, positions: Any) -> Any:
    """By rotary positions, where there are such."""
    if a.rope is None:
        return vectors
    positions = _positions(torch, vectors, positions)
    frequencies = torch.as_tensor(_frequencies(a.rope, a.qk_rank, positions), device=vectors.device)
    angles = (positions.to(torch.float64)[..., None] * frequencies)[..., None, :]
    cosine, sine = (
        (a.rope.magnitude * part).to(vectors.dtype)
        for part in (torch.cos(angles), torch.sin(angles))
    )
    real, imaginary = (torch.as_tensor(part) for part in a.rope.pairs(a.qk_rank))
    x, y = vectors[..., real], vectors[..., imaginary]
    turned = vectors.clone()
    turned[..., real], turned[..., imaginary] = x * cosine - y * sine, y * cosine + x * sine
    return turned


def _positions(torch: Any, z: Any, given: Any) -> Any:
    return torch.arange(z.shape[1], device=z.device) if given is None else given


def _frequencies(rope: Rope, head_dim: int, positions: Any) -> Float64:
    """Of each pair, (f,); where they depend on the length, (n, 1, f) or (1, f)."""
    scaling = rope.scaling
    if isinstance(scaling, DynamicNTK):
        lengths = np.atleast_1d(positions.amax(dim=-1).cpu().numpy()) + 1.0
        with float64():
            found = scaling.stretched(rope.base, rope.rotated(head_dim), jnp.asarray(lengths))
        if found is not None:
            return np.array(found)[:, None] if positions.ndim > 1 else np.array(found)
    return rope.frequencies(head_dim)


def _by_distance(torch: Any, a: Architecture, params: Any, positions: Any) -> Any:
    """What distances add to logits: ([n,] m, k, k)."""
    bias, distance = a.distance_bias, positions[..., None, :] - positions[..., :, None]
    if isinstance(bias, T5Bias):
        with float64():
            bucket = np.array(bias.bucket(jnp.asarray(distance.cpu().numpy(), float)), np.int64)
        index = torch.as_tensor(bucket, device=distance.device)
        return params["position_table"][index].movedim(-1, -3)
    assert isinstance(bias, Alibi)
    slopes = torch.as_tensor(bias.slopes(a.heads), device=distance.device)
    return -distance.abs()[..., None, :, :] * slopes[:, None, None]


def _masked(torch: Any, a: Architecture, logits: Any) -> Any:
    k = logits.shape[-1]
    index = torch.arange(k, device=logits.device)
    away = index[:, None] - index
    hidden = torch.zeros(k, k, dtype=torch.bool, device=logits.device)
    if a.causal:
        hidden = hidden | (away < 0)
    if a.window is not None:
        hidden = hidden | (away.abs() >= a.window)
    return logits.masked_fill(hidden, -torch.inf)
