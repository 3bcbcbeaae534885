"""Run a model like the engine does, but without the engine: pages, chunks, mixed batches, single tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ops.attention import AttentionMetadata, token_positions
from ops.select import Kernels, select
from runtime.batch import Batch
from runtime.config.plan import ModelPlan
from runtime.kv_cache.pools import KVPool
from runtime.layers.forward_batch import ForwardBatch, KindInputs
from runtime.layers.sharding import TensorParallelGroup
from runtime.loading.facts import read_facts
from runtime.loading.loader import load_model
from runtime.modeling.decoder import Decoder, collect_specs
from runtime.worker.cpu_graph import CpuGraph


def load(
    path: str,
    overrides: dict | None = None,
    *,
    kernels: Kernels | None = None,
    group: TensorParallelGroup | None = None,
    **changes,
) -> Decoder:
    """Return the model of a checkpoint on the CPU in float32, by default the native one. `changes` are fields of the
    plan.

    With a `group` it is one rank's shard.
    """
    facts = read_facts(path, overrides)
    plan = plan_for(path, **{"context_length": facts.context_length, **changes})
    return load_model(facts, plan, kernels or select(), group)


def plan_for(path: str, **changes: Any) -> ModelPlan:
    """Return the plan of a checkpoint on the CPU in float32, for short texts. `changes` are fields of the plan."""
    values = {
        "path": path,
        "load_format": "auto",
        "dtype": "float32",
        "device": "cpu",
        "context_length": 64,
        "random_seed": 0,
    }
    return ModelPlan(**{**values, **changes})


def all_logits(model: Decoder, sequences: list[list[int]], page_size: int, seed: int = 0) -> list[torch.Tensor]:
    """Return the logits of every position of every sequence, float32 [len, V] each.

    They are computed in several steps of random chunks and single tokens, with mixed sequences and pages in random
    order.
    """
    rng = np.random.default_rng(seed)
    num_pages = [-(-len(ids) // page_size) for ids in sequences]
    order = iter(rng.permutation(sum(num_pages)).tolist())
    table = np.zeros((len(sequences), max(num_pages)), np.int32)
    for row, count in enumerate(num_pages):
        table[row, :count] = [next(order) for _ in range(count)]
    pool = pool_for(model, sum(num_pages), page_size)
    done, parts = [0] * len(sequences), [[] for _ in sequences]
    while any(n < len(ids) for n, ids in zip(done, sequences)):
        rows, counts = [], []
        for row, ids in enumerate(sequences):
            left = len(ids) - done[row]
            count = min(left, (0, 1, 1, int(rng.integers(2, 20)))[rng.integers(4)])
            if count:
                rows.append(row)
                counts.append(count)
        if rows:
            starts = [done[row] for row in rows]
            ids = [sequences[row][start : start + n] for row, start, n in zip(rows, starts, counts)]
            logits = compute(model, ids, starts, table[rows], pool)
            for row, part in zip(rows, logits):
                parts[row].append(part)
                done[row] += len(part)
    return [torch.cat(part) for part in parts]


def compute(
    model: Decoder, ids: list[list[int]], starts: list[int], page_table: np.ndarray, pool: KVPool
) -> list[torch.Tensor]:
    """Compute one step: row b computes ids[b] from position starts[b] on. Return each row's float32 logits [len, V]."""
    batch = batch_of(ids, starts, page_table, pool)
    return list(model.logits(model(batch)).split([len(row) for row in ids]))


def batch_of(
    ids: list[list[int]], starts: list[int], page_table: np.ndarray, pool: KVPool, **changes: Any
) -> ForwardBatch:
    """Return the batch of a step: row b is ids[b] from position starts[b] on. `changes` are fields of the batch."""
    counts = [len(row) for row in ids]
    values = {
        "token_ids": torch.tensor([token for row in ids for token in row]),
        "positions": torch.from_numpy(token_positions(starts, counts)),
        "attention": AttentionMetadata.build(starts, counts, page_table, pool.page_size),
        "cache": pool,
    }
    if "state" in pool.kinds:
        places = np.cumsum([0, *counts])
        lines = [int(page) + 1 for page in page_table[:, 0]]
        spans = [
            (line if start else 0, line, place, count)
            for line, start, place, count in zip(lines, starts, places, counts, strict=False)
        ]
        inputs = KindInputs({"spans": torch.tensor(spans, dtype=torch.int32)}, values["attention"])
        values["kinds"] = {"state": inputs}
    return ForwardBatch(**{**values, **changes})


def step_of(
    number: int, ids: Tensor, rows: list[int], starts: list[int], counts: list[int], page_table: np.ndarray
) -> Batch:
    """Return a step without sampling: for each row, `counts` tokens of ids[row] from its start on."""
    parts = [ids[row, start : start + count] for row, start, count in zip(rows, starts, counts, strict=True)]
    return Batch(
        number=number,
        sequences=(),
        starts=np.array(starts, np.int32),
        counts=np.array(counts, np.int32),
        sequence_indices=np.array(rows, np.int32),
        token_ids=torch.cat(parts).numpy().astype(np.int32),
        page_table=page_table[rows],
        sampling=None,
    )


def pool_for(model: Decoder, num_pages: int, page_size: int) -> KVPool:
    """Return a pool for the model or its rank's shard. The number of a row's first page is also its state slot."""
    specs = collect_specs(model)
    with_states = any(spec.kind == "state" for spec in specs.values())
    kinds = {"state": num_pages + 1} if with_states else {}  # slot 0 holds zeros
    return KVPool(specs, num_pages, page_size, model.dtype, "cpu", kinds=kinds)


def embedded(model: Decoder) -> torch.Tensor:
    """Return the weight of the token embedding, [V, E]."""
    embedding: Any = model.embedding
    return embedding.weight


def graph_logits(graph: CpuGraph, model: Decoder, batch: Batch, last_tokens: Tensor) -> Tensor:
    """Return float32 logits [R, V] of the sampled positions: hidden states from the graph, then the LM head."""
    return model.logits(graph.states(batch, last_tokens)[0])
