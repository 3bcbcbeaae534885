"""`penstock batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from serve import SyncEngine
from serve.cli import REFUSED, run

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
        assert found["text"]["response"]["body"]["text"] == engine.generate(**TEXT)["text"]
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
    assert f"{answered} cannot be used" in capsys.readouterr().err
