"""The interface of cache kinds, which are caches that layers use in addition to KV pages or instead of them.

A module has a cache if it has the attributes `cache_spec` (a `LayerSpec`) and `index` (its layer). Layers of the kind
"paged" keep the keys and values of all tokens in the pages of the prefix cache. Every other kind is a subclass of
`CacheKind`, in its own file of this folder, with one line in `registry.py`.

A kind defines:
- how much memory it takes
- what it does when pages are allocated, shared and freed
- after which pages of a cached prefix a sequence can resume
- the arrays that the device gets in each step
- the cache of a layer

This module does not import torch. Methods that run on the device import it when they are called.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, ClassVar

from runtime.batch import Ints
from runtime.sequence import Sequence

if TYPE_CHECKING:
    import torch

    from runtime.config.plan import Plan
    from runtime.layers.forward_batch import LayerCache

PAGED = "paged"
# Maps the index of a layer in the whole model to its `LayerSpec`. With several models, the keys are (model, layer
# index).
Specs = Mapping[Any, Any]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e5m2": 1, "float8_e4m3fn": 1}


class CacheKind:
    """The host side of a cache kind, called by the prefix cache. The methods of this base class do nothing.

    A kind allocates `num_units` units (its own pages, or states), numbered from 0. Unit `num_units` is the scratch
    unit, to which padding writes. In this class, a `page` is the id of a page of the prefix cache. A kind may have one
    unit for each page.

    Steps run in the order in which their batches are built. A unit may therefore be reused as soon as no batch that is
    built later reads it (see `prefix_cache.py`). A kind frees such units in `filled`.
    """

    name: ClassVar[str]
    # Maximum number of computed tokens that a sequence can rewind; None: no limit. A sequence rewinds rejected draft
    # tokens, and a row for which nothing was sampled because its host data was late.
    steps_back: int | None = None

    # Advice for the error about too little memory; the error appends the GiB that the units take.
    less_memory: ClassVar[str] = ""

    # --- sizing ---

    @staticmethod
    def num_units(specs: Specs, plan: Plan, num_pages: int) -> int:
        """Return the number of units for `num_pages` pages.

        The result must not decrease as `num_pages` grows. `specs` contains only layers of this kind.
        """
        raise NotImplementedError

    @staticmethod
    def unit_bytes(specs: Specs, plan: Plan) -> int:
        """Return the bytes of one unit, summed over the layers in `specs`."""
        raise NotImplementedError

    @staticmethod
    def per_sequence(specs: Specs, plan: Plan) -> str:
        """Return what a running sequence takes, for the text about the sizes of the pools, or ""."""
        return ""

    @staticmethod
    def used(specs: Specs, plan: Plan) -> bool:
        """Return whether the plan uses this kind. If it does not, the layers of this kind keep all tokens in pages."""
        return True

    # --- on the device ---

    @staticmethod
    def make_layer(spec: Any, num_units: int, page_size: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """Create the cache of one layer, filled with zeros.

        The layer reads the arrays of `step_arrays` from `batch.kinds[name].arrays`.
        """
        raise NotImplementedError

    @staticmethod
    def buffer_sizes(max_rows: int, max_pages: int, max_drafts: int = 0) -> Mapping[str, int] | None:
        """Return an upper bound on the number of elements of each array of `step_arrays`.

        `max_drafts` is the maximum number of draft tokens of a step. CUDA graphs allocate fixed buffers of these sizes.
        If the result is None, steps with this kind are not captured.
        """
        return None

    @staticmethod
    def scratch_arrays(counts: Seq[int], num_units: int) -> dict[str, Ints]:
        """Return the arrays of `step_arrays` for padding rows, which read and write only the scratch unit.

        `counts` has the number of tokens of each padding row. For kinds that use pages, every count is 1.
        """
        return {}

    @staticmethod
    def with_starts(arrays: Mapping[str, Any], rejected: Any) -> dict[str, Any]:
        """Return the arrays that depend on the starts of rows, computed for the exact starts.

        `arrays` are those of `step_arrays`, which are for upper bounds on the starts. `rejected` [B] is the upper bound
        minus the exact start: the number of draft tokens that were rejected since. All arrays are tensors on the
        device, or NumPy arrays.
        """
        return {}

    # --- at run time ---

    def __init__(self, specs: Specs, num_units: int, num_pages: int, page_size: int, max_drafts: int = 0) -> None:
        """Create the kind. `max_drafts` is the maximum number of draft tokens per row."""
        self.count = num_units

    @property
    def max_sequences(self) -> int | None:
        """Maximum number of running sequences. None: no limit."""
        return None

    @property
    def num_available(self) -> int | None:
        """Number of prefix-cache pages for which this kind still has units. None: no limit."""
        return None

    def pages_ahead(self, sequence: Sequence, num_pages: int) -> int:
        """Return an upper bound on the decrease of `num_available` while a sequence grows by `num_pages` pages."""
        return 0

    def row_end(self, sequence: Sequence, end: int) -> int:
        """Return the position, at most `end`, at which a row of known tokens should end.

        The sequence's next row begins at this position.
        """
        return end

    def resumable(self, pages: Seq[int], count: int) -> int:
        """Return the largest number of leading pages, at most `count`, after which a sequence can resume."""
        return count

    def enter(self, sequence: Sequence) -> None:
        """Called when a sequence starts to run, after its cached prefix (possibly empty) was locked."""

    def allocate(self, pages: list[int]) -> None:
        """Called after `pages` were allocated to a sequence. Their number never exceeds `num_available`."""

    def step_arrays(
        self, sequences: Seq[Sequence], starts: Ints, counts: Ints, page_table: Ints, unknown: Collection[int] = ()
    ) -> dict[str, Ints]:
        """Return the int32 arrays that this kind's layers need in one step, by name. They are copied to the device.

        Called once per step, after its rows are chosen and before any of their pages is shared or freed. `page_table`
        [B, W] has the rows' pages in the prefix cache. A kind with its own pages returns an array "page_table" of the
        same shape, with the page ids in its own pool. The worker then also computes a slot mapping for that pool.

        `unknown` are the rows for whose start the host knows only an upper bound. If the arrays depend on starts, the
        kind returns further arrays, which `with_starts` replaces.
        """
        return {}

    def filled(self, sequences: Iterable[Sequence]) -> None:
        """Called after a batch is built.

        `sequences` are those with a row that completes a page in this batch. They include sequences whose row may
        complete a page, because the row's start is not known yet (`Batch.unknown_starts`).
        """

    def replace(self, sequence: Sequence, first: int, private: Seq[int], shared: Seq[int]) -> None:
        """Called after private pages of a sequence, from index `first` on, were replaced by tree pages (`shared`)."""

    def leave(self, sequence: Sequence) -> None:
        """Called before a sequence loses all its pages. For its private pages, `free` is called afterwards."""

    def free(self, pages: Iterable[int]) -> None:
        """Called when these pages are freed."""

    def reset(self) -> None:
        """Free all units."""

    def check(self, sequences: Iterable[Sequence], tree_pages: Iterable[int]) -> None:
        """Raise `ValueError` unless every unit is free or belongs to a running sequence or a tree page."""
