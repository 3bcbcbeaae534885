"""The memory that the largest steps take, found out by running them before there is a KV cache."""

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

GRAPH_BYTES = 16 << 20  # what the driver keeps for each graph, guessed


def profile_memory(
    executor: StepExecutor, plan: Plan, kinds: Mapping[str, int] = MappingProxyType({})
) -> StepMemory:
    """The larger of the largest prompt step and the largest step of single tokens, and what graphs take.

    The executor's pool needs one page, and of these `kinds` of caches so many units: all rows write there, and what
    they compute is worth nothing. Raises `ConfigurationError` when there is too little memory for one of the steps.
    """
    schedule, sizes = plan.scheduler, plan.graphs.sizes
    page_size, context = plan.cache.page_size, plan.model.context_length

    def run(counts: list[int]) -> None:
        executor.run(profile_batch(counts, page_size, schedule.max_running, kinds, plan.model.is_embedding))()

    def peak(counts: list[int]) -> int:
        return executor.device.measure(lambda: run(counts)).peak_bytes

    tokens = largest_step_tokens(plan)
    prompts = [min(context, tokens - first) for first in range(0, tokens, context)]
    try:
        run([1])  # compiles and loads kernels, and what libraries keep
        activation_bytes = max(peak(prompts), peak([1] * schedule.max_running))
        # Two graphs of each size: to tokens, and to hidden states.
        graph_bytes = peak([1] * max(sizes)) + 2 * GRAPH_BYTES * len(sizes) if sizes else 0
    except OutOfMemory as error:
        raise ConfigurationError(
            f"There is too little memory for a step of {tokens} tokens beside the weights; lower "
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
    """Rows of so many tokens from position 0, all in page 0, that choose in the way that takes most memory.

    With `is_embedding` they choose nothing, and vectors are made of them.
    """
    num_rows = len(counts)
    nothing: Any = None  # the runner never looks inside a sequence
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
            rows=np.arange(num_rows, dtype=np.int32),
            greedy=np.zeros(num_rows, np.bool_),
            uniform=np.full(num_rows, 0.5, np.float32),
            params={"top_p": np.full(num_rows, 0.9, np.float32)},
        ),
        kinds={name: KINDS[name].scratch_arrays(counts, units) for name, units in kinds.items()},
    )
