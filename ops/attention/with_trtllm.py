"""Paged attention with TensorRT-LLM's kernels in FlashInfer, which need no plan and read the page table directly.

Written for flashinfer-python 0.6.13. FlashInfer downloads the compiled kernels at first use, or takes them from the
package flashinfer-cubin. The kernels read all arguments on the device, except for the maximum lengths. These lengths
only determine how the work is divided, so a captured step passes an upper bound: the capacity of the page table.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions
from ops.attention.hybrid import hybrid
from ops.attention.with_flashinfer import check_heads
from ops.backends import TRTLLM_PAGE_SIZES

WORKSPACE_BYTES = 256 * 2**20


class Lengths(NamedTuple):
    """Lengths of a step's rows, which the kernels need besides `AttentionMetadata`."""

    of_rows: Tensor  # int32 [B], number of positions of each row
    starts: Tensor  # int32 [B + 1], prefix sums of `of_rows`
    longest: int  # largest of `of_rows`; in captured steps, an upper bound
    most_queries: int  # largest number of computed tokens of a row


class Workspace:
    """Scratch memory for the kernels of one engine, allocated on first use."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """Return the memory, uint8 [WORKSPACE_BYTES]. The kernels keep counters in it, which must start at 0."""
        if self._memory is None:
            self._memory = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._memory


class TensorRT:
    """Owns the workspace of the kernels of one engine. `attend` follows the contract of `ops.attention`."""

    def __init__(self) -> None:
        self.attend = hybrid(self._decode, self._prefill, drafts_by_prefill=True)
        self._workspace = Workspace()

    def _decode(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention of rows of one token."""
        run = import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
        shared = self._shared(q, k_pool, v_pool, metadata, options)
        return run(max_seq_len=row_lengths(metadata).longest, backend="trtllm-gen", **shared)

    def _prefill(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention of longer rows."""
        run = import_module("flashinfer.prefill").trtllm_batch_context_with_kv_cache
        shared, lengths = self._shared(q, k_pool, v_pool, metadata, options), row_lengths(metadata)
        return run(
            max_q_len=lengths.most_queries,
            max_kv_len=lengths.longest,
            batch_size=len(metadata.counts_host),
            cum_seq_lens_q=metadata.query_starts,
            cum_seq_lens_kv=lengths.starts,
            **shared,
        )

    def _shared(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> dict[str, Any]:
        """Return the arguments that decode and prefill share. Raises ValueError for features that the kernels lack."""
        if options.soft_cap is not None:
            raise ValueError("trtllm_mha has no soft cap. Use triton.")
        if options.chunked:
            raise ValueError("trtllm_mha has no chunks. Use triton.")
        if options.slopes is not None:
            raise ValueError("trtllm_mha has no slopes (ALiBi). Use triton.")
        if metadata.page_size not in TRTLLM_PAGE_SIZES:
            raise ValueError(
                f"trtllm_mha reads pages of {TRTLLM_PAGE_SIZES} tokens, not of {metadata.page_size}. Use triton."
            )
        check_heads(q)
        if k_pool.dtype != q.dtype:
            raise ValueError(f"trtllm_mha reads a cache of the query's {q.dtype}, not of {k_pool.dtype}. Use triton.")
        return {
            "query": q.contiguous(),
            "kv_cache": (k_pool, v_pool),
            "workspace_buffer": self._workspace.on(q.device),
            "block_tables": metadata.page_table,
            "seq_lens": row_lengths(metadata).of_rows,
            "bmm1_scale": options.scale * options.k_scale,
            "bmm2_scale": options.v_scale,
            "window_left": -1 if options.window is None else options.window - 1,
            "sinks": options.sinks,
            "kv_layout": "HND",
        }


def make_attend() -> Attend:
    """Return an `attend` for one engine."""
    return TensorRT().attend


def row_lengths(metadata: AttentionMetadata) -> Lengths:
    """Return the lengths of the step's rows. Computed once per step."""
    if __name__ not in metadata.plan_cache:
        of_rows = metadata.starts + metadata.counts
        starts = torch.zeros_like(metadata.query_starts)
        torch.cumsum(of_rows, 0, dtype=torch.int32, out=starts[1:])
        if metadata.replans is None:
            longest = max(start + count for start, count in zip(metadata.starts_host, metadata.counts_host))
        else:  # an upper bound that is valid for all steps that replay the graph
            longest = metadata.page_table.shape[1] * metadata.page_size
        metadata.plan_cache[__name__] = Lengths(of_rows, starts, longest, max(metadata.counts_host))
    return metadata.plan_cache[__name__]
