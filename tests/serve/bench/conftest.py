"""A real streaming server in a thread, in all three protocols, that answers as the prompt tells it to.

The prompt's last words choose the behaviour: "refuse" HTTP 500, "garbage" an event that is not JSON, "cut" a
connection closed in the middle, "error" an error event, "hang" nothing until the server stops.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CACHED = 3
PROMPT_TOKENS = 7


def chat_event(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "usage": None}


def completion_event(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None}


def usage_event(num: int) -> dict[str, Any]:
    details = {"cached_tokens": CACHED}
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": num, "prompt_tokens_details": details}
    return {"choices": [], "usage": usage}


def native_event(num: int, total: int) -> dict[str, Any]:
    finish = {"type": "length", "length": total} if num == total else None
    counts = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": num, "cached_tokens": CACHED}
    meta = {"id": "x", "finish_reason": finish, **counts}
    return {"text": "a " * num, "output_ids": [5], "meta_info": meta}


@dataclass
class FakeServer:
    """The address of the server, and the requests that it received."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    peak: int = 0
    flushed: int = 0
    tokenizer_path: str | None = None  # of /get_model_info

    async def generate(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        words = json.dumps(body.get("prompt") or body.get("messages") or body.get("text"))
        if "refuse" in words:
            return JSONResponse({"message": "no room left"}, status_code=500)
        return StreamingResponse(self.events(request, body, words), media_type="text/event-stream")

    async def events(self, request: Request, body: dict[str, Any], words: str) -> AsyncIterator[bytes]:
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            async for event in self.script(request.url.path, body, words):
                yield (b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n")
                await asyncio.sleep(0.001)  # so that each event is a separate write
        finally:
            self.running -= 1

    async def script(self, path: str, body: dict[str, Any], words: str) -> AsyncIterator[dict[str, Any] | bytes]:
        total = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        if path == "/generate":
            for num in range(1, total + 1):
                yield native_event(num, total)
        else:
            write = chat_event if "chat" in path else completion_event
            yield write("")
            for num in range(total):
                if num == 1 and "hang" in words:
                    await asyncio.Event().wait()
                if num == 1 and "garbage" in words:
                    yield b"{not json"
                if num == 1 and "error" in words:
                    yield {"error": {"message": "the step failed", "code": 500}}
                if num == 1 and "cut" in words:
                    raise ConnectionResetError("cut")
                yield write("a ")
            yield usage_event(total)
        yield b"[DONE]"

    async def flush(self, request: Request) -> Response:
        self.flushed += 1
        return Response("Cache flushed.")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake-model"}]})

    async def model_info(self, request: Request) -> Response:
        return JSONResponse({"tokenizer_path": self.tokenizer_path})

    def app(self) -> Starlette:
        posts = ("/v1/chat/completions", "/v1/completions", "/generate")
        routes = [Route(path, self.generate, methods=["POST"]) for path in posts]
        routes += [Route("/get_model_info", self.model_info)]
        routes += [Route("/v1/models", self.models), Route("/flush_cache", self.flush, methods=["POST"])]
        return Starlette(routes=routes)


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    listener = socket.create_server(("127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(fake.app(), log_level="critical", timeout_graceful_shutdown=0)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield fake
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
def refused_url() -> str:
    """Return the URL of a port on which no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
