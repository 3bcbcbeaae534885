"""Tensors from the user's functions (--custom-weight-loader), for unsupported checkpoint formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module

from torch import Tensor

from runtime.errors import CheckpointError
from runtime.loading.tensors import Cuts, Take, give_parts


class CustomTensors:
    """Tensors that the user's functions return, with the interface of `runtime.loading.tensors.TensorFiles`.

    Tensors stay in memory until they are read. Each of `paths` names a function, `package.module.function`, that takes
    the model's folder and returns pairs of names and tensors, or a mapping. Raises CheckpointError if a function cannot
    be imported or returns something else.
    """

    def __init__(self, paths: Sequence[str], directory: str, rename: Callable[[str], str | None]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for path in paths:
            for stored, tensor in _load(path, directory):
                name = rename(stored)
                if name is None:
                    continue
                if name in self._tensors:
                    raise CheckpointError(
                        f"--custom-weight-loader {path} returns {name}, which another function has returned already."
                    )
                self._tensors[name] = tensor
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read_all(self, take: Take, cuts: Cuts, num_threads: int = 1) -> None:
        """Call `take(name, index, part)` on this thread for each part in `cuts`. Release each tensor afterwards."""
        for name in cuts:
            give_parts(take, cuts, name, self._tensors.pop(name))


def _load(path: str, directory: str) -> Iterable[tuple[str, Tensor]]:
    module, _, name = path.rpartition(".")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"--custom-weight-loader {path} cannot be imported ({error}). Use the form package.module.function."
        ) from error
    try:
        result = function(directory)
        pairs = list(result.items() if isinstance(result, Mapping) else result)
        valid = all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in pairs)
    except Exception as error:  # user code may raise any exception
        raise CheckpointError(f"--custom-weight-loader {path} failed: {error!r}.") from error
    if not valid:
        raise CheckpointError(f"--custom-weight-loader {path} must return pairs of a name and a tensor.")
    return pairs
