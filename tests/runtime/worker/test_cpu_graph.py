"""Captured steps on a CPU: bit for bit equal to single C++ kernels, and close to plain torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paged_forward
import tiny_checkpoints
from cpp_kernels import CHOICES, library
from greedy import FAMILIES, RECURRENT
from ops.cpp.kernel_launcher import NotCapturable
from ops.select import Kernels, select
from runtime.batch import UNKNOWN, Batch, LogprobParams, Sampling
from runtime.kv_cache.pools import KVPool
from runtime.layers.embedding import Embedding
from runtime.layers.forward_batch import ForwardBatch
from runtime.modeling.decoder import Decoder
from runtime.worker.cpu_graph import CpuGraph
from runtime.worker.device import CpuDevice
from runtime.worker.sampler import chooses_greedily
from runtime.worker.step_inputs import Staging, prepare

MAX_ROWS, CAPACITY, NUM_PAGES = 4, 40, 64
STEPS = st.lists(st.lists(st.integers(0, 9), min_size=MAX_ROWS, max_size=MAX_ROWS), min_size=1, max_size=4)


def kernels(num_threads: int) -> Kernels:
    library()  # skips the test without a compiler
    return select(CHOICES, {"with_cpp": {"num_threads": num_threads}})


@cache
def models(family: str, dtype: str, quantization: str | None) -> tuple[Decoder, Kernels, Decoder, Decoder]:
    """Return a model that is captured on two threads, one for one thread, and one in plain torch."""
    path = tiny_checkpoints.cached(family, head_dim=16, tie_word_embeddings=family == "qwen3")
    two, one, load = kernels(2), kernels(1), paged_forward.load
    return (
        load(path, kernels=two, dtype=dtype, quantization=quantization),
        two,
        load(path, kernels=one, dtype=dtype, quantization=quantization),
        load(path, dtype=dtype, quantization=quantization if quantization == "w4a16" else None),
    )


class Sequences:
    """Random tokens of several rows. Every step computes some more of them."""

    def __init__(self, page_size: int, seed: int, *, with_states: bool = False) -> None:
        self.with_states = with_states
        self.rng = np.random.default_rng(seed)
        self.page_size = page_size
        self.done = np.zeros(MAX_ROWS, np.int32)
        self.lines = np.stack([np.zeros(MAX_ROWS, np.int32), np.arange(MAX_ROWS, dtype=np.int32) + 1], 1)
        self.table = self.rng.permutation(NUM_PAGES).astype(np.int32).reshape(MAX_ROWS, -1)
        self.last_tokens = torch.from_numpy(self.rng.integers(0, 128, MAX_ROWS))

    def batch(self, counts: list[int]) -> Batch:
        """Return a batch of the next tokens. In single-token rows, only the device may know the token."""
        rows = np.array([row for row, count in enumerate(counts) if count], np.int32)
        number = np.array([count for count in counts if count], np.int32)
        ids = self.rng.integers(0, 128, number.sum()).astype(np.int32)
        ends = np.cumsum(number)
        ids[ends[(number == 1) & (self.rng.random(len(rows)) < 0.5)] - 1] = UNKNOWN
        starts = self.done[rows]
        self.done[rows] += number
        order = self.rng.permutation(MAX_ROWS).astype(np.int32)
        sampling = greedy(np.flatnonzero(self.rng.random(len(rows)) < 0.7).astype(np.int32), number)
        read, written = self.lines[rows].T  # slots alternate, so that a step can be repeated
        self.lines[rows] = np.stack([written, np.where(read == 0, rows + 1 + MAX_ROWS, read)], 1)
        spans = np.stack([read, written, ends - number, number], 1)
        kinds = {"state": {"spans": spans.astype(np.int32)}} if self.with_states else {}
        return Batch(0, (), starts, number, order[rows], ids, self.table[rows], sampling, kinds=kinds)


def greedy(rows: np.ndarray, counts: np.ndarray) -> Sampling:
    """Return sampling arrays with which each of these rows chooses a token at its last position."""
    positions = np.cumsum(counts, dtype=np.int32)[rows] - 1
    return Sampling(positions, rows, np.ones(len(rows), np.bool_), np.zeros(len(rows), np.float32))


def eager(model: Decoder, pool: KVPool, batch: Batch, last_tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the sampling rows, computed operation by operation."""
    inputs = prepare(batch, pool, Staging(CpuDevice()), last_tokens)
    return model.logits(model(inputs.forward)[inputs.samples.index])


