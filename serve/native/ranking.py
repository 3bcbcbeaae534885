"""`/v1/rerank`, `/rerank`, `/v1/score`, `/score`: how well documents fit, and how likely words follow a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from uuid import uuid4

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest
from runtime.request import Chunk, LogprobParams, Request
from runtime.sampling_params import MAX_BIASES, SamplingParams
from serve.decode import Length, NotBuilt, Range
from serve.endpoint import decode_open, json_response, parse_object, read_all_or_disconnect, read_call
from serve.errors import ErrorFormat, openai_body
from serve.native.generate import GenerateAnswers
from serve.openai.models import check_model
from serve.prompts import MAX_PROMPTS, of_client
from serve.ranking import Answers, Scores, rank, requested_logprobs
from serve.work_budget import check_joined

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

RERANK_ERRORS = ErrorFormat(openai_body, {"text": "documents"})
SCORE_ERRORS = ErrorFormat(
    openai_body, {"text": "items", "input_ids": "items", "token_ids_logprob": "label_token_ids"}
)
Texts = str | Annotated[list[str], Length(1, MAX_PROMPTS)]


@dataclass(slots=True, kw_only=True)
class Document:
    """A text in an object of its own."""

    text: str


@dataclass(slots=True, kw_only=True)
class RerankBody:
    """The body of /v1/rerank and /rerank. `user` is accepted without effect."""

    query: Annotated[str, Length(1, 1 << 22)]
    documents: Annotated[list[str | Document], Length(1, MAX_PROMPTS)]
    model: str | None = None
    top_n: Annotated[int, Range(1, 1 << 20)] | None = None
    return_documents: bool = True
    instruction: Annotated[str, Length(1, 4096)] | None = None
    truncate: bool | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Range(-1, -1)] | None = None  # vLLM's word for truncate
    max_tokens_per_doc: NotBuilt = None  # these are of other servers and services
    max_chunks_per_doc: NotBuilt = None
    rank_fields: NotBuilt = None
    use_activation: Literal[True] = True
    priority: NotBuilt = None

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class Ranked(NamedTuple):
    """One document and its score, with the answer to its request where it had one of its own."""

    index: int
    score: float
    text: str
    request: Request | None
    chunk: Chunk | None


async def rerank_list(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The documents from the best to the worst, as a list (SGLang's form)."""
    body, _, ranked, _ = await _ranked(http, core)
    found = []
    for each in ranked:
        document = {"document": each.text} if body.return_documents else {}
        entry: dict[str, Any] = {"score": each.score, **document, "index": each.index}
        if each.request is not None and each.chunk is not None:
            [described] = GenerateAnswers(core, [each.request], indexed=False).embeddings([[each.chunk]])
            entry["meta_info"] = described["meta_info"]
        found.append(entry)
    return json_response(found)


async def rerank(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The documents from the best to the worst, in the form of Jina and Cohere."""
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
    answers = await read_all_or_disconnect(await core.submit_all(of_client(core, requests)), http.receive)
    ranked = await anyio.to_thread.run_sync(order, body.texts, requests, scores, answers, body.top_n)
    return body, model, ranked, answers


def _read_rerank(core: EngineCore, raw: bytes) -> tuple[RerankBody, str, list[Request], Scores]:
    body = decode_open(RerankBody, parse_object(raw), core, "/v1/rerank")
    model = check_model(core, body.model)
    requests, scores = rank_documents(core, body)
    return body, model, requests, scores


def rank_documents(core: EngineCore, body: RerankBody) -> tuple[list[Request], Scores]:
    """Raises `InvalidRequest` for an empty document, too much text, and where the model cannot rank.

    A chat is rendered for each document where the model reads one: for a thread.
    """
    for index, text in enumerate(body.texts):
        if not text:
            raise InvalidRequest(f"documents.{index} must not be empty.", param=f"documents.{index}")
    check_joined(body.query, body.texts, "query")
    pairs = [(body.query, text) for text in body.texts]
    return rank(core, pairs, instruction=body.instruction, truncate=_truncate(core, body))


def _truncate(core: EngineCore, body: RerankBody | ScoreBody) -> bool | None:
    """Whether texts are cut. Those within a chat are not: with vLLM's -1 too long ones are refused as without it."""
    if body.truncate_prompt_tokens is not None and core.facts.is_encoder:
        return True
    return body.truncate


def order(
    texts: Sequence[str], requests: Sequence[Request], scores: Scores, answers: Answers, top_n: int | None
) -> list[Ranked]:
    """The best `top_n` documents, the best first; of equal ones that which was named first."""
    own = len(requests) == len(texts)
    ranked = [
        Ranked(index, score, text, requests[index] if own else None, answers[index][0] if own else None)
        for index, (score, text) in enumerate(zip(scores(answers), texts, strict=True))
    ]
    return sorted(ranked, key=lambda each: -each.score)[:top_n]


@dataclass(slots=True, kw_only=True)
class ScoreBody:
    """The body of /v1/score and /score.

    With `label_token_ids`: how likely each of them follows the query and an item. With `text_1` and `text_2`: how well
    these fit each other. `user` is accepted without effect.
    """

    query: str | list[int] | None = None
    items: Texts | Annotated[list[list[int]], Length(1, MAX_PROMPTS)] | None = None
    label_token_ids: Annotated[list[int], Length(1, MAX_BIASES)] | None = None
    apply_softmax: bool = False
    item_first: bool = False
    text_1: Texts | None = None
    text_2: Texts | None = None
    truncate: bool | None = None
    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Range(-1, -1)] | None = None
    use_activation: Literal[True] = True
    priority: NotBuilt = None


