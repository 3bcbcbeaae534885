"""Which implementation of each operation is used: chosen once, handed to the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from torch import Tensor

# operation -> (the Kernels fields its backend file provides, the backend files there are)
OPERATIONS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "activation": (("gate",), ("native",)),
    "attention": (("attend",), ("native", "with_onednn")),
    "kv": (("store",), ("native",)),
    "matmul": (("prepare", "linear"), ("native", "with_onednn")),
    "norm": (("rms_norm", "add_rms_norm"), ("native",)),
    "rope": (("rotate",), ("native",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One callable per operation; each contract stands in its folder, `attend` in `ops.attention` and so on."""

    attend: Callable[..., Tensor]
    store: Callable[..., None]
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rotate: Callable[..., tuple[Tensor, Tensor]]
    gate: Callable[..., Tensor]
    prepare: Callable[[Tensor], Tensor]
    linear: Callable[..., Tensor]


def select(choices: Mapping[str, str] | None = None) -> Kernels:
    """The kernels for `choices`: operation -> backend file, for example {"attention": "native"}.

    What is not named is "native". Raises ValueError for an operation or backend that does not exist.
    """
    choices = choices or {}
    for operation in choices:
        if operation not in OPERATIONS:
            raise ValueError(
                f"There is no operation '{operation}'; there are {', '.join(sorted(OPERATIONS))}."
            )
    callables = {}
    for operation, (fields, backends) in OPERATIONS.items():
        backend = choices.get(operation, "native")
        if backend not in backends:
            raise ValueError(f"'{operation}' has no backend '{backend}'; it has {', '.join(backends)}.")
        module = import_module(f"ops.{operation}.{backend}")
        callables.update({field: getattr(module, field) for field in fields})
    return Kernels(**callables)
