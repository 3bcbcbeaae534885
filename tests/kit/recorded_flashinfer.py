"""Fakes of the wrappers of flashinfer-python 0.6.13 that Penstock calls, with the same signatures.

They compute their arguments with native attention, so that a wrong page or length gives a wrong result. `bench.contact.
flashinfer_calls` compares the calls with the signatures of the installed flashinfer.
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import recorded_experts
import recorded_fused
import recorded_latent
import recorded_nvfp4
import recorded_products
import recorded_trtllm
from ops.attention import AttentionMetadata, AttentionOptions, native


class _Fixed:
    """The behaviour of a wrapper for CUDA graphs: it copies a plan to the memory that captured kernels read.

    As in the real wrapper, the plan is written to the wrapper's host memory, which the copy reads when it runs. Kernels
    read only device memory.
    """

    def __init__(self, page_starts: Tensor, pages: Tensor, last_lengths: Tensor) -> None:
        assert len(page_starts) == len(last_lengths) + 1
        self._buffers = (page_starts, pages, last_lengths)
        self._size = len(last_lengths)
        self._host = torch.zeros(self._size, dtype=torch.int32)
        self.said: Tensor | None = None

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> None:
        page_starts, pages, last_lengths = self._buffers
        assert len(indices) <= len(pages)
        assert indices.dtype == torch.int32
        page_starts.copy_(indptr)
        last_lengths.copy_(last_page_len)
        pages[: len(indices)].copy_(indices)
        self.say(indptr, last_page_len, page_size)

    def say(self, indptr: Tensor, last_page_len: Tensor, page_size: int) -> None:
        """Copy the rows' lengths to the memory that kernels read, and no other array."""
        assert len(last_page_len) == self._size, "The batch size should be fixed in cudagraph mode"
        assert indptr.dtype == last_page_len.dtype == torch.int32
        self._host.copy_((indptr.diff() - 1) * page_size + last_page_len)
        assert self.said is not None
        self.said[: 4 * self._size].view(torch.int32).copy_(self._host)

    def attend(self, q: Tensor, cache: tuple[Tensor, Tensor], plan: dict[str, Any]) -> Tensor:
        page_starts, pages, _ = self._buffers
        assert len(q) == self._size
        assert self.said is not None
        lengths = self.said[: 4 * self._size].view(torch.int32)
        width = len(pages) // self._size
        places = (page_starts[:-1, None] + torch.arange(width)).clamp_max(len(pages) - 1)
        keys, values = (pool[pages[places].long()].transpose(1, 2).flatten(2, 3).float() for pool in cache)
        scores = q.unflatten(1, (keys.shape[1], -1)).float() @ keys.transpose(2, 3) * plan["sm_scale"]
        positions = torch.arange(keys.shape[2])
        unseen = positions >= lengths[:, None, None, None]
        if plan["window_left"] >= 0:
            unseen = unseen | (positions + plan["window_left"] + 1 < lengths[:, None, None, None])
        if plan["logits_soft_cap"]:
            scores = plan["logits_soft_cap"] * torch.tanh(scores / plan["logits_soft_cap"])
        scores, values = scores.masked_fill(unseen, -torch.inf), values.nan_to_num()
        return (scores.softmax(-1) @ values).flatten(1, 2).to(q.dtype)


