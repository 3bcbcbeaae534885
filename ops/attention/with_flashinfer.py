"""Paged attention with FlashInfer (arXiv 2501.01005): a plan per step and kind of layer, then one launch per layer.

Written for flashinfer-python 0.6.13. A wrapper stores its plan, so engines cannot share wrappers: each engine has its
own `FlashInfer` object. Pages have the layout that FlashInfer calls HND. By default FlashInfer chooses the kernels.
With `FA3`, FlashAttention 3 (arXiv 2407.08608) computes the rows of several tokens.

Captured steps have a separate wrapper for each number of rows, with buffers that keep their addresses. The plan of
such a wrapper is updated outside the graph before each replay (see `AttentionMetadata.replans`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions
from ops.attention.hybrid import hybrid
from ops.backends import FLASHINFER_HEAD_DIMS
from ops.sampling.native import to_device

# Size of the workspace for partial results. All wrappers share it, because they run one after the other.
WORKSPACE_BYTES = 256 * 2**20
PLAN_BYTES = 8 * 2**20  # size of the buffer with a plan's data for the kernels
# Number of wrappers that successive steps use in turn. While the host plans a later step, the GPU may still copy the
# plan of an earlier step from its wrapper's pinned buffer. The runner keeps two steps in flight.
TURNS = 3
FA3 = "fa3"
CUDA_CORE_GROUPS = (1, 2)  # numbers of query heads per kv head with which decode is faster without tensor cores


class Setting(NamedTuple):
    """Properties, besides the rows, on which a plan depends."""

    is_decode: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    window: int | None
    soft_cap: float | None


class FixedBuffers(NamedTuple):
    """Buffers from which captured kernels read a step's rows. Steps of all sizes share them."""

    plan: Tensor  # uint8 [PLAN_BYTES]
    query_starts: Tensor  # int32 [B + 1]
    page_starts: Tensor  # int32 [B + 1], prefix sums of the rows' numbers of pages
    pages: Tensor  # int32 [number of elements of the page table]
    last_lengths: Tensor  # int32 [B], number of tokens in each row's last page


