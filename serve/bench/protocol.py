"""How each kind of server is measured: its request bodies, and the times and token counts of its stream events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from runtime.errors import ConfigurationError
from serve.bench.client import Received, Response
from serve.bench.metrics import Outcome
from serve.bench.workload import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """Settings of all requests of a run."""

    model: str | None
    ignore_eos: bool = True
    # further fields of each body, which replace fields of the same name
    extra: Mapping[str, Any] = field(default_factory=dict)


class Event(NamedTuple):
    """The content of one streamed event. Token counts are totals of the request so far, or None if not reported."""

    text: str = ""  # new text, or the whole text so far if the protocol is cumulative
    produced: bool = False  # whether the event carries output
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finished: bool = False  # whether the event has a finish reason
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Backend:
    """A kind of server: its route, its request bodies and its events."""

    path: str
    takes_ids: bool
    takes_messages: bool
    cumulative: bool  # whether each event repeats the whole text so far
    body: Callable[[Prompt, RequestDefaults], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], Event]

    def request_body(self, prompt: Prompt, defaults: RequestDefaults) -> dict[str, Any]:
        """Return the JSON body for `prompt`.

        Raises `ConfigurationError` if this kind of server does not accept token ids or messages as prompts.
        """
        if prompt.ids is not None and not self.takes_ids:
            raise ConfigurationError(f"{self.path} does not accept token ids; use another --backend.")
        if prompt.messages is not None and not self.takes_messages:
            raise ConfigurationError(f"{self.path} does not accept messages; use --backend openai-chat.")
        return {**self.body(prompt, defaults), **defaults.extra}


def _openai_body(prompt: Prompt, defaults: RequestDefaults) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": defaults.model,
        "max_tokens": prompt.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if defaults.ignore_eos:
        body["ignore_eos"] = True  # an extension of OpenAI's API; --disable-ignore-eos leaves it out
    return body


def _completion_body(prompt: Prompt, defaults: RequestDefaults) -> dict[str, Any]:
    content = prompt.text if prompt.ids is None else list(prompt.ids)
    return {**_openai_body(prompt, defaults), "prompt": content}


def _chat_body(prompt: Prompt, defaults: RequestDefaults) -> dict[str, Any]:
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    return {**_openai_body(prompt, defaults), "messages": list(messages)}


def _native_body(prompt: Prompt, defaults: RequestDefaults) -> dict[str, Any]:
    content = {"text": prompt.text} if prompt.ids is None else {"input_ids": list(prompt.ids)}
    sampling = {
        "temperature": 0.0,
        "max_new_tokens": prompt.output_tokens,
        "ignore_eos": defaults.ignore_eos,
    }
    return {**content, "sampling_params": sampling, "stream": True}


def _error_text(event: Mapping[str, Any]) -> str | None:
    error = event.get("error")
    if error is None and event.get("object") == "error":
        error = event
    if isinstance(error, Mapping):
        return str(error.get("message", error))
    return None if error is None else str(error)


def _read_choice(event: Mapping[str, Any], text_of: Callable[[Mapping[str, Any]], str]) -> Event:
    if (error := _error_text(event)) is not None:
        return Event(error=error)
    choices = event.get("choices") or ()
    text = text_of(choices[0]) if choices else ""
    usage = event.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Event(
        text=text,
        produced=bool(text),
        output_tokens=usage.get("completion_tokens"),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=details.get("cached_tokens"),
        finished=bool(choices) and choices[0].get("finish_reason") is not None,
    )


def _chat_text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    calls = (call.get("function") or {} for call in delta.get("tool_calls") or ())
    arguments = "".join((call.get("name") or "") + (call.get("arguments") or "") for call in calls)
    return reasoning + (delta.get("content") or "") + arguments


def _completion_text(choice: Mapping[str, Any]) -> str:
    return choice.get("text") or ""


def _read_native(event: Mapping[str, Any]) -> Event:
    if (error := _error_text(event)) is not None:
        return Event(error=error)
    meta = event.get("meta_info") or {}
    finish = meta.get("finish_reason")
    if isinstance(finish, Mapping) and finish.get("type") == "abort":
        return Event(error=str(finish.get("message", "aborted")))
    text = event.get("text") or ""
    return Event(
        text=text,
        produced=bool(text or event.get("output_ids")),
        output_tokens=meta.get("completion_tokens"),
        prompt_tokens=meta.get("prompt_tokens"),
        cached_tokens=meta.get("cached_tokens"),
        finished=finish is not None,
    )


BACKENDS: Mapping[str, Backend] = {
    "openai-chat": Backend(
        "/v1/chat/completions", False, True, False, _chat_body, lambda event: _read_choice(event, _chat_text)
    ),
    "openai": Backend(
        "/v1/completions", True, False, False, _completion_body,
        lambda event: _read_choice(event, _completion_text),
    ),
    "native": Backend("/generate", True, False, True, _native_body, _read_native),
}  # fmt: skip


MAX_ERROR_CHARS = 200
DONE = b"[DONE]"


class StreamError(Exception):
    """Raised if the response is not a valid stream of events, or reports an error."""


class Stamped(NamedTuple):
    """The data of one server-sent event, and the time at which its last byte was read."""

    at_s: float
    data: bytes


def split_events(received: Iterable[Received]) -> list[Stamped]:
    """Split a body into server-sent events. A received part may contain several events, or only a part of one.

    Fields other than `data` are skipped. An incomplete event at the end is dropped, as the format's specification
    requires.
    """
    events: list[Stamped] = []
    data: list[bytes] = []
    rest = b""
    for at_s, part in received:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                events.append(Stamped(at_s, b"\n".join(data)))
                data.clear()
    return events


class Timeline:
    """Token times of one request, from its events in order.

    If an event has k new tokens, the time since the previous event counts as k inter-token latencies, each a k-th of
    that time. k is the increase of the token count that the server reports, or 1 if an event reports no count.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.first_s: float | None = None
        self.last_s = 0.0
        self.gaps_s: list[float] = []
        self.text = ""
        self.seen_tokens = 0  # number of tokens added so far
        self.output_tokens: int | None = None  # latest count of output tokens that the server reported, or None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finished = False

    def add(self, at_s: float, event: Mapping[str, Any]) -> None:
        """Add one event. Raises `StreamError` with the server's message if the event reports an error."""
        parsed = self._backend.read(event)
        if parsed.error is not None:
            raise StreamError(parsed.error[:MAX_ERROR_CHARS])
        self.finished = self.finished or parsed.finished
        for name in ("output_tokens", "prompt_tokens", "cached_tokens"):
            if (value := getattr(parsed, name)) is not None:
                setattr(self, name, value)
        if parsed.text:
            self.text = parsed.text if self._backend.cumulative else self.text + parsed.text
        if parsed.produced:
            self._add_tokens(at_s, 1 if parsed.output_tokens is None else parsed.output_tokens - self.seen_tokens)

    def _add_tokens(self, at_s: float, num: int) -> None:
        if num < 1:
            return
        if self.first_s is None:
            self.first_s = at_s
        else:
            self.gaps_s.extend([(at_s - self.last_s) / num] * num)
        self.last_s = at_s
        self.seen_tokens += num


