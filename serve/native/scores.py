"""The handlers of `/classify`, `/v1/classify`, `/v1/rerank`, `/rerank`, `/v1/score` and `/score`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.request import Request
from serve.calls.body import decode_open, parse_object
from serve.calls.decode import decode
from serve.calls.generate.answers import GenerateAnswers
from serve.calls.scores.classify import ClassifyBody, ClassifyListBody, classified, classify_requests
from serve.calls.scores.ranking import Answers, Scores, rank, truncation
from serve.calls.scores.rerank import Ranked, RerankBody, order, rank_documents
from serve.calls.scores.score import ScoreBody, label_requests, label_scores, pairs_of
from serve.calls.served_model import choose_model, with_adapter
from serve.http.endpoint import compute, decodes, json_response, read_call
from serve.http.errors import ErrorFormat, openai_body

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

RERANK_ERRORS = ErrorFormat(openai_body, {"text": "documents"})
CLASSIFY_ERRORS = ErrorFormat(openai_body, {"text": "input", "input_ids": "input"})
SCORE_ERRORS = ErrorFormat(openai_body, {"text": "items", "input_ids": "items", "token_ids_logprob": "label_token_ids"})


@decodes(ClassifyBody)
async def classify(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the labels' scores, the most likely label and the probabilities, per prompt."""
    is_batch, requests = await read_call(http, core, _read_classify)
    answers = await compute(http, core, requests)
    return await anyio.to_thread.run_sync(_classified, core, requests, answers, is_batch)


def _classified(core: EngineCore, requests: Sequence[Request], answers: Answers, is_batch: bool) -> Response:
    results = classified(core, requests, answers)
    return json_response(results if is_batch else results[0])


@decodes(ClassifyListBody)
async def classify_list(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the most likely label and all probabilities per input (vLLM's format)."""
    model, requests = await read_call(http, core, _read_classify_list)
    answers = await compute(http, core, requests)
    return await anyio.to_thread.run_sync(_classified_list, core, model, requests, answers)


def _classified_list(core: EngineCore, model: str, requests: Sequence[Request], answers: Answers) -> Response:
    data = [
        {"index": index, "label": each["label"], "probs": each["probs"], "num_classes": len(each["probs"])}
        for index, each in enumerate(classified(core, requests, answers))
    ]
    head = {"id": f"classify-{uuid4().hex}", "object": "list", "created": int(time.time()), "model": model}
    return json_response({**head, "data": data, "usage": usage_of(answers)})


def _read_classify_list(core: EngineCore, raw: bytes) -> tuple[str, list[Request]]:
    body = decode_open(ClassifyListBody, parse_object(raw), core, "/v1/classify")
    model = choose_model(core, body.model)
    is_ids = not isinstance(body.input, str) and bool(body.input) and not isinstance(body.input[0], str)
    field = {"input_ids" if is_ids else "text": body.input}
    _, requests = classify_requests(core, decode(ClassifyBody, {**field, "truncate": body.truncate}))
    return model.name, with_adapter(requests, model.adapter)


def _read_classify(core: EngineCore, raw: bytes) -> tuple[bool, list[Request]]:
    return classify_requests(core, decode_open(ClassifyBody, parse_object(raw), core, "/classify"))


@decodes(RerankBody)
async def rerank_list(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the documents as a list, best first (SGLang's format)."""
    body, _, ranked, _ = await _ranked(http, core)
    entries = []
    for each in ranked:
        document = {"document": each.text} if body.return_documents else {}
        entry: dict[str, Any] = {"score": each.score, **document, "index": each.index}
        if each.request is not None and each.chunk is not None:
            [answer] = GenerateAnswers(core, [each.request], indexed=False).embeddings([[each.chunk]])
            entry["meta_info"] = answer["meta_info"]
        entries.append(entry)
    return json_response(entries)


@decodes(RerankBody)
async def rerank(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the documents, best first, in the format of Jina and Cohere."""
    body, model, ranked, answers = await _ranked(http, core)
    results = [
        {"index": each.index, "relevance_score": each.score}
        | ({"document": {"text": each.text}} if body.return_documents else {})
        for each in ranked
    ]
    return json_response(
        {"id": f"rerank-{uuid4().hex}", "model": model, "results": results, "usage": usage_of(answers)}
    )


async def _ranked(http: HttpRequest, core: EngineCore) -> tuple[RerankBody, str, list[Ranked], Answers]:
    body, model, requests, scores = await read_call(http, core, _read_rerank, inline_bytes=0)
    answers = await compute(http, core, requests)
    ranked = await anyio.to_thread.run_sync(order, body.texts, requests, scores, answers, body.top_n)
    return body, model, ranked, answers


def _read_rerank(core: EngineCore, raw: bytes) -> tuple[RerankBody, str, list[Request], Scores]:
    body = decode_open(RerankBody, parse_object(raw), core, "/v1/rerank")
    model = choose_model(core, body.model)
    requests, scores = rank_documents(core, body)
    return body, model.name, with_adapter(requests, model.adapter), scores


@decodes(ScoreBody)
async def score(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return probabilities of tokens after texts (SGLang's format), or scores of text pairs (vLLM's)."""
    body, model, requests, scores = await read_call(http, core, _read_score, inline_bytes=0)
    answers = await compute(http, core, requests)
    usage = usage_of(answers)
    if scores is None:
        compute_scores = partial(label_scores, answers, softmax=body.apply_softmax)
        scores_of_labels = await anyio.to_thread.run_sync(compute_scores)
        return json_response({"object": "scoring", "scores": scores_of_labels, "model": model, "usage": usage})
    scores_of_pairs = await anyio.to_thread.run_sync(scores, answers)
    data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores_of_pairs)]
    return json_response({"id": f"score-{uuid4().hex}", "object": "list", "data": data, "model": model, "usage": usage})


def _read_score(core: EngineCore, raw: bytes) -> tuple[ScoreBody, str, list[Request], Scores | None]:
    body = decode_open(ScoreBody, parse_object(raw), core, "/v1/score")
    model = choose_model(core, body.model)
    if body.text_1 is None and body.text_2 is None:
        return body, model.name, with_adapter(label_requests(core, body), model.adapter), None
    requests, scores = rank(core, pairs_of(body), truncate=truncation(core, body))
    return body, model.name, with_adapter(requests, model.adapter), scores


def usage_of(answers: Answers) -> dict[str, int]:
    """Return the `usage` object with the number of prompt tokens.

    Output tokens do not count, because they are generated only for their log-probabilities.
    """
    prompt = sum(chunk.usage.prompt for chunks in answers for chunk in chunks)
    return {"prompt_tokens": prompt, "total_tokens": prompt}
