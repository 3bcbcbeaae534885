"""Paged attention by FlashInfer (arXiv 2501.01005): a plan for each step and kind of layer, then one launch.

Written against flashinfer-python 0.6.13. Its wrappers keep what they planned, so they belong to one engine:
`FlashInfer` owns them. A row's pages are read in our own layout, which FlashInfer calls HND. Which of its kernels run
is its own choice, or FlashAttention 3 (arXiv 2407.08608) for all rows.
"""

from __future__ import annotations

from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.attention import AttentionMetadata
from ops.attention.divided import Attend, divide
from ops.backends import FLASHINFER_HEAD_DIMS
from ops.sampling.native import to_device

WORKSPACE_BYTES = 256 * 2**20  # for partial results; shared by all wrappers, which run one after the other
# A plan is copied from a pinned buffer of its wrapper while later steps are launched already, so wrappers take
# turns; the runner keeps two steps in flight.
TURNS = 3
FA3 = "fa3"
CUDA_CORE_GROUPS = (1, 2)  # query heads per kv head up to which tensor cores do not pay in decode


class Setting(NamedTuple):
    """What a plan depends on besides the rows."""

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


class FlashInfer:
    """FlashInfer's wrappers of one engine. `attend` follows the contract of `ops.attention`, without sinks.

    `kernels` is "auto" or "fa3". FlashAttention 3 takes rows of all lengths in one launch, and a cache of the query's
    dtype only.
    """

    def __init__(self, kernels: str = "auto") -> None:
        self.attend: Attend = self._attend if kernels == FA3 else divide(self._attend, self._attend)
        self._kernels = kernels
        self._workspace: Tensor | None = None
        self._wrappers: dict[Setting, list[Any]] = {}

    def _attend(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """Rows that are all of one token, or all longer. Raises ValueError for what FlashInfer lacks."""
        (_, num_heads, head_dim), (_, num_kv_heads, page_size, _) = q.shape, k_pool.shape
        if sinks is not None:
            raise ValueError("FlashInfer's paged kernels have no attention sinks; use triton")
        check_heads(q)
        if self._kernels == FA3 and k_pool.dtype != q.dtype:
            raise ValueError(f"fa3 reads a cache of the query's {q.dtype}, not of {k_pool.dtype}; use triton")
        setting = Setting(
            self._kernels != FA3 and all(count == 1 for count in metadata.counts_host),
            num_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q.dtype,
            k_pool.dtype,
            scale,
            window,
            soft_cap,
        )
        key = (__name__, setting)
        if key not in metadata.plan_cache:
            metadata.plan_cache[key] = self._planned(setting, metadata)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        used = {
            name: scale for name, scale in scales.items() if scale != 1.0
        }  # each costs a pass over the result
        return metadata.plan_cache[key].run(q, (k_pool, v_pool), **used)

    def _planned(self, setting: Setting, metadata: AttentionMetadata) -> Any:
        """The next wrapper for this setting, planned for these rows."""
        device = metadata.page_table.device
        ring = self._wrappers.setdefault(setting, [])
        wrapper = self._new(setting, device) if len(ring) < TURNS else ring.pop(0)
        ring.append(wrapper)
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
            query_starts = torch.tensor([0, *accumulate(metadata.counts_host)], dtype=torch.int32)
            wrapper.plan(query_starts, *pages, head_dim_qk=setting.head_dim, causal=True, **shared)
        return wrapper

    def _new(self, setting: Setting, device: torch.device) -> Any:
        flashinfer = import_module("flashinfer")  # seconds, and an extra: for those who chose it
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        if not setting.is_decode:
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "HND", backend=self._kernels
            )
        group = setting.num_heads // setting.num_kv_heads
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=group not in CUDA_CORE_GROUPS
        )


def make_attend() -> Attend:
    """An `attend` for one engine."""
    return FlashInfer().attend


def check_heads(q: Tensor) -> None:
    """Raise ValueError for heads that FlashInfer has no kernels for."""
    if q.shape[2] not in FLASHINFER_HEAD_DIMS or q.dtype.itemsize != 2:
        raise ValueError(
            f"FlashInfer computes head dimensions {FLASHINFER_HEAD_DIMS} in 16 bits, not {q.shape[2]} in {q.dtype}; "
            f"use triton"
        )


def _pages(metadata: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """(prefix sums of the rows' numbers of pages, their pages, tokens in each last page).

    The pages are on the device; the others on the host, where a plan reads them.
    """
    size, width = metadata.page_size, metadata.page_table.shape[1]
    lengths = [start + count for start, count in zip(metadata.starts_host, metadata.counts_host)]
    num_pages = [-(-length // size) for length in lengths]
    index = torch.cat([torch.arange(n) + row * width for row, n in enumerate(num_pages)])
    pages = metadata.page_table.flatten().index_select(0, to_device(index, metadata.page_table.device))
    last = [length - (n - 1) * size for length, n in zip(lengths, num_pages)]
    starts = [0, *accumulate(num_pages)]
    return torch.tensor(starts, dtype=torch.int32), pages, torch.tensor(last, dtype=torch.int32)
