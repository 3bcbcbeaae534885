"""Multi-head latent attention with TensorRT-LLM's decode kernels in FlashInfer.

Written for flashinfer-python 0.6.13. The decode kernels compute rows of one token. Like the kernels of `with_trtllm`,
they need no plan and read the page table directly. FlashInfer's wrapper for latent vectors computes longer rows.
"""

from __future__ import annotations

from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions
from ops.attention.hybrid import hybrid
from ops.attention.with_flashinfer import FlashInfer, check_latent, is_latent
from ops.attention.with_trtllm import Workspace, row_lengths
from ops.backends import LATENT_DIMS, TRTLLM_LATENT_PAGE_SIZES

NOPE_DIM = 128  # the only value that FlashInfer accepts for latent vectors of 512 elements; kernels do not use it
TABLE_TOKENS = 128  # the kernels read the page table in blocks of this number of tokens


class LatentTensorRT:
    """Owns the workspace of the kernels of one engine. `attend` follows the contract of `ops.attention`.

    The pools must be one pool of latent vectors (`ops.latent`) with 512 + 64 elements. The last 64 elements of each
    result stay uninitialised.
    """

    def __init__(self) -> None:
        self._by_rows = hybrid(self._decode, FlashInfer().attend, drafts_by_prefill=True)
        self._workspace = Workspace()

    def attend(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention over latent vectors. Raise ValueError for unsupported features."""
        if not is_latent(k_pool, v_pool):
            raise ValueError(f"trtllm_mla reads latent vectors of {LATENT_DIMS} dimensions only. Use triton.")
        if any(option is not None for option in (options.sinks, options.slopes)) or options.chunked:
            raise ValueError("trtllm_mla has no sinks, no slopes (ALiBi) and no chunks. Use triton.")
        if metadata.page_size not in TRTLLM_LATENT_PAGE_SIZES:
            raise ValueError(
                f"trtllm_mla reads pages of {TRTLLM_LATENT_PAGE_SIZES} tokens, not of {metadata.page_size}. Use triton."
            )
        check_latent(q, k_pool, options)
        if q.dtype != torch.bfloat16:
            raise ValueError(f"trtllm_mla computes in bfloat16, not in {q.dtype}. Use triton.")
        return self._by_rows(q, k_pool, v_pool, metadata, options)

    def _decode(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention of rows of one token."""
        run = import_module("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla
        (rank, rope_dim), lengths, out = LATENT_DIMS, row_lengths(metadata), torch.empty_like(q)
        out[..., :rank] = run(
            query=q.unsqueeze(1),
            kv_cache=k_pool,
            workspace_buffer=self._workspace.on(q.device),
            qk_nope_head_dim=NOPE_DIM,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope_dim,
            block_tables=_whole_blocks(metadata),
            seq_lens=lengths.of_rows,
            max_seq_len=lengths.longest,
            bmm1_scale=options.scale,
            bmm2_scale=1.0,
            backend="trtllm-gen",
        ).squeeze(1)
        return out


def make_attend() -> Attend:
    """Return an `attend` for one engine."""
    return LatentTensorRT().attend


def _whole_blocks(metadata: AttentionMetadata) -> Tensor:
    """Return the page table, padded with page 0 so that each row covers a multiple of TABLE_TOKENS tokens."""
    key = (__name__, "table")
    if key not in metadata.plan_cache:
        table = metadata.page_table
        missing = -table.shape[1] % (TABLE_TOKENS // metadata.page_size)
        metadata.plan_cache[key] = F.pad(table, (0, missing)) if missing else table
    return metadata.plan_cache[key]
