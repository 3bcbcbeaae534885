"""What a layer keeps of each sequence, and the kinds of caches beside the pages that every sequence has.

A model says what its layers keep: each module with an attribute `cache_spec` (a `LayerSpec`) and its layer's `index`
has a cache. Layers of the kind "paged" keep the keys and values of all tokens, in the pages that sequences and
the prefix tree hold. Everything else is a kind of its own: one file in this folder with a subclass of `CacheKind`, and
one line in `registry.py`. A kind decides for itself how much memory it takes, what it does when pages are handed out,
shared and given back, behind which pages of a found prefix a sequence can go on, what the device is told in each step,
and how a layer's cache is made.

Torch-free: the parts for the device import torch when they are called.
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
Specs = Mapping[int, Any]  # what layers keep (`LayerSpec`), by their numbers in the whole model
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e5m2": 1, "float8_e4m3fn": 1}


class CacheKind:
    """The host's half of a kind: one object beside the prefix cache, which calls it. The methods here do nothing.

    A kind has `num_units` of what it hands out (pages of its own, states), numbered from 0; one more, number
    `num_units`, is there for nobody's use: padding writes to it. `page` below is the id of a page of the prefix cache;
    a kind may keep something for each of them.

    Steps run in the order in which their batches are filled, so a unit may be handed out again as soon as no batch
    that is filled from now on reads it (the argument is in `prefix_cache.py`). `filled` is where to give up units.
    """

    name: ClassVar[str]
    # A token can be computed once more, but only in the step behind its own.
    one_step_back: ClassVar[bool] = False

    less_memory: ClassVar[str] = ""  # what to do where units take too much memory, and what they are

    # --- how large, before there is one ---

    @staticmethod
    def num_units(specs: Specs, plan: Plan, num_pages: int) -> int:
        """How many units go with `num_pages` pages: never fewer for more pages. `specs` are of this kind."""
        raise NotImplementedError

    @staticmethod
    def unit_bytes(specs: Specs, plan: Plan) -> int:
        """Bytes of one unit over all these layers."""
        raise NotImplementedError

    @staticmethod
    def used(specs: Specs, plan: Plan) -> bool:
        """Whether layers of this kind have caches of it; if not, they have pages for all tokens."""
        return True

    # --- on the device ---

    @staticmethod
    def make_layer(
        spec: Any, num_units: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        """One layer's cache, zeroed. In a step it finds what `step_arrays` gave in `batch.kinds[name]`."""
        raise NotImplementedError

    @staticmethod
    def buffer_sizes(max_rows: int, max_pages: int) -> Mapping[str, int] | None:
        """Of each of the arrays of `step_arrays` the most numbers that it may have, for a graph that is captured with
        fixed buffers; None where steps of this kind are not to be captured.
        """
        return None

    @staticmethod
    def scratch_arrays(counts: Seq[int], num_units: int) -> dict[str, Ints]:
        """As `step_arrays`, for rows of so many tokens that touch nothing but the unit that is for nobody's use; of
        one token each where a kind has pages.
        """
        return {}

    # --- while the engine runs ---

    def __init__(self, specs: Specs, num_units: int, num_pages: int, page_size: int) -> None:
        self.count = num_units

    @property
    def max_sequences(self) -> int | None:
        """How many sequences may run together; None: any number."""
        return None

    @property
    def num_available(self) -> int | None:
        """How many further pages could be handed out as far as this kind is concerned; None: any number."""
        return None

    def pages_ahead(self, sequence: Sequence, num_pages: int) -> int:
        """How much of `num_available` a sequence takes at most while it grows by `num_pages` pages."""
        return 0

    def row_end(self, sequence: Sequence, end: int) -> int:
        """Where a row that computes known tokens up to `end` should end, so that the next one begins there."""
        return end

    def resumable(self, pages: Seq[int], count: int) -> int:
        """The largest number, up to `count`, of leading pages of a found prefix behind which a sequence can go on."""
        return count

    def enter(self, sequence: Sequence) -> None:
        """A sequence that held nothing now has the pages of its prefix (perhaps none), and goes on behind them."""

    def allocate(self, pages: list[int]) -> None:
        """These pages were handed to a sequence. There are as many as `num_available` allowed."""

    def step_arrays(
        self, sequences: Seq[Sequence], starts: Ints, counts: Ints, page_table: Ints
    ) -> dict[str, Ints]:
        """What the device is told of a step: int32 arrays by name. Called once a step, when its rows are known, before
        any page of it moves. An array "page_table" like the one given, [B, W], names the rows' pages in the kind's own
        pool, and the device gets the slot mapping for it too.
        """
        return {}

    def filled(self, sequences: Iterable[Sequence]) -> None:
        """A step with rows of these sequences was filled, behind the last token of a page of each."""

    def replace(self, sequence: Sequence, first: int, own: Seq[int], kept: Seq[int]) -> None:
        """From its page number `first` on, a sequence lists the tree's `kept` pages where its `own` were."""

    def leave(self, sequence: Sequence) -> None:
        """A sequence is about to lose all pages; what it shares stays in the tree, its own are freed next."""

    def free(self, pages: Iterable[int]) -> None:
        """Nobody holds these pages any more."""

    def reset(self) -> None:
        """Nobody holds anything any more."""

    def check(self, sequences: Iterable[Sequence], tree_pages: Iterable[int]) -> None:
        """Raise `ValueError` unless every unit is accounted for, given all who hold pages and all pages of the tree."""
