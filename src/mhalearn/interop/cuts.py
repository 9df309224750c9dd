"""Weights that lie in a block in ways of their own: CodeGen's, and those of latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mhalearn.interop.cutting import Weights, take
from mhalearn.interop.projections import (
    Cut,
    Params,
    Sizes,
    assemble_heads,
    flat_outputs,
    flat_sides,
    reshape_as,
)


@dataclass(frozen=True)
class InFour(Cut):
    """One weight in four parts, each with queries, values and keys of a quarter of the heads
    (CodeGen, which was trained on four cores)."""

    name: str
    out: str

    def read(self, weights: Weights, sizes: Sizes) -> Params:
        packed = take(weights, f"{self.name}.weight", 2)
        if sizes.heads % 4:
            raise ValueError(f"{sizes.heads} heads do not lie in four parts")
        shape = (4, 3, sizes.heads // 4 * sizes.head_dim, packed.shape[1])
        parts = reshape_as(packed, shape, f"{self.name}.weight")
        query, value, key = (parts[:, i].reshape(-1, packed.shape[1]) for i in range(3))
        return assemble_heads([query, key, value], [None] * 3, weights, self.out, sizes)

    def write(self, params: Params) -> Params:
        query, key, value = (
            weight.reshape(4, -1, weight.shape[1]) for weight, _ in flat_sides(params)
        )
        packed = np.stack([query, value, key], axis=1)
        weight = packed.reshape(-1, packed.shape[-1])
        return flat_outputs(params, self.out) | {f"{self.name}.weight": weight}


@dataclass(frozen=True)
class Latents(Cut):
    """Latent attention (DeepSeek-V2 and V3). Heads have their rotated dimensions last there, and
    first here."""

    def read(self, weights: Weights, sizes: Sizes) -> Params:
        rotated, values = sizes.rotated, sizes.value_dim or sizes.head_dim
        still = sizes.head_dim - rotated
        down = take(weights, "kv_a_proj_with_mqa.weight", 2)
        if len(down) != sizes.rank + rotated:
            raise ValueError(
                f"kv_a_proj_with_mqa.weight has shape {down.shape}: the config says "
                f"{sizes.rank} + {rotated} rows"
            )
        params = {"latent": down[: sizes.rank].T, "rotary_key": down[sizes.rank :].T}
        params["latent_gain"] = take(weights, "kv_a_layernorm.weight", 1)
        name = "q_b_proj.weight" if "q_a_proj.weight" in weights else "q_proj.weight"
        query = _heads(take(weights, name, 2), sizes.heads, sizes.head_dim, name)
        params["query"] = np.roll(query, rotated, axis=2)
        if name == "q_b_proj.weight":
            params["query_latent"] = take(weights, "q_a_proj.weight", 2).T
            params["query_latent_gain"] = take(weights, "q_a_layernorm.weight", 1)
        up = take(weights, "kv_b_proj.weight", 2)
        both = _heads(up, sizes.heads, still + values, "kv_b_proj.weight")
        params["key"], params["value"] = both[..., :still], both[..., still:]
        out = take(weights, "o_proj.weight", 2).T
        params["out"] = reshape_as(out, (sizes.heads, values, out.shape[1]), "o_proj.weight")
        return params

    def write(self, params: Params) -> Params:
        found = flat_outputs(params, "o_proj")
        down = [params["latent"].T, params["rotary_key"].T]
        found["kv_a_proj_with_mqa.weight"] = np.concatenate(down)
        found["kv_a_layernorm.weight"] = params["latent_gain"]
        both = np.concatenate([params["key"], params["value"]], axis=2)
        found["kv_b_proj.weight"] = _rows(both)
        query = _rows(np.roll(params["query"], -params["rotary_key"].shape[1], axis=2))
        if "query_latent" not in params:
            return found | {"q_proj.weight": query}
        found |= {"q_b_proj.weight": query, "q_a_proj.weight": params["query_latent"].T}
        return found | {"q_a_layernorm.weight": params["query_latent_gain"]}


def _heads(weight: NDArray[Any], heads: int, width: int, name: str) -> NDArray[Any]:
    """(m h, d) as (m, d, h)."""
    return reshape_as(weight, (heads, width, weight.shape[1]), name).swapaxes(1, 2)


def _rows(heads: NDArray[Any]) -> NDArray[Any]:
    return heads.swapaxes(1, 2).reshape(-1, heads.shape[1])
