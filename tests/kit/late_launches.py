"""Triton launches in the interpreter on a fake device: recorded, captured, and executed when the device proceeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from fake_device import LateDevice


@contextmanager
def launches_on(device: LateDevice) -> Iterator[list[str]]:
    """Enqueue all launches on the device instead of executing them. Yields a list that collects the kernels' names."""
    import triton.runtime.interpreter as interpreter

    executor, names = interpreter.GridExecutor, []
    launch = executor.__call__

    def enqueue(self: Any, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                device.adopt(value)
        names.append(self.fn.__name__)
        device.enqueue("forward", lambda: launch(self, *args, **kwargs))
        device.linger()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "__call__", enqueue)
        yield names
