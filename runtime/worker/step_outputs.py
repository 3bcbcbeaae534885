"""Copies the results of a step to the host, and converts them to plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from runtime.batch import Batch, Drafts, StepOutput
from runtime.request import Logprobs, joined
from runtime.worker.device import Device, Read
from runtime.worker.logprobs import ScoredPrompts
from runtime.worker.sampler import Sampled


def copy_out(
    device: Device,
    batch: Batch,
    sampled: Sampled | None = None,
    prompts: ScoredPrompts | None = None,
    vectors: Tensor | None = None,
    states: Tensor | None = None,
    experts: Tensor | None = None,
) -> Read[StepOutput]:
    """Start to copy results to the host. Return a function that waits for the copy and returns the step's output.

    `vectors`, float32 [M, D], are the vectors of the batch's `embedding_rows`. `states`, float32 [n, E], are the hidden
    states of all tokens of its `hidden_rows`. `experts`, int16 [n, L, k], are the chosen experts of all tokens of its
    `expert_rows`.
    """
    tensors = [*sampled.tensors()] if sampled is not None else []
    if prompts is not None:
        tensors += prompts.tensors()
    if vectors is not None:
        tensors.append(vectors)
    tensors += [each for each in (states, experts) if each is not None]
    host, copied = device.download(tensors)

    def read() -> StepOutput:
        copied.wait()
        return _output(batch, sampled, prompts, host)

    return read


def _used_choices(
    row_of: Sequence[int], drafts: Drafts, accepted: Sequence[int], taken: Sequence[int] | None
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the sampled positions whose tokens become output, each with the row whose output it extends.

    A row's output ends with the token that was sampled instead of its first rejected draft token. If a branch has this
    token, the output continues in the branch. The second result is `StepOutput.taken`.
    """
    left, owners, continued = dict.fromkeys(row_of, 1), dict[int, int](), dict[int, int]()
    if drafts.branches is not None:
        left |= dict.fromkeys(drafts.branches.rows.tolist(), 0)
    for number, (row, num_accepted) in enumerate(zip(drafts.rows.tolist(), accepted, strict=True)):
        left[row] += num_accepted
        if drafts.branches is not None and taken is not None and taken[number] >= 0:
            depth, branch = int(drafts.branches.depths[taken[number]]), int(drafts.branches.rows[taken[number]])
            left[row], left[branch], owners[branch] = depth, num_accepted - depth + 1, row
            continued[row] = branch - row - 1  # the branches of a row follow it
    used: dict[int, int] = {}
    for index, row in enumerate(row_of):
        if left[row]:
            left[row] -= 1
            used[index] = owners.get(row, row)
    return used, continued


def _output(batch: Batch, sampled: Sampled | None, prompts: ScoredPrompts | None, host: Sequence[Tensor]) -> StepOutput:
    """Return plain values from the host copies. `host` has the order of `copy_out`."""
    num_rows = len(batch.sequences)
    copies = iter(host)
    tokens: list[list[int]] = [[] for _ in range(num_rows)]
    failed: list[int] = []
    stuck: list[int] = []
    logprobs: list[Logprobs | None] | None = None
    prompt_logprobs: list[tuple[int, Logprobs]] = []
    taken: dict[int, int] = {}
    embeddings: list[list[float] | None] | None = None
    if sampled is not None and batch.sampling is not None:
        rows = batch.sampling.row_of.tolist()
        read = sampled.read(list(islice(copies, len(sampled.tensors()))))
        if batch.drafts is None:
            used = dict(enumerate(rows))
            for row, new_ids in zip(rows, read.tokens, strict=True):
                tokens[row] = new_ids
            failed = [rows[index] for index in read.failed]
        else:
            used, taken = _used_choices(rows, batch.drafts, read.accepted or [], read.taken)
            for index, row in used.items():
                tokens[row] = tokens[row] + read.tokens[index]
            failed = sorted({used[index] for index in read.failed if index in used})
        stuck = [rows[index] for index in read.stuck]
        if read.logprobs is not None:
            logprobs = [None for _ in range(num_rows)]
            for index, row in used.items():
                logprobs[row] = joined(logprobs[row], read.logprobs[index])
    if prompts is not None:
        prompt_logprobs = prompts.read(list(islice(copies, len(prompts.tensors()))))
    if batch.embedding_rows is not None:
        embeddings = [None for _ in range(num_rows)]
        # NumPy is used because torch would release the GIL for each operation, and then wait to acquire it again.
        vectors = next(copies).numpy()
        finite = np.logical_and.reduce(np.isfinite(vectors), axis=-1)
        rows = batch.embedding_rows.tolist()
        for row, vector, is_finite in zip(rows, vectors.tolist(), finite, strict=True):
            if is_finite:
                embeddings[row] = vector
            else:
                failed.append(row)
    hidden, experts = (_of_rows(batch, rows, copies) for rows in (batch.hidden_rows, batch.expert_rows))
    return StepOutput(tokens, failed, logprobs, prompt_logprobs, embeddings, stuck, hidden, experts, taken)


def _of_rows(batch: Batch, rows: Sequence[int], copies: Iterator[Tensor]) -> list[tuple[int, Any]]:
    """Split the next copied array, which has an entry for each token of `rows`, by row."""
    if not rows:
        return []
    whole = next(copies).numpy()
    parts = np.split(whole, batch.counts[list(rows)].cumsum()[:-1])
    # A request keeps its part of the array. If the part is small, it is copied, because a view would keep the whole
    # array in memory.
    return [(row, part.copy() if 2 * len(part) < len(whole) else part) for row, part in zip(rows, parts, strict=True)]
