"""What a block is made of, and how many numbers its function determines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mhalearn._runtime.validation import check_count
from mhalearn.layer.architecture import Architecture
from mhalearn.layer.block.activations import Activation
from mhalearn.layer.block.norms import PLACES, check_kind

if TYPE_CHECKING:
    from mhalearn.layer.block.parametrisation import BlockParametrisation

# An epsilon from which on it shows at which scale normalised vectors were.
SHOWN = 1e-9


@dataclass(frozen=True)
class BlockDesign:
    """The class of blocks considered; what `Architecture.attention` is for them.

    attention: of the heads, with as many outputs as features. hidden: neurons.
    bias: the feed-forward part has biases; those of attention are in its own architecture.
    linear: a linear map stands beside the neurons; see `FeedForward`.
    norm: None, "pre" or "post"; norm_kind: "layer" or "rms"; norm_bias: of LayerNorms.
    """

    attention: Architecture
    hidden: int
    activation: str = "gelu"
    bias: bool = True
    linear: bool = False
    norm: str | None = None
    norm_kind: str = "layer"
    epsilon: float = 1e-5
    norm_bias: bool = True

    def __post_init__(self) -> None:
        a = self.attention
        if a.outputs != a.d:
            raise ValueError(
                f"out_dim={a.outputs} beside d={a.d}: a residual path needs them equal"
            )
        if a.attention is not None:
            raise ValueError("a block has heads of this package's kinds: leave `attention` out")
        if a.memory is not None:
            raise ValueError("memory: heads of a block have keys and values of its own tokens")
        if a.latent is not None:
            raise ValueError("latent: heads through latents are not held in a block yet")
        check_count("hidden", self.hidden, least=0)
        Activation(self.activation)
        if self.norm not in (None, *PLACES):
            raise ValueError(f"norm={self.norm!r}: pass None, 'pre' or 'post'")
        check_kind(self.norm_kind, self.epsilon)
        if self.norm is None or self.norm_kind == "rms":
            object.__setattr__(self, "norm_bias", False)

    @property
    def act(self) -> Activation:
        return Activation(self.activation)

    @property
    def has_positions(self) -> bool:
        return self.attention.has_positions

    @property
    def architecture(self) -> Architecture:
        """What every layer has, with this as its kind of attention."""
        a = self.attention
        return Architecture(a.d, a.n_heads, bias=a.bias, causal=a.causal, attention=self)

    @property
    def without_linear(self) -> Architecture:
        """The class without a linear map beside the neurons, whose unknowns are counted."""
        return replace(self, linear=False).architecture

    def __call__(self, architecture: Architecture) -> BlockParametrisation:
        """How its blocks are written as numbers; `Architecture.parametrisation` asks."""
        from mhalearn.layer.block.parametrisation import BlockParametrisation

        heads = architecture.n_heads
        if heads is None or heads == self.attention.n_heads:
            return BlockParametrisation(self.architecture)
        wider = replace(self, attention=self.attention.with_heads(heads))
        return BlockParametrisation(wider.architecture)

    @property
    def is_counted(self) -> bool:
        """Whether `count` has a formula: biases are everywhere, or nowhere."""
        biases = {self.attention.bias, self.bias}
        if self.norm is not None and self.norm_kind == "layer":
            biases.add(self.norm_bias)
        return len(biases) == 1 and not self.linear

    def count(self) -> int:
        """Unknowns of a block, its gauge left out.

        A LayerNorm's outputs, before its gain, lie on a hyperplane: what follows has one feature
        less to act on; and one output less to show where it precedes. Gains and biases before a
        linear map are part of it. Without norms the output bias of attention cannot be told from
        those of the neurons; nor can a post-norm's first bias.
        Trust: equal to the rank of a Jacobian wherever that was measured (`tests/test_block.py`).
        """
        a, d, b = self.attention, self.attention.d, self.bias
        flat = self.norm is not None and self.norm_kind == "layer"
        pre, post = self.norm == "pre", self.norm == "post"
        seen, shown = d - (flat and pre), d - (flat and post)  # by attention, and of it
        heads = replace(a, d=seen, out_dim=shown, head_dim=_at_most(a.head_dim, seen))
        count = heads.count() + self._count_neurons(d - flat, shown) + shown * b
        if self.norm is None:
            count -= d * b
        elif pre:
            count -= flat and b  # constants that the second norm does not see
        else:
            count += 2 * d + d * self.norm_bias - (self.epsilon < SHOWN)
        return count

    def _count_neurons(self, inputs: int, outputs: int) -> int:
        """An input each, a gate where there is one, an output; less scales that do not show."""
        each = (inputs + self.bias) * (1 + self.act.is_gated) + outputs
        return self.hidden * (each - self.act.is_gated - self.act.scales)


def _at_most(head_dim: int | None, features: int) -> int | None:
    return None if head_dim is None else min(head_dim, features)
