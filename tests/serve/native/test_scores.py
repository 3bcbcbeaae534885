"""Classification, ranking and scoring over HTTP and from Python, against transformers."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import http_server
import tiny_checkpoints
import tiny_encoders
from serve import Engine, InvalidRequest
from serve.calls.scores.ranking import INSTRUCTION, TASK
from serve.server.app import build_app
from served_core import Serve

QUERY, DOCUMENTS = "w5 w6 w7", ["w9 w5", "w20 w21 w22 w23", "w7", "w30 w31 w5 w6 w7"]


@asynccontextmanager
async def serving(path: Path | str, **options: Any) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    async with (
        Engine(model_path=str(path), dtype="float32", log_level="error", **options) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield engine, client


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_cross_encoder_ranks_as_transformers_scores(tmp_path: Path) -> None:
    """The second text of a pair has another token type, for which BERT has embeddings."""
    model: Any = tiny_encoders.save(tmp_path, "bert", num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    wanted = []
    for document in DOCUMENTS:
        inputs = tokenizer(QUERY, document, return_tensors="pt", return_token_type_ids=True)
        assert inputs["token_type_ids"].max() == 1
        with torch.no_grad():
            wanted.append(torch.sigmoid(model(**inputs).logits[0, 0]).item())
    best = sorted(range(len(DOCUMENTS)), key=lambda index: -wanted[index])
    async with serving(tmp_path) as (engine, client):
        body = {"query": QUERY, "documents": DOCUMENTS}
        listed = await post(client, "/v1/rerank", body)
        assert [each["index"] for each in listed] == best
        assert [each["score"] for each in listed] == pytest.approx([wanted[index] for index in best], abs=1e-5)
        assert listed[0]["document"] == DOCUMENTS[best[0]]
        assert listed[0]["meta_info"]["prompt_tokens"] == len(tokenizer(QUERY, DOCUMENTS[best[0]]).input_ids)
        as_objects = [{"text": text} for text in DOCUMENTS]
        found = await post(client, "/rerank", {"query": QUERY, "documents": as_objects, "top_n": 2})
        assert [each["relevance_score"] for each in found["results"]] == [each["score"] for each in listed[:2]]
        assert found["results"][0]["document"] == {"text": DOCUMENTS[best[0]]}
        assert found["usage"]["total_tokens"] == sum(len(tokenizer(QUERY, text).input_ids) for text in DOCUMENTS)
        bare = await post(client, "/v1/rerank", {**body, "return_documents": False})
        assert bare[0].keys() == {"score", "index", "meta_info"}
        pairs = await post(client, "/score", {"text_1": QUERY, "text_2": DOCUMENTS})
        assert [each["score"] for each in pairs["data"]] == pytest.approx(wanted, abs=1e-5)
        ranked = await engine.rerank(QUERY, DOCUMENTS)
        assert [(each["index"], each["score"]) for each in ranked] == [(e["index"], e["score"]) for e in listed]
        for path, wrong, word in (
            ("/v1/rerank", {"query": "", "documents": ["w5"]}, "query"),
            ("/v1/rerank", {"query": "w5", "documents": []}, "documents"),
            ("/v1/rerank", {"query": "w5", "documents": ["w5", ""]}, "documents.1"),
            ("/v1/rerank", {**body, "instruction": "Judge."}, "instruction"),
            ("/v1/rerank", {"query": "w5 " * 200, "documents": ["w5"], "truncate": True}, "long"),
            ("/score", {"text_1": ["w5", "w6"], "text_2": ["w5"]}, "text_2"),
            ("/score", {"text_1": "w5", "text_2": "w6", "apply_softmax": True}, "apply_softmax"),
            ("/score", {"text_1": "w5", "text_2": "w6", "item_first": True}, "item_first"),
            ("/v1/score", {"query": "w5", "items": ["w6"], "label_token_ids": [3]}, "label_token_ids"),
            ("/v1/embeddings", {"input": "w5"}, "/classify"),
        ):
            assert word in str(await post(client, path, wrong, 400)), wrong
        cut = await post(client, "/rerank", {"query": QUERY, "documents": ["w9 " * 200], "truncate": True})
        assert cut["usage"]["total_tokens"] == engine.core.facts.context_length
        body = {"query": QUERY, "documents": ["w9 " * 200], "truncate_prompt_tokens": -1}
        assert (await post(client, "/rerank", body))["results"] == cut["results"]


async def test_a_classifier_names_the_likeliest_label(tmp_path: Path) -> None:
    labels = {0: "bad", 1: "fair", 2: "good"}
    model: Any = tiny_encoders.save(tmp_path, "roberta", num_labels=3, id2label=labels)
    async with serving(tmp_path) as (engine, client):
        found = await post(client, "/classify", {"text": DOCUMENTS})
        listed = await post(client, "/v1/classify", {"input": DOCUMENTS})
        assert [(each["label"], each["probs"]) for each in listed["data"]] == [(e["label"], e["probs"]) for e in found]
        assert listed["usage"]["prompt_tokens"] == sum(each["meta_info"]["prompt_tokens"] for each in found)
        assert len((await post(client, "/v1/classify", {"input": "w5"}))["data"]) == 1
        [alone] = await engine.classify(input_ids=[[3, 4, 5]])
        paired = await engine.classify("w5", pair="w6")
        assert "3 labels" in str(await post(client, "/v1/rerank", {"query": "w5", "documents": ["w6"]}, 400))
        assert "text_pair" in str(await post(client, "/classify", {"text": ["w5"], "text_pair": "w6"}, 400))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        for answer, text in zip(found, DOCUMENTS, strict=True):
            logits = model(torch.tensor([tokenizer(text).input_ids])).logits[0]
            assert answer["embedding"] == pytest.approx(logits.tolist(), abs=1e-5)
            assert answer["probs"] == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
            assert answer["label"] == labels[int(logits.argmax())]
        logits = model(torch.tensor([tokenizer("w5", "w6").input_ids])).logits[0]
        assert paired["embedding"] == pytest.approx(logits.tolist(), abs=1e-5)
        logits = model(torch.tensor([[3, 4, 5]])).logits[0]
        assert alone["embedding"] == pytest.approx(logits.tolist(), abs=1e-5)


async def test_a_decoder_classifies_by_its_last_token(tmp_path: Path) -> None:
    """With chunks, and with cached prefixes."""
    config = tiny_checkpoints.CONFIGS["qwen3"](
        vocab_size=96, **{**tiny_checkpoints.SHAPE, "num_labels": 3, "pad_token_id": 0}
    )
    model: Any = AutoModelForSequenceClassification.from_config(config)
    tiny_encoders.redraw(model).save_pretrained(tmp_path)
    prompts = [list(range(3, 63)), [*range(3, 63), 4], [5, 6]]
    options: dict[str, Any] = {"skip_tokenizer_init": True, "chunked_prefill_size": 32, "log_level": "error"}
    async with Engine(model_path=str(tmp_path), **options) as engine:
        found = await engine.classify(input_ids=prompts)
        with pytest.raises(InvalidRequest, match="cannot generate text"):
            await engine.generate(input_ids=[3, 4])
    for answer, ids in zip(found, prompts, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([ids])).logits[0]
        assert answer["embedding"] == pytest.approx(wanted.tolist(), abs=1e-4)


async def test_a_model_that_writes_ranks_by_yes_and_no_and_scores_labels(tmp_path: Path) -> None:
    """With Qwen3-Reranker's prompt. Also checks the probabilities of tokens after texts."""
    tiny_checkpoints.write(tmp_path, "llama", vocab_size=96)
    tiny_encoders.save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    yes, no = (tokenizer(word, add_special_tokens=False).input_ids[0] for word in ("yes", "no"))

    def following(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].log_softmax(0)

    labelled = {"query": "w5 w6", "items": [" w7", " w8 w9"], "label_token_ids": [yes, no]}
    async with serving(tmp_path) as (engine, client):
        scored = await post(client, "/v1/score", labelled)
        by_ids = await engine.score([5, 6], [[7], [8, 9]], [yes, no], apply_softmax=True, item_first=True)
        ranked = await post(client, "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
        for wrong, word in (
            ({"query": "a", "items": "b"}, "label_token_ids"),
            ({**labelled, "items": [[1]]}, "items.0"),
            ({**labelled, "label_token_ids": [96]}, "label_token_ids"),
            ({**labelled, "text_1": "w5"}, "text_1"),
            ({**labelled, "truncate": True}, "truncate"),
            ({"text_1": QUERY, "text_2": DOCUMENTS, "truncate": True}, "truncate"),
        ):
            assert word in str(await post(client, "/v1/score", wrong, 400)), wrong
    for found, text in zip(scored["scores"], ("w5 w6 w7", "w5 w6 w8 w9"), strict=True):
        assert found == pytest.approx(following(tokenizer(text).input_ids)[[yes, no]].exp().tolist(), abs=1e-5)
    for found, ids in zip(by_ids, ([7, 5, 6], [8, 9, 5, 6]), strict=True):
        assert found == pytest.approx(following(ids)[[yes, no]].softmax(0).tolist(), abs=1e-5)
    assert [each["score"] for each in ranked] == sorted((each["score"] for each in ranked), reverse=True)
    for each in ranked:
        asked = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {each['document']}"
        messages = [{"role": "system", "content": TASK}, {"role": "user", "content": asked}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        logprobs = following(list(ids))
        assert each["score"] == pytest.approx(torch.sigmoid(logprobs[yes] - logprobs[no]).item(), abs=1e-4)


async def test_a_model_for_vectors_ranks_by_their_cosine(tmp_path: Path) -> None:
    model = tiny_encoders.save(tmp_path, "bert")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    def vector(text: str) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0].mean(0)

    async with serving(tmp_path) as (engine, _):
        ranked = await engine.rerank(QUERY, [*DOCUMENTS, QUERY])
    assert ranked[0]["index"] == len(DOCUMENTS)
    for each in ranked:
        wanted = F.cosine_similarity(vector(QUERY), vector(each["document"]), dim=0).item()
        assert each["score"] == pytest.approx(wanted, abs=1e-5)


async def test_a_part_that_is_repeated_too_often_is_refused_before_it_is(serve: Serve) -> None:
    """Bodies of kilobytes that would become prompts of many megabytes."""
    served = await serve()
    query, many = 17_000, 1024
    for path, body, param in (
        ("/v1/score", {"query": [5] * query, "items": [[6]] * many, "label_token_ids": [7]}, "query"),
        ("/v1/score", {"text_1": "a" * query, "text_2": ["b"] * many}, "text_1"),
        ("/rerank", {"query": "a" * query, "documents": ["b"] * many}, "query"),
    ):
        refused = await served.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert not served.core.submitted


async def test_ranking_leaves_the_event_loop_free(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small body can name a thousand documents, so a thread creates their prompts and scores."""
    found: dict[str, bool] = {}

    def noted(name: str, answer: Any) -> Any:
        def function(*_: Any) -> Any:
            found[name] = threading.current_thread() is threading.main_thread()
            return answer

        return function

    monkeypatch.setattr("serve.calls.chat.prepare.render", noted("render", "yes or no?"))
    monkeypatch.setattr("serve.calls.scores.ranking.requested_logprobs", noted("score", [-1.0, -2.0]))
    monkeypatch.setattr("serve.calls.scores.score.requested_logprobs", noted("label", [-1.0]))
    served = await serve()
    monkeypatch.setattr("serve.calls.scores.ranking.WORDS", ("a", "b"))  # single tokens of the scripted core
    await served.post("/v1/rerank", query="q", documents=["a"])
    assert found == {"render": False, "score": False}
    await served.post("/v1/score", query="q", items=["a"], label_token_ids=[7])
    assert found["label"] is False
