"""Attention of transformers' modules, given to whoever computes a step.

A module finds its step as its attribute `penstock_step`: models share the one name that is registered with
transformers, and no step is kept anywhere else.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

NAME = "penstock"
# What changes nothing here: no training, no cache of transformers, positions that are applied already.
IDLE = frozenset({"dropout", "use_cache", "output_attentions", "position_ids", "cache_position", "is_causal"})


class AttentionStep(Protocol):
    """Takes every call of attention of one model."""

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """q [T, H, D], k [T, K, D], v [T, K, Dv] of all rows -> [T, H, Dv]. `options` has no None."""
        ...


def register() -> None:
    """Make the name known to transformers; again does nothing."""
    AttentionInterface.register(NAME, _attend)


def give(model: nn.Module, step: AttentionStep) -> None:
    """Let all attention of `model` go to `step`."""
    for module in model.modules():
        setattr(module, "penstock_step", step)  # noqa: B010 - a name that is no module's own


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """As transformers calls attention: q [1, H, T, D], k [1, K, T, D], v [1, K, T, Dv] -> [1, T, H, Dv]."""
    step: AttentionStep = module.penstock_step  # pyright: ignore
    given = {name: value for name, value in options.items() if value is not None and name not in IDLE}
    if attention_mask is not None:
        given["attention_mask"] = attention_mask
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return step.attend(module, q, k, v, given)[None], None
