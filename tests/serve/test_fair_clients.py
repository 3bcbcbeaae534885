"""A client whose long requests hold every row does not delay the short requests of another client."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from server_process import serving

NUM_ROWS = 64
NUM_SHORT = 20
LONG = {
    "text": "Tell me a story.",
    "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True, "min_new_tokens": 1900},
}
SHORT = {"text": "Hello", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}}


@pytest.mark.slow
async def test_four_tokens_of_another_client_take_no_turn_of_long_requests(tmp_path: Path):
    """Run with `-s` to see the times (docs/reliability.md, R14)."""
    keys = tmp_path / "keys"
    keys.write_text("heavy heavy-key-1\nlight light-key-1\n", encoding="utf-8")
    with serving("--api-key-file", str(keys), "--max-running-requests", str(NUM_ROWS)) as server:
        clients = [
            httpx.AsyncClient(
                base_url=server.url,
                timeout=120,
                headers={"authorization": f"Bearer {name}-key-1"},
                limits=httpx.Limits(max_connections=None),
            )
            for name in ("heavy", "light")
        ]
        async with clients[0] as heavy, clients[1] as light:
            alone = [await seconds(light) for _ in range(NUM_SHORT)]
            tasks = [asyncio.create_task(heavy.post("/generate", json=LONG)) for _ in range(2 * NUM_ROWS)]
            while await rows(light) < NUM_ROWS:
                await asyncio.sleep(0.05)
            beside = [await seconds(light) for _ in range(NUM_SHORT)]
            num_ended = sum(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    for name, times in {"alone": alone, "with all rows held by another key": beside}.items():
        print(f"four tokens {name}: median {statistics.median(times) * 1e3:.0f} ms, most {max(times) * 1e3:.0f} ms")
    assert num_ended == 0  # all short requests ended before any of the long ones, which held every row


@pytest.mark.slow
async def test_keys_share_the_rows_by_their_weights(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("batch batch-key-1 admin\nchat chat-key-1\n", encoding="utf-8")
    options = ["--api-key-file", str(keys), "--api-key-weights", '{"chat": 3}', "--max-running-requests", "8"]
    with serving(*options) as server:
        counts: dict[str, int] = {}
        clients = {
            name: httpx.AsyncClient(base_url=server.url, timeout=120, headers={"authorization": f"Bearer {name}-key-1"})
            for name in ("batch", "chat")
        }
        # So slow that no request ends during the test.
        slowed = await clients["batch"].post("/slow_down", json={"forward_sleep_time": 0.05})
        assert slowed.status_code == 200, slowed.text
        tasks = []
        for name, num_running in (("batch", 8), ("chat", 6)):  # "batch" holds all rows first, and gives up six
            for number in range(16):
                body = {**LONG, "rid": f"{name}-{number}", "stream": True}
                tasks.append(asyncio.create_task(first_chunk(clients[name], body, name, counts)))
            while counts.get(name, 0) < num_running:
                await asyncio.sleep(0.01)
        for _ in range(5):  # some answers of the server later, no further request of "chat" has begun
            await rows(clients["chat"])
        assert await rows(clients["chat"]) == 8
        num_chat = counts["chat"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in clients.values():
            await client.aclose()
    assert num_chat == 6


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ('{"nobody": 2}', "has no key named 'nobody'"),
        ('{"chat": 0}', "between 0.01 and 100"),
        ('{"chat": true}', "between 0.01 and 100"),
    ],
)
def test_wrong_weights_are_refused(weights: str, words: str, tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("chat chat-key-1\n", encoding="utf-8")
    command = [sys.executable, "-m", "serve", "--api-key-file", str(keys), "--api-key-weights", weights]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert words in ended.stderr


async def first_chunk(client: httpx.AsyncClient, body: dict[str, object], name: str, counts: dict[str, int]) -> None:
    """Count the request when its first token arrives, then read the rest of the stream."""
    async with client.stream("POST", "/generate", json=body) as answer:
        async for _ in answer.aiter_lines():
            break
        counts[name] = counts.get(name, 0) + 1
        async for _ in answer.aiter_lines():
            pass


async def seconds(client: httpx.AsyncClient) -> float:
    start = time.perf_counter()
    answer = await client.post("/generate", json=SHORT)
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["completion_tokens"] == 4
    return time.perf_counter() - start


async def rows(client: httpx.AsyncClient) -> int:
    answer = await client.get("/v1/loads")
    return sum(load["num_running_reqs"] for load in answer.json()["loads"])
