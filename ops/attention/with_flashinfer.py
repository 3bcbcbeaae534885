"""Paged attention with FlashInfer (arXiv 2501.01005): a plan per step and kind of layer, then one launch per layer.

Written for flashinfer-python 0.6.13. A wrapper stores its plan, so each engine has its own `FlashInfer` object with its
own wrappers. Pages have the layout that FlashInfer calls HND. By default FlashInfer chooses the kernels. With `FA3`,
FlashAttention 3 (arXiv 2407.08608) computes the rows of several tokens. A separate wrapper for latent vectors (MLA)
computes rows of any number of tokens in one launch.

Captured steps have a separate wrapper for each number of rows, with buffers that keep their addresses. The plan of
such a wrapper is updated outside the graph before each replay (see `AttentionMetadata.replans`).
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions
from ops.attention.flashinfer_plans import FixedBuffers, Setting, plan, replan_decode
from ops.attention.hybrid import hybrid
from ops.backends import FLASHINFER_HEAD_DIMS, LATENT_DIMS

# Size of the workspace for partial results. All wrappers share it, because they run one after the other.
WORKSPACE_BYTES = 256 * 2**20
# Number of wrappers that successive steps use in turn. While the host plans a step, the GPU may still copy an earlier
# step's plan from the pinned buffer of its wrapper. At most two steps are in flight, so three wrappers suffice.
TURNS = 3
FA3 = "fa3"
CUDA_CORE_GROUPS = (1, 2)  # numbers of query heads per kv head with which decode is faster without tensor cores


class FlashInfer:
    """Owns FlashInfer's wrappers of one engine.

    `attend` follows the contract of `ops.attention`, but supports no sinks, no chunked attention and no slopes
    (FlashInfer supports ALiBi only with its standard slopes). If keys and values are the same pool, with heads of
    512 + 64 dimensions, the pool has latent vectors (`ops.latent`). The last 64 elements of each result then stay
    uninitialised.

    `kernels` is "auto" or "fa3". With "fa3", FlashAttention 3 computes the rows of several tokens, and the cache must
    have the query's dtype. Rows of one token still use the decode kernels, because FlashAttention 3 would read the
    cache once per query head and would not split long rows. FlashInfer's kernels for latent vectors read the cache once
    for all heads, so "fa3" applies to all their rows.
    """

    def __init__(self, kernels: str = "auto") -> None:
        self._attend_by_rows: Attend = hybrid(self._attend_heads, self._attend_heads, drafts_by_prefill=True)
        self._kernels = kernels
        self._workspace: Tensor | None = None
        self._wrappers: dict[Setting, list[Any]] = {}
        # Buffers and wrappers of captured steps. Keys are the setting, the address of the page table and, for wrappers,
        # the number of rows.
        self._buffers: dict[tuple[Setting, int], FixedBuffers] = {}
        self._fixed: dict[tuple[Setting, int, int], tuple[Any, FixedBuffers]] = {}

    def attend(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention (see `ops.attention`). Raise ValueError for unsupported features."""
        if options.sinks is not None:
            raise ValueError("FlashInfer's paged kernels have no attention sinks. Use triton.")
        if options.chunked:
            raise ValueError("FlashInfer's paged kernels have no chunks. Use triton.")
        if options.slopes is not None:
            raise ValueError("FlashInfer's paged kernels support no custom slopes (ALiBi). Use triton.")
        if self._kernels == FA3 and k_pool.dtype != q.dtype:
            raise ValueError(f"fa3 reads a cache of the query's {q.dtype}, not of {k_pool.dtype}. Use triton.")
        if is_latent(k_pool, v_pool):
            return self._attend_latent(q, k_pool, metadata, options)
        check_heads(q)
        return self._attend_by_rows(q, k_pool, v_pool, metadata, options)

    def _attend_heads(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention over keys and values. Either all rows have one token, or all rows have several tokens."""
        setting = Setting(
            "decode" if all(count == 1 for count in metadata.counts_host) else "prefill",
            q.shape[1],
            k_pool.shape[1],
            q.shape[2],
            k_pool.shape[2],
            q.dtype,
            k_pool.dtype,
            options.scale,
            options.window,
            options.soft_cap,
        )
        scales = {"k_scale": options.k_scale, "v_scale": options.v_scale}
        # Each given scale costs a pass over the result, so a scale of 1 is omitted.
        used = {name: scale for name, scale in scales.items() if scale != 1.0}
        return self._ready(setting, metadata).run(q, (k_pool, v_pool), **used)

    def _attend_latent(self, q: Tensor, pool: Tensor, metadata: AttentionMetadata, options: AttentionOptions) -> Tensor:
        """Compute attention over latent vectors."""
        check_latent(q, pool, options)
        setting = Setting(
            "latent",
            q.shape[1],
            1,
            q.shape[2],
            pool.shape[2],
            q.dtype,
            pool.dtype,
            options.scale,
            None,
            None,
            causal=any(count > 1 for count in metadata.counts_host),
        )
        rank, latents = LATENT_DIMS[0], pool[:, 0]
        out = torch.empty_like(q)
        self._ready(setting, metadata).run(
            q[..., :rank], q[..., rank:], latents[..., :rank], latents[..., rank:], out=out[..., :rank]
        )
        return out

    def _ready(self, setting: Setting, metadata: AttentionMetadata) -> Any:
        """Return a wrapper that has a plan for this step."""
        return self._planned(setting, metadata) if metadata.replans is None else self._captured(setting, metadata)

    def _planned(self, setting: Setting, metadata: AttentionMetadata) -> Any:
        """Return the wrapper of this step and setting. The first layer with this setting plans it."""
        key = (__name__, setting)
        if key not in metadata.plan_cache:
            ring = self._wrappers.setdefault(setting, [])
            wrapper = self._new(setting, metadata.page_table.device) if len(ring) < TURNS else ring.pop(0)
            ring.append(wrapper)
            plan(wrapper, setting, metadata)
            metadata.plan_cache[key] = wrapper
        return metadata.plan_cache[key]

    def _captured(self, setting: Setting, metadata: AttentionMetadata) -> Any:
        """Return the wrapper for captured steps with this number of rows. In the warm-up run, plan this wrapper."""
        size, table = len(metadata.counts_host), metadata.page_table.data_ptr()
        if (setting, table, size) not in self._fixed:
            self._fixed[setting, table, size] = self._new_fixed(setting, metadata)
        (wrapper, buffers), key = self._fixed[setting, table, size], (__name__, setting)
        if metadata.replans is not None and key not in metadata.replans:
            plan(wrapper, setting, metadata)
            metadata.replans[key] = partial(plan, wrapper, setting)
            if setting.kind == "decode":
                fast_plan = import_module("flashinfer").fast_decode_plan
                metadata.replans[key] = partial(replan_decode, fast_plan, wrapper, setting, buffers)
        return wrapper

    def _new(self, setting: Setting, device: torch.device, **fixed: Any) -> Any:
        flashinfer = import_module("flashinfer")  # takes seconds and is an optional package
        if self._workspace is None:
            # Some kernels keep counters in the workspace, which must be zero at first use.
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        if setting.kind == "latent":
            make = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
            return make(self._workspace, backend=self._kernels, **fixed)
        if setting.kind == "prefill":
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "HND", backend=self._kernels, **fixed
            )
        group = setting.num_heads // setting.num_kv_heads
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=group not in CUDA_CORE_GROUPS, **fixed
        )

    def _new_fixed(self, setting: Setting, metadata: AttentionMetadata) -> tuple[Any, FixedBuffers]:
        """Return a wrapper and its fixed buffers. The first captured step has the most rows, and so sets their size."""
        size, device = len(metadata.counts_host), metadata.page_table.device
        key = (setting, metadata.page_table.data_ptr())
        if key not in self._buffers or len(self._buffers[key].last_lengths) < size:
            self._buffers[key] = FixedBuffers.empty(size, metadata.page_table.numel(), device)
        buffers = self._buffers[key]
        wrapper = self._new(setting, device, **buffers.arguments(setting.kind, size))
        if setting.kind != "latent":  # a wrapper for latent vectors keeps its own buffer for the plan
            wrapper.reset_workspace_buffer(self._workspace, buffers.plan)
        return wrapper, buffers


def make_attend() -> Attend:
    """Return an `attend` for one engine."""
    return FlashInfer().attend


def is_latent(k_pool: Tensor, v_pool: Tensor) -> bool:
    """Return whether the pools are one pool of latent vectors (`ops.latent`)."""
    return k_pool.shape[1] == 1 and k_pool.shape[3] == sum(LATENT_DIMS) and k_pool.data_ptr() == v_pool.data_ptr()


def check_heads(q: Tensor) -> None:
    """Raise ValueError if FlashInfer has no kernels for these heads."""
    if q.shape[2] not in FLASHINFER_HEAD_DIMS or q.dtype.itemsize != 2:
        raise ValueError(
            f"FlashInfer computes head dimensions {FLASHINFER_HEAD_DIMS} in 16 bits, not {q.shape[2]} in {q.dtype}. "
            f"Use triton."
        )


def check_latent(q: Tensor, pool: Tensor, options: AttentionOptions) -> None:
    """Raise ValueError if FlashInfer has no kernels for these latent vectors."""
    if q.dtype.itemsize != 2 or pool.dtype != q.dtype:
        raise ValueError(
            f"FlashInfer reads latent vectors in the query's dtype and in 16 bits, not {pool.dtype} with queries in "
            f"{q.dtype}. Use triton."
        )
    if options.window is not None or options.soft_cap is not None:
        raise ValueError("FlashInfer's kernels for latent vectors have no windows and no soft cap. Use triton.")
