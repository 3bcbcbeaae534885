"""/v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest
from runtime.request import Chunk, LogprobParams, Request
from serve.body import read_body, require_json
from serve.core import EngineCore
from serve.errors import Dialect, openai_body
from serve.native.schema import check_choices, labels_of
from serve.openai.answers import Head
from serve.openai.completion_answers import CompletionAnswers
from serve.openai.requests import check_model, decode_body, sampling_of
from serve.openai.schema import NAMES, CompletionBody
from serve.replies import json_response, submit_all, wait_all
from serve.sse import EventStream

DIALECT = Dialect(
    openai_body, {**NAMES, "text": "prompt", "input_ids": "prompt", "top_logprobs_num": "logprobs"}
)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, read and checked."""

    body: CompletionBody
    model: str
    requests: list[Request]
    echoes: list[str] | None  # the prompts' texts


class CompletionsDoor:
    """Prompts in, their continuations out, whole or streamed."""

    def __init__(self, core: EngineCore, *, max_body_bytes: int) -> None:
        self._core = core
        self._max_body_bytes = max_body_bytes

    async def complete(self, http: HttpRequest) -> ASGIApp:
        require_json(http)
        call = await read_body(http, self._read, limit=self._max_body_bytes)
        core, body = self._core, call.body
        label = body.rid if isinstance(body.rid, str) else call.requests[0].label
        answers = CompletionAnswers(
            Head.of(core, label, call.model),
            core.tokenizer,
            call.requests,
            echoes=call.echoes,
            options=body.stream_options,
        )
        replies = submit_all(core, call.requests)
        if body.stream:
            return EventStream(replies, answers, DIALECT)
        chunks = await wait_all(replies, http.receive)
        if body.logprobs is not None:  # long lists
            return await anyio.to_thread.run_sync(self._answer, answers, chunks)
        return self._answer(answers, chunks)

    def _answer(self, answers: CompletionAnswers, chunks: Sequence[Sequence[Chunk]]) -> Response:
        return json_response(answers.whole(chunks))

    def _read(self, raw: bytes) -> _Call:
        core, body = self._core, decode_body(CompletionBody, raw)
        tokenizer = core.tokenizer
        if tokenizer is None:
            raise InvalidRequest(
                "This server has no tokenizer; use /generate with input_ids.", param="prompt"
            )
        model = check_model(core, body.model)
        sampling = sampling_of(core, body)
        if body.best_of is not None and body.best_of != sampling.n:
            raise InvalidRequest("best_of is not built yet; leave it out or make it n.", param="best_of")
        if sampling.max_new_tokens == 0 and not body.echo:
            raise InvalidRequest("max_tokens must be at least 1 unless echo is true.", param="max_tokens")
        prompts, is_batch = _prompts(body)
        check_choices(len(prompts), sampling.n)
        logprobs = _logprobs(body)
        rid = body.rid or uuid4().hex
        labels = labels_of(rid, len(prompts), is_batch=is_batch)
        requests = [
            Request(
                text=prompt if isinstance(prompt, str) else None,
                ids=None if isinstance(prompt, str) else tuple(prompt),
                sampling=sampling,
                logprobs=logprobs,
                truncate=core.plan.serve.allow_auto_truncate,
                label=label,
            )
            for prompt, label in zip(prompts, labels, strict=True)
        ]
        echoes = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts] if body.echo else None
        return _Call(body, model, requests, echoes)


def _prompts(body: CompletionBody) -> tuple[Sequence[str | list[int]], bool]:
    """The prompts, and whether the body gave a list of them."""
    prompt = body.prompt
    if not prompt:
        raise InvalidRequest("prompt must not be empty.", param="prompt")
    if isinstance(prompt, str):
        return [prompt], False
    if isinstance(prompt[0], int):
        return [prompt], False  # pyright: ignore[reportReturnType]
    for place, item in enumerate(prompt):
        if not item:
            raise InvalidRequest(f"prompt.{place} must not be empty.", param=f"prompt.{place}")
    return prompt, True  # pyright: ignore[reportReturnType]


def _logprobs(body: CompletionBody) -> LogprobParams | None:
    if body.logprobs is None:
        return None
    return LogprobParams(start=0 if body.echo else -1, top=body.logprobs, text=True)
