"""What a request says of its rows reaches every layer, and nothing drops it: tried with an adapter of one matrix."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from greedy import GREEDY, NUM_NEW, model_path, prompts, reference
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve import Engine

SIZE = 32


def delta() -> Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(5)) * 0.3


def adapted(prompt: list[int]) -> list[int]:
    """What transformers answers with the adapter merged into every output projection of attention."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path("llama"), dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight += (
                delta() @ torch.ones(SIZE, layer.self_attn.o_proj.in_features) / 8
            )
    tokens = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=0
    )
    return tokens[0, len(prompt) :].tolist()


async def test_rows_with_an_adapter_are_computed_with_it_beside_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Linear.forward

    def forward(self: Linear, x: Tensor, batch: ForwardBatch) -> Tensor:
        out, which = plain(self, x, batch), batch.values_of_tokens("adapter")
        if which is None or not self.layout.sub_layers[0].name.endswith("o_proj"):
            return out
        more = x @ (delta() @ torch.ones(SIZE, x.shape[-1]) / 8).T
        return out + torch.where((which == 1)[:, None], more, 0.0)

    monkeypatch.setattr(Linear, "forward", forward)
    caplog.set_level(logging.INFO, "penstock.core")
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW, ignore_eos=True)

    async def ask(engine: Engine, index: int, adapter: int) -> list[int]:
        values = {"adapter": adapter} if adapter else {}
        request = Request(ids=tuple(prompts()[index]), sampling=sampling, row_values=values)
        pieces = [piece async for piece in engine.core.submit(request).chunks()]
        return [token for piece in pieces for chunk in piece for token in chunk.ids]

    async with Engine(model_path("llama"), skip_tokenizer_init=True, random_seed=1, page_size=1) as engine:
        chosen = (5, 7, 17)
        for _ in range(2):  # the second time from the cache, where each finds its own
            asked = [ask(engine, index, adapter) for index in chosen for adapter in (1, 0)]
            found = await asyncio.gather(*asked)
            assert found[1::2] == [reference("llama")[index] for index in chosen]
            assert found[::2] == [adapted(prompts()[index]) for index in chosen]
        answer = await engine.generate(input_ids=prompts()[5], sampling_params=GREEDY)
        assert answer["output_ids"] == reference("llama")[5]
    said = [record.message for record in caplog.records if "operation by operation" in record.message]
    # None without a compiler.
    assert said in (
        [],
        ["Steps with adapter are computed operation by operation."],
    )
