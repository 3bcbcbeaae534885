"""The memory profile run: measures the memory of the largest steps before the KV cache is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from runtime.batch import Batch, Sampling
from runtime.config.plan import Plan
from runtime.errors import ConfigurationError, OutOfMemory
from runtime.kv_cache.registry import KINDS
from runtime.kv_cache.sizing import StepMemory, largest_step_tokens
from runtime.worker.model_runner import StepExecutor

GRAPH_BYTES = 16 << 20  # estimate of the driver's memory for each graph


def profile_memory(
    executor: StepExecutor, plan: Plan, kinds: Mapping[str, int] = MappingProxyType({}), *, verifies: bool = True
) -> StepMemory:
    """Return the activation memory of the largest prefill or decode step, and an estimate of the memory of all graphs.

    The executor's pool needs one page, and for each other cache kind the number of units in `kinds`. All rows of the
    measured steps use this page and these units. `verifies` says whether the model verifies the plan's draft tokens.
    Raises `ConfigurationError` if a step does not fit into memory.
    """
    schedule, sizes, prompt_sizes = plan.scheduler, plan.graphs.sizes, plan.graphs.prompt_sizes
    page_size, context = plan.cache.page_size, plan.model.context_length

    def run(counts: list[int]) -> None:
        executor.run(profile_batch(counts, page_size, schedule.max_running, kinds, plan.model.is_embedding))()

    def peak(counts: list[int]) -> int:
        return executor.device.measure(lambda: run(counts)).peak_bytes

    def rows_of(tokens: int) -> list[int]:
        return [min(context, tokens - first) for first in range(0, tokens, context)]

    tokens = largest_step_tokens(plan)
    try:
        run([1])  # compiles and loads kernels, and allocates the workspaces of libraries
        sampled = schedule.max_sampled if verifies else schedule.max_running
        activation_bytes = max(peak(rows_of(tokens)), peak([1] * sampled))
        # There are two graphs of each size: one samples tokens, and one ends at the hidden states. Steps with branches
        # of draft tokens, or with draft tokens and recurrent states, have two further graphs (see `CudaGraphRunner`).
        has_more = verifies and (schedule.takes_branches or (schedule.max_drafts > 0 and bool(kinds)))
        num_graphs = (4 if has_more else 2) * len(sizes)
        graph_bytes = peak([1] * max(sizes)) + GRAPH_BYTES * num_graphs if sizes else 0
        # The graphs of one prompt size (one per layer) have together as many kernels as two decode graphs.
        if prompt_sizes:
            graph_bytes += peak(rows_of(max(prompt_sizes))) + 2 * GRAPH_BYTES * len(prompt_sizes)
    except OutOfMemory as error:
        raise ConfigurationError(
            f"A step of {tokens} tokens does not fit into the memory that the weights leave free; lower "
            "--chunked-prefill-size, --max-prefill-tokens or --max-running-requests."
        ) from error
    return StepMemory(activation_bytes=activation_bytes, graph_bytes=graph_bytes, measured=True)


def profile_batch(
    counts: list[int],
    page_size: int,
    num_sequences: int,
    kinds: Mapping[str, int] = MappingProxyType({}),
    is_embedding: bool = False,
) -> Batch:
    """Return a batch of rows with these token counts.

    All rows use page 0, and sample with the parameters that need most memory. With `is_embedding`, the rows compute
    embeddings and sample no tokens.
    """
    num_rows = len(counts)
    nothing: Any = None  # the executor never reads a sequence
    return Batch(
        number=0,
        sequences=(nothing,) * num_rows,
        starts=np.zeros(num_rows, np.int32),
        counts=np.array(counts, np.int32),
        sequence_indices=np.arange(num_rows, dtype=np.int32) % num_sequences,
        token_ids=np.zeros(sum(counts), np.int32),
        page_table=np.zeros((num_rows, -(-max(counts) // page_size)), np.int32),
        embedding_rows=np.arange(num_rows, dtype=np.int32) if is_embedding else None,
        sampling=None
        if is_embedding
        else Sampling(
            positions=np.cumsum(counts, dtype=np.int32) - 1,
            row_of=np.arange(num_rows, dtype=np.int32),
            greedy=np.zeros(num_rows, np.bool_),
            uniform=np.full(num_rows, 0.5, np.float32),
            params={"top_p": np.full(num_rows, 0.9, np.float32)},
        ),
        kinds={name: KINDS[name].scratch_arrays(counts, units) for name, units in kinds.items()},
    )
