"""The handler of `/v1/completions`, and its answers, complete or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import anyio.to_thread
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.config.chat_templates import MIDDLE_TEMPLATES
from runtime.errors import InvalidRequest
from runtime.request import Chunk, Finish, LogprobParams, Logprobs, Request
from serve.calls.bootstrap import with_prefill_server
from serve.calls.chat_completions.answers import AnswerHeader, UsageCount, event_end
from serve.calls.chat_completions.requests import decode_body, keep_last_of, sampling_of
from serve.calls.chat_completions.schema import NAMES, CompletionBody, StreamOptions
from serve.calls.errors import ended
from serve.calls.hidden_states import last_hidden
from serve.calls.logprobs import CompletionLogprobs, prompt_logprobs, with_top
from serve.calls.prompts import (
    batch_of,
    check_choices,
    check_parts,
    labels_of,
    namespaces_of,
    of_client,
    service_of,
)
from serve.calls.routed_experts import routed_experts
from serve.calls.served_model import adapters_of, choose_model
from serve.calls.work_budget import check_joined, prompt_ids
from serve.http.endpoint import decodes, json_response, read_all_or_disconnect, read_call
from serve.http.errors import ErrorFormat, openai_body
from serve.http.sse import EventStream

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.tokenizer.tokenizer import Tokenizer

ERROR_FORMAT = ErrorFormat(
    openai_body, {**NAMES, "text": "prompt", "input_ids": "prompt", "top_logprobs_num": "logprobs"}
)
KIND = "text_completion"


@dataclass(frozen=True, slots=True)
class _Call:
    """A call whose body is decoded and checked."""

    body: CompletionBody
    model: str
    requests: list[Request]
    echoes: list[str] | None  # texts of the prompts if the answer repeats them (`echo`), else None


@decodes(CompletionBody)
async def create(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Complete one or several prompts: as one JSON object, or as a stream of events."""
    call = await read_call(http, core, _read)
    body = call.body
    label = body.rid if isinstance(body.rid, str) else call.requests[0].label
    answers = CompletionAnswers(
        AnswerHeader.of(core, label, call.model),
        core.tokenizer,
        call.requests,
        echoes=call.echoes,
        options=body.stream_options,
        top_logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    streams = await core.submit_all(of_client(core, call.requests))
    if body.stream:
        return EventStream(streams, answers, ERROR_FORMAT)
    chunks = await read_all_or_disconnect(streams, http.receive)
    listed = body.logprobs is not None or body.prompt_logprobs is not None
    if listed or body.return_routed_experts:  # serializing long lists and texts would block the event loop
        return await anyio.to_thread.run_sync(_response, answers, chunks)
    return _response(answers, chunks)


def _response(answers: CompletionAnswers, chunks: Sequence[Sequence[Chunk]]) -> Response:
    return json_response(answers.whole(chunks))


def _read(core: EngineCore, raw: bytes) -> _Call:
    body = decode_body(CompletionBody, raw, core)
    tokenizer = core.tokenizer
    if tokenizer is None:
        raise InvalidRequest("This server has no tokenizer; use /generate with input_ids.", param="prompt")
    model = choose_model(core, body.model)
    sampling = sampling_of(core, body)
    if body.echo and body.truncate_prompt_tokens is not None:
        raise InvalidRequest("echo and truncate_prompt_tokens exclude each other.", param="truncate_prompt_tokens")
    prompts, is_batch = _prompts(body)
    if body.suffix:
        prompts = _fill_in_the_middle(core, body, prompts)
    check_choices(len(prompts), sampling.n)
    check_parts(
        hidden=body.return_hidden_states,
        routed=body.return_routed_experts,
        num_choices=len(prompts) * sampling.n,
        stream=body.stream,
    )
    logprobs = _logprobs(body)
    rid = body.rid or uuid4().hex
    keep_last = keep_last_of(body)
    cut = True if keep_last is not None else None
    labels = labels_of(rid, len(prompts), is_batch=is_batch)
    namespaces = namespaces_of(body.cache_salt, body.extra_key, len(prompts))
    adapters = adapters_of(model, body.lora_path, len(prompts))
    requests = [
        Request(
            text=prompt if isinstance(prompt, str) else None,
            ids=None if isinstance(prompt, str) else prompt_ids(prompt, core.plan, cut=cut),
            sampling=sampling,
            grammar=body.grammar,
            logprobs=logprobs,
            returns_ids=body.return_token_ids,
            returns_hidden=body.return_hidden_states,
            experts_from=body.experts_from,
            truncate=core.plan.serve.allow_auto_truncate,
            keep_last=keep_last,
            add_special_tokens=body.add_special_tokens,
            namespace=namespace,
            priority=body.priority,
            service=service_of(body.timeout_s, body.service_tier, body.prompt_cache_key, body.session_id),
            lora=adapter,
            label=label,
            batch=batch_of(rid, is_batch=is_batch),
        )
        for prompt, namespace, label, adapter in zip(prompts, namespaces, labels, adapters, strict=True)
    ]
    echoes = [_echo(core, tokenizer, prompt) for prompt in prompts] if body.echo else None
    return _Call(body, model.name, with_prefill_server(body, core, requests), echoes)


def _echo(core: EngineCore, tokenizer: Tokenizer, prompt: str | list[int]) -> str:
    """Return the prompt's text. Raises `InvalidRequest` for token ids outside the vocabulary."""
    if isinstance(prompt, str):
        return prompt
    size = core.facts.vocab_size
    if min(prompt) < 0 or max(prompt) >= size:
        raise InvalidRequest(f"Token ids must be in [0, {size}).", param="prompt")
    return tokenizer.decode(prompt)


def _prompts(body: CompletionBody) -> tuple[Sequence[str | list[int]], bool]:
    """Return the prompts, and whether the body has a list of prompts instead of a single prompt."""
    prompt = body.prompt
    if not prompt:
        raise InvalidRequest("prompt must not be empty.", param="prompt")
    if isinstance(prompt, str):
        return [prompt], False
    if isinstance(prompt[0], int):
        return [prompt], False  # pyright: ignore[reportReturnType]
    for index, item in enumerate(prompt):
        if not item:
            raise InvalidRequest(f"prompt.{index} must not be empty.", param=f"prompt.{index}")
    return prompt, True  # pyright: ignore[reportReturnType]


def _fill_in_the_middle(core: EngineCore, body: CompletionBody, prompts: Sequence[str | list[int]]) -> list[str]:
    """Return one fill-in-the-middle prompt per prompt, in the model's format.

    The model completes it with the text between the original prompt and the body's suffix.
    """
    template = core.plan.tokenizer.middle
    if template is None and core.tokenizer is not None:
        marks = {mark for each in MIDDLE_TEMPLATES.values() for mark in each[:3]}
        known = core.tokenizer.ids_of(marks).keys()
        template = next((each for each in MIDDLE_TEMPLATES.values() if known >= {*each[:3]}), None)
    if template is None:
        raise InvalidRequest(
            "This model's fill-in-the-middle format is not known: start the server with --completion-template.",
            param="suffix",
        )
    if body.echo:
        raise InvalidRequest("echo and suffix exclude each other.", param="suffix")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise InvalidRequest("With a suffix, the prompt must be text, not token ids.", param="suffix")
    suffix = body.suffix or ""
    check_joined(suffix, texts, "suffix")
    return [template.prompt(text, suffix) for text in texts]


def _logprobs(body: CompletionBody) -> LogprobParams | None:
    if body.logprobs is None and body.prompt_logprobs is None:
        return None
    start = 0 if body.prompt_logprobs is not None or (body.echo and body.logprobs is not None) else -1
    top = max(body.logprobs or 0, body.prompt_logprobs or 0)
    return LogprobParams(start=start, top=top, text=not body.return_tokens_as_token_ids)


# --- the answer ---


class CompletionAnswers:
    """Builds the answer of one call. Choices are numbered over all prompts: request_index * n + index.

    `echoes` are the texts of the prompts if the answer repeats them, else None. `top_logprobs` and `prompt_logprobs`
    are the numbers of alternatives per token for output and prompt, or None for an answer without log-probabilities.
    """

    def __init__(
        self,
        header: AnswerHeader,
        tokenizer: Tokenizer | None,
        requests: Sequence[Request],
        *,
        echoes: Sequence[str] | None,
        options: StreamOptions | None,
        top_logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        self._top_logprobs, self._prompt_logprobs = top_logprobs, prompt_logprobs
        self._header = header
        self._tokenizer = tokenizer
        self._requests = requests
        self._echoes = echoes
        self._options = options or StreamOptions()
        self._usage = UsageCount(cache_report=header.cache_report)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._start = header.event_start(KIND)
        self._end = event_end()
        self._before_text: dict[int, bytes] = {}
        self._finishes: list[Finish] = []

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        """Return the `text_completion` object, from one finished chunk per choice."""
        choices = []
        for request_index, chunks in enumerate(answers):
            for chunk in chunks:
                number, text = self._number(request_index, chunk), self._echo(request_index) + chunk.text
                self._usage.note(request_index, chunk.index, chunk.usage)
                finish = ended(chunk.finish)
                choices.append(
                    {
                        "index": number,
                        "text": text,
                        "logprobs": self._piece(request_index, number, chunk, text),
                        "finish_reason": finish.kind,
                        "matched_stop": finish.matched,
                        **self._more(request_index, chunk),
                    }
                )
        return self._header.whole(KIND, choices, self._usage.total())

    # --- streaming: see serve.http.sse.Encoder ---

    def events(self, request_index: int, chunks: Sequence[Chunk]) -> bytes:
        parts: list[bytes] = []
        for chunk in chunks:
            number, text = self._number(request_index, chunk), chunk.text
            before = self._before_text.get(number)
            if before is None:
                before = self._before_text[number] = self._start + b'{"index":%d,"text":' % number
                text = self._echo(request_index) + text
            self._usage.note(request_index, chunk.index, chunk.usage)
            wants_more = chunk.logprobs is not None or self._requests[request_index].returns_ids
            if not text and chunk.finish is None and not wants_more:
                continue
            parts += (
                before,
                orjson.dumps(text),
                self._rest(request_index, number, chunk, text),
                self._event_end(request_index, chunk),
            )
        return b"".join(parts)

    def closing(self) -> bytes:
        """Return the last events, after all text has been sent.

        Raises `Aborted` or `EngineFailure` if an answer is incomplete.
        """
        for finish in self._finishes:
            ended(finish)
        return self._start + event_end(self._usage.total()) if self._options.include_usage else b""

    def _rest(self, request_index: int, number: int, chunk: Chunk, text: str) -> bytes:
        """Return the bytes of a choice's JSON after its text."""
        if chunk.finish is None and chunk.logprobs is None and not self._requests[request_index].returns_ids:
            return b',"logprobs":null,"finish_reason":null,"matched_stop":null}'
        finish = chunk.finish
        if finish is not None:
            self._finishes.append(finish)
        whole = finish if finish is not None and finish.kind != "abort" else None
        fields = {
            "logprobs": self._piece(request_index, number, chunk, text),
            "finish_reason": whole.kind if whole else None,
            "matched_stop": whole.matched if whole else None,
            **self._more(request_index, chunk),
        }
        return b"," + orjson.dumps(fields)[1:]

    def _event_end(self, request_index: int, chunk: Chunk) -> bytes:
        if self._options.in_every_event:
            return event_end(self._usage.so_far(request_index, chunk.index, chunk.usage))
        return self._end

    # --- complete answers and streams ---

    def _number(self, request_index: int, chunk: Chunk) -> int:
        return request_index * self._requests[request_index].sampling.n + chunk.index

    def _echo(self, request_index: int) -> str:
        return self._echoes[request_index] if self._echoes is not None else ""

    def _more(self, request_index: int, chunk: Chunk) -> dict[str, Any]:
        """Return the additional fields of a choice that the request asks for.

        They are hidden states, routed experts (in `sgl_ext`), token ids, and log-probabilities of the prompt.
        """
        fields: dict[str, Any] = {}
        if self._requests[request_index].returns_hidden:
            fields["hidden_states"] = last_hidden(chunk)
        if self._requests[request_index].experts_from is not None:
            fields["sgl_ext"] = {"routed_experts": routed_experts(chunk)}
        if self._requests[request_index].returns_ids:
            fields["token_ids"] = chunk.ids
            if chunk.prompt_ids is not None:
                fields["prompt_token_ids"] = chunk.prompt_ids
        if self._prompt_logprobs is not None and chunk.prompt_logprobs is not None and self._tokenizer is not None:
            found = prompt_logprobs(chunk.prompt_logprobs, self._tokenizer, self._prompt_logprobs)
            fields["prompt_logprobs"] = found
        return fields

    def _piece(self, request_index: int, number: int, chunk: Chunk, text: str) -> dict[str, Any] | None:
        """Return the logprobs object for the tokens of `text`, including those of an echoed prompt."""
        request, tokenizer = self._requests[request_index], self._tokenizer
        if request.logprobs is None or tokenizer is None or self._top_logprobs is None:
            return None
        pieces = self._logprobs.get(number)
        if pieces is None:
            pieces = self._logprobs[number] = CompletionLogprobs(
                tokenizer,
                skip_special_tokens=request.sampling.skip_special_tokens,
                as_ids=not request.logprobs.text,
            )
        joined = _joined(chunk.prompt_logprobs if self._echoes is not None else None, chunk.logprobs)
        return pieces.piece(with_top(joined, self._top_logprobs), text)


def _joined(prompt: Logprobs | None, output: Logprobs | None) -> Logprobs:
    empty = Logprobs([], [], [])
    first, second = prompt or empty, output or empty
    return Logprobs(first.chosen + second.chosen, first.top + second.top, first.requested + second.requested)