class _Wrapper:
    kv_layout: str
    planned: dict[str, Any]
    num_fast_plans = 0
    fixed: _Fixed | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        assert self.fixed is not None
        self.fixed.said = int_workspace_buffer

    def compute(self, q: Tensor, cache: tuple[Tensor, Tensor], counts: list[int], **scales: float | None) -> Tensor:
        """Compute native attention with the plan."""
        plan = self.planned
        assert self.kv_layout == "HND"
        if self.fixed is not None:
            assert set(scales.values()) == {None}
            return self.fixed.attend(q, cache, plan)
        assert cache[0].shape[1:] == (plan["num_kv_heads"], plan["page_size"], q.shape[2])
        assert (q.shape[1], q.dtype) == (plan["num_qo_heads"], plan["q_data_type"])
        assert cache[0].dtype == plan["kv_data_type"]
        edges, pages = plan["indptr"].tolist(), plan["indices"].tolist()
        table = np.zeros((len(counts), max(np.diff(edges))), np.int32)
        lengths = []
        for row, (low, high) in enumerate(pairwise(edges)):
            table[row, : high - low] = pages[low:high]
            lengths.append((high - low - 1) * plan["page_size"] + plan["last_page_len"][row].item())
        starts = [length - count for length, count in zip(lengths, counts)]
        inputs = AttentionMetadata.build(starts, counts, table, plan["page_size"])
        window = None if plan["window_left"] < 0 else plan["window_left"] + 1
        soft_cap = plan["logits_soft_cap"] or None
        given: dict[str, Any] = {name: scale for name, scale in scales.items() if scale is not None}
        options = AttentionOptions(plan["sm_scale"], window, soft_cap=soft_cap, **given)
        return native.attend(q, *cache, inputs, options)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer: Any = None, paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None, backend="auto", jit_args=None,
    ) -> None:  # fmt: skip
        self.kv_layout, self.use_tensor_cores = kv_layout, use_tensor_cores
        if use_cuda_graph:
            self.fixed = _Fixed(paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16",
        kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None,
        non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False,
        q_len_per_req=1,
    ) -> None:  # fmt: skip
        self.planned = dict(locals())
        if self.fixed is not None:
            self.fixed.plan(indptr, indices, last_page_len, page_size)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
        return_lse=False, enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None, kv_cache_sf=None,
    ) -> Tensor:  # fmt: skip
        counts = [1] * (len(self.planned["indptr"]) - 1)
        return self.compute(q, paged_kv_cache, counts, k_scale=k_scale, v_scale=v_scale)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None, paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto",
        jit_args=None, jit_kwargs=None,
    ) -> None:  # fmt: skip
        self.kv_layout, self.backend = kv_layout, backend
        if use_cuda_graph:
            assert len(qo_indptr_buf) == len(paged_kv_indptr_buf)
            self.fixed = _Fixed(paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
        logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None,
        max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False,
    ) -> None:  # fmt: skip
        assert causal
        assert self.backend == "auto" or kv_data_type == q_data_type  # a requirement of FlashAttention 3
        self.planned = dict(locals()) | {
            "indptr": paged_kv_indptr,
            "indices": paged_kv_indices,
            "last_page_len": paged_kv_last_page_len,
        }
        if self.fixed is not None:
            assert qo_indptr.tolist() == list(range(len(qo_indptr)))
            self.fixed.plan(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
        return_lse=False, enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
    ) -> Tensor:  # fmt: skip
        counts = self.planned["qo_indptr"].diff().tolist()
        return self.compute(q, paged_kv_cache, counts, k_scale=k_scale, v_scale=v_scale)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim,
    page_size, pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type=None, kv_data_type=None,
    data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, fixed_split_size=None,
    disable_split_kv=False, global_override_indptr_cpu: Any = None,
) -> None:  # fmt: skip
    """Plan a wrapper for CUDA graphs again. Like FlashInfer's function, leave its buffers for the rows as they are."""
    assert self.fixed is not None
    assert self.planned["kv_data_type"] == kv_data_type  # planned before, with the same kernels
    self.num_fast_plans += 1
    self.planned |= {"sm_scale": sm_scale, "window_left": window_left, "logits_soft_cap": logits_soft_cap}
    self.fixed.say(global_override_indptr_cpu, last_page_len, page_size)
    assert len(indices) == global_override_indptr_cpu[-1]


def modules() -> dict[str, ModuleType]:
    """Return replacements for the package `flashinfer` and its modules, by name."""
    found: dict[str, ModuleType] = {}
    for name, contents in CONTENTS.items():
        found[name] = ModuleType(name)
        for each in contents:
            setattr(found[name], each.__name__, each)
    return found


CONTENTS: dict[str, tuple[Any, ...]] = {
    "flashinfer": (
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
        fast_decode_plan,
        recorded_nvfp4.fp4_quantize,
        recorded_fused.mxfp8_quantize,
        recorded_fused.shuffle_matrix_a,
        recorded_fused.shuffle_matrix_sf_a,
    ),
    "flashinfer.mla": (
        recorded_latent.BatchMLAPagedAttentionWrapper,
        recorded_latent.trtllm_batch_decode_with_kv_cache_mla,
    ),
    "flashinfer.gemm": (
        recorded_products.fp8_blockscale_gemm_sm90,
        recorded_products.gemm_fp8_nt_groupwise,
        recorded_nvfp4.mm_fp4,
    ),
    "flashinfer.fused_moe": (
        recorded_experts.cutlass_fused_moe,
        recorded_fused.interleave_moe_scales_for_sm90_mixed_gemm,
        recorded_fused.interleave_moe_weights_for_sm90_mixed_gemm,
        recorded_fused.trtllm_fp4_block_scale_routed_moe,
        recorded_fused.trtllm_fp8_block_scale_routed_moe,
    ),
    "flashinfer.decode": (recorded_trtllm.trtllm_batch_decode_with_kv_cache,),
    "flashinfer.prefill": (recorded_trtllm.trtllm_batch_context_with_kv_cache,),
}