async def score(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Probabilities of tokens behind texts (SGLang's form), or how well pairs of texts fit (vLLM's)."""
    body, model, requests, scores = await read_call(http, core, _read_score, inline_bytes=0)
    answers = await read_all_or_disconnect(await core.submit_all(of_client(core, requests)), http.receive)
    usage = usage_of(answers)
    if scores is None:
        of_labels = partial(label_scores, answers, softmax=body.apply_softmax)
        found = await anyio.to_thread.run_sync(of_labels)
        return json_response({"object": "scoring", "scores": found, "model": model, "usage": usage})
    of_pairs = await anyio.to_thread.run_sync(scores, answers)
    data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(of_pairs)]
    return json_response(
        {"id": f"score-{uuid4().hex}", "object": "list", "data": data, "model": model, "usage": usage}
    )


def _read_score(core: EngineCore, raw: bytes) -> tuple[ScoreBody, str, list[Request], Scores | None]:
    body = decode_open(ScoreBody, parse_object(raw), core, "/v1/score")
    model = check_model(core, body.model)
    if body.text_1 is None and body.text_2 is None:
        return body, model, label_requests(core, body), None
    requests, scores = rank(core, _pairs(body), truncate=_truncate(core, body))
    return body, model, requests, scores


def _pairs(body: ScoreBody) -> list[tuple[str, str]]:
    if body.query is not None or body.items is not None or body.label_token_ids is not None:
        raise InvalidRequest(
            "text_1 and text_2 do not go with query, items and label_token_ids.", param="text_1"
        )
    for name in ("apply_softmax", "item_first"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} does not go with text_1 and text_2.", param=name)
    sides = [[each] if isinstance(each, str) else list(each or ()) for each in (body.text_1, body.text_2)]
    first, second = sides
    if len(first) == 1:
        check_joined(first[0], second, "text_1")
        first = first * len(second)
    if not first or len(first) != len(second):
        raise InvalidRequest(
            "text_2 must hold as many texts as text_1, which may be a single one.", param="text_2"
        )
    for name, side in zip(("text_1", "text_2"), (first, second)):
        if not all(side):
            raise InvalidRequest(f"{name} must hold no empty text.", param=name)
    return list(zip(first, second))


def label_requests(core: EngineCore, body: ScoreBody) -> list[Request]:
    """One request for each item. Raises `InvalidRequest` where query and items do not go together."""
    for name in ("query", "items", "label_token_ids"):
        if getattr(body, name) is None:
            raise InvalidRequest(f"{name} is missing.", param=name)
    if core.plan.model.is_embedding:
        raise InvalidRequest("This model writes no text: send text_1 and text_2.", param="label_token_ids")
    if body.truncate:
        raise InvalidRequest("query and items are not cut: leave truncate out.", param="truncate")
    items: list[Any] = [body.items] if isinstance(body.items, str) else list(body.items or ())
    query: Any = body.query or ("" if isinstance(items[0], str) else [])
    check_joined(query, items, "query")
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    logprobs = LogprobParams(token_ids=tuple(body.label_token_ids or ()))
    requests = []
    for index, item in enumerate(items):
        if type(item) is not type(query):
            raise InvalidRequest(
                "query and items must both be texts or both token ids.", param=f"items.{index}"
            )
        whole = item + query if body.item_first else query + item
        if not whole:
            raise InvalidRequest(f"items.{index} must not be empty.", param=f"items.{index}")
        requests.append(
            Request(
                text=whole if isinstance(whole, str) else None,
                ids=None if isinstance(whole, str) else tuple(whole),
                sampling=sampling,
                logprobs=logprobs,
            )
        )
    return requests


def label_scores(answers: Answers, *, softmax: bool) -> list[list[float]]:
    """For each item the probability of each label, among all tokens or, with `softmax`, among the labels."""
    found = []
    for chunks in answers:
        each = [math.exp(logprob) for logprob in requested_logprobs(chunks)]
        total = sum(each) if softmax else 1.0
        found.append([one / total for one in each] if total else each)
    return found


def usage_of(answers: Answers) -> dict[str, int]:
    """What was read; what was written only makes the log-probabilities known."""
    prompt = sum(chunk.usage.prompt for chunks in answers for chunk in chunks)
    return {"prompt_tokens": prompt, "total_tokens": prompt}
