"""Tensors of a quantised checkpoint: interface of the format readers, and dequantisation while loading."""

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
from runtime.errors import CheckpointError, MissingTensor
from runtime.loading.tensors import Cut, Cuts, Take, Tensors, for_each, give_parts


class Read(Protocol):
    """Returns a stored tensor, or the part of it that `cut` selects."""

    def __call__(self, name: str, cut: Cut = (), /) -> Tensor: ...


class Stored(Tensors, Protocol):
    """Tensors of a checkpoint as its files hold them."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...
    def read(self, name: str, cut: Cut = (), /) -> Tensor: ...

    def release(self) -> None: ...


class DerivedTensor(NamedTuple):
    """One of the model's tensors: its shape, and functions that compute it in float32 from stored tensors.

    `make_grouped` returns some rows of a weight as 4-bit to 8-bit codes with a scale for each group of consecutive
    inputs (`ops/matmul/grouped.py`). A tensor with `make_rows` is dequantised by rows, never as a whole.
    """

    shape: tuple[int, ...]
    make: Callable[[Read], Tensor]
    make_grouped: Callable[[Read, slice], GroupedWeight] | None = None
    form: GroupForm | None = None  # form of `make_grouped`
    make_rows: Callable[[Read, slice], Tensor] | None = None


NUMBERS_AT_ONCE = 2**18  # numbers unpacked at a time; intermediate tensors take several times their memory
PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # dtypes of unquantised tensors
# parts of a grouped weight, read as tensors NAME.codes, NAME.scales and NAME.shifts
PARTS = ("codes", "scales", "shifts")
INPUT_SCALE = "input_scale"  # name of a further part, which is the same for all rows


@dataclass(slots=True)
class Derived:
    """Map from a checkpoint's tensors to the model's. Tensors not named here are unquantised."""

    tensors: dict[str, DerivedTensor] = field(default_factory=dict)
    # Stored tensors that are not tensors of the model: derived tensors read them, or they are not needed.
    used: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)  # stored name -> the model's name
    # name of a weight -> function that computes the scale of its inputs, float32 [1] (`ops/matmul/nvfp4.py`)
    input_scales: dict[str, Callable[[Read], Tensor]] = field(default_factory=dict)

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
        """Add the model's tensor `name`, computed from the stored tensors in `used`.

        `make` returns the whole tensor. `make_rows` returns a slice of its rows, dequantised; `make_grouped` returns a
        slice of its rows in groups of `form`.
        """
        self.tensors[name] = DerivedTensor(tuple(shape), make, make_grouped, form, make_rows)
        self.used.update(used)

    def add_input_scale(self, name: str, stored: str, *, inverse: bool = False) -> None:
        """Add the scale of the inputs of the weight `name`: the stored number, or with `inverse` 1 divided by it."""

        def read_scale(read: Read) -> Tensor:
            scale = read(stored).float().reshape(1)
            if not bool((scale > 0) & scale.isfinite()):
                raise CheckpointError(f"{stored} must be a positive number, not {scale.item()}.")
            return 1 / scale if inverse else scale

        self.input_scales[name] = read_scale
        self.used.add(stored)


class QuantizedTensors:
    """The model's tensors of a quantised checkpoint, dequantised when they are read.

    Has the interface of `runtime.loading.tensors.TensorFiles`. Raises CheckpointError for missing parts.
    """

    def __init__(self, stored: Stored, fields: Fields) -> None:
        self._stored = stored
        form = import_module(f"runtime.loading.formats.{FORMATS[fields.values['quant_method']].file}")
        with fitting("tensors"):
            self._derived: Derived = form.derive(stored, fields)
        derived = self._derived
        plain = {name: name for name in stored.shapes if name not in derived.used | derived.renamed.keys()}
        # Tensors that are read unchanged: the model's name -> stored name.
        self._plain = plain | {ours: name for name, ours in derived.renamed.items()}
        self.forms = {name: each.form for name, each in derived.tensors.items() if each.form is not None}
        self._kept: Mapping[str, GroupForm] = {}
        self.shapes: dict[str, tuple[int, ...]] = {
            **{name: stored.shapes[origin] for name, origin in self._plain.items()},
            **{name: each.shape for name, each in derived.tensors.items()},
        }

    def keep_grouped(self, kept: Mapping[str, GroupForm]) -> None:
        """From now on, read the weights in `kept` as codes, scales and shifts, and all other weights dequantised."""
        self._kept = kept
        for name in self.forms:
            out_size, in_size = self._derived.tensors[name].shape
            for each in (name, *(f"{name}.{part}" for part in (*PARTS, INPUT_SCALE))):
                self.shapes.pop(each, None)
            if name not in kept:
                self.shapes[name] = (out_size, in_size)
                continue
            form = kept[name]
            self.shapes[f"{name}.codes"] = (out_size, in_size)
            for part in PARTS[1 : 2 + form.shifted]:
                self.shapes[f"{name}.{part}"] = (out_size, in_size // form.group)
            if form.input_scaled and name in self._derived.input_scales:  # in an update, it may not have arrived yet
                self.shapes[f"{name}.{INPUT_SCALE}"] = (1,)

    def check_unquantized(self, needed: Iterable[str]) -> None:
        """Drop biases that are zero and not among the `needed` tensors: some tools write them for every layer.

        Raises CheckpointError if a needed tensor has a quantised dtype but no scales.
        """
        known, dtypes = set(needed), self._stored.dtypes
        for name in known & self._plain.keys():
            if (dtype := dtypes[self._plain[name]]) not in PLAIN:
                raise CheckpointError(f"The quantized checkpoint has {name} in {dtype} without scales.")
        for name in [name for name in self._plain if name.endswith(".bias") and name not in known]:
            if not self._stored.read(self._plain[name]).any():
                del self._plain[name], self.shapes[name]

    def read_all(self, take: Take, cuts: Cuts, num_threads: int = 1) -> None:
        """Like `TensorFiles.read_all`."""
        ours = {origin: name for name, origin in self._plain.items()}
        plain = {self._plain[name]: parts for name, parts in cuts.items() if name in self._plain}
        self._stored.read_all(lambda name, number, part: take(ours[name], number, part), plain, num_threads)

        def make(name: str) -> None:
            derived = self._derived.tensors[name]
            if f"{name}.codes" in cuts:
                self._give_groups(name, take, cuts)
            elif derived.make_rows is not None:
                for number, cut in enumerate(cuts[name]):
                    rows = derived.make_rows(self._stored.read, cut[0] if cut else slice(None))
                    take(name, number, rows[(slice(None), *cut[1:])])
            else:
                with fitting(name):
                    tensor = derived.make(self._stored.read)
                if tuple(tensor.shape) != derived.shape:
                    raise CheckpointError(
                        f"{name} has the shape {list(tensor.shape)} instead of {list(derived.shape)}."
                    )
                give_parts(take, cuts, name, tensor)
            self._stored.release()

        for name, read_scale in self._derived.input_scales.items():
            if (part := f"{name}.{INPUT_SCALE}") in cuts:
                with fitting(part):
                    give_parts(take, cuts, part, read_scale(self._stored.read))
        names = [name for name in self._derived.tensors if name in cuts or f"{name}.codes" in cuts]
        for_each(make, names, num_threads)

    def _give_groups(self, name: str, take: Take, cuts: Cuts) -> None:
        """Pass codes, scales and shifts to `take`, computed for the range of rows that the cuts cover."""
        derived, parts = self._derived.tensors[name], [f"{name}.{part}" for part in PARTS]
        if derived.make_grouped is None:
            raise RuntimeError(f"{name} cannot be read in groups.")
        every = slice(0, derived.shape[0])
        spans = [cut[0] if cut else every for each in parts for cut in cuts.get(each, ())]
        rows = slice(min(span.start for span in spans), max(span.stop for span in spans))
        with fitting(name):
            tensors = self._make_groups(derived, derived.make_grouped, self._kept[name], rows)
        for each, tensor in zip(parts, tensors, strict=False):
            for number, cut in enumerate(cuts.get(each, ())):
                span, *columns = cut or (every,)
                local = slice(span.start - rows.start, span.stop - rows.start)
                take(each, number, tensor[(local, *columns)])

    def _make_groups(
        self,
        tensor: DerivedTensor,
        make: Callable[[Read, slice], GroupedWeight],
        form: GroupForm,
        rows: slice,
    ) -> tuple[Tensor, ...]:
        """Return codes, scales and shifts of some rows. Tensors with `make_rows` are unpacked a few rows at a time."""
        (_, in_size), size = tensor.shape, rows.stop - rows.start
        step = max(1, NUMBERS_AT_ONCE // in_size) if tensor.make_rows is not None else size
        groups = (size, in_size // form.group)
        codes, scales = torch.empty(size, in_size, dtype=torch.uint8), torch.empty(groups)
        shifts = torch.zeros(groups) if form.shifted else None
        for first in range(0, size, step):
            local = slice(first, min(first + step, size))
            source = slice(rows.start + local.start, rows.start + local.stop)
            weight = make(self._stored.read, source).as_form(form)
            codes[local], scales[local] = weight.codes, weight.scales
            if shifts is not None and weight.shifts is not None:
                shifts[local] = weight.shifts
        return (codes, scales) if shifts is None else (codes, scales, shifts)


@contextmanager
def fitting(name: str) -> Iterator[None]:
    """Turn the errors that damaged tensors cause into a CheckpointError that contains `name`."""
    try:
        yield
    except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"The quantized checkpoint's {name} cannot be read: {error}.") from error


def require(stored: Stored, *names: str) -> None:
    """Raise CheckpointError for the first of these tensors that is missing."""
    for name in names:
        if name not in stored.shapes:
            raise MissingTensor(name)


def first_of(stored: Stored, *names: str) -> str | None:
    """Return the first of these names that is a stored tensor, or None."""
    return next((name for name in names if name in stored.shapes), None)
