"""The two wrappers of flashinfer-python 0.6.13 that we call: their signatures as its source has them.

What they are given they compute with native attention, so that a wrong page or length gives a wrong result.
`test_with_flashinfer` compares them with flashinfer itself where it is installed.
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from ops.attention import AttentionMetadata, native


class _Wrapper:
    kv_layout: str
    planned: dict[str, Any]

    def compute(
        self, q: Tensor, cache: tuple[Tensor, Tensor], counts: list[int], **scales: float | None
    ) -> Tensor:
        """Native attention over what was planned."""
        plan = self.planned
        assert self.kv_layout == "HND"
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
        options: dict[str, Any] = {"scale": plan["sm_scale"], "window": window, "soft_cap": soft_cap}
        options |= {name: scale for name, scale in scales.items() if scale is not None}
        return native.attend(q, *cache, inputs, **options)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ) -> None:
        self.kv_layout, self.use_tensor_cores = kv_layout, use_tensor_cores

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
    ) -> None:
        self.planned = dict(locals())

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ) -> Tensor:
        counts = [1] * (len(self.planned["indptr"]) - 1)
        return self.compute(q, paged_kv_cache, counts, k_scale=k_scale, v_scale=v_scale)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ) -> None:
        self.kv_layout, self.backend = kv_layout, backend

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ) -> None:
        assert causal
        assert self.backend == "auto" or kv_data_type == q_data_type  # as FlashAttention 3 wants it
        self.planned = dict(locals()) | {
            "indptr": paged_kv_indptr,
            "indices": paged_kv_indices,
            "last_page_len": paged_kv_last_page_len,
        }

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
    ) -> Tensor:
        counts = self.planned["qo_indptr"].diff().tolist()
        return self.compute(q, paged_kv_cache, counts, k_scale=k_scale, v_scale=v_scale)


def module() -> ModuleType:
    """Stands for the package `flashinfer`."""
    stand_in = ModuleType("flashinfer")
    for wrapper in WRAPPERS:
        setattr(stand_in, wrapper.__name__, wrapper)
    return stand_in


WRAPPERS = (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper)
METHODS = ("__init__", "plan", "run")
