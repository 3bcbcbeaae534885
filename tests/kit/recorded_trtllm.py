"""Fakes of TensorRT-LLM's paged attention in flashinfer-python 0.6.13, with the same signatures.

They compute their arguments with native attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.attention import AttentionMetadata, AttentionOptions, native

used_workspaces: list[int] = []  # addresses


def trtllm_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
    window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND",
    enable_pdl=None, backend="auto", q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None,
    cum_seq_lens_q=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None,
    uses_shared_paged_kv_idx=True, lse=None, return_lse=False,
) -> Tensor:  # fmt: skip
    assert backend == "trtllm-gen"  # a Hopper GPU would use other kernels otherwise
    assert len(query) == len(seq_lens)
    return _compute(dict(locals()), [1] * len(query), max_seq_len)


def trtllm_batch_context_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale,
    batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, o_sf_scale=None,
    o_sf_vec_size=None, kv_layout="HND", enable_pdl=None, sinks=None, kv_cache_sf=None,
    skip_softmax_threshold_scale_factor=None, uses_shared_paged_kv_idx=True, causal=True, lse=None,
    return_lse=False,
) -> Tensor:  # fmt: skip
    counts = cum_seq_lens_q.diff().tolist()
    assert batch_size == len(counts) == len(seq_lens)
    assert max_q_len == max(counts)
    assert cum_seq_lens_kv.dtype == cum_seq_lens_q.dtype == torch.int32
    assert cum_seq_lens_kv.diff().tolist() == seq_lens.tolist()
    assert cum_seq_lens_kv[0] == 0
    return _compute(dict(locals()), counts, max_kv_len)


def _compute(given: dict[str, Any], counts: list[int], longest: int) -> Tensor:
    """Compute native attention with these arguments."""
    assert given["kv_layout"] == "HND"
    assert given["seq_lens"].dtype == given["block_tables"].dtype == torch.int32
    assert given["query"].is_contiguous()
    assert not given["workspace_buffer"].any()
    used_workspaces.append(given["workspace_buffer"].data_ptr())
    lengths, (k_pool, v_pool) = given["seq_lens"].tolist(), given["kv_cache"]
    assert longest == max(lengths)
    starts = [length - count for length, count in zip(lengths, counts)]
    inputs = AttentionMetadata.build(starts, counts, given["block_tables"].numpy(), k_pool.shape[2])
    return native.attend(
        given["query"],
        k_pool,
        v_pool,
        inputs,
        AttentionOptions(
            scale=given["bmm1_scale"],
            window=None if given["window_left"] < 0 else given["window_left"] + 1,
            sinks=given["sinks"],
            v_scale=given["bmm2_scale"],
        ),
    )
