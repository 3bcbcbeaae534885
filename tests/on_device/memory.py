"""Memory that engines leave allocated on a device, and steps that run out of memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import anyio
import pytest
import torch

import tiny_checkpoints
from greedy import GREEDY
from runtime.errors import PenstockError
from runtime.layers.forward_batch import ForwardBatch
from runtime.modeling.decoder import Decoder
from serve import Engine

BIG_PROMPT = [3 + place % 90 for place in range(1500)]  # the prompt whose step runs out of memory
SMALL_PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5], [40, 41])
LONG_ANSWER = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
# So large that the big prompt's step takes 150 MB, while small steps fit into the spare bytes.
WIDE = {"max_position_embeddings": 2048, "intermediate_size": 8192}
SPARE_BYTES = 64 * 2**20  # torch allocates memory in blocks of up to 20 MiB
STARVING: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "random_seed": 1,
    "max_total_tokens": 8192,
    "chunked_prefill_size": 4096,
    "disable_cuda_graph": True,  # no graph must be captured while memory is short
}


def allocated_bytes(device: str) -> int:
    """Return the memory of all tensors on the device, after garbage collection."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    sizes = {_place(tensor): tensor.nbytes for tensor in tensors if tensor.device.type == "cpu"}
    return sum(sizes.values())


def _place(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's memory, or of the tensor for weights with their own layout."""
    return id(tensor) if tensor.is_mkldnn else tensor.data_ptr()


async def after_cycles(number: int, path: str, device: str, **options: Any) -> list[int]:
    """Return the allocated bytes after each of several engines was opened, used and closed."""
    return [await _after_one(path, device, options) for _ in range(number)]


async def _after_one(path: str, device: str, options: dict[str, Any]) -> int:
    async with Engine(path, device=device, **options) as engine:
        answer = await engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
        assert len(answer["output_ids"]) == GREEDY["max_new_tokens"]
    return allocated_bytes(device)


class Starved(NamedTuple):
    """The results of requests while the device has no memory for a large step."""

    small: list[list[int]]  # ids that small requests generated
    big: PenstockError | None  # error of the big request


async def starve(engine: Engine, device: str) -> Starved:
    """Run three small requests, then submit a big prompt for whose step there is no memory."""
    begun = [anyio.Event() for _ in SMALL_PROMPTS]
    found: list[list[int]] = [[] for _ in SMALL_PROMPTS]
    failed: PenstockError | None = None

    async def read(place: int) -> None:
        async for piece in engine.stream(input_ids=SMALL_PROMPTS[place], sampling_params=LONG_ANSWER):
            found[place] += piece["output_ids"]
            begun[place].set()

    with starved(device):
        async with anyio.create_task_group() as together:
            for place in range(len(SMALL_PROMPTS)):
                together.start_soon(read, place)
            for event in begun:
                await event.wait()
            try:
                await engine.generate(input_ids=BIG_PROMPT, sampling_params=GREEDY)
            except PenstockError as error:
                failed = error
    return Starved(found, failed)


@contextmanager
def starved(device: str) -> Iterator[None]:
    """Inside this context, a step of many tokens runs out of memory, but a step of a few tokens does not."""
    with _capped() if device.startswith("cuda") else _failing():
        yield


@contextmanager
def _capped() -> Iterator[None]:
    """Limit torch's allocator to little more than the memory in use."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + SPARE_BYTES) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def _failing() -> Iterator[None]:
    """Make models raise the error of a full GPU."""
    forward = Decoder.forward

    def full(self: Decoder, batch: ForwardBatch) -> torch.Tensor:
        if batch.num_tokens > len(BIG_PROMPT) // 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "forward", full)
        yield


async def check_starving(device: str) -> None:
    """Raise AssertionError unless only the big request fails and the engine continues normally."""
    path = tiny_checkpoints.cached("llama", **WIDE)
    async with Engine(path, device=device, **STARVING) as engine:
        calm = await engine.generate(input_ids=[*SMALL_PROMPTS], sampling_params=LONG_ANSWER)
        small, big = await starve(engine, device)
        assert big is not None
        assert small == [answer["output_ids"] for answer in calm]
        answer = await engine.generate(input_ids=BIG_PROMPT, sampling_params=GREEDY)
        assert len(answer["output_ids"]) == GREEDY["max_new_tokens"]
        assert engine.status().num_used_pages == 0
