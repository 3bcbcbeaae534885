"""What a form's reader sees of a checkpoint and what it says of it, and the tensors of a quantised checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ops.matmul.grouped import GroupedWeight
from runtime.config.fields import Fields
from runtime.config.quantization import FORMATS
from runtime.errors import CheckpointError
from runtime.models.tensors import Cuts, Take, Tensors, for_each, give_parts

Read = Callable[[str], Tensor]  # a stored tensor by its name


class Stored(Tensors, Protocol):
    """A checkpoint's tensors as its files hold them."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...
    def read(self, name: str) -> Tensor: ...

    def release(self) -> None: ...


class Made(NamedTuple):
    """One of the model's tensors: its shape, and what makes it, in float32, of stored ones.

    What holds 4 bits in groups of neighbouring inputs can also be made as such (`ops/matmul/grouped.py`). What can be
    made row by row is never there as a whole.
    """

    shape: tuple[int, ...]
    make: Callable[[Read], Tensor]
    make_grouped: Callable[[Read], GroupedWeight] | None = None
    group: int = 0  # inputs in a group, where it can be made as such
    make_rows: Callable[[Read, slice], Tensor] | None = None


PARTS = ("codes", "scales", "shifts")  # of a weight in groups, as tensors named NAME.codes and so on


@dataclass(slots=True)
class Derived:
    """What becomes of a checkpoint's tensors: those not named here are the model's own."""

    made: dict[str, Made] = field(default_factory=dict)
    used: set[str] = field(
        default_factory=set
    )  # stored tensors that others are made of, or that nobody needs
    renamed: dict[str, str] = field(default_factory=dict)  # stored name -> the model's
    tables: dict[str, tuple[float, ...]] = field(
        default_factory=dict
    )  # what codes stand for, where not whole numbers

    def add(
        self,
        name: str,
        shape: Sequence[int],
        used: Iterable[str],
        make: Callable[[Read], Tensor],
        make_grouped: Callable[[Read], GroupedWeight] | None = None,
        group: int = 0,
        make_rows: Callable[[Read, slice], Tensor] | None = None,
    ) -> None:
        self.made[name] = Made(tuple(shape), make, make_grouped, group, make_rows)
        self.used.update(used)


class QuantizedTensors:
    """A quantised checkpoint's tensors, each as the model knows it: dequantised when it is read.

    Stands in the place of `runtime.models.tensors.TensorFiles`. Raises CheckpointError for parts that are missing.
    """

    def __init__(self, stored: Stored, fields: Fields) -> None:
        self._stored = stored
        form = import_module(f"runtime.models.formats.{FORMATS[fields.values['quant_method']].file}")
        self._derived: Derived = form.derive(stored, fields)
        derived = self._derived
        plain = {name: name for name in stored.shapes if name not in derived.used | derived.renamed.keys()}
        self._plain = plain | {
            ours: name for name, ours in derived.renamed.items()
        }  # the model's name -> stored
        self.groups = {
            name: made.group for name, made in derived.made.items() if made.make_grouped is not None
        }
        self.tables: Mapping[str, tuple[float, ...]] = derived.tables
        self.shapes: dict[str, tuple[int, ...]] = {
            **{name: stored.shapes[origin] for name, origin in self._plain.items()},
            **{name: made.shape for name, made in derived.made.items()},
        }

    def keep_grouped(self, wanted: Iterable[str]) -> None:
        """Give the weights whose codes the model wants as codes, scales and shifts, the others whole."""
        known = set(wanted)
        for name, group in self.groups.items():
            out_size, in_size = self._derived.made[name].shape
            whole = {name: (out_size, in_size)}
            parts = {f"{name}.{part}": (out_size, in_size // group) for part in PARTS}
            parts[f"{name}.codes"] = (out_size, in_size)
            for each in whole | parts:
                self.shapes.pop(each, None)
            self.shapes |= parts if f"{name}.codes" in known else whole

    def without_zero_biases(self, wanted: Iterable[str]) -> None:
        """Forget biases that the model does not want and that are zero: some tools write them for every layer."""
        known = set(wanted)
        for name in [name for name in self._plain if name.endswith(".bias") and name not in known]:
            if not self._stored.read(self._plain[name]).any():
                del self._plain[name], self.shapes[name]

    def read_all(self, take: Take, cuts: Cuts, num_threads: int = 1) -> None:
        """As `TensorFiles.read_all`."""
        ours = {origin: name for name, origin in self._plain.items()}
        plain = {self._plain[name]: parts for name, parts in cuts.items() if name in self._plain}
        self._stored.read_all(lambda name, number, part: take(ours[name], number, part), plain, num_threads)

        def make(name: str) -> None:
            made = self._derived.made[name]
            if f"{name}.codes" in cuts:
                if made.make_grouped is None:
                    raise RuntimeError(f"{name} has no groups.")
                weight = made.make_grouped(self._stored.read)
                shifts = torch.zeros_like(weight.scales) if weight.shifts is None else weight.shifts
                for part, tensor in zip(PARTS, (weight.codes, weight.scales, shifts), strict=True):
                    give_parts(take, cuts, f"{name}.{part}", tensor)
            elif made.make_rows is not None:
                for number, cut in enumerate(cuts[name]):
                    rows = made.make_rows(self._stored.read, cut[0] if cut else slice(None))
                    take(name, number, rows[(slice(None), *cut[1:])])
            else:
                tensor = made.make(self._stored.read)
                if tuple(tensor.shape) != made.shape:
                    raise CheckpointError(f"{name} becomes {list(tensor.shape)}, not {list(made.shape)}.")
                give_parts(take, cuts, name, tensor)
            self._stored.release()

        names = [name for name in self._derived.made if name in cuts or f"{name}.codes" in cuts]
        for_each(make, names, num_threads)


def require(stored: Stored, *names: str) -> None:
    """Raise CheckpointError for the first of these tensors that is not there."""
    for name in names:
        if name not in stored.shapes:
            raise CheckpointError(f"The quantized checkpoint lacks {name}.")


def first_of(stored: Stored, *names: str) -> str | None:
    """The first of these names that a stored tensor has."""
    return next((name for name in names if name in stored.shapes), None)