class FlashInfer:
    """Owns FlashInfer's wrappers of one engine.

    `attend` follows the contract of `ops.attention`, but supports no sinks, no chunked attention and no slopes
    (FlashInfer supports ALiBi only with its standard slopes).

    `kernels` is "auto" or "fa3". With "fa3", FlashAttention 3 computes the rows of several tokens, and the cache must
    have the query's dtype. Rows of one token still use the decode kernels, because FlashAttention 3 would read the
    cache once per query head and would not split long rows.
    """

    def __init__(self, kernels: str = "auto") -> None:
        self.attend: Attend = hybrid(self._attend, self._attend)
        self._kernels = kernels
        self._workspace: Tensor | None = None
        self._wrappers: dict[Setting, list[Any]] = {}
        # Buffers and wrappers of captured steps. Keys are the setting, the address of the page table and, for wrappers,
        # the number of rows.
        self._buffers: dict[tuple[Setting, int], FixedBuffers] = {}
        self._fixed: dict[tuple[Setting, int, int], Any] = {}

    def _attend(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention of rows that all have one token, or all more. Raise ValueError for unsupported features."""
        (_, num_heads, head_dim), (_, num_kv_heads, page_size, _) = q.shape, k_pool.shape
        if options.sinks is not None:
            raise ValueError("FlashInfer's paged kernels have no attention sinks. Use triton.")
        if options.chunked:
            raise ValueError("FlashInfer's paged kernels have no chunks. Use triton.")
        if options.slopes is not None:
            raise ValueError("FlashInfer's paged kernels support no custom slopes (ALiBi). Use triton.")
        check_heads(q)
        if self._kernels == FA3 and k_pool.dtype != q.dtype:
            raise ValueError(f"fa3 reads a cache of the query's {q.dtype}, not of {k_pool.dtype}. Use triton.")
        setting = Setting(
            all(count == 1 for count in metadata.counts_host),
            num_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q.dtype,
            k_pool.dtype,
            options.scale,
            options.window,
            options.soft_cap,
        )
        wrapper = self._planned(setting, metadata) if metadata.replans is None else self._captured(setting, metadata)
        scales = {"k_scale": options.k_scale, "v_scale": options.v_scale}
        # Each given scale costs a pass over the result, so a scale of 1 is omitted.
        used = {name: scale for name, scale in scales.items() if scale != 1.0}
        return wrapper.run(q, (k_pool, v_pool), **used)

    def _planned(self, setting: Setting, metadata: AttentionMetadata) -> Any:
        """Return the wrapper of this step and setting. The first layer with this setting plans it."""
        key = (__name__, setting)
        if key not in metadata.plan_cache:
            ring = self._wrappers.setdefault(setting, [])
            wrapper = self._new(setting, metadata.page_table.device) if len(ring) < TURNS else ring.pop(0)
            ring.append(wrapper)
            _plan(wrapper, setting, metadata)
            metadata.plan_cache[key] = wrapper
        return metadata.plan_cache[key]

    def _captured(self, setting: Setting, metadata: AttentionMetadata) -> Any:
        """Return the wrapper of captured steps with this number of rows. The warm-up run plans it."""
        size, table = len(metadata.counts_host), metadata.page_table.data_ptr()
        if (setting, table, size) not in self._fixed:
            self._fixed[setting, table, size] = self._new_fixed(setting, metadata)
        wrapper, key = self._fixed[setting, table, size], (__name__, setting)
        if metadata.replans is not None and key not in metadata.replans:
            _plan(wrapper, setting, metadata)
            metadata.replans[key] = partial(_plan, wrapper, setting)
        return wrapper

    def _new(self, setting: Setting, device: torch.device, **fixed: Any) -> Any:
        flashinfer = import_module("flashinfer")  # takes seconds and is an optional package
        if self._workspace is None:
            # Some kernels keep counters in the workspace, which must be zero at first use.
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        if not setting.is_decode:
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "HND", backend=self._kernels, **fixed
            )
        group = setting.num_heads // setting.num_kv_heads
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=group not in CUDA_CORE_GROUPS, **fixed
        )

    def _new_fixed(self, setting: Setting, metadata: AttentionMetadata) -> Any:
        """Return a wrapper with the fixed buffers. The first captured step has the most rows and decides their size."""
        size, device = len(metadata.counts_host), metadata.page_table.device
        key = (setting, metadata.page_table.data_ptr())
        if key not in self._buffers or len(self._buffers[key].last_lengths) < size:
            lengths = (size + 1, size + 1, metadata.page_table.numel(), size)
            self._buffers[key] = FixedBuffers(
                torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device),
                *(torch.zeros(length, dtype=torch.int32, device=device) for length in lengths),
            )
        buffers = self._buffers[key]
        names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
        values = (buffers.page_starts[: size + 1], buffers.pages, buffers.last_lengths[:size])
        if setting.is_decode:
            fixed = dict(zip((f"{name}fer" for name in names), values))
        else:
            fixed = {"qo_indptr_buf": buffers.query_starts[: size + 1], **dict(zip(names, values))}
        wrapper = self._new(setting, device, use_cuda_graph=True, **fixed)
        wrapper.reset_workspace_buffer(self._workspace, buffers.plan)
        return wrapper


def make_attend() -> Attend:
    """Return an `attend` for one engine."""
    return FlashInfer().attend


def check_heads(q: Tensor) -> None:
    """Raise ValueError if FlashInfer has no kernels for these heads."""
    if q.shape[2] not in FLASHINFER_HEAD_DIMS or q.dtype.itemsize != 2:
        raise ValueError(
            f"FlashInfer computes head dimensions {FLASHINFER_HEAD_DIMS} in 16 bits, not {q.shape[2]} in {q.dtype}. "
            f"Use triton."
        )


def _plan(wrapper: Any, setting: Setting, metadata: AttentionMetadata) -> None:
    """Plan a wrapper for the rows of a step."""
    pages = _pages(metadata)
    shared: dict[str, Any] = {
        "num_qo_heads": setting.num_heads,
        "num_kv_heads": setting.num_kv_heads,
        "page_size": setting.page_size,
        "sm_scale": setting.scale,
        "window_left": -1 if setting.window is None else setting.window - 1,
        "logits_soft_cap": setting.soft_cap,
        "q_data_type": setting.dtype,
        "kv_data_type": setting.kv_dtype,
    }
    if setting.is_decode:
        wrapper.plan(*pages, head_dim=setting.head_dim, **shared)
    else:
        query_starts = _pinned([0, *accumulate(metadata.counts_host)], metadata.page_table.device)
        wrapper.plan(query_starts, *pages, head_dim_qk=setting.head_dim, causal=True, **shared)


def _pages(metadata: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """Return (prefix sums of the rows' numbers of pages, the rows' pages, number of tokens in each row's last page).

    The pages are on the device, the other tensors on the host, where a plan reads them. Computed once per step.
    """
    key = (__name__, "pages")
    if key not in metadata.plan_cache:
        size, width, device = metadata.page_size, metadata.page_table.shape[1], metadata.page_table.device
        lengths = np.add(metadata.starts_host, metadata.counts_host)
        num_pages = -(-lengths // size)
        starts = np.concatenate([[0], np.cumsum(num_pages)])
        # For each row: the index of its first page in the flattened page table, minus the index in the result.
        first = np.arange(len(lengths)) * width - starts[:-1]
        index = torch.from_numpy(np.arange(starts[-1]) + np.repeat(first, num_pages))
        metadata.plan_cache[key] = (
            _pinned(starts, device),
            metadata.page_table.flatten().index_select(0, to_device(index, device)),
            _pinned(lengths - (num_pages - 1) * size, device),
        )
    return metadata.plan_cache[key]


def _pinned(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Return int32 values on the host, pinned if a plan copies them to a GPU."""
    host = torch.from_numpy(np.array(values, np.int32))
    return host.pin_memory() if device.type == "cuda" else host
