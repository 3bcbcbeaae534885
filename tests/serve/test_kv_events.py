"""`--kv-events-config`: events that a subscriber of SGLang or vLLM receives about cached pages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

import tiny_models
from runtime.actors.kv_events import END, address_of
from runtime.errors import ConfigurationError
from serve import Engine


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """The type that subscribers declare."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True): ...


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def read(frames: list[bytes]) -> tuple[int, Batch]:
    topic, number, payload = frames
    assert topic == b"cache"
    return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch)


async def test_a_subscriber_learns_what_is_stored_removed_and_cleared(tmp_path: Any):
    address, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = {"publisher": "zmq", "endpoint": address, "replay_endpoint": replay, "topic": "cache"}
    greedy = {"max_new_tokens": 1, "temperature": 0}
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.RCVTIMEO, 60_000)
        subscriber.subscribe(b"cache")
        subscriber.connect(address)
        async with Engine(tiny_models.cached(), page_size=4, max_total_tokens=64, kv_events_config=config) as engine:
            prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
            numbers, events = [], []

            async def until(kind: type) -> Any:
                while True:
                    if found := [event for event in events if isinstance(event, kind)]:
                        return found[-1]
                    number, batch = read(await subscriber.recv_multipart())
                    assert batch.data_parallel_rank == 0
                    numbers.append(number)
                    events.extend(batch.events)

            while not await subscriber.poll(50):  # waits until the subscriber is connected
                engine.flush_cache()
            await engine.generate(input_ids=prompt, sampling_params=greedy)
            stored = await until(BlockStored)
            assert (stored.token_ids, stored.block_size) == (prompt[:8], 4)
            assert (stored.parent_block_hash, stored.lora_id, len(stored.block_hashes)) == (None, None, 2)
            events.clear()
            await engine.generate(input_ids=[*prompt[:8], 1, 2, 3, 4, 5], sampling_params=greedy)
            more = await until(BlockStored)
            assert (more.parent_block_hash, more.token_ids) == (stored.block_hashes[1], [1, 2, 3, 4])
            await engine.generate(input_ids=[20] * 60, sampling_params=greedy)
            removed = await until(BlockRemoved)
            assert set(removed.block_hashes) <= {*stored.block_hashes, *more.block_hashes}
            events.clear()
            assert engine.flush_cache()
            await until(AllBlocksCleared)
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            with context.socket(zmq.DEALER) as ask:
                ask.setsockopt(zmq.LINGER, 0)
                ask.connect(replay)
                await ask.send_multipart([b"", (1).to_bytes(8, "big")])
                again = []
                while (answer := await ask.recv_multipart())[1] != END:
                    again.append(int.from_bytes(answer[1], "big"))
            assert again == list(range(1, numbers[-1] + 1))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"publisher": "kafka"}, "publisher must be"),
        ({"publisher": "zmq", "port": 1}, "'port' is unknown"),
        ({"publisher": "zmq", "hwm": "many"}, "hwm cannot be 'many'"),
        ({"publisher": "zmq", "endpoint": "here"}, "must be like"),
        ({"publisher": "zmq", "endpoint": "tcp://no.such.address.example*:1"}, "cannot be used"),
    ],
)
async def test_what_cannot_be_done_is_refused(config: dict[str, Any], said: str):
    with pytest.raises(ConfigurationError, match=said):
        await Engine(tiny_models.cached(), kv_events_config=config).start()


def test_replicas_have_addresses_of_their_own():
    assert address_of("tcp://*:5557", 0) == "tcp://*:5557"
    assert address_of("tcp://*:5557", 2) == "tcp://*:5559"
    assert address_of("ipc:///run/kv", 1) == "ipc:///run/kv_dp1"
