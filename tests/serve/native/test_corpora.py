"""External corpora over HTTP and in Python: they change the number of accepted drafts, and no token."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import http_server
from greedy import model_path, prompts
from runtime.actors import corpora
from runtime.errors import ConfigurationError, InvalidRequest
from serve import Engine, SyncEngine
from serve.server.app import build_app
from served_core import Serve, Served

NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_adaptive": {"enabled": False}}
PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
ROUTES = [("POST", "/add_external_corpus"), ("POST", "/remove_external_corpus"), ("GET", "/list_external_corpora")]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The answer without speculation."""
    with SyncEngine(log_level="error") as engine:
        return engine.generate(PROMPT, sampling_params=GREEDY)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with (
        Engine(log_level="error", **NGRAM) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


async def refusal(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    answer = await http.post(path, json=body)
    assert (answer.status_code, answer.json()["success"]) == (400, False), answer.text
    return answer.json()["message"]


def num_accepted(answer: dict[str, Any]) -> int:
    return answer["meta_info"].get("spec_num_correct_drafts", 0)


async def test_corpora_bring_drafts_until_they_are_removed(
    http: httpx.AsyncClient, plain: dict[str, Any], tmp_path: Path
) -> None:
    async def generated() -> int:
        answer = (await http.post("/generate", json={"text": PROMPT, "sampling_params": GREEDY})).json()
        assert answer["output_ids"] == plain["output_ids"]
        return num_accepted(answer)

    text, file = PROMPT + plain["text"], tmp_path / "corpus.jsonl"
    file.write_text(json.dumps("Another text.") + "\n\n" + json.dumps(text) + "\n")
    alone, counts = await generated(), set()
    for name, body in {
        "documents": {"documents": ["", "Another text.", text]},
        "file": {"file_path": str(file)},
        "ids": {"token_chunks": [[], plain["output_ids"]]},
    }.items():
        answer = (await http.post("/add_external_corpus", json={"corpus_id": name, **body})).json()
        assert (answer["success"], answer["corpus_id"]) == (True, name), answer
        listed = (await http.get("/list_external_corpora")).json()
        assert listed["corpus_token_counts"] == {name: answer["loaded_token_count"]}
        counts.add(answer["loaded_token_count"])
        assert await generated() > max(alone, 30)
        message = await refusal(http, "/add_external_corpus", {"corpus_id": name, **body})
        assert "There is a corpus" in message
        assert (await http.post("/remove_external_corpus", json={"corpus_id": name})).json()["success"]
        assert await generated() == alone
    assert len(counts) == 2  # the file has the texts of the documents
    assert 60 in counts
    assert "There is no corpus" in await refusal(http, "/remove_external_corpus", {"corpus_id": "file"})


async def test_corpus_of_the_start_is_used_and_can_be_removed(plain: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(json.dumps("Another text.") + "\n" + json.dumps(PROMPT + plain["text"]) + "\n")
    options = {"corpus_path": str(file), "sam_budget": 3, "corpus_max_tokens": 100}
    options = {f"speculative_ngram_external_{name}": value for name, value in options.items()}
    async with Engine(log_level="error", **NGRAM, **options) as engine:
        [(name, count)] = engine.list_external_corpora()["corpus_token_counts"].items()
        assert name == str(file)
        answer = await engine.generate(PROMPT, sampling_params=GREEDY)
        assert answer["output_ids"] == plain["output_ids"]
        assert num_accepted(answer) > 30
        assert len(answer["meta_info"]["spec_correct_drafts_histogram"]) <= 1 + 3
        with pytest.raises(
            InvalidRequest, match=f"at most {98 - count} more tokens"
        ):  # each document counts as a token
            await engine.add_external_corpus(token_chunks=[[1] * 100])
        await engine.remove_external_corpus(name)
        assert num_accepted(await engine.generate(PROMPT, sampling_params=GREEDY)) < 30


async def test_start_with_a_corpus_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('"a"\n[1]')
    path = {"speculative_ngram_external_corpus_path": str(file)}
    starts: list[tuple[str, dict[str, Any]]] = [
        ("not a file", {"speculative_ngram_external_corpus_path": str(tmp_path)}),
        ("leaves no drafts", {**path, "speculative_ngram_external_sam_budget": 0}),
        ("skip-tokenizer-init", {**path, "skip_tokenizer_init": True}),
        ("needs --speculative-algorithm NGRAM", {**path, "speculative_algorithm": None}),
        ("corpus.jsonl: Line 2 is not a JSON string", path),
    ]
    for words, options in starts:
        with pytest.raises(ConfigurationError, match=words):
            await Engine(log_level="error", **{**NGRAM, **options}).start()
    file.write_text('"Two words"')
    with pytest.raises(ConfigurationError, match="too large: at most 1 more"):
        await Engine(log_level="error", **NGRAM, **path, speculative_ngram_external_corpus_max_tokens=1).start()


async def test_corpora_that_cannot_be_used_are_refused(
    http: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(**body: Any) -> str:
        message = await refusal(http, "/add_external_corpus", body)
        assert (await http.get("/list_external_corpora")).json()["corpus_token_counts"] == {}
        return message

    file, fifo = tmp_path / "corpus.jsonl", tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "exactly one" in await refused()
    assert "exactly one" in await refused(documents=["a"], token_chunks=[[1]])
    assert "no tokens" in await refused(documents=["", ""])
    assert "Token ids must be" in await refused(token_chunks=[[1, 10**6]])
    assert "Token ids must be" in await refused(token_chunks=[[-1]])
    for path in (str(tmp_path), "/dev/zero", str(fifo), "http://host/a", "a\0b", str(tmp_path / "none")):
        assert "must be a file" in await refused(file_path=path)
    for line, words in (("[1]", "Line 2 is not a JSON string"), ("a", "Line 2 is not JSON"), ("[" * 10**5, "Line 2")):
        file.write_text('"a"\n' + line)
        assert words in await refused(file_path=str(file))
    first = {"corpus_id": "a", "token_chunks": [[1, 2, 3, 4]]}
    assert (await http.post("/add_external_corpus", json=first)).json()["loaded_token_count"] == 4
    monkeypatch.setattr(corpora, "MAX_CORPORA", 1)
    assert "at most 1 are allowed" in await refusal(http, "/add_external_corpus", {"token_chunks": [[1]]})


async def test_engine_without_ngram_or_tokenizer_says_what_it_lacks(served: Served) -> None:
    for method, path in ROUTES:
        answer = await served.http.request(method, path, json={"corpus_id": "a", "token_chunks": [[1]]})
        if path.startswith("/remove"):
            answer = await served.http.request(method, path, json={"corpus_id": "a"})
        assert answer.status_code == 400
        assert "--speculative-algorithm NGRAM" in answer.json()["message"]
    async with Engine(model_path("llama"), skip_tokenizer_init=True, log_level="error", **NGRAM) as engine:
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            await engine.add_external_corpus(documents=["a"])
        with pytest.raises(InvalidRequest, match="lone surrogate"):  # /list_external_corpora could not answer
            await engine.add_external_corpus(corpus_id="a\ud800", token_chunks=[[1]])
        assert (await engine.add_external_corpus(token_chunks=[prompts()[0]]))["success"]
    async with Engine(log_level="error", **NGRAM, speculative_ngram_external_sam_budget=0) as engine:
        with pytest.raises(InvalidRequest, match="sam-budget 0"):
            await engine.add_external_corpus(token_chunks=[[1]])


async def test_only_admins_call_the_routes(serve: Serve) -> None:
    served = await serve(api_key="user", admin_api_key="admin")
    for method, path in ROUTES:
        for key, status in (("wrong", 401), ("user", 403), ("admin", 400)):
            answer = await served.http.request(method, path, json={}, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status, path


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dp_size": 2}, {"tp_size": 2}, {"speculative_ngram_max_bfs_breadth": 3}], ids=str)
async def test_replicas_ranks_and_trees_use_corpora(options: dict[str, Any], plain: dict[str, Any]) -> None:
    async with Engine(log_level="error", **NGRAM, **options) as engine:
        await engine.add_external_corpus(corpus_id="a", documents=[PROMPT + plain["text"]])
        for _ in range(2):
            answers = await engine.generate([PROMPT] * 4, sampling_params=GREEDY)
            for answer in answers:
                assert num_accepted(answer) > 30
                assert "tp_size" in options or answer["output_ids"] == plain["output_ids"]
        await engine.remove_external_corpus("a")
        assert engine.list_external_corpora()["corpus_token_counts"] == {}
