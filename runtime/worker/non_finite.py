"""Finds the first module whose output has values that are not finite (`--enable-nan-detection`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runtime.layers.forward_batch import ForwardBatch
from runtime.modeling.decoder import Decoder

logger = logging.getLogger("penstock.core")


class NonFiniteSearch:
    """Recomputes failed steps module by module. Logs where non-finite values begin, once for each such module."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._logged: set[str] = set()

    def log_origin(self, batch: ForwardBatch) -> None:
        """Recompute the batch, and log the first module whose output is not finite."""
        origin = find_origin(self._model, batch)
        if origin not in self._logged:
            self._logged.add(origin)
            logger.error("Values are not finite: %s.", origin)


def find_origin(model: Decoder, batch: ForwardBatch) -> str:
    """Return a description of the first module, in the order of computation, whose output is not finite.

    Recomputing the batch writes its KV again, with the same values.
    """
    found: list[str] = []
    with _watched(model, found):
        hidden = model(batch)
        if not found:
            model.logits(hidden)
    return found[0] if found else "in the logits of this step, but not when the step was computed again"


@contextmanager
def _watched(model: Decoder, found: list[str]) -> Iterator[None]:
    def watch(name: str, module: nn.Module) -> Any:
        def note(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if not found and not all(map(_is_finite, _tensors(output))):
                found.append(_describe(name, module, all(map(_is_finite, _tensors(inputs)))))

        return module.register_forward_hook(note)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name and not any(module.children()):  # innermost modules, whose hooks run before those of their parents
                hooks.callback(watch(name, module).remove)
        for name, module in model.named_modules():
            if name and any(module.children()):
                hooks.callback(watch(name, module).remove)
        yield


def _describe(name: str, module: nn.Module, from_finite: bool) -> str:
    own = [f"{name}.{key}" for key, value in module.named_parameters(recurse=False) if not _is_finite(value)]
    if own:
        return f"first in {name} ({type(module).__name__}), whose weight {', '.join(own)} is not finite"
    cause = "from inputs that are finite" if from_finite else "from inputs that are not"
    return f"first in {name} ({type(module).__name__}), {cause}"


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _is_finite(values: Tensor) -> bool:
    if not values.is_floating_point():
        return True
    try:
        return bool(torch.isfinite(values).all())
    except (RuntimeError, NotImplementedError):  # the parameter has a packed layout that only its library can read
        return True
