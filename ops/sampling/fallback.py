"""Lets `native` compute the rows whose limits a backend does not support."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection

import numpy as np
import torch
from torch import Tensor

from ops.sampling import NO_LIMIT, Masks, SamplingArrays, native

logger = logging.getLogger(__name__)
Choose = Callable[[Tensor, SamplingArrays, SamplingArrays | None, Masks | None], tuple[Tensor, Tensor]]


def native_for_other_limits(
    limits: Collection[str],
) -> Callable[[Choose], Callable[..., tuple[Tensor, Tensor]]]:
    """Return a decorator for the `choose` of a backend that supports only these `limits` of `SamplingArrays`.

    The backend computes rows with unsupported limits as if they were greedy, and `native` then replaces their results.
    If the backend supports no row of the step, `native` computes the whole step. A row's own limits decide who computes
    it, so its token does not depend on the other rows.
    """
    others = tuple(name for name in NO_LIMIT if name not in limits)

    def decorate(backend: Choose) -> Callable[..., tuple[Tensor, Tensor]]:
        if not others:
            return backend

        @functools.wraps(backend)
        def choose(
            logits: Tensor,
            arrays: SamplingArrays,
            host: SamplingArrays | None = None,
            masks: Masks | None = None,
        ) -> tuple[Tensor, Tensor]:
            plan = arrays if host is None else host
            unsupported = _rows_with(others, plan)
            if unsupported is None:
                return backend(logits, arrays, host, masks)
            _log_once(backend.__module__, others)
            if unsupported.all():
                return native.choose(logits, arrays, host, masks)
            rows = torch.from_numpy(np.flatnonzero(unsupported))
            index = native.to_device(rows, logits.device)
            greedy = arrays.greedy.index_fill(0, index, True)
            ids, sound = backend(logits, arrays._replace(greedy=greedy), host, masks)  # the backend applies the masks
            planned = SamplingArrays(*(field[rows] for field in plan))
            selected = planned if host is None else SamplingArrays(*(field[index] for field in arrays))
            ids[index], sound[index] = native.choose(logits[index], selected, planned)
            return ids, sound

        return choose

    return decorate


def _rows_with(limits: tuple[str, ...], plan: SamplingArrays) -> np.ndarray | None:
    """Return which rows use one of `limits` (bool [R]), or None if no row does. Greedy rows use no limit."""
    greedy = plan.greedy.numpy()
    if greedy.all():
        return None
    used = np.zeros(len(greedy), np.bool_)
    for name in limits:
        used |= getattr(plan, name).numpy() != NO_LIMIT[name]
    used &= ~greedy
    return used if used.any() else None


@functools.cache
def _log_once(backend: str, limits: tuple[str, ...]) -> None:
    logger.debug("%s does not compute %s; torch computes the rows that use them.", backend, ", ".join(limits))
