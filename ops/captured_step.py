"""Launches the first and the last kernels of a step in a CPU graph: those before and after the kernels of the layers.

The first kernel derives positions and slot mapping from the batch. The last kernels select or pool hidden states, or
choose the most likely tokens (`ops/cpp/source/whole.h`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ops.attention import AttentionMetadata
from ops.cpp.kernel_launcher import KernelLauncher, NotCapturable
from ops.cpp.library import address
from ops.cpp.structures import Begin, Choose, Last, PoolRows, Product, Product8, Step
from ops.matmul.with_cpp import PACKED, PackedWeight4, PackedWeight8, product4, scratch8

SAMPLES = -1  # as a product's number of rows, this value means the number of sampled rows of the step
BEST_BYTES = 5 * 64  # size of the scratch memory that one thread needs for one row


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Buffers that the first kernel of a step fills and the other kernels read.

    Only `row_values` is filled by the caller. The first kernel copies these values to `token_values`.
    """

    query_starts: Tensor  # int32 [B + 1]
    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    row_values: Tensor  # int32 [N, B], N values of each row (see `ForwardBatch.row_values`)
    token_values: Tensor  # int32 [N, T], for each token the values of its row
    position_axes: Tensor | None = None  # int64 [3, T]
    page_table: Tensor | None = None  # int32; None if the pool uses the step's page table

    @classmethod
    def empty(cls, max_tokens: int, max_rows: int, num_values: int = 0, *, with_axes: bool = False) -> Inputs:
        """Return uninitialised buffers. Only the row values are initialised, to 0."""
        ids, positions, slot_mapping = (torch.empty(max_tokens, dtype=torch.int64) for _ in range(3))
        return cls(
            torch.empty(max_rows + 1, dtype=torch.int32),
            ids,
            positions,
            slot_mapping,
            torch.zeros(num_values, max_rows, dtype=torch.int32),
            torch.empty(num_values, max_tokens, dtype=torch.int32),
            torch.empty(3, max_tokens, dtype=torch.int64) if with_axes else None,
        )

    def with_own_pages(self, page_table: Tensor) -> Inputs:
        """Return a copy of these inputs for a cache pool that has its own pages.

        The copy has `page_table` (int32), a new slot mapping, no row values and no position axes. It shares all other
        buffers with `self`.
        """
        return replace(
            self,
            slot_mapping=torch.empty_like(self.slot_mapping),
            row_values=self.row_values[:0],
            position_axes=None,
            page_table=page_table,
        )

    def addresses(self) -> dict[str, int]:
        """Return the addresses of these tensors, by the field names of `Step` and `Begin`."""
        names = ("query_starts", "token_ids", "positions", "slot_mapping")
        pages = {} if self.page_table is None else {"page_table": self.page_table.data_ptr()}
        return {name: getattr(self, name).data_ptr() for name in names} | pages

    def attention(self, step: Step) -> AttentionMetadata:
        """Return metadata with these buffers, for the capture of the layers.

        The metadata describes no rows, because each run of the graph gets its rows from a `Step`.
        """
        empty = torch.empty(0, 0, dtype=torch.int32)
        return AttentionMetadata(
            page_table=empty if self.page_table is None else self.page_table[None],
            starts=empty[0:0],
            counts=empty[0:0],
            query_starts=self.query_starts,
            slot_mapping=self.slot_mapping,
            page_size=step.page_size,
            starts_host=(),
            counts_host=(),
        )


def derive_inputs(launcher: KernelLauncher, inputs: Inputs, dtype: torch.dtype) -> None:
    """Launch the kernel that computes all arrays of `inputs` except `row_values` from the arrays of the step."""
    operands = Begin(
        **inputs.addresses(),
        position_axes=address(inputs.position_axes),
        row_values=address(inputs.row_values),
        token_values=address(inputs.token_values),
        num_values=len(inputs.row_values),
        max_rows=inputs.row_values.shape[1],
        max_tokens=len(inputs.token_ids),
    )
    launcher.launch("begin", dtype, operands)


def select_sampled(launcher: KernelLauncher, hidden: Tensor, out: Tensor) -> None:
    """Copy the hidden states [T, E] of the sampled positions to out [R, E]."""
    launcher.launch("last", hidden.dtype, Last(hidden=address(hidden), out=address(out), size=hidden.shape[1]))


def pool_rows(launcher: KernelLauncher, hidden: Tensor, out: Tensor, *, mean: bool, normalized: bool) -> None:
    """Write one vector per row of the hidden states [T, E] to out, float32 [B, E].

    The vector is the mean of the row's hidden states if `mean` is true, otherwise the first of them. With `normalized`,
    the vector is scaled to length 1.
    """
    operands = PoolRows(
        hidden=address(hidden), out=address(out), size=hidden.shape[1], mean=mean, normalized=normalized
    )
    launcher.launch("pool_rows", hidden.dtype, operands)


def choose_greedy(launcher: KernelLauncher, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the id of each row's largest logit (int64 [R]), and whether the row is sound (bool [R]).

    The logits are hidden [R, E] @ weight.T, which the kernel does not store. The results equal those of `choose` for
    greedy rows (see `ops.sampling`, also for "sound"). The kernel also writes the ids to the step's `last_tokens`.
    Raises `NotCapturable` if the weight is not packed.
    """
    if not isinstance(weight, PACKED):
        raise NotCapturable("the weight of the LM head is not packed")
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
        product = Product8(plain=plain, scales=weight.scales_address, rounded=address(rounded))
    operands = Choose(best=address(best), ids=address(ids), sound=address(sound), max_samples=max_rows, product=product)
    if isinstance(weight, PackedWeight4):
        operands.product4, _kept = product4(launcher, plain, weight, max_rows, hidden.dtype)
        launcher.launch("choose4", hidden.dtype, operands)
        return ids, sound
    launcher.launch("choose8" if isinstance(weight, PackedWeight8) else "choose", hidden.dtype, operands)
    return ids, sound
