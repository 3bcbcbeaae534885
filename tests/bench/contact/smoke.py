"""Smoke test: start a server with the demo model as users do, and check a chat answer, whole and streamed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import anyio
import orjson

from bench.gpu.cold_row import running_server
from runtime.errors import EngineFailure
from serve.bench.client import Client, ExchangeError

QUESTION, ANSWER = "What is 2 + 3?", "5"
START_S = 100.0
POLL_S = 0.05


def main(argv: Sequence[str]) -> int:
    """Return 0 if both answers are right, and 2 if the server refuses its options."""
    parser = argparse.ArgumentParser(prog="bench.contact.smoke")
    parser.add_argument("--device", required=True)
    options, words = parser.parse_known_args(argv)
    anyio.run(_smoke, ["--device", options.device, *words])
    return 0


async def _smoke(words: Sequence[str]) -> None:
    async with running_server(words) as (server, url), Client(url) as client:
        with anyio.fail_after(START_S):
            while not await _ready(client):
                if server.poll() == 2:
                    sys.stdout.write("The server refused its options.\n")
                    raise SystemExit(2)
                if server.poll() is not None:
                    raise EngineFailure("The server ended before it was ready.")
                await anyio.sleep(POLL_S)
        whole, streamed = await _answer(client, stream=False), await _answer(client, stream=True)
    sys.stdout.write(f"whole: {whole!r}\nstreamed: {streamed!r}\n")
    if ANSWER not in whole or streamed != whole:
        raise EngineFailure(f"{QUESTION!r} was answered with {whole!r} and, streamed, with {streamed!r}.")


async def _ready(client: Client) -> bool:
    try:
        response = await client.get("/health")
    except ExchangeError:  # the server does not listen yet
        return False
    return response.status == 200


async def _answer(client: Client, *, stream: bool) -> str:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 32,
        "stream": stream,
    }
    response = await client.post("/v1/chat/completions", orjson.dumps(body))
    if response.status != 200:
        raise EngineFailure(f"The chat was answered with {response.status}: {response.body[:300]!r}")
    if not stream:
        return orjson.loads(response.body)["choices"][0]["message"]["content"]
    events = [line[6:] for line in response.body.split(b"\n") if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in orjson.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
