"""Tensors that functions of the user's give (--custom-weight-loader), for checkpoints in forms that we do not read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module

from torch import Tensor

from runtime.errors import CheckpointError
from runtime.models.tensors import Cuts, Take, give_parts


class GivenTensors:
    """Stands in the place of `runtime.models.tensors.TensorFiles`; all tensors are in memory until they are taken.

    Each of `paths` is that of a function, `package.module.function`, which takes the model's folder and gives pairs of
    names and tensors, or a mapping. Raises CheckpointError for what cannot be imported or gives something else.
    """

    def __init__(self, paths: Sequence[str], directory: str, rename: Callable[[str], str | None]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for path in paths:
            for stored, tensor in _given(path, directory):
                name = rename(stored)
                if name is None:
                    continue
                if name in self._tensors:
                    raise CheckpointError(
                        f"--custom-weight-loader {path} gives {name}, which is there already."
                    )
                self._tensors[name] = tensor
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read_all(self, take: Take, cuts: Cuts, num_threads: int = 1) -> None:
        """As `TensorFiles.read_all`, on this thread; tensors that were taken are let go."""
        for name in cuts:
            give_parts(take, cuts, name, self._tensors.pop(name))


def _given(path: str, directory: str) -> Iterable[tuple[str, Tensor]]:
    module, _, name = path.rpartition(".")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"--custom-weight-loader {path} cannot be imported ({error}): give package.module.function."
        ) from error
    try:
        given = function(directory)
        pairs = list(given.items() if isinstance(given, Mapping) else given)
        fits = all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in pairs)
    except Exception as error:  # the user's code, of which anything may come
        raise CheckpointError(f"--custom-weight-loader {path} failed: {error!r}.") from error
    if not fits:
        raise CheckpointError(f"--custom-weight-loader {path} must give pairs of a name and a tensor.")
    return pairs
