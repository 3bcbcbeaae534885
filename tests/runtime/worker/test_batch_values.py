"""Optional inputs of a batch on every path of a step, compared with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

import late_steps
import paged_forward
import tiny_checkpoints
from cpp_kernels import CHOICES, library
from fake_device import LateDevice
from late_steps import Steps
from ops.select import Kernels, select
from runtime.batch import Batch, MediaSpan
from runtime.config.resolve.graph_sizes import Buckets
from runtime.layers.batch_reads import BatchReads, batch_reads
from runtime.layers.embedding import Embedding
from runtime.layers.forward_batch import ForwardBatch
from runtime.modeling.decoder import Decoder
from runtime.worker.cpu_graph import CpuGraph
from runtime.worker.cuda_graph import CudaGraphRunner
from runtime.worker.device import CpuDevice
from runtime.worker.step_inputs import Staging, prepare

SIZE, VOCAB_SIZE, SECTIONS = 32, 128, [2, 2, 4]
LENGTH, PAGE_SIZE, NUM_PAGES = 24, 4, 32
IMAGE = slice(5, 17)  # three rows of four patches, in sequences with an image
# Number of tokens of each of four sequences per step: chunks that divide the image, and single tokens within it.
STEPS = [(7, 6, 0, 9), (1, 1, 5, 1), (4, 0, 9, 1), (1, 1, 1, 1), (0, 8, 1, 4), (1, 1, 1, 1), (10, 7, 7, 7)]
# Sequences 0 and 2 have an image, sequences 1 and 2 an adapter.
HAS_IMAGE = (True, False, True, False)
ADAPTERS = (0, 3, 12, 0)

generator = torch.Generator().manual_seed(8)
IDS = torch.randint(0, VOCAB_SIZE, (4, LENGTH), generator=generator)
VECTORS = torch.randn(4, IMAGE.stop - IMAGE.start, SIZE, generator=generator)
TYPES = torch.randn(2, SIZE, generator=generator)


class AdaptedEmbedding(Embedding):
    """Adds one vector to all tokens, and another vector to tokens from the position in their row's value on."""

    row_values = ("adapter",)

    def forward(self, batch: ForwardBatch) -> Tensor:
        values = batch.values_of_tokens("adapter")
        return self.kernels.embed_with_positions(batch.token_ids, self.weight, batch.positions, None, TYPES, values)


