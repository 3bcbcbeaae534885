"""Row values of a request reach the layers that read them: a simple adapter, and token types."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from greedy import GREEDY, NUM_NEW, model_path, prompts, reference
from runtime.layers.embedding import Embedding
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve import Engine

SIZE = 32
SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW, ignore_eos=True)
TYPES = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(6)) * 0.2


def delta() -> Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(5)) * 0.3


def adapted(prompt: list[int]) -> list[int]:
    """Return the answer of transformers with the adapter merged into every output projection of attention."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path("llama"), dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight += delta() @ torch.ones(SIZE, layer.self_attn.o_proj.in_features) / 8
    tokens = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=0
    )
    return tokens[0, len(prompt) :].tolist()


def typed(prompt: list[int], second: int) -> list[int]:
    """Return the answer of transformers with one vector added to every token, and another from position `second` on."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path("llama"), dtype=torch.float32)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_NEW):
            is_second = (torch.arange(len(ids)) >= second) & (second > 0)
            vectors = model.model.embed_tokens(torch.tensor(ids)) + TYPES[is_second.long()]
            ids.append(int(model(inputs_embeds=vectors[None]).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def asked(engine: Engine, index: int, value: int) -> Awaitable[list[int]]:
    """Return the tokens of a request with this row value."""
    values = {"adapter": value} if value else {}
    request = Request(ids=tuple(prompts()[index]), sampling=SAMPLING, row_values=values)

    async def ids() -> list[int]:
        pieces = [piece async for piece in engine.core.submit(request).chunks()]
        return [token for piece in pieces for chunk in piece for token in chunk.ids]

    return ids()


async def test_a_value_of_rows_reaches_a_layer_that_the_graph_captures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forward(self: Embedding, batch: ForwardBatch) -> Tensor:
        values = batch.values_of_tokens("adapter")
        return self.kernels.embed_with_positions(batch.token_ids, self.weight, batch.positions, None, TYPES, values)

    monkeypatch.setattr(Embedding, "forward", forward)
    monkeypatch.setattr(Embedding, "row_values", ("adapter",), raising=False)
    caplog.set_level(logging.INFO, "penstock.core")
    async with Engine(model_path("llama"), skip_tokenizer_init=True, random_seed=1) as engine:
        wanted = [(index, value) for index in (5, 7, 17) for value in (0, 2, len(prompts()[index]) + 2)]
        found = await asyncio.gather(*(asked(engine, *each) for each in wanted))
        assert found == [typed(prompts()[index], value) for index, value in wanted]
    assert not [record.message for record in caplog.records if "operation by operation" in record.message]


async def test_rows_with_an_adapter_are_computed_with_it_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Linear.forward

    def forward(self: Linear, x: Tensor, batch: ForwardBatch) -> Tensor:
        out, which = plain(self, x, batch), batch.values_of_tokens("adapter")
        if which is None or not self.layout.sub_layers[0].name.endswith("o_proj"):
            return out
        more = x @ (delta() @ torch.ones(SIZE, x.shape[-1]) / 8).T
        return out + torch.where((which == 1)[:, None], more, 0.0)

    monkeypatch.setattr(Linear, "forward", forward)
    monkeypatch.setattr(Linear, "row_values", ("adapter",), raising=False)
    async with Engine(model_path("llama"), skip_tokenizer_init=True, random_seed=1, page_size=1) as engine:
        chosen = (5, 7, 17)
        for _ in range(2):  # the second time with cached prefixes, separate for each value
            found = await asyncio.gather(*(asked(engine, index, adapter) for index in chosen for adapter in (1, 0)))
            assert found[1::2] == [reference("llama")[index] for index in chosen]
            assert found[::2] == [adapted(prompts()[index]) for index in chosen]
        answer = await engine.generate(input_ids=prompts()[5], sampling_params=GREEDY)
        assert answer["output_ids"] == reference("llama")[5]
