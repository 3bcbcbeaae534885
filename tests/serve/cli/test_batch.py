"""Batches by `penstock batch` and /v1/batches: a file of requests in, a file of answers out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import openai
import pytest

import http_server
import tiny_models
from serve import Engine, SyncEngine
from serve.cli.main import REFUSED, run
from serve.server.app import build_app

CHAT = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 6, "temperature": 0}
TEXT = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 6, "temperature": 0}}


def line(custom_id: str, url: str, body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def test_every_line_is_answered_as_the_routes_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tiny_models.cached()
    lines = [
        line("chat", "/v1/chat/completions", CHAT),
        "",
        line("text", "/generate", TEXT),
        line("vector", "/v1/embeddings", {"input": "Once"}),
        line("wrong", "/v1/chat/completions", {**CHAT, "temperature": "hot"}),
        line("streamed", "/v1/chat/completions", {**CHAT, "stream": True}),
        line("elsewhere", "/flush_cache", {}),
        "{",
        *(line(f"many {i}", "/v1/completions", {"prompt": [5, i], "max_tokens": 3}) for i in range(5, 25)),
    ]
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("\n".join(lines))
    words = [
        "batch",
        str(asked),
        str(answered),
        "--model-path",
        path,
        "--max-total-tokens",
        "256",
        "--at-once",
        "9",
    ]
    assert run(words) == 1
    assert "23 answered, 4 failed" in capsys.readouterr().err
    found = {each["custom_id"]: each for each in map(json.loads, answered.read_text().splitlines())}
    assert len(found) == 27
    with SyncEngine(path) as engine:
        expected = engine.chat(**CHAT).choices[0].message.content
        assert found["text"]["response"]["body"]["text"] == cast(Any, engine.generate(**TEXT))["text"]
    response = found["chat"]["response"]
    assert (response["status_code"], found["chat"]["error"]) == (200, None)
    assert response["body"]["choices"][0]["message"]["content"] == expected
    assert found["vector"]["response"]["body"]["data"][0]["embedding"]
    assert found["wrong"]["response"]["status_code"] == 400
    assert found["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["streamed"]["error"]["param"] == "body.stream"
    assert found["elsewhere"]["error"]["param"] == "url"
    assert found[None]["error"]["message"].startswith("Line 8: ")
    assert run(words) == REFUSED
    assert f"Cannot open {answered}" in capsys.readouterr().err


@pytest.mark.slow
async def test_the_official_client_runs_a_batch_on_a_server(tmp_path: Path):
    folder = tmp_path / "files"
    lines = [
        *(line(f"chat {i}", "/v1/chat/completions", CHAT) for i in range(5)),
        line("wrong", "/v1/chat/completions", {**CHAT, "temperature": "hot"}),
        line("elsewhere", "/v1/completions", {"prompt": "a"}),
    ]
    async with (
        Engine(tiny_models.cached(), file_storage_path=str(folder)) as engine,
        http_server.serving(build_app(engine.core)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        content = "\n".join(lines).encode()
        source = await client.files.create(file=("lines.jsonl", content), purpose="batch")
        assert (source.bytes, source.filename, source.purpose) == (len(content), "lines.jsonl", "batch")
        assert (await client.files.content(source.id)).content == content
        asked: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await client.batches.create(input_file_id=source.id, **asked)
        while (batch := await client.batches.retrieve(batch.id)).status != "completed":
            assert batch.status in ("validating", "in_progress")
            await asyncio.sleep(0.02)
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (7, 5, 2)
        assert batch.output_file_id is not None
        answers = (await client.files.content(batch.output_file_id)).text.splitlines()
        expected = (await engine.chat(**CHAT)).choices[0].message.content
        for each in map(json.loads, answers):
            assert each["response"]["body"]["choices"][0]["message"]["content"] == expected
        assert len(answers) == 5
        errors = (await client.files.content(batch.error_file_id or "")).text.splitlines()
        assert {json.loads(each)["custom_id"] for each in errors} == {"wrong", "elsewhere"}
        assert len([each async for each in client.files.list()]) == 3

        long = line("long", "/v1/chat/completions", {**CHAT, "max_tokens": 400, "ignore_eos": True})
        source = await client.files.create(file=("long.jsonl", "\n".join([long] * 50).encode()), purpose="batch")
        batch = await client.batches.create(input_file_id=source.id, **asked)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        while (batch := await client.batches.retrieve(batch.id)).status != "cancelled":
            await asyncio.sleep(0.02)
        while engine.status().num_requests:
            await asyncio.sleep(0.02)
        assert [each.id async for each in client.batches.list()][:1] == [batch.id]
        await client.files.delete(source.id)
        for call in (
            client.files.retrieve(source.id),
            client.batches.create(input_file_id=source.id, **asked),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        empty = await client.files.create(file=("empty.jsonl", b"\n"), purpose="batch")
        failed = await client.batches.create(input_file_id=empty.id, **asked)
        while (failed := await client.batches.retrieve(failed.id)).status != "failed":
            await asyncio.sleep(0.02)
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=("x", b"a"), purpose="fine-tune")
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve("..%2f..%2fetc%2fpasswd")
