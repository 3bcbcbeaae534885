"""Construction of one decoder layer from the parts that most families share with Llama."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from runtime.layers.attention import Attention
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.mlp import MLP, GatedMLP
from runtime.layers.moe import MoE
from runtime.layers.norm import LayerNorm, Norm, RMSNorm
from runtime.modeling.config import Config

NormT = TypeVar("NormT", LayerNorm, RMSNorm)


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer that is being built. Methods return the layer's parts, whose tensor names begin with `name`."""

    config: Config
    build: Build
    index: int
    name: str  # prefix of the layer's tensor names, for example "model.layers.0"

    def attention(self, name: str = "self_attn", *, bias: bool | None = None, **options: Any) -> Attention:
        """Return attention. `options` are further arguments of `Attention`; `rope` defaults to the model's.

        `bias` says whether q, k and v have biases, and is the default of `out_bias`. If it is None, config.json's
        `attention_bias` is used.
        """
        config = self.config
        bias = config.flag("attention_bias") if bias is None else bias
        if "rope" not in options:
            options["rope"] = self.build.rope(config.rope())
        return Attention(
            f"{self.name}.{name}",
            self.index,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self.build,
            **{"bias": bias, "out_bias": bias, **options},
        )

    def head_norms(
        self, names: Sequence[str] = ("q_norm", "k_norm"), kind: type[NormT] = RMSNorm, **options: Any
    ) -> tuple[NormT, NormT]:
        """Return the norms of q and k, applied per head. `options` are arguments of `kind`."""
        size, eps = self.config.head_dim, self.config.norm_eps
        q, k = (kind(f"{self.name}.self_attn.{name}", size, eps, self.build, **options) for name in names)
        return q, k

    def norms_of_heads(self, name: str) -> tuple[LayerNorm, LayerNorm]:
        """Return the layer norms of q and k with separate weights for each head; {} in `name` stands for q or k."""
        config = self.config
        q, k = (
            LayerNorm(
                f"{self.name}.{name.format(part)}",
                config.head_dim,
                config.norm_eps,
                self.build,
                bias=False,
                heads=heads,
            )
            for part, heads in (("q", config.num_heads), ("k", config.num_kv_heads))
        )
        return q, k.of_kv_heads()

    def mlp(
        self, size: int | None = None, *, name: str = "mlp", activation: str | None = None, **options: Any
    ) -> GatedMLP:
        """Return a gated MLP of the configured inner size, or of `size`. `options` are arguments of `GatedMLP`."""
        config = self.config
        size, activation = size or config.intermediate_size, activation or config.activation
        return GatedMLP(f"{self.name}.{name}", config.hidden_size, size, activation, self.build, **options)

    def plain_mlp(self, size: int | None = None, *, name: str = "mlp", **options: Any) -> MLP:
        """Return an MLP without a gate. `options` are arguments of `MLP`."""
        config = self.config
        sizes = config.hidden_size, size or config.intermediate_size
        return MLP(f"{self.name}.{name}", *sizes, config.activation, self.build, **options)

    def experts(
        self, size: int, num_experts: int, *, name: str = "mlp", activation: str | None = None, **options: Any
    ) -> MoE:
        """Return an MoE layer whose experts have the inner size `size`. `options` are arguments of `MoE`."""
        name, activation = f"{self.name}.{name}", activation or self.config.activation
        return MoE(name, self.config.hidden_size, size, num_experts, activation, self.build, **options)

    def norm(self, name: str, **options: Any) -> RMSNorm:
        """Return an RMSNorm of hidden states. `options` are arguments of `RMSNorm`."""
        return norms(self.config, self.build, RMSNorm, **options)(f"{self.name}.{name}")

    def block(self, attention: nn.Module, mlp: nn.Module, *, norm: Callable[[str], Norm] | None = None) -> PreNormBlock:
        """Return a block with a norm before attention and a norm before the MLP.

        `norm` returns a norm for a name; the default is an RMSNorm.
        """
        norm = norm or norms(self.config, self.build, RMSNorm)
        before, between = norm(f"{self.name}.input_layernorm"), norm(f"{self.name}.post_attention_layernorm")
        return PreNormBlock(before, attention, between, mlp)


def norms(config: Config, build: Build, kind: type[NormT], **options: Any) -> Callable[[str], NormT]:
    """Return a function that maps a name to a norm of hidden states. `options` are arguments of `kind`."""
    return lambda name: kind(name, config.hidden_size, config.norm_eps, build, **options)
