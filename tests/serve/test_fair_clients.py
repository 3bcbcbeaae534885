"""A client whose long requests hold every row does not delay the short requests of another client."""

from __future__ import annotations

import asyncio
import statistics
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


async def seconds(client: httpx.AsyncClient) -> float:
    start = time.perf_counter()
    answer = await client.post("/generate", json=SHORT)
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["completion_tokens"] == 4
    return time.perf_counter() - start


async def rows(client: httpx.AsyncClient) -> int:
    answer = await client.get("/v1/loads")
    return sum(load["num_running_reqs"] for load in answer.json()["loads"])
