"""The time of a step as a function of its batch: fitted to a record, or derived from a GPU's data sheet.

    seconds = base + max(floor, rows * row + prompt tokens * token) + context * context_s + pairs * pair

`rows` is the number of rows with one token. `context` is the number of cached tokens that these rows read. `pairs` is
the number of pairs of a prompt token and a token that it attends to. On a GPU, `floor` is the time to read the weights.
A fit has no floor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Batch
from runtime.config.model_facts import ModelFacts
from runtime.errors import ConfigurationError

# A fit ignores steps that take this many times as long as predicted, for example because the process was suspended.
OUTLIER = 10.0
NUM_FITS = 6  # each fit weights the steps by the predictions of the previous fit
MIN_STEPS = 20  # minimum number of steps for a fit


class GpuFigures(NamedTuple):
    """Figures from a GPU's data sheet, for dense bf16 operations."""

    flops: float  # operations per second
    bandwidth: float  # memory bandwidth in bytes per second


# NVIDIA's data sheets: H100 SXM, H200 SXM, A100 SXM 80 GB, L4.
GPUS: Mapping[str, GpuFigures] = {
    "h100": GpuFigures(989e12, 3.35e12),
    "h200": GpuFigures(989e12, 4.8e12),
    "a100": GpuFigures(312e12, 2.04e12),
    "l4": GpuFigures(121e12, 0.3e12),
}
# Shares of these figures that whole steps reach. They come from NVIDIA's measured kernel tables (aiconfigurator-core
# 0.12.0): Llama-3.1-8B in bf16 decodes one row at 70 % of the bandwidth, and 8 prompts of 1,024 tokens reach 72 % to 78
# % of the operations per second. Gaps between kernels are not included.
BANDWIDTH_SHARE, FLOPS_SHARE = 0.7, 0.75


class StepCosts(NamedTuple):
    """Coefficients of the formula for the time of a step, in seconds."""

    base: float = 0.0
    row: float = 0.0
    token: float = 0.0
    context: float = 0.0
    pair: float = 0.0
    floor: float = 0.0

    def seconds(self, batch: Batch) -> float:
        """Return the predicted time of a step in seconds."""
        rows, tokens, context, pairs = features(batch)
        work = max(self.floor, rows * self.row + tokens * self.token)
        return self.base + work + context * self.context + pairs * self.pair

    def decode_seconds(self, num_rows: int, context: int, num_steps: int) -> NDArray[np.float64]:
        """Return the predicted times [num_steps] of decode steps with the same rows.

        `context` is that of the first step.
        """
        work = max(self.floor, num_rows * self.row)
        contexts = np.arange(context, context + num_rows * num_steps, num_rows, dtype=np.float64)
        return contexts * self.context + (self.base + work)


def features(batch: Batch) -> tuple[int, int, int, int]:
    """Return the values of a step in the formula: (rows, tokens, context, pairs).

    A row with one token counts in `rows` and `context`, any other row in `tokens` and `pairs`.
    """
    starts, counts = batch.starts, batch.counts
    num_tokens = len(batch.token_ids)
    if num_tokens == len(counts):
        return num_tokens, 0, int(starts.sum()), 0
    single = counts == 1
    rows = int(single.sum())
    context = int(starts[single].sum())
    others, first = counts[~single].astype(np.int64), starts[~single]
    return rows, num_tokens - rows, context, int((others * (first + (others + 1) / 2)).sum())


def fit(steps: list[tuple[tuple[int, int, int, int], float]]) -> StepCosts:
    """Fit the costs to measured steps: (features, seconds). Minimizes the relative errors.

    Errors are relative to the predictions, so the predicted total time of many steps is right even if single steps are
    delayed. Raises `ConfigurationError` if there are too few steps.
    """
    if len(steps) < MIN_STEPS:
        raise ConfigurationError(f"The record has {len(steps)} timed steps; a fit needs {MIN_STEPS}.")
    matrix = np.array([(1.0, *values) for values, _ in steps])
    seconds = np.array([max(each, 1e-6) for _, each in steps])
    kept, scale = np.ones(len(steps), np.bool_), seconds
    found = np.zeros(matrix.shape[1])
    for _ in range(NUM_FITS):
        found = _least_squares(matrix[kept] / scale[kept, None], seconds[kept] / scale[kept])
        scale = np.maximum(matrix @ found, 1e-6)
        kept = seconds <= OUTLIER * scale
    return StepCosts(*map(float, found))


def _least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a least-squares solution without negative coefficients.

    While the solution has negative coefficients, the column of a most negative one is left out. Its coefficient is 0.
    """
    columns = [column for column in range(matrix.shape[1]) if matrix[:, column].any()]
    found = np.zeros(matrix.shape[1])
    while columns:
        scale = np.abs(matrix[:, columns]).max(axis=0)
        values = np.linalg.lstsq(matrix[:, columns] / scale, target, rcond=None)[0]
        if (values >= 0).all():
            found[columns] = values / scale
            break
        del columns[int(values.argmin())]
    return found


def published(gpu: str, facts: ModelFacts, weight_bytes: int) -> StepCosts:
    """Return the costs of a dense model with `weight_bytes` bytes of bf16 weights on one GPU of `GPUS`."""
    figures = GPUS[gpu]
    bandwidth, flops = figures.bandwidth * BANDWIDTH_SHARE, figures.flops * FLOPS_SHARE
    kv_bytes = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * 2
    token_s = weight_bytes / flops  # a weight of two bytes needs two operations
    return StepCosts(
        row=token_s,
        token=token_s,
        context=kv_bytes / bandwidth,
        pair=4 * facts.num_layers * facts.num_heads * facts.head_dim / flops,
        floor=weight_bytes / bandwidth,
    )


def weight_bytes(facts: ModelFacts) -> int:
    """Return the bytes of a dense model in bf16: its size on disk, or else the size that its configuration implies."""
    if facts.weight_bytes:
        return facts.weight_bytes
    inner = int(facts.config.get("intermediate_size") or 4 * facts.hidden_size)
    attention = facts.hidden_size * facts.head_dim * 2 * (facts.num_heads + facts.num_kv_heads)
    layers = facts.num_layers * (attention + 3 * facts.hidden_size * inner)
    return 2 * (layers + 2 * facts.vocab_size * facts.hidden_size)
