"""How each kind of server is asked, and what its events say. Pure functions on dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runtime.errors import ConfigurationError
from serve.bench.workload import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What every request of a run has in common."""

    model: str | None
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)  # merged over the body, last


class Event(NamedTuple):
    """What one streamed event says. Counts are totals of the request so far, None where it does not say."""

    text: str = ""  # new text, or all text so far when the protocol is cumulative
    produced: bool = False  # carries output
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finished: bool = False  # a finish reason
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Backend:
    """A kind of server: where to post, what to post, how to read an event."""

    path: str
    takes_ids: bool
    takes_messages: bool
    cumulative: bool  # events repeat the text from its start
    body: Callable[[Prompt, Asking], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], Event]

    def ask(self, prompt: Prompt, asking: Asking) -> dict[str, Any]:
        """The JSON body for `prompt`. Raises `ConfigurationError` when this kind of server cannot take it."""
        if prompt.ids is not None and not self.takes_ids:
            raise ConfigurationError(f"{self.path} cannot take token ids; use another --backend.")
        if prompt.messages is not None and not self.takes_messages:
            raise ConfigurationError(f"{self.path} cannot take messages; use --backend openai-chat.")
        return {**self.body(prompt, asking), **asking.extra}


def _openai_body(prompt: Prompt, asking: Asking) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": asking.model,
        "max_tokens": prompt.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if asking.ignore_eos:
        body["ignore_eos"] = True  # an extension: off with --disable-ignore-eos
    return body


def _completion_body(prompt: Prompt, asking: Asking) -> dict[str, Any]:
    content = prompt.text if prompt.ids is None else list(prompt.ids)
    return {**_openai_body(prompt, asking), "prompt": content}


def _chat_body(prompt: Prompt, asking: Asking) -> dict[str, Any]:
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    return {**_openai_body(prompt, asking), "messages": list(messages)}


def _native_body(prompt: Prompt, asking: Asking) -> dict[str, Any]:
    what = {"text": prompt.text} if prompt.ids is None else {"input_ids": list(prompt.ids)}
    sampling = {
        "temperature": 0.0,
        "max_new_tokens": prompt.output_tokens,
        "ignore_eos": asking.ignore_eos,
    }
    return {**what, "sampling_params": sampling, "stream": True}


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
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    calls = (call.get("function") or {} for call in delta.get("tool_calls") or ())
    arguments = "".join((call.get("name") or "") + (call.get("arguments") or "") for call in calls)
    return thought + (delta.get("content") or "") + arguments


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
