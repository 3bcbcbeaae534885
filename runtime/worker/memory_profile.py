"""What the largest steps take, found out by running them before there is a KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ops.select import Kernels
from runtime.batch import Batch, Sampling
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.errors import ConfigurationError, OutOfMemory
from runtime.kv_cache.pools import KVPool
from runtime.kv_cache.sizing import StepMemory, largest_step_tokens
from runtime.models.decoder import Decoder
from runtime.worker.device import Device
from runtime.worker.launch import Launcher
from runtime.worker.rank import Rank
from runtime.worker.sampler import Sampler

GRAPH_BYTES = 16 << 20  # what the driver keeps for each graph, guessed


class DryRun:
    """A model with a cache of one page, into which all rows write: what they compute is worth nothing."""

    def __init__(
        self, model: Decoder, kernels: Kernels, plan: Plan, facts: ModelFacts, device: Device
    ) -> None:
        self._plan = plan
        self._device = device
        num_slots = plan.schedule.max_running
        pool = KVPool(
            facts.num_layers,
            1,
            plan.cache.page_size,
            facts.num_kv_heads,
            facts.head_dim,
            getattr(torch, plan.cache.kv_dtype),
            device.torch_device,
        )
        sampler = Sampler(facts.vocab_size, num_slots, device, choose=kernels.choose)
        rank = Rank(model, pool, model, num_slots=num_slots, device=device)
        self._launcher = Launcher(rank, sampler, device)

    def measure(self) -> StepMemory:
        """The larger of the largest prompt step and the largest step of single tokens, and what graphs take.

        Raises `ConfigurationError` when there is too little memory for one of them.
        """
        schedule, sizes = self._plan.schedule, self._plan.graphs.sizes
        context = self._plan.model.context_length
        tokens = largest_step_tokens(self._plan)
        prompts = [min(context, tokens - first) for first in range(0, tokens, context)]
        try:
            self._run([1])  # compiles and loads kernels, and what libraries keep
            peak = max(self._peak(prompts), self._peak([1] * schedule.max_running))
            graphs = self._peak([1] * max(sizes)) + GRAPH_BYTES * len(sizes) if sizes else 0
        except OutOfMemory as error:
            raise ConfigurationError(
                f"There is too little memory for a step of {tokens} tokens beside the weights; lower "
                "--chunked-prefill-size, --max-prefill-tokens or --max-running-requests."
            ) from error
        return StepMemory(activation_bytes=peak, graph_bytes=graphs, measured=True)

    def _peak(self, counts: list[int]) -> int:
        return self._device.measure(lambda: self._run(counts)).peak_bytes

    def _run(self, counts: list[int]) -> None:
        batch = dry_batch(counts, self._plan.cache.page_size, self._plan.schedule.max_running)
        self._launcher.run(batch)()


def dry_batch(counts: list[int], page_size: int, num_slots: int) -> Batch:
    """Rows of so many tokens from position 0, all in page 0, that choose in the way that takes most memory."""
    num_rows = len(counts)
    nothing: Any = None  # the runner never looks inside a sequence
    return Batch(
        number=0,
        sequences=(nothing,) * num_rows,
        starts=np.zeros(num_rows, np.int32),
        counts=np.array(counts, np.int32),
        slots=np.arange(num_rows, dtype=np.int32) % num_slots,
        token_ids=np.zeros(sum(counts), np.int32),
        page_table=np.zeros((num_rows, -(-max(counts) // page_size)), np.int32),
        sampling=Sampling(
            rows=np.arange(num_rows, dtype=np.int32),
            greedy=np.zeros(num_rows, np.bool_),
            uniform=np.full(num_rows, 0.5, np.float32),
            params={"top_p": np.full(num_rows, 0.9, np.float32)},
        ),
    )
