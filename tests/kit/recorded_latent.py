"""Fakes of FlashInfer's attention over latent vectors (flashinfer-python 0.6.13), with the same signatures.

They compute their arguments with native attention. In a wrapper for CUDA graphs, the kernels read only the buffer of
pages and the plan on the device.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ops.attention import AttentionMetadata, AttentionOptions, native

RANK, ROPE_DIM = 512, 64  # the only sizes for which FlashInfer generates kernels


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr: Any = None, kv_indptr: Any = None,
        kv_indices: Any = None, kv_len_arr: Any = None, backend="auto",
    ) -> None:  # fmt: skip
        assert backend in ("auto", "fa2", "fa3")
        self.backend, self.planned, self.num_plans = backend, {}, 0
        self._buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr) if use_cuda_graph else None
        if use_cuda_graph:
            assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
            size = len(kv_len_arr)
            # prefix sums of the pages, and lengths
            self._host = torch.zeros(2, size, dtype=torch.int32)
            self._device = torch.zeros(2, size, dtype=torch.int32, device=kv_indices.device)

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ) -> None:  # fmt: skip
        assert (head_dim_ckv, head_dim_kpe) == (RANK, ROPE_DIM)
        assert {qo_indptr.dtype, kv_indptr.dtype, kv_indices.dtype, kv_len_arr.dtype} == {torch.int32}
        assert kv_indptr.diff().tolist() == [-(-length // page_size) for length in kv_len_arr.tolist()]
        assert causal or set(qo_indptr.diff().tolist()) == {1}
        self.planned, self.num_plans = dict(locals()), self.num_plans + 1
        if self._buffers is None:
            return
        for buffer, values in zip(self._buffers, (qo_indptr, kv_indptr, kv_indices, kv_len_arr), strict=True):
            (buffer[: len(kv_indices)] if values is kv_indices else buffer).copy_(values)
        self._host[0].copy_(kv_indptr[:-1])
        self._host[1].copy_(kv_len_arr)
        self._device.copy_(self._host)

    def run(
        self, q_nope, q_pe, ckv_cache, kpe_cache, out: Any = None, lse=None, return_lse=False, profiler_buffer=None,
        kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None,
    ) -> Tensor:  # fmt: skip
        plan = self.planned
        assert q_nope.shape == out.shape == (len(q_pe), plan["num_heads"], RANK)
        assert (q_pe.shape[2], kpe_cache.shape[2], ckv_cache.shape[2]) == (ROPE_DIM, ROPE_DIM, RANK)
        assert ckv_cache.shape[1] == kpe_cache.shape[1] == plan["page_size"]
        assert (q_nope.dtype, ckv_cache.dtype) == (plan["q_data_type"], plan["kv_data_type"])
        pool = torch.cat((ckv_cache, kpe_cache), -1).unsqueeze(1)
        query = torch.cat((q_nope, q_pe), -1)
        if self._buffers is not None:
            out.copy_(self._captured(query, pool[:, 0])[..., :RANK])
            return out
        edges, pages = plan["kv_indptr"].tolist(), plan["kv_indices"].tolist()
        table = np.zeros((len(edges) - 1, max(np.diff(edges))), np.int32)
        for row, (low, high) in enumerate(pairwise(edges)):
            table[row, : high - low] = pages[low:high]
        counts = plan["qo_indptr"].diff().tolist()
        starts = [length - count for length, count in zip(plan["kv_len_arr"].tolist(), counts)]
        inputs = AttentionMetadata.build(starts, counts, table, plan["page_size"])
        out.copy_(native.attend(query, pool, pool, inputs, AttentionOptions(plan["sm_scale"]))[..., :RANK])
        return out

    def _captured(self, query: Tensor, pool: Tensor) -> Tensor:
        assert self._buffers is not None
        pages, (firsts, lengths) = self._buffers[2], self._device
        width = len(pages) // len(lengths)
        places = (firsts[:, None] + torch.arange(width)).clamp_max(len(pages) - 1)
        keys = pool[pages[places].long()].flatten(1, 2).float()  # [B, positions, R + P]
        scores = query.float() @ keys.transpose(1, 2) * self.planned["sm_scale"]
        unseen = torch.arange(keys.shape[1]) >= lengths[:, None, None]
        return (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ keys.nan_to_num()).to(query.dtype)


def trtllm_batch_decode_with_kv_cache_mla(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
    max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale: Any = 1.0, bmm2_scale: Any = 1.0, sinks=None,
    skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend="auto", is_var_seq=True,
    uses_shared_paged_kv_idx=True, lse=None, return_lse=False, cute_dsl_impl="auto",
) -> Tensor:  # fmt: skip
    assert backend == "trtllm-gen"
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim) == (128, RANK, ROPE_DIM)
    assert query.shape[1:2] + query.shape[3:] == (1, RANK + ROPE_DIM)
    assert query.dtype == torch.bfloat16  # FlashInfer allocates the result in bfloat16
    assert seq_lens.dtype == block_tables.dtype == torch.int32
    assert not workspace_buffer.any()
    page_size = kv_cache.shape[-2]
    assert block_tables.shape[1] % (128 / page_size) == 0
    lengths = seq_lens.tolist()
    assert max_seq_len >= max(lengths)
    inputs = AttentionMetadata.build(
        [length - 1 for length in lengths], [1] * len(lengths), block_tables.numpy(), page_size
    )
    attended = native.attend(
        query.squeeze(1), kv_cache, kv_cache, inputs, AttentionOptions(bmm1_scale, v_scale=bmm2_scale)
    )
    return attended[..., :RANK].unsqueeze(1)