def observe(
    prompt: Prompt,
    response: Response,
    backend: Backend,
    *,
    sent_s: float,
    start_s: float,
    count: Callable[[str], int] | None = None,
) -> Outcome:
    """Return the outcome of one request. If the server answered with an error, it is in the outcome's `error`.

    `sent_s` and `start_s` (the start of the run) are `time.perf_counter` values. The number of output tokens is the
    count that the server reports, otherwise `count(text)`, or the number of events if `count` is None.
    """
    timeline = Timeline(backend)
    try:
        _read_stream(timeline, response)
    except StreamError as error:
        return failed(prompt, str(error), sent_s=sent_s, ended_s=response.ended_s, start_s=start_s)
    output = timeline.output_tokens
    if output is None:
        output = count(timeline.text) if count is not None else timeline.seen_tokens
    first_s = sent_s if timeline.first_s is None else timeline.first_s
    return Outcome(
        started_s=sent_s - start_s,
        e2e_s=response.ended_s - sent_s,
        ttft_s=first_s - sent_s,
        decode_s=timeline.last_s - first_s,
        itl_s=tuple(timeline.gaps_s),
        prompt_tokens=prompt.prompt_tokens or 0 if timeline.prompt_tokens is None else timeline.prompt_tokens,
        output_tokens=output,
        cached_tokens=timeline.cached_tokens,
        text=timeline.text,
    )


def _read_stream(timeline: Timeline, response: Response) -> None:
    if response.status != 200:
        words = response.body[:MAX_ERROR_CHARS].decode("utf-8", errors="replace")
        raise StreamError(f"HTTP {response.status}: {words}")
    done = False
    for at_s, data in split_events(response.received):
        if data == DONE:
            done = True
            break
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise StreamError(f"an event is not JSON: {data[:80]!r}") from error
        if not isinstance(event, dict):
            raise StreamError(f"an event is not an object: {data[:80]!r}")
        timeline.add(at_s, event)
    if timeline.first_s is None:
        raise StreamError("the response has no output")
    if not (done or timeline.finished):
        raise StreamError("the stream ended before it was finished")


def failed(prompt: Prompt, error: str, *, sent_s: float, ended_s: float, start_s: float) -> Outcome:
    """Return the outcome of a request without a usable response."""
    return Outcome(
        started_s=sent_s - start_s,
        e2e_s=max(ended_s - sent_s, 0.0),
        prompt_tokens=prompt.prompt_tokens or 0,
        error=error,
    )
