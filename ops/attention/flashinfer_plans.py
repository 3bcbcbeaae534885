"""Plans of FlashInfer's wrappers, which determine the rows, pages and lengths that a launch computes.

Planning reads the rows of the step on the host. Wrappers of captured steps read their rows from `FixedBuffers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.attention import AttentionMetadata
from ops.backends import LATENT_DIMS
from ops.sampling.native import to_device

PLAN_BYTES = 8 * 2**20  # size of the buffer from which the kernels read a plan


class Setting(NamedTuple):
    """Properties of a layer, and the kind of rows, on which a plan depends."""

    kind: Literal["decode", "prefill", "latent"]  # "latent": absorbed MLA, for rows of any number of tokens
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    window: int | None
    soft_cap: float | None
    causal: bool = True  # for "latent": False if all rows have one token


class FixedBuffers(NamedTuple):
    """Buffers from which captured kernels read a step's rows. Graphs of all sizes share these buffers."""

    plan: Tensor  # uint8 [PLAN_BYTES]
    query_starts: Tensor  # int32 [B + 1]
    page_starts: Tensor  # int32 [B + 1], prefix sums of the rows' numbers of pages
    pages: Tensor  # int32 [number of elements of the page table]
    last_lengths: Tensor  # int32 [B], number of tokens in each row's last page; for "latent", in the whole row

    @classmethod
    def empty(cls, num_rows: int, num_pages: int, device: torch.device) -> FixedBuffers:
        """Return buffers for steps of up to `num_rows` rows with page tables of up to `num_pages` elements."""
        return cls(
            torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device),
            *(
                torch.zeros(length, dtype=torch.int32, device=device)
                for length in (num_rows + 1, num_rows + 1, num_pages, num_rows)
            ),
        )

    def arguments(self, kind: str, num_rows: int) -> dict[str, Any]:
        """Return the keyword arguments that make a FlashInfer wrapper use these buffers.

        The wrapper is for captured steps of `num_rows` rows.
        """
        query_starts, page_starts = self.query_starts[: num_rows + 1], self.page_starts[: num_rows + 1]
        last_lengths = self.last_lengths[:num_rows]
        shared: dict[str, Any] = {"use_cuda_graph": True}
        if kind == "latent":
            return shared | {
                "qo_indptr": query_starts,
                "kv_indptr": page_starts,
                "kv_indices": self.pages,
                "kv_len_arr": last_lengths,
            }
        if kind == "prefill":
            return shared | {
                "qo_indptr_buf": query_starts,
                "paged_kv_indptr_buf": page_starts,
                "paged_kv_indices_buf": self.pages,
                "paged_kv_last_page_len_buf": last_lengths,
            }
        return shared | {
            "paged_kv_indptr_buffer": page_starts,
            "paged_kv_indices_buffer": self.pages,
            "paged_kv_last_page_len_buffer": last_lengths,
        }


class Rows(NamedTuple):
    """Pages and lengths of a step's rows. Unless noted, tensors are int32 on the host, where planning reads them."""

    page_starts: Tensor  # [B + 1], prefix sums of the rows' numbers of pages
    last_lengths: Tensor  # [B], number of tokens in each row's last page
    lengths: Tensor  # [B], number of positions of each row
    index: Tensor  # int64 [number of pages] on the device: index of each page in the flattened page table


def plan(wrapper: Any, setting: Setting, metadata: AttentionMetadata) -> None:
    """Call the wrapper's method `plan` for the rows of a step."""
    rows = _rows(metadata)
    pages = _pages(metadata)
    if setting.kind == "decode":
        wrapper.plan(rows.page_starts, pages, rows.last_lengths, head_dim=setting.head_dim, **_shared(setting))
        return
    counts = metadata.counts_host
    query_starts = _pinned([0, *accumulate(counts)], metadata.page_table.device)
    if setting.kind == "prefill":
        wrapper.plan(
            query_starts,
            rows.page_starts,
            pages,
            rows.last_lengths,
            head_dim_qk=setting.head_dim,
            causal=True,
            max_token_per_sequence=max(counts),
            **_shared(setting),
        )
        return
    rank, rope_dim = LATENT_DIMS
    wrapper.plan(
        query_starts,
        rows.page_starts,
        pages,
        rows.lengths,
        num_heads=setting.num_heads,
        head_dim_ckv=rank,
        head_dim_kpe=rope_dim,
        page_size=setting.page_size,
        causal=setting.causal,
        sm_scale=setting.scale,
        q_data_type=setting.dtype,
        kv_data_type=setting.kv_dtype,
    )


def replan_decode(
    fast_plan: Any, wrapper: Any, setting: Setting, buffers: FixedBuffers, metadata: AttentionMetadata
) -> None:
    """Plan a wrapper of captured decode steps again, with FlashInfer's `fast_decode_plan`.

    The wrapper's method `plan` compares the lengths of the rows one by one in Python, which takes 1 to 2 us per row.
    `fast_decode_plan` omits this, and its caller fills the buffers.
    """
    rows, num_rows = _rows(metadata), len(metadata.counts_host)
    pages = buffers.pages[: len(rows.index)]
    buffers.page_starts[: num_rows + 1].copy_(rows.page_starts, non_blocking=True)
    buffers.last_lengths[:num_rows].copy_(rows.last_lengths, non_blocking=True)
    torch.index_select(metadata.page_table.flatten(), 0, rows.index, out=pages)
    fast_plan(
        wrapper,
        rows.page_starts,
        pages,
        rows.last_lengths,
        head_dim=setting.head_dim,
        global_override_indptr_cpu=rows.page_starts,
        **_shared(setting),
    )


def _shared(setting: Setting) -> dict[str, Any]:
    return {
        "num_qo_heads": setting.num_heads,
        "num_kv_heads": setting.num_kv_heads,
        "page_size": setting.page_size,
        "sm_scale": setting.scale,
        "window_left": -1 if setting.window is None else setting.window - 1,
        "logits_soft_cap": setting.soft_cap,
        "q_data_type": setting.dtype,
        "kv_data_type": setting.kv_dtype,
    }


def _rows(metadata: AttentionMetadata) -> Rows:
    """Return the step's rows. Computed once per step."""
    key = (__name__, "rows")
    if key not in metadata.plan_cache:
        size, width, device = metadata.page_size, metadata.page_table.shape[1], metadata.page_table.device
        lengths = np.add(metadata.starts_host, metadata.counts_host)
        num_pages = -(-lengths // size)
        starts = np.concatenate([[0], np.cumsum(num_pages)])
        # For each row: the index of its first page in the flattened page table, minus that page's index in the result.
        first = np.arange(len(lengths)) * width - starts[:-1]
        index = torch.from_numpy(np.arange(starts[-1]) + np.repeat(first, num_pages))
        metadata.plan_cache[key] = Rows(
            _pinned(starts, device),
            _pinned(lengths - (num_pages - 1) * size, device),
            _pinned(lengths, device),
            to_device(index, device),
        )
    return metadata.plan_cache[key]


def _pages(metadata: AttentionMetadata) -> Tensor:
    """Return the pages of all rows, row by row (int32, on the device). Computed once per step."""
    key = (__name__, "pages")
    if key not in metadata.plan_cache:
        metadata.plan_cache[key] = metadata.page_table.flatten().index_select(0, _rows(metadata).index)
    return metadata.plan_cache[key]


def _pinned(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Return the values as an int32 tensor on the host, in pinned memory if `device` is a GPU."""
    host = torch.from_numpy(np.array(values, np.int32))
    return host.pin_memory() if device.type == "cuda" else host
