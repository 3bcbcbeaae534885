"""Attention of transformers' modules, given to whoever computes a step.

A module finds it as its attribute `penstock_attend`: models share the one name that is registered with
transformers, and no step is kept anywhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def without_messages_of(*names: str) -> Iterator[None]:
    """Meanwhile, drop what the loggers of these names are told. Loggers below them and all others stay as they are."""
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


# torchao is imported with it: it warns of its libraries for other machines, and torch of how it registers types.
with without_messages_of("torchao", "torch.utils._pytree"):
    from transformers.modeling_utils import AttentionInterface

NAME = "penstock"
# What changes nothing here: no training, no cache of transformers, positions that are applied already.
IDLE = frozenset({"dropout", "use_cache", "output_attentions", "position_ids", "cache_position", "is_causal"})


# Takes every call of one model: (module, q [T, H, D], k [T, K, D], v [T, K, Dv] of all rows, options) -> [T, H, Dv].
# No option is None.
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]


def writing_part(model: Any) -> Any:
    """The model itself, or the causal language model within one that also sees and has no head of its own."""
    inner = getattr(model, "language_model", None)
    return inner if type(inner).__name__.endswith("ForCausalLM") else model


def body_name(model: Any) -> str:
    """The attribute of a causal language model that holds all but its head."""
    names = (model.base_model_prefix, "model", "transformer", "backbone", "decoder", "language_model")
    found = (name for name in names if isinstance(getattr(model, name, None) if name else None, nn.Module))
    return next(found, "")


def body(model: Any) -> Any:
    """All but its head."""
    name = body_name(model)
    return getattr(model, name) if name else model


def register() -> None:
    """Make the name known to transformers; again does nothing."""
    AttentionInterface.register(NAME, _attend)


def give(model: nn.Module, attend: Attend) -> None:
    """Let `attend` compute all attention of `model`."""
    for module in model.modules():
        setattr(module, "penstock_attend", attend)  # noqa: B010 - a name that is no module's own


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """As transformers calls attention: q [1, H, T, D], k [1, K, T, D], v [1, K, T, Dv] -> [1, T, H, Dv]."""
    attend: Attend = module.penstock_attend  # pyright: ignore
    given = {name: value for name, value in options.items() if value is not None and name not in IDLE}
    if attention_mask is not None:
        given["attention_mask"] = attention_mask
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(module, q, k, v, given)[None], None