PRECISIONS = [
    ("float32", None, 1e-4),
    ("bfloat16", None, None),
    ("bfloat16", "w8a8_int8", None),
    ("float32", "w4a16", 1e-4),
    ("bfloat16", "w4a8", None),
]
# The other models are in a second pass.
EACH_PRECISION = (
    "gemma2",
    "gpt_neox",
    "gpt_oss",
    "llama",
    "phi3",
    "qwen3_moe",
)
# Models whose logits are scaled, capped or biased.
MORE_THAN_PRODUCTS = {
    "cohere",
    "cohere2",
    "gemma2",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "minicpm",
    "minicpm3",
    "phi",
}


@pytest.mark.parametrize(
    ("family", "dtype", "quantization", "apart"),
    [
        pytest.param(
            family,
            *precision,
            marks=[] if precision == PRECISIONS[0] or family in EACH_PRECISION else pytest.mark.slow,
        )
        for family in FAMILIES
        for precision in PRECISIONS
    ],
)
@given(steps=STEPS, page_size=st.sampled_from([1, 3, 16]), seed=st.integers(0, 99))
@settings(max_examples=12)
def test_a_recorded_step_is_the_kernels_one_by_one_is_plain_torch(
    family, dtype, quantization, apart, steps, page_size, seed
) -> None:
    captured, two, alone, native = models(family, dtype, quantization)
    if page_size == 1:
        steps = [[min(count, 4) for count in step] for step in steps]
    pools = [paged_forward.pool_for(model, NUM_PAGES, page_size) for model in (captured, alone, native)]
    graph = CpuGraph(captured, pools[0], two, CAPACITY, MAX_ROWS)
    sequences = Sequences(page_size, seed, with_states=family in RECURRENT)
    for counts in steps:
        if not any(counts):
            continue
        batch = sequences.batch(counts)
        last_tokens = sequences.last_tokens
        with torch.inference_mode():
            one_by_one = eager(alone, pools[1], batch, last_tokens)
            if apart is not None:
                plain = eager(native, pools[2], batch, last_tokens)
                assert len(plain) == 0 or (one_by_one - plain).abs().max() <= apart
            assert torch.equal(paged_forward.graph_logits(graph, captured, batch, last_tokens), one_by_one)
            assert graph.chooses == (family not in MORE_THAN_PRODUCTS)
            if not graph.chooses:
                continue
            ids, sound = (x.clone() for x in graph.choose(batch, last_tokens))
        assert torch.equal(ids, one_by_one.argmax(-1))
        assert sound.all()
        assert batch.sampling is not None
        assert torch.equal(last_tokens[batch.sequence_indices[batch.sampling.row_of]], ids)


def a_graph(family: str = "llama") -> tuple[CpuGraph, KVPool, Kernels]:
    captured, two, _, _ = models(family, "float32", None)
    pool = paged_forward.pool_for(captured, NUM_PAGES, 16)
    return CpuGraph(captured, pool, two, CAPACITY, MAX_ROWS), pool, two


def batch_of(counts: list[int], **changes: Any) -> Batch:
    number = np.array(counts, np.int32)
    rows = np.arange(len(counts), dtype=np.int32)
    table = np.arange(len(counts) * 4, dtype=np.int32).reshape(-1, 4)
    values = {
        "number": 0,
        "sequences": (),
        "starts": 0 * rows,
        "counts": number,
        "sequence_indices": rows,
        "token_ids": np.arange(number.sum(), dtype=np.int32),
        "page_table": table,
        "sampling": greedy(rows, number),
    }
    return Batch(**{**values, **changes})


