"""A backend on a device that is called with host tensors, so that test cases do not depend on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ops.attention import AttentionMetadata
from ops.recurrence import Segments
from ops.sampling import SamplingArrays


class Moved:
    """A wrapper with the functions of `backend`. Arguments are copied to the device, and results back.

    Strides, offsets and shared memory are preserved. Changes to arguments are copied back too.
    """

    def __init__(self, backend: Any, device: str) -> None:
        self._backend = backend
        self._device = device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._backend, name)

        def call(*args: Any, **keywords: Any) -> Any:
            there = _Copies(self._device)
            keywords = there.of(keywords)
            for arg in args:
                if isinstance(arg, SamplingArrays):  # planned on the host by contract
                    keywords["host"] = arg
            results = function(*there.of(args), **keywords)
            found = to_host(results)
            there.bring_back()
            return found

        return call


def to_host(value: Any) -> Any:
    """Return the same structure with all tensors on the host. Waits for the device."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, tuple):
        return type(value)(*map(to_host, value)) if hasattr(value, "_fields") else tuple(map(to_host, value))
    return value


class _Copies:
    """Copies of the memory of one call's arguments, each memory once."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # address -> all bytes on the host and on the device

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, AttentionMetadata):
            moved = {field.name: self.of(getattr(value, field.name)) for field in fields(value)}
            return replace(value, **moved)
        if isinstance(value, Segments):
            return replace(value, spans=self.of(value.spans), plans={})
        if isinstance(value, Mapping):
            return {key: self.of(item) for key, item in value.items()}
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value

    def bring_back(self) -> None:
        for here, there in self._copies.values():
            here.copy_(there.cpu())

    def _tensor(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if not storage.nbytes():
            return x.to(self._device)
        if storage.data_ptr() not in self._copies:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._copies[storage.data_ptr()] = here, here.to(self._device, copy=True)
        _, there = self._copies[storage.data_ptr()]
        empty = torch.empty(0, dtype=x.dtype, device=self._device)
        return empty.set_(there.untyped_storage(), x.storage_offset(), x.size(), x.stride())
