"""From the tensors of one step back to plain values on the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
from torch import Tensor

from runtime.batch import Batch, StepOutput
from runtime.worker.device import Device, Read
from runtime.worker.logprobs import ScoredPrompts
from runtime.worker.sampler import Sampled


def copy_out(
    device: Device,
    batch: Batch,
    sampled: Sampled | None = None,
    prompts: ScoredPrompts | None = None,
    vectors: Tensor | None = None,
) -> Read[StepOutput]:
    """Start copying results to the host behind the forward; what is returned waits for that.

    `vectors` are float32 [M, D], of the batch's `embedding_rows`.
    """
    tensors = [*sampled.tensors()] if sampled is not None else []
    if prompts is not None:
        tensors += prompts.tensors()
    if vectors is not None:
        tensors.append(vectors)
    host, copied = device.download(tensors)

    def read() -> StepOutput:
        copied.wait()
        return _output(batch, sampled, prompts, host)

    return read


def _output(
    batch: Batch, sampled: Sampled | None, prompts: ScoredPrompts | None, host: Sequence[Tensor]
) -> StepOutput:
    """Plain values from the copies on the host, in the order in which `copy_out` lists them."""
    num_rows = len(batch.sequences)
    copies = iter(host)
    tokens: list[list[int]] = [[] for _ in range(num_rows)]
    failed: list[int] = []
    stuck: list[int] = []
    logprobs, prompt_logprobs = None, []
    embeddings: list[list[float] | None] | None = None
    if sampled is not None and batch.sampling is not None:
        rows = batch.sampling.rows.tolist()
        read = sampled.read(list(islice(copies, len(sampled.tensors()))))
        for row, new_ids in zip(rows, read.tokens, strict=True):
            tokens[row] = new_ids
        failed = [rows[index] for index in read.failed]
        stuck = [rows[index] for index in read.stuck]
        if read.logprobs is not None:
            by_row = dict(zip(rows, read.logprobs, strict=True))
            logprobs = [by_row.get(row) for row in range(num_rows)]
    if prompts is not None:
        prompt_logprobs = prompts.read(list(islice(copies, len(prompts.tensors()))))
    if batch.embedding_rows is not None:
        embeddings = [None for _ in range(num_rows)]
        # By NumPy: torch gives Python's lock away for each of these, and waits to have it back.
        vectors = next(copies).numpy()
        finite = np.logical_and.reduce(np.isfinite(vectors), axis=-1)
        rows = batch.embedding_rows.tolist()
        for row, vector, is_finite in zip(rows, vectors.tolist(), finite, strict=True):
            if is_finite:
                embeddings[row] = vector
            else:
                failed.append(row)
    return StepOutput(tokens, failed, logprobs, prompt_logprobs, embeddings, stuck)