@cache
def checkpoint() -> tuple[str, Qwen2VLTextModel]:
    """Return Qwen2-VL's text model, whose rotary embedding has sections, and an equivalent checkpoint of Qwen 2."""
    shape: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    path = Path(tiny_checkpoints.write(Path(tiny_checkpoints.cached("qwen2")).parent / "axes", "qwen2", **shape))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTIONS}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    shape = {**tiny_checkpoints.SHAPE, **shape, "vocab_size": VOCAB_SIZE, "rope_parameters": rope}
    del shape["head_dim"]
    model = Qwen2VLTextModel._from_config(Qwen2VLTextConfig(**shape), attn_implementation="eager").eval()
    tiny_checkpoints.redraw(model, seed=4)
    tensors = {f"model.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    tensors["lm_head.weight"] = torch.randn(VOCAB_SIZE, SIZE)
    save_file(tensors, path / "model.safetensors")
    return str(path), model


def loaded(kind: str, kernels: Kernels) -> Decoder:
    """Return the model. With "adapter" its embedding reads a row value, with "image" it accepts vectors."""
    model = paged_forward.load(checkpoint()[0], kernels=kernels)
    embedding: Any = model.embedding
    if kind == "adapter":
        embedding.__class__ = AdaptedEmbedding
    embedding.takes_media = kind == "image"
    return model


def axes_of(row: int) -> Tensor:
    """Return the positions [3, T] of a sequence: text, an image and text, or only text."""
    if not HAS_IMAGE[row]:
        return torch.arange(LENGTH).expand(3, -1)
    patches = torch.arange(12)
    image = torch.stack([torch.zeros(12).long(), patches // 4, patches % 4]) + IMAGE.start
    after = torch.arange(LENGTH - IMAGE.stop).expand(3, -1) + IMAGE.start + 4
    return torch.cat([torch.arange(IMAGE.start).expand(3, -1), image, after], dim=1)


@cache
def expected(kind: str) -> Tensor:
    """Return the hidden states [4, T, E] of transformers for each sequence alone."""
    theirs, found = checkpoint()[1], []
    for row, ids in enumerate(IDS):
        vectors, positions = theirs.embed_tokens(ids).detach(), torch.arange(LENGTH).expand(3, -1)
        if kind == "adapter":
            second = (torch.arange(LENGTH) >= ADAPTERS[row]) & (ADAPTERS[row] > 0)
            vectors = vectors + TYPES[second.long()]
        elif HAS_IMAGE[row]:
            vectors, positions = vectors.clone(), axes_of(row)
            vectors[IMAGE] = VECTORS[row]
        with torch.no_grad():
            output = theirs(inputs_embeds=vectors[None], position_ids=positions[:, None], use_cache=False)
        found.append(output.last_hidden_state[0])
    return torch.stack(found)


def batches(kind: str) -> Iterator[tuple[list[tuple[int, int]], Batch]]:
    """Yield the steps, with the row and the position of each row's last token."""
    done, order = [0] * 4, np.random.default_rng(2).permutation(NUM_PAGES).astype(np.int32)
    table = order[: 4 * LENGTH // PAGE_SIZE].reshape(4, -1)
    for number, step in enumerate(STEPS):
        rows = [row for row in range(4) if step[row]]
        starts = [done[row] for row in rows]
        counts = [step[row] for row in rows]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        batch = paged_forward.step_of(number, IDS, rows, starts, counts, table)
        spans, parts, first = [], [], 0
        for row, start, end in zip(rows, starts, ends, strict=True):
            low, high = max(start, IMAGE.start), min(end, IMAGE.stop)
            if HAS_IMAGE[row] and low < high:
                vectors = VECTORS[row, low - IMAGE.start : high - IMAGE.start]
                spans.append(MediaSpan(first + low - start, vectors.numpy()))
            parts.append((axes_of(row)[:, start:end] - torch.arange(start, end)).numpy().astype(np.int32))
            first += end - start
        values = np.array([ADAPTERS[row] for row in rows], np.int32)
        if kind == "adapter" and values.any():
            batch = replace(batch, row_values={"adapter": values})
        offsets = np.concatenate(parts, axis=1)
        if kind == "image":
            batch = replace(batch, media=tuple(spans), position_offsets=offsets if offsets.any() else None)
        yield [(row, end - 1) for row, end in zip(rows, ends, strict=True)], batch
        for row, end in zip(rows, ends, strict=True):
            done[row] = end


Compute = Callable[[Batch], Tensor]  # batch -> hidden states [B, E] of the rows' last tokens
LAST_TOKENS = torch.zeros(4, dtype=torch.int64)


def one_by_one(kind: str, kernels: Kernels) -> Compute:
    model = loaded(kind, kernels)
    pool, staging = paged_forward.pool_for(model, NUM_PAGES, PAGE_SIZE), Staging(CpuDevice())

    def compute(batch: Batch) -> Tensor:
        hidden = model(prepare(batch, pool, staging, LAST_TOKENS).forward)
        return hidden[torch.from_numpy(np.cumsum(batch.counts) - 1)]

    return compute


def with_cpp() -> Kernels:
    library()  # skips the test without a compiler
    return select(CHOICES, {"with_cpp": {"num_threads": 2}})


def cpu_graph(kind: str) -> Compute:
    kernels = with_cpp()
    model = loaded(kind, kernels)
    pool = paged_forward.pool_for(model, NUM_PAGES, PAGE_SIZE)
    graph = CpuGraph(model, pool, kernels, 40, 4)

    def compute(batch: Batch) -> Tensor:
        assert graph.takes(batch)
        lasts = np.cumsum(batch.counts, dtype=np.int32) - 1
        return graph.hidden(batch, LAST_TOKENS, lasts).clone()

    return compute


def cuda_graph(kind: str) -> Compute:
    """Compute with graphs of two and four rows on a late device."""
    model = loaded(kind, late_steps.kernels())
    pool, device = paged_forward.pool_for(model, NUM_PAGES, PAGE_SIZE), LateDevice(Random(3))
    eager: list[int] = []

    def forward(batch: ForwardBatch) -> Tensor:
        eager.append(batch.num_tokens)
        return model(batch)

    graphs = CudaGraphRunner(
        forward, pool, device, Buckets((2, 4), padding=True), max_pages=NUM_PAGES, reads=batch_reads(model)
    )
    while graphs.capture_next():
        pass
    staging = Staging(device)

    def compute(batch: Batch) -> Tensor:
        eager.clear()
        with torch.inference_mode(), device.forward():
            hidden = graphs(prepare(batch, pool, staging, LAST_TOKENS).forward)
            found = hidden[torch.from_numpy(np.cumsum(batch.counts) - 1)]
        device.settle()
        assert bool(eager) == (batch.counts.max() > 1), "a step of single tokens left the graph"
        return found

    return compute


PATHS: dict[str, Callable[[str], Compute]] = {
    "torch": lambda kind: one_by_one(kind, select()),
    "C++ kernels": lambda kind: one_by_one(kind, with_cpp()),
    "CPU graph": cpu_graph,
    "CUDA graph": cuda_graph,
}


def apart(kind: str, compute: Compute, change: Callable[[Batch], Batch] = lambda batch: batch) -> float:
    """Return the largest difference from transformers' hidden states in all steps."""
    wanted, worst = expected(kind), 0.0
    with torch.inference_mode():
        for places, batch in batches(kind):
            found = compute(change(batch))
            for own, (row, position) in zip(found, places, strict=True):
                worst = max(worst, float((own - wanted[row, position]).abs().max()))
    return worst


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["adapter", "image"])
def test_every_path_reads_what_a_batch_says(kind: str, path: str) -> None:
    assert apart(kind, PATHS[path](kind)) < 1e-4


MUTATIONS: dict[str, tuple[str, Callable[[Batch], Batch]]] = {
    "another row's value": (
        "adapter",
        lambda batch: replace(batch, row_values={k: np.roll(v, 1) for k, v in batch.row_values.items()}),
    ),
    "no values": ("adapter", lambda batch: replace(batch, row_values={})),
    "no vectors": ("image", lambda batch: replace(batch, media=())),
    "vectors of another place": (
        "image",
        lambda batch: replace(batch, media=tuple(MediaSpan(s.offset, np.roll(s.vectors, 1, 0)) for s in batch.media)),
    ),
    "no offsets": ("image", lambda batch: replace(batch, position_offsets=None)),
    **{
        f"axis {axis} lost": (
            "image",
            lambda batch, axis=axis: replace(batch, position_offsets=without(batch, axis)),
        )
        for axis in range(3)
    },
}


def without(batch: Batch, axis: int) -> Any:
    """Return the offsets of a batch with one axis replaced by another."""
    offsets = batch.position_offsets
    return None if offsets is None else offsets[[(axis + 1) % 3 if each == axis else each for each in range(3)]]


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("path", ["torch", "CPU graph", "CUDA graph"])
def test_what_gets_lost_is_noticed(path: str, mutation: str) -> None:
    kind, change = MUTATIONS[mutation]
    assert apart(kind, PATHS[path](kind), change) > 1e-2


def test_a_model_that_reads_nothing_more_has_no_buffers_for_it() -> None:
    kernels = with_cpp()
    model = paged_forward.load(tiny_checkpoints.cached("llama", head_dim=16), kernels=kernels)
    assert batch_reads(model) == BatchReads()
    pool = paged_forward.pool_for(model, NUM_PAGES, PAGE_SIZE)
    graph = CpuGraph(model, pool, kernels, 40, 4)
    assert graph._inputs.row_values.numel() == graph._inputs.token_values.numel() == 0
    assert graph._inputs.position_axes is graph._embeds is None
    assert batch_reads(loaded("adapter", kernels)).row_values == ("adapter",)
    assert batch_reads(loaded("image", kernels)) == BatchReads((), True, SIZE)


@pytest.mark.parametrize("kind", ["adapter", "image"])
def test_what_no_layer_reads_is_refused(kind: str) -> None:
    steps = Steps(NUM_PAGES, 4)
    batch = [batch for _, batch in batches(kind)][-1]
    with pytest.raises(ValueError, match="No layer of this model reads"):
        steps.launch(batch)