def test_what_does_not_fit_a_graph_is_said_before() -> None:
    graph, _, _ = a_graph()
    assert graph.takes(batch_of([CAPACITY]))
    assert graph.takes(batch_of([1] * MAX_ROWS))
    assert not graph.takes(batch_of([CAPACITY, 1]))
    assert not graph.takes(batch_of([1] * (MAX_ROWS + 1)))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_row_without_finite_logits_is_not_sound_and_hurts_no_other(broken: float) -> None:
    path = tiny_checkpoints.cached("llama", head_dim=16)
    own = kernels(2)
    model = paged_forward.load(path, kernels=own)
    with torch.no_grad():
        paged_forward.embedded(model)[7] = broken
    graph = CpuGraph(model, paged_forward.pool_for(model, NUM_PAGES, 16), own, CAPACITY, MAX_ROWS)
    batch = batch_of([1, 1, 1], token_ids=np.array([3, 7, 9], np.int32))
    _, sound = graph.choose(batch, torch.zeros(MAX_ROWS, dtype=torch.int64))
    assert sound.tolist() == [True, False, True]


def test_hidden_states_of_any_positions_are_those_of_the_model() -> None:
    graph, _, _ = a_graph()
    model, last_tokens = models("llama", "float32", None)[2], torch.zeros(MAX_ROWS, dtype=torch.int64)
    batch = batch_of([3, 1, 5], sampling=None)
    own = paged_forward.pool_for(model, NUM_PAGES, 16)
    with torch.inference_mode():
        wanted = model(prepare(batch, own, Staging(CpuDevice()), last_tokens).forward)
        found = graph.hidden(batch, last_tokens, np.array([1, 2, 8], np.int32))
    assert torch.equal(found, wanted[[1, 2, 8]])


THREES = torch.full((32,), 3.0)


class NormedEmbedding(Embedding):
    """An embedding with kernels that can be captured, as a family might define it."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.kernels.rms_norm(super().forward(batch), THREES, 1e-6)


class ScaledInTorch(Embedding):
    """The same embedding with a part that torch computes."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return super().forward(batch) * 3.0


def changed(kind: type[Embedding], own: Kernels) -> Decoder:
    model = paged_forward.load(tiny_checkpoints.cached("llama", head_dim=16), kernels=own)
    assert model.embedding is not None
    model.embedding.__class__ = kind
    return model


def test_whatever_the_models_embedding_does_is_captured() -> None:
    own, last_tokens = kernels(2), torch.zeros(MAX_ROWS, dtype=torch.int64)
    model, plain = (changed(kind, own) for kind in (NormedEmbedding, Embedding))
    pools = [paged_forward.pool_for(model, NUM_PAGES, 16) for _ in range(3)]
    graphs = [CpuGraph(each, pool, own, CAPACITY, MAX_ROWS) for each, pool in zip((model, plain), pools)]
    batch = batch_of([5, 1])
    with torch.inference_mode():
        wanted = eager(model, pools[2], batch, last_tokens)
        found, other = (
            paged_forward.graph_logits(graph, each, batch, last_tokens) for graph, each in zip(graphs, (model, plain))
        )
    assert torch.equal(found, wanted)
    assert not torch.equal(other, wanted)


def test_an_embedding_that_torch_scales_is_not_captured() -> None:
    own = kernels(1)
    model = changed(ScaledInTorch, own)
    with pytest.raises(NotCapturable, match="mul"):
        CpuGraph(model, paged_forward.pool_for(model, 4, 16), own, CAPACITY, MAX_ROWS)


def test_only_plain_greedy_rows_are_chosen_by_the_graph() -> None:
    plain = greedy(np.array([0, 1], np.int32), np.array([1, 1]))
    assert chooses_greedily(plain)
    assert not chooses_greedily(replace(plain, greedy=np.array([True, False])))
    assert not chooses_greedily(replace(plain, logprobs=(None, LogprobParams(top=1))))


def test_a_model_of_which_torch_computes_a_part_is_not_captured() -> None:
    library()
    partly = select({**CHOICES, "norm": "native"}, {"with_cpp": {"num_threads": 1}})
    model = paged_forward.load(tiny_checkpoints.cached("llama", head_dim=16), kernels=partly)
    with pytest.raises(NotCapturable, match="computed by torch"):
        CpuGraph(model, paged_forward.pool_for(model, 4, 16), partly, CAPACITY, MAX_ROWS)
