"""Expert parallelism: choose the rank that computes each pair of a token and an expert."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from runtime.experts.placement import Placement, in_order, placed
from runtime.mesh.axis import Axis

# With --moe-a2a-backend all_to_all: steps of at least this number of tokens combine results by all-to-all and
# all-gather. Smaller steps use one all-reduce, which synchronises the ranks once instead of twice.
EXCHANGE_TOKENS = 64


class ExpertSharing:
    """The placement of experts on ranks for all MoE layers of a model. Each rank has one such object.

    Layers are identified by their number in the whole model. All ranks change a placement between the same two steps.
    If the axis has one rank, this rank holds every expert.
    """

    def __init__(
        self,
        axis: Axis,
        *,
        num_redundant: int = 0,
        dispatch: str = "static",
        exchanges: bool = False,
        records: bool = False,
        record_tokens: int = 0,
        first: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """`first` maps a layer to the initial expert of each of its slots; other layers place their experts in order.

        `dispatch` selects among the copies of an expert: "static", "dynamic" or "fake" (see `--ep-dispatch-algorithm`).
        With `exchanges`, large steps combine results by all-to-all. With `records`, layers store the experts that each
        token chose. On a GPU, steps of up to `record_tokens` tokens store them in fixed buffers, which captured graphs
        can write.
        """
        self.axis = axis
        self.num_redundant = num_redundant
        self.records = records
        self._dispatch, self._exchanges, self._record_tokens = dispatch, exchanges, record_tokens
        self._recorded: dict[int, Tensor] = {}  # layer -> chosen experts of the last step, if not in `_buffers`
        self._buffers: dict[int, Tensor] = {}  # layer -> chosen experts, in a fixed buffer on a GPU
        self._first = first or {}
        self._placements: dict[int, Placement] = {}
        self._tables: dict[int, _Tables] = {}
        self._calls: dict[int, int] = {}  # layer -> number of calls of `_draw`

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share the experts."""
        return self.axis.size > 1

    @property
    def has_copies(self) -> bool:
        """Whether an expert may have copies in several slots."""
        return self.num_redundant > 0

    def placement(self, layer: int, num_experts: int) -> Placement:
        """Return the current placement of a layer. Raises ValueError if the initial placement does not fit."""
        if layer not in self._placements:
            if layer in self._first:
                made = placed(self._first[layer], num_experts, self.axis.size)
            else:
                made = in_order(num_experts, self.axis.size, self.num_redundant)
            if len(made.experts) != num_experts + self.num_redundant:
                raise ValueError(
                    f"The placement of layer {layer} has {len(made.experts)} copies, not {num_experts} + "
                    f"{self.num_redundant} redundant ones."
                )
            self._placements[layer] = made
        return self._placements[layer]

    def place(self, layer: int, placement: Placement) -> None:
        """Set a new placement of a layer. The caller must already have moved the weights."""
        self._placements[layer] = placement
        if layer in self._tables:
            self._tables[layer].write(placement, self.axis.rank)

    def choose(self, layer: int, experts: Tensor, num_experts: int) -> Tensor:
        """Return a slot of each chosen expert if experts have copies, otherwise `experts`: int32 [T, k] -> [T, k].

        With the dispatch "fake", random experts replace the chosen ones. All ranks return the same tensor.
        """
        if self._dispatch == "fake":
            experts = self._draw(layer, experts, num_experts)
        if not self.has_copies:
            return experts
        tables = self._tables_of(layer, num_experts, experts.device)
        if self._dispatch == "dynamic":
            drawn = self._draw(layer, experts, 1 << 30) % tables.counts[experts]
            return tables.slots[experts, drawn]
        return tables.fixed[self._owners(len(experts), experts.device).unsqueeze(1), experts]

    def remember(self, layer: int, chosen: Tensor) -> None:
        """Store a step's chosen experts, int32 [T, k], for `remembered`."""
        count = len(chosen)
        if chosen.is_cuda and count <= self._record_tokens:
            if layer not in self._buffers:
                self._buffers[layer] = chosen.new_empty(self._record_tokens, chosen.shape[1])
            self._buffers[layer][:count].copy_(chosen)
        else:
            self._recorded[layer] = chosen

    def remembered(self, layer: int, count: int) -> Tensor | None:
        """Return the experts chosen in the last step, int32 [count, k], or None if there was no step."""
        source = self._buffers if layer in self._buffers and count <= self._record_tokens else self._recorded
        return source[layer][:count] if layer in source else None

    def here(self, layer: int, chosen: Tensor, num_experts: int) -> Tensor:
        """Return the local index of each chosen expert, or -1 if another rank holds it: int32 [T, k] -> [T, k]."""
        if not self.is_shared:
            return chosen
        return self._tables_of(layer, num_experts, chosen.device).here[chosen]

    def exchanges(self, x: Tensor) -> bool:
        """Whether a step of tokens x [T, E] outside CUDA graphs combines results by all-to-all.

        Steps in CUDA graphs use an all-reduce instead, because the host must know the message sizes of an all-to-all.
        """
        return self._exchanges and self.is_shared and len(x) >= EXCHANGE_TOKENS

    def combine(self, layer: int, chosen: Tensor, num_experts: int, mix: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the MoE layer's output [T, E], combined by an all-to-all and an all-gather of uneven sizes.

        `mix(tokens)` returns this rank's part of the output of these tokens. Each rank owns a share of the tokens, and
        adds the parts that all ranks send it for its tokens, in float32. Every rank knows the experts of all tokens, so
        ranks need not exchange message sizes.
        """
        axis, count = self.axis, len(chosen)
        placement = self.placement(layer, num_experts)
        slots = chosen if self.has_copies else self._tables_of(layer, num_experts, chosen.device).slot_of[chosen]
        needed = torch.zeros(count, axis.size, dtype=torch.bool, device=chosen.device)
        needed.scatter_(1, slots.long() // placement.per_rank, True)
        bounds = [-(-count * rank // axis.size) for rank in range(axis.size + 1)]  # the ranges of `_owners`
        sizes = [end - start for start, end in itertools.pairwise(bounds)]
        counts = [part.sum(0).tolist() for part in needed.split(sizes)]  # [owner][rank with experts]
        part = mix(needed[:, axis.rank].nonzero().squeeze(1))
        received = axis.all_to_all(part, [of_owner[axis.rank] for of_owner in counts], counts[axis.rank])
        own = torch.zeros(sizes[axis.rank], part.shape[1], dtype=torch.float32, device=part.device)
        rows = needed[bounds[axis.rank] : bounds[axis.rank + 1]].t().nonzero()[:, 1]  # rank by rank, as received
        own.index_add_(0, rows, received.float())
        return axis.all_gather(own.to(part.dtype), sizes)

    def _tables_of(self, layer: int, num_experts: int, device: torch.device) -> _Tables:
        if layer not in self._tables:
            placement = self.placement(layer, num_experts)
            self._tables[layer] = _Tables(placement, self.axis.rank, self.num_redundant + 1, device)
        return self._tables[layer]

    def _owners(self, count: int, device: torch.device) -> Tensor:
        """Return the rank that owns each of `count` tokens, [T]. Ranks own consecutive, nearly equal ranges."""
        return torch.arange(count, device=device) * self.axis.size // max(1, count)

    def _draw(self, layer: int, experts: Tensor, limit: int) -> Tensor:
        """Return pseudo-random numbers below `limit`, int32 [T, k], equal on all ranks and different in each step."""
        calls = self._calls[layer] = self._calls.get(layer, 0) + 1
        first = calls * 2654435761 + layer * 40503
        pairs = (torch.arange(experts.numel(), device=experts.device) + first) & 0xFFFFFFFF
        pairs = ((pairs ^ (pairs >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
        drawn = (pairs ^ (pairs >> 16)) % limit
        return drawn.to(torch.int32).view(experts.shape)


class _Tables:
    """A layer's placement as tensors on the device. `write` fills them in place, as graphs hold their addresses."""

    def __init__(self, placement: Placement, rank: int, width: int, device: torch.device) -> None:
        ids, slots = placement.num_experts, len(placement.experts)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        self._has_copies = width > 1
        self.slot_of = empty(ids)  # the first slot of each expert
        self.here = empty(slots if self._has_copies else ids)  # local index of each slot (no copies: expert), or -1
        if self._has_copies:
            self.slots, self.counts = empty(ids, width), empty(ids)  # all slots of each expert, and their number
            self.fixed = empty(placement.num_ranks, ids)  # the slot to which each rank sends its tokens for each expert
        self.write(placement, rank)

    def write(self, placement: Placement, rank: int) -> None:
        """Set the tables to another placement with the same number of slots."""
        self.slot_of.copy_(torch.tensor([slots[0] for slots in placement.slots], dtype=torch.int32))
        slots = torch.arange(len(placement.experts), dtype=torch.int32) - rank * placement.per_rank
        slots[(slots < 0) | (slots >= placement.per_rank)] = -1
        if not self._has_copies:
            self.here.copy_(slots[self.slot_of.cpu()])
            return
        self.here.copy_(slots)
        table, counts = placement.slot_table(self.slots.shape[1])
        for target, values in ((self.slots, table), (self.counts, counts), (self.fixed, placement.fixed_slots)):
            target.copy_(torch.from_numpy(values))
