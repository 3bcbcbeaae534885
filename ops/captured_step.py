"""The beginning and the end of a step that is captured whole (`source/whole.h`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ops.attention import AttentionMetadata
from ops.cpp.kernel_launcher import KernelLauncher, NotCapturable
from ops.cpp.library import address
from ops.cpp.structures import Begin, Choose, Last, PoolTexts, Product, Product8, Step
from ops.matmul.with_cpp import PACKED, PackedWeight4, PackedWeight8, product4, scratch8

SAMPLES = -1  # as the number of a kernel's rows: those of the step that sample
BEST_BYTES = 5 * 64  # of what a thread notes about a row


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a step's kernels derive from its batch first, for all that follow."""

    query_starts: Tensor  # int32 [B + 1]
    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    page_table: Tensor | None = None  # int32, as wide as the step's: of a pool with pages of its own

    @classmethod
    def empty(cls, max_tokens: int, max_rows: int) -> Inputs:
        ids, positions, slot_mapping = (torch.empty(max_tokens, dtype=torch.int64) for _ in range(3))
        return cls(torch.empty(max_rows + 1, dtype=torch.int32), ids, positions, slot_mapping)

    def with_own_pages(self, page_table: Tensor) -> Inputs:
        """The same for a pool with pages of its own, named by this table, int32 of any width."""
        return replace(self, slot_mapping=torch.empty_like(self.slot_mapping), page_table=page_table)

    def addresses(self) -> dict[str, int]:
        """As fields of a `Step`."""
        names = ("query_starts", "token_ids", "positions", "slot_mapping")
        own = {} if self.page_table is None else {"page_table": self.page_table.data_ptr()}
        return {name: getattr(self, name).data_ptr() for name in names} | own

    def attention(self, step: Step) -> AttentionMetadata:
        """What layers are given while they are captured: it says nothing of any batch."""
        nothing = torch.empty(0, 0, dtype=torch.int32)
        return AttentionMetadata(
            page_table=nothing if self.page_table is None else self.page_table[None],
            starts=nothing[0:0],
            counts=nothing[0:0],
            query_starts=self.query_starts,
            slot_mapping=self.slot_mapping,
            page_size=step.page_size,
            starts_host=(),
            counts_host=(),
        )


def begin(launcher: KernelLauncher, inputs: Inputs, dtype: torch.dtype) -> None:
    """Token ids, positions and slot mapping from the batch's arrays."""
    launcher.launch("begin", dtype, Begin(**inputs.addresses()))


def last(launcher: KernelLauncher, hidden: Tensor, out: Tensor) -> None:
    """hidden [T, E] of the tokens that predict one -> out [R, E]."""
    launcher.launch("last", hidden.dtype, Last(address(hidden), address(out), hidden.shape[1]))


def pool_texts(
    launcher: KernelLauncher, hidden: Tensor, out: Tensor, *, mean: bool, normalized: bool
) -> None:
    """hidden [T, E] -> out [B, E], float32: the mean of each row's tokens or its first one, of length one if asked."""
    operands = PoolTexts(address(hidden), address(out), hidden.shape[1], mean, normalized)
    launcher.launch("pool_texts", hidden.dtype, operands)


def likeliest(launcher: KernelLauncher, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The id of the largest of hidden @ weight.T, int64 [R], and whether the row is sound, bool [R].

    As choose in `ops.sampling` for greedy rows, but no logit is written down. `last_tokens` of the step get the ids.
    """
    if not isinstance(weight, PACKED):
        raise NotCapturable("the head's weight is not packed")
    max_rows, (out_size, in_size) = len(hidden), weight.shape
    ids, sound = launcher.empty((max_rows,), torch.int64), launcher.empty((max_rows,), torch.bool)
    best = launcher.empty((launcher.num_threads * max_rows * BEST_BYTES,), torch.uint8)
    plain = Product(
        x=address(hidden),
        x_stride=in_size,
        rows=SAMPLES,
        weight=address(weight),
        in_size=in_size,
        out_size=out_size,
    )
    product = Product8(plain=plain)
    if isinstance(weight, PackedWeight8):
        rounded = scratch8(launcher, max_rows, in_size)
        product = Product8(plain, weight.scales_address, address(rounded))
    operands = Choose(address(best), address(ids), address(sound), max_rows, product)
    if isinstance(weight, PackedWeight4):
        operands.product4, _kept = product4(launcher, plain, weight, max_rows, hidden.dtype)
        launcher.launch("choose4", hidden.dtype, operands)
        return ids, sound
    launcher.launch("choose8" if isinstance(weight, PackedWeight8) else "choose", hidden.dtype, operands)
    return ids, sound
