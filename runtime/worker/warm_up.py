"""Compiles the kernels of a GPU at start, so that no request waits for a compilation.

A Triton kernel has variants, which are compiled separately. For matrix products and MoE layers, the number of a step's
tokens selects the variant. The variant changes only at powers of two.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ops.select import Kernels
from runtime.batch import Batch
from runtime.errors import ConfigurationError
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.registry import KINDS
from runtime.layers.batch_reads import BatchReads, batch_reads
from runtime.layers.forward_batch import ForwardBatch
from runtime.mesh.rank_info import RankInfo
from runtime.modeling.decoder import Decoder
from runtime.modeling.draft_head import DraftHead
from runtime.worker.device import Device
from runtime.worker.logprobs import CHUNK
from runtime.worker.memory_profile import profile_batch
from runtime.worker.step_inputs import Staging, prepare

logger = logging.getLogger("penstock.core")

MEDIA_TOKENS = 8  # tokens of the step with media vectors


def compiles_at_first_use(kernels: Kernels) -> bool:
    """Return whether some kernels are compiled at their first launch."""
    return "with_triton" in kernels.backends.values()


def token_counts(largest: int) -> list[int]:
    """Return numbers of tokens, up to `largest`, whose steps together use every variant."""
    return [*(1 << power for power in range((largest - 1).bit_length())), largest]


def warm_up(
    model: Decoder,
    pool: KVPool,
    device: Device,
    rank_info: RankInfo,
    *,
    max_tokens: int,
    max_sampled: int,
    context_length: int,
    is_embedding: bool = False,
) -> None:
    """Run the rank's layers for steps of up to `max_tokens` tokens, so that all kernels are compiled.

    Only scratch pages and scratch states are written. Logits are computed for up to `max_sampled` positions, or for a
    chunk of prompt log-probabilities if this is more. Ranks that share layers must call this function at the same time.
    Raises `ConfigurationError` if a step does not fit into memory.
    """
    began, reads, staging = time.perf_counter(), batch_reads(model), Staging(device)
    steps = [_rows(count, context_length) for count in token_counts(max_tokens)]
    last_tokens = torch.zeros(max(map(len, steps)), dtype=torch.int64, device=device.torch_device)
    most = 0 if is_embedding else max(max_sampled, CHUNK)
    with torch.inference_mode(), device.forward():
        for counts in steps:
            step = prepare(_batch(counts, pool, reads), pool, staging, last_tokens).forward
            variants = [step]
            if counts == [MEDIA_TOKENS] and (reads.media_size or reads.position_axes):
                variants.append(_with_media(step, reads))
            for each in variants:
                try:
                    _run(model, _with_states(each, reads, rank_info), rank_info, most)
                except torch.OutOfMemoryError as error:
                    raise ConfigurationError(
                        f"A step of {sum(counts)} tokens does not fit into the device's memory; lower "
                        "--chunked-prefill-size, --max-prefill-tokens or --mem-fraction-static."
                    ) from error
        device.record().wait()
    device.release_unused()
    logger.info("Kernels for steps of up to %d tokens are compiled, %.1f s.", max_tokens, time.perf_counter() - began)


def _rows(num_tokens: int, context_length: int) -> list[int]:
    """Return the number of tokens of each row, for a step of `num_tokens` tokens."""
    return [min(context_length, num_tokens - first) for first in range(0, num_tokens, context_length)]


def _batch(counts: Sequence[int], pool: KVPool, reads: BatchReads) -> Batch:
    """Return a batch of rows with these token counts, which use only scratch pages and states."""
    batch = profile_batch(list(counts), pool.page_size, len(counts), pool.kinds)
    width = batch.page_table.shape[1]

    def widened(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            name: np.repeat(array, width, axis=1) if name == "page_table" else array for name, array in arrays.items()
        }

    kinds = {name: widened(KINDS[name].scratch_arrays(counts, unit)) for name, unit in pool.kinds.items()}
    return replace(
        batch,
        page_table=np.full_like(batch.page_table, pool.scratch_page),
        row_values={name: np.zeros(len(counts), np.int32) for name in reads.row_values},
        kinds=kinds,
    )


def _with_media(step: ForwardBatch, reads: BatchReads) -> ForwardBatch:
    """Return the step with media vectors for some ids and with positions on three axes, if the model reads them."""
    like = step.token_ids
    if reads.position_axes:
        step = replace(step, position_axes=step.positions.repeat(3, 1))
    if reads.media_size:
        vectors = torch.zeros(len(like), reads.media_size, device=like.device)
        step = replace(step, input_embeds=vectors, embeds_mask=torch.zeros_like(like, dtype=torch.bool))
    return step


def _with_states(step: ForwardBatch, reads: BatchReads, rank_info: RankInfo) -> ForwardBatch:
    """Return the step with the states that a draft head reads and the token counts of attention groups."""
    if reads.state_size:
        shape = len(step.token_ids), reads.state_size
        step = replace(step, states=torch.zeros(shape, dtype=reads.state_dtype, device=step.token_ids.device))
    if rank_info.dp_size > 1:
        step = replace(step, group_tokens=(step.num_tokens,) * rank_info.dp_size)
    return step


def _run(model: Decoder, step: ForwardBatch, rank_info: RankInfo, max_sampled: int) -> None:
    """Run the layers of this pipeline stage, and compute the logits of the first `max_sampled` positions."""
    if rank_info.pp_size == 1:
        hidden = model(step)
    else:
        hidden = torch.zeros(step.num_tokens, model.hidden_size, dtype=model.dtype, device=step.token_ids.device)
        x, residual = model.blocks(hidden if model.embedding is None else model.embed(step), None, step)
        if model.norm is not None:
            model.finish(x, residual)
    if max_sampled and model.head is not None:
        model.logits(hidden[:max_sampled])
    if isinstance(model, DraftHead) and model.projection is not None:
        size = model.projection.layout.in_size
        model.project(torch.zeros(step.num_tokens, size, dtype=model.dtype, device=step.token_ids.device))
