"""Route the attention of transformers' modules to Penstock.

All models share one attention function, which is registered with transformers. The function calls `penstock_attend`, an
attribute of each module, so that a step needs no global state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runtime.errors import CheckpointError


@contextmanager
def without_messages_of(*names: str) -> Iterator[None]:
    """Drop the messages of these loggers inside the context. Child loggers are not affected."""
    loggers = [logging.getLogger(name) for name in names]

    def drop(record: logging.LogRecord) -> bool:
        return False

    for logger in loggers:
        logger.addFilter(drop)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(drop)


# Importing transformers imports torchao. Drop torchao's warnings about missing libraries, and torch's about its types.
with without_messages_of("torchao", "torch.utils._pytree"):
    try:
        from transformers.modeling_utils import AttentionInterface
    except RuntimeError as error:  # torch cannot register the operators of a torchvision for another torch
        raise CheckpointError(
            f"transformers cannot be imported: {error}. If torchvision is installed, uninstall it, or install the one "
            f"that fits torch {torch.__version__}."
        ) from error

NAME = "penstock"
# Ignored options: there is no training and no transformers cache, and RoPE is already applied.
IDLE = frozenset({"dropout", "use_cache", "output_attentions", "position_ids", "cache_position", "is_causal"})


# Attention function of one model: (module, q [T, H, D], k [T, K, D], v [T, K, Dv], options) -> [T, H, Dv]. T counts the
# tokens of all rows. `options` has no values of None.
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]


def causal_lm(model: Any) -> Any:
    """Return the causal language model inside a multimodal model that has no LM head of its own, else the model."""
    inner = getattr(model, "language_model", None)
    return inner if type(inner).__name__.endswith("ForCausalLM") else model


def body_name(model: Any) -> str:
    """Return the name of the attribute that holds the model without its LM head, or "" if there is none."""
    names = (model.base_model_prefix, "model", "transformer", "backbone", "decoder", "language_model")
    modules = (name for name in names if isinstance(getattr(model, name, None) if name else None, nn.Module))
    return next(modules, "")


def body(model: Any) -> Any:
    """Return the model without its LM head."""
    name = body_name(model)
    return getattr(model, name) if name else model


def register() -> None:
    """Register the attention function with transformers. Repeated calls have no effect."""
    AttentionInterface.register(NAME, _attend)


def set_attention(model: nn.Module, attend: Attend) -> None:
    """Use `attend` for every attention call of `model`."""
    for module in model.modules():
        setattr(module, "penstock_attend", attend)  # noqa: B010 - not an attribute of nn.Module


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Adapt transformers' attention interface: q [1, H, T, D], k [1, K, T, D], v [1, K, T, Dv] -> [1, T, H, Dv]."""
    attend: Attend = module.penstock_attend  # pyright: ignore
    effective = {name: value for name, value in options.items() if value is not None and name not in IDLE}
    if attention_mask is not None:
        effective["attention_mask"] = attention_mask
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(module, q, k, v, effective)[None], None
