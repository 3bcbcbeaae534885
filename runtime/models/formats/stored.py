"""What a form's reader sees of a checkpoint and what it says of it, and the tensors of a quantised checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ops.matmul.grouped import GroupedWeight, GroupForm
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

    What holds 4 to 8 bits in groups of neighbouring inputs can also be made as such (`ops/matmul/grouped.py`), some
    rows of it. What can be made row by row is never there as a whole.
    """

    shape: tuple[int, ...]
    make: Callable[[Read], Tensor]
    make_grouped: Callable[[Read, slice], GroupedWeight] | None = None
    form: GroupForm | None = None  # where it can be made as such
    make_rows: Callable[[Read, slice], Tensor] | None = None


NUMBERS_AT_ONCE = 2**18  # that are unpacked: what is there meanwhile takes several times their memory
PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # dtypes of what is not quantised
PARTS = ("codes", "scales", "shifts")  # of a weight in groups, as tensors named NAME.codes and so on


@dataclass(slots=True)
class Derived:
    """What becomes of a checkpoint's tensors: those not named here are the model's own."""

    made: dict[str, Made] = field(default_factory=dict)
    # Stored tensors that others are made of, or that nobody needs.
    used: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)  # stored name -> the model's

    def add(
        self,
        name: str,
        shape: Sequence[int],
        used: Iterable[str],
        make: Callable[[Read], Tensor],
        make_grouped: Callable[[Read, slice], GroupedWeight] | None = None,
        form: GroupForm | None = None,
        make_rows: Callable[[Read, slice], Tensor] | None = None,
    ) -> None:
        """The model's tensor `name` of this shape is made of the stored tensors in `used`.

        `make` gives all of it, `make_rows` and `make_grouped` a slice of its rows, where that is possible: dequantised,
        or in groups of the given form.
        """
        self.made[name] = Made(tuple(shape), make, make_grouped, form, make_rows)
        self.used.update(used)


class QuantizedTensors:
    """A quantised checkpoint's tensors, each as the model knows it: dequantised when it is read.

    Stands in the place of `runtime.models.tensors.TensorFiles`. Raises CheckpointError for parts that are missing.
    """

    def __init__(self, stored: Stored, fields: Fields) -> None:
        self._stored = stored
        form = import_module(f"runtime.models.formats.{FORMATS[fields.values['quant_method']].file}")
        with fitting("tensors"):
            self._derived: Derived = form.derive(stored, fields)
        derived = self._derived
        plain = {name: name for name in stored.shapes if name not in derived.used | derived.renamed.keys()}
        # The model's name -> stored.
        self._plain = plain | {ours: name for name, ours in derived.renamed.items()}
        self.forms = {name: made.form for name, made in derived.made.items() if made.form is not None}
        self._kept: Mapping[str, GroupForm] = {}
        self.shapes: dict[str, tuple[int, ...]] = {
            **{name: stored.shapes[origin] for name, origin in self._plain.items()},
            **{name: made.shape for name, made in derived.made.items()},
        }

    def keep_grouped(self, kept: Mapping[str, GroupForm]) -> None:
        """Give these weights as codes, scales and shifts in that form, all others whole."""
        self._kept = kept
        for name in self.forms:
            out_size, in_size = self._derived.made[name].shape
            for each in (name, *(f"{name}.{part}" for part in PARTS)):
                self.shapes.pop(each, None)
            if name not in kept:
                self.shapes[name] = (out_size, in_size)
                continue
            form = kept[name]
            self.shapes[f"{name}.codes"] = (out_size, in_size)
            for part in PARTS[1 : 2 + form.shifted]:
                self.shapes[f"{name}.{part}"] = (out_size, in_size // form.group)

    def check_plain(self, wanted: Iterable[str]) -> None:
        """Forget biases that the model does not want and that are zero: some tools write them for every layer.

        Raises CheckpointError for what it wants and what is in a quantised dtype with nothing that says how to read it.
        """
        known, dtypes = set(wanted), self._stored.dtypes
        for name in known & self._plain.keys():
            if (dtype := dtypes[self._plain[name]]) not in PLAIN:
                raise CheckpointError(
                    f"The quantized checkpoint has {name} in {dtype}, and lacks its scales."
                )
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
                self._give_groups(name, take, cuts)
            elif made.make_rows is not None:
                for number, cut in enumerate(cuts[name]):
                    rows = made.make_rows(self._stored.read, cut[0] if cut else slice(None))
                    take(name, number, rows[(slice(None), *cut[1:])])
            else:
                with fitting(name):
                    tensor = made.make(self._stored.read)
                if tuple(tensor.shape) != made.shape:
                    raise CheckpointError(f"{name} becomes {list(tensor.shape)}, not {list(made.shape)}.")
                give_parts(take, cuts, name, tensor)
            self._stored.release()

        names = [name for name in self._derived.made if name in cuts or f"{name}.codes" in cuts]
        for_each(make, names, num_threads)

    def _give_groups(self, name: str, take: Take, cuts: Cuts) -> None:
        """Codes, scales and shifts of those rows that are wanted of any of them."""
        made, wanted = self._derived.made[name], [f"{name}.{part}" for part in PARTS]
        if made.make_grouped is None:
            raise RuntimeError(f"{name} has no groups.")
        every = slice(0, made.shape[0])
        spans = [cut[0] if cut else every for each in wanted for cut in cuts.get(each, ())]
        rows = slice(min(span.start for span in spans), max(span.stop for span in spans))
        with fitting(name):
            tensors = self._make_groups(made, made.make_grouped, self._kept[name], rows)
        for each, tensor in zip(wanted, tensors, strict=False):
            for number, cut in enumerate(cuts.get(each, ())):
                span, *columns = cut or (every,)
                here = slice(span.start - rows.start, span.stop - rows.start)
                take(each, number, tensor[(here, *columns)])

    def _make_groups(
        self, made: Made, make: Callable[[Read, slice], GroupedWeight], form: GroupForm, rows: slice
    ) -> tuple[Tensor, ...]:
        """Codes, scales and shifts of some rows in a form. What is made row by row is unpacked a few rows at a time."""
        (_, in_size), size = made.shape, rows.stop - rows.start
        step = max(1, NUMBERS_AT_ONCE // in_size) if made.make_rows is not None else size
        groups = (size, in_size // form.group)
        codes, scales = torch.empty(size, in_size, dtype=torch.uint8), torch.empty(groups)
        shifts = torch.zeros(groups) if form.shifted else None
        for first in range(0, size, step):
            here = slice(first, min(first + step, size))
            there = slice(rows.start + here.start, rows.start + here.stop)
            weight = make(self._stored.read, there).as_form(form)
            codes[here], scales[here] = weight.codes, weight.scales
            if shifts is not None and weight.shifts is not None:
                shifts[here] = weight.shifts
        return (codes, scales) if shifts is None else (codes, scales, shifts)


@contextmanager
def fitting(name: str) -> Iterator[None]:
    """Say of which tensor a damaged checkpoint's parts do not fit each other."""
    try:
        yield
    except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"The quantized checkpoint's {name} cannot be read: {error}.") from error


def require(stored: Stored, *names: str) -> None:
    """Raise CheckpointError for the first of these tensors that is not there."""
    for name in names:
        if name not in stored.shapes:
            raise CheckpointError(f"The quantized checkpoint lacks {name}.")


def first_of(stored: Stored, *names: str) -> str | None:
    """The first of these names that a stored tensor has."""
    return next((name for name in names if name in stored.shapes), None)
