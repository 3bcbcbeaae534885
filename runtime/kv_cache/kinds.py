"""The interface of cache kinds: caches that layers have in addition to, or in place of, KV pages.

Each module of a model with the attributes `cache_spec` (a `LayerSpec`) and `index` (its layer) has a cache. Layers of
the kind "paged" keep the keys and values of all tokens in the pages of the prefix cache. Every other kind is a
subclass of `CacheKind` in its own file of this folder, with one line in `registry.py`. A kind defines its memory, its
reaction when pages are allocated, shared and freed, after which pages of a cached prefix a sequence can resume, the
arrays that the device gets in each step, and the cache of a layer.

Does not import torch; the methods for the device import it when they are called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, ClassVar

from runtime.batch import Ints
from runtime.sequence import Sequence

if TYPE_CHECKING:
    import torch

    from runtime.config.plan import Plan
    from runtime.layers.forward_batch import LayerCache

PAGED = "paged"
# `LayerSpec` by layer index in the whole model; with several models, by (model, layer index).
Specs = Mapping[Any, Any]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e5m2": 1, "float8_e4m3fn": 1}


class CacheKind:
    """The host side of a kind, called by the prefix cache. The methods of this base class do nothing.

    A kind allocates `num_units` units (its own pages, or states), numbered from 0. Unit `num_units` is the scratch
    unit, to which padding writes. A `page` below is the id of a page of the prefix cache; a kind may have a unit for
    each page.

    Steps run in the order in which their batches are built, so a unit may be reused as soon as no batch built from now
    on reads it (see `prefix_cache.py`). A kind frees such units in `filled`.
    """

    name: ClassVar[str]
    # How many computed tokens a sequence can rewind; None: any number. Only tokens that were pending when their batch
    # was built are ever rewound.
    steps_back: ClassVar[int | None] = None

    less_memory: ClassVar[str] = ""  # advice in the error for too little memory, which appends the GiB that units take

    # --- sizing ---

    @staticmethod
    def num_units(specs: Specs, plan: Plan, num_pages: int) -> int:
        """Return the number of units for `num_pages` pages.

        The number must not fall as `num_pages` grows. `specs` has only layers of this kind.
        """
        raise NotImplementedError

    @staticmethod
    def unit_bytes(specs: Specs, plan: Plan) -> int:
        """Return the bytes that one unit takes in all these layers together."""
        raise NotImplementedError

    @staticmethod
    def used(specs: Specs, plan: Plan) -> bool:
        """Whether the plan uses this kind. If not, its layers keep all tokens in pages."""
        return True

    # --- on the device ---

    @staticmethod
    def make_layer(spec: Any, num_units: int, page_size: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """Create one layer's cache, zeroed.

        The layer reads the arrays of `step_arrays` from `batch.kinds[name].arrays`.
        """
        raise NotImplementedError

    @staticmethod
    def buffer_sizes(max_rows: int, max_pages: int) -> Mapping[str, int] | None:
        """Return the upper bound on the number of elements of each array of `step_arrays`.

        Graphs allocate fixed buffers of these sizes. None means that steps with this kind are not captured.
        """
        return None

    @staticmethod
    def scratch_arrays(counts: Seq[int], num_units: int) -> dict[str, Ints]:
        """Return the arrays of `step_arrays` for padding rows, which read and write only the scratch unit.

        `counts` has the number of tokens of each padding row. If the kind has pages, every count is 1.
        """
        return {}

    # --- at run time ---

    def __init__(self, specs: Specs, num_units: int, num_pages: int, page_size: int) -> None:
        self.count = num_units

    @property
    def max_sequences(self) -> int | None:
        """Maximum number of running sequences. None: no limit."""
        return None

    @property
    def num_available(self) -> int | None:
        """Number of further pages for which this kind has units. None: no limit."""
        return None

    def pages_ahead(self, sequence: Sequence, num_pages: int) -> int:
        """Return an upper bound on how far `num_available` falls while a sequence grows by `num_pages` pages."""
        return 0

    def row_end(self, sequence: Sequence, end: int) -> int:
        """Return the position, at most `end`, where a row of known tokens should end. The next row begins there."""
        return end

    def resumable(self, pages: Seq[int], count: int) -> int:
        """Return the largest number (up to `count`) of leading pages after which a sequence can resume."""
        return count

    def enter(self, sequence: Sequence) -> None:
        """Called when a sequence starts to run, after its cached prefix (possibly empty)."""

    def allocate(self, pages: list[int]) -> None:
        """Called after these pages, at most `num_available`, were allocated to a sequence."""

    def step_arrays(self, sequences: Seq[Sequence], starts: Ints, counts: Ints, page_table: Ints) -> dict[str, Ints]:
        """Return the arrays that the device gets for a step: int32 arrays by name.

        Called once per step, when its rows are known and before any of its pages change owners. An array "page_table"
        of the shape of `page_table` [B, W] lists the rows' pages in the kind's own pool; the device then also gets
        its slot mapping.
        """
        return {}

    def filled(self, sequences: Iterable[Sequence]) -> None:
        """Called after a batch is built.

        The rows of these sequences complete a page in this batch, or may complete one (`unknown_starts`).
        """

    def replace(self, sequence: Sequence, first: int, private: Seq[int], shared: Seq[int]) -> None:
        """Called when `shared` pages of the tree replaced `private` pages from index `first` of the page list."""

    def leave(self, sequence: Sequence) -> None:
        """Called before a sequence loses all its pages. `free` is then called for its private pages."""

    def free(self, pages: Iterable[int]) -> None:
        """Called when these pages are freed."""

    def reset(self) -> None:
        """Free all units."""

    def check(self, sequences: Iterable[Sequence], tree_pages: Iterable[int]) -> None:
        """Raise `ValueError` unless the running sequences and the tree's pages account for every unit."""
