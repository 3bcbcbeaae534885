"""Build the `response` object, and the stream of its numbered events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson

from runtime.request import Chunk, Finish, Usage
from serve.calls.chat.parts import Closed, Grown, Opened, Part, PartAssembler, PartEvent
from serve.calls.chat.prepare import PreparedChat
from serve.calls.logprobs import chat_logprobs
from serve.http.errors import Failure
from serve.http.sse import Framing

if TYPE_CHECKING:
    from runtime.tokenizer.tokenizer import Tokenizer

FRAMING = Framing(done=b"")
_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
ABORTED = {"code": "server_error", "message": "The request was aborted."}


class Response:
    """One response, built from the chunks of its output. `head` has the fields that do not change."""

    def __init__(
        self,
        head: Mapping[str, Any],
        prepared: PreparedChat,
        tokenizer: Tokenizer | None,
        custom_tools: frozenset[str] = frozenset(),
        namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> None:
        self._head = head
        self._namespaces = namespaces
        self._custom_tools = custom_tools
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._parser = prepared.new_parser()
        self._assembler = PartAssembler()
        self._ids: list[str] = []
        # Index of a text part -> log-probabilities of the part.
        self._logprobs: dict[int, list[dict[str, Any]]] = {}
        self._finish: Finish | None = None
        self._usage: Usage | None = None

    def feed(self, chunk: Chunk) -> list[tuple[PartEvent, list[dict[str, Any]]]]:
        """Return the events of a chunk, each as (part event, log-probabilities of the event's text).

        The log-probabilities are an empty list for an event without text.
        """
        self._usage = chunk.usage
        self._finish = chunk.finish or self._finish
        part_events = self._assembler.feed(self._parser.feed_chunk(chunk))
        self._name_parts()
        logprobs = self._logprobs_of(chunk, part_events)
        events = []
        for event in part_events:
            event_logprobs = logprobs if isinstance(event, Grown) and event.part.kind == "text" else []
            if event_logprobs:
                self._logprobs.setdefault(event.part.index, []).extend(event_logprobs)
                logprobs = []
            events.append((event, event_logprobs))
        return events

    def end(self) -> list[PartEvent]:
        return self._assembler.end()

    @property
    def parts(self) -> Sequence[Part]:
        return self._assembler.parts

    def _name_parts(self) -> None:
        for part in self._assembler.parts[len(self._ids) :]:
            prefix = "ctc" if self.is_custom(part) else _PREFIXES[part.kind]
            self._ids.append(f"{prefix}_{uuid4().hex}")

    def is_custom(self, part: Part) -> bool:
        """Whether a part is the call of a custom tool, whose input is free text."""
        return part.kind == "call" and part.name in self._custom_tools

    @property
    def summarizes(self) -> bool:
        """Whether the request asks for a summary of the reasoning, which is then the complete reasoning."""
        return self._head["reasoning"]["summary"] is not None

    def _logprobs_of(self, chunk: Chunk, events: Sequence[PartEvent]) -> list[dict[str, Any]]:
        """Return the log-probabilities of a chunk's text, or [] if the chunk also has reasoning or calls."""
        if chunk.logprobs is None or self._tokenizer is None:
            return []
        if any(event.part.kind != "text" for event in events):
            return []
        return chat_logprobs(chunk.logprobs, self._tokenizer)["content"]

    # --- as JSON ---

    def begun(self) -> dict[str, Any]:
        """Return the `response` object before its first item, with the status in_progress."""
        return self._object("in_progress", [], None)

    def ended(self, *, cancelled: bool = False) -> dict[str, Any]:
        """Return the `response` object after its last item, with the final status."""
        finish = self._finish or Finish("abort")
        if finish.kind == "abort":
            status = "cancelled" if cancelled else "failed"
        else:
            status = "incomplete" if finish.kind == "length" else "completed"
        items = [self.item(part) for part in self.parts]
        if items and status != "completed":
            items[-1]["status"] = "incomplete"
        changes: dict[str, Any] = {}
        if status == "incomplete":
            changes["incomplete_details"] = {"reason": "max_output_tokens"}
        elif status == "completed":
            changes["completed_at"] = int(time.time())
        elif status == "failed":
            changes["error"] = ABORTED
        return {**self._object(status, items, self._usage), **changes}

    def failed(self, failure: Failure) -> dict[str, Any]:
        """Return the `response` object after an error, with the status failed."""
        code = "server_error" if failure.status >= 500 else "invalid_prompt"
        items = [{**self.item(part), "status": "incomplete"} for part in self.parts]
        error = {"code": code, "message": failure.message}
        return {**self._object("failed", items, self._usage), "error": error}

    def message(self) -> dict[str, Any]:
        """Return the answer as a message of the conversation. Truncated calls are left out."""
        message: dict[str, Any] = {"role": "assistant", "content": self._joined("text")}
        if reasoning := self._joined("reasoning"):
            message["reasoning_content"] = reasoning
        calls = [
            {
                "id": part.call_id,
                "type": "function",
                "function": {"name": part.name, "arguments": part.text or "{}"},
            }
            for part in self.parts
            if part.kind == "call" and _is_object(part.text or "{}")
        ]
        return {**message, "tool_calls": calls} if calls else message

    def _joined(self, kind: str) -> str:
        return "".join(part.text for part in self.parts if part.kind == kind)

    def _object(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        counted = None if usage is None else _usage(usage, self._parser.num_reasoning_tokens)
        return {**self._head, "status": status, "output": output, "usage": counted}

    def item(self, part: Part, status: str = "completed", *, empty: bool = False) -> dict[str, Any]:
        """Return a part as an output item. `empty`: without its text, for the event that opens the item."""
        common = {"id": self._ids[part.index], "status": status}
        content = [] if empty else [self.content(part)]
        match part.kind:
            case "text":
                return {**common, "type": "message", "role": "assistant", "content": content}
            case "reasoning":
                return {
                    **common,
                    "type": "reasoning",
                    "summary": [] if empty or not self.summarizes else [summary_of(part)],
                    "content": content,
                    "encrypted_content": None,
                }
            case "call":
                text = "" if empty else part.text
                if self.is_custom(part):
                    called = {"call_id": part.call_id, "name": part.name, "input": "" if empty else input_of(part)}
                    return {**common, "type": "custom_tool_call", **called}
                named = {"call_id": part.call_id, "name": part.name, "arguments": text}
                if part.name in self._namespaces:
                    named["namespace"], named["name"] = self._namespaces[part.name]
                return {**common, "type": "function_call", **named}

    def content(self, part: Part, *, empty: bool = False) -> dict[str, Any]:
        """Return the content part of a text or reasoning item, without its text if `empty` is true."""
        text = "" if empty else part.text
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if empty else self._logprobs.get(part.index, [])
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def location(self, part: Part) -> dict[str, Any]:
        """Return the fields that identify the item to which an event belongs."""
        return {"item_id": self._ids[part.index], "output_index": part.index}


class ResponseEvents:
    """Events of one streamed response (see serve.http.sse.Encoder). At the end, calls `keep(response object)`."""

    def __init__(self, response: Response, keep: Callable[[dict[str, Any]], None]) -> None:
        self._response = response
        self._keep = keep
        self._number = 0
        self._begun = False

    def events(self, request_index: int, chunks: Sequence[Chunk]) -> bytes:
        written: list[bytes] = []
        if not self._begun:
            self._begun = True
            written.append(self._event("response.created", response=self._response.begun()))
            written.append(self._event("response.in_progress", response=self._response.begun()))
        for chunk in chunks:
            for event, logprobs in self._response.feed(chunk):
                written.append(self._part_event(event, logprobs))
        return b"".join(written)

    def closing(self) -> bytes:
        ended = self._response.ended()
        status = "completed" if ended["status"] == "completed" else "incomplete"
        written = [self._closed(event.part, status) for event in self._response.end()]
        self._keep(ended)
        return b"".join([*written, self._event(f"response.{ended['status']}", response=ended)])

    def failing(self, failure: Failure) -> bytes:
        """Return the event that ends a started stream with an error."""
        return self._event("response.failed", response=self._response.failed(failure))

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"

    def _part_event(self, event: PartEvent, logprobs: list[dict[str, Any]]) -> bytes:
        match event:
            case Opened(part):
                return self._opened(part)
            case Grown(part, text):
                return self._grown(part, text, logprobs)
            case Closed(part):
                return self._closed(part)

    def _opened(self, part: Part) -> bytes:
        response = self._response
        item = response.item(part, "in_progress", empty=True)
        added = self._event("response.output_item.added", output_index=part.index, item=item)
        if part.kind == "call":
            return added
        if part.kind == "reasoning" and response.summarizes:
            location = {**response.location(part), "summary_index": 0}
            empty = {"type": "summary_text", "text": ""}
            added += self._event("response.reasoning_summary_part.added", **location, part=empty)
        content = response.content(part, empty=True)
        location = {**response.location(part), "content_index": 0}
        return added + self._event("response.content_part.added", **location, part=content)

    def _grown(self, part: Part, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        location = self._response.location(part)
        match part.kind:
            case "text":
                location["content_index"] = 0
                return self._event("response.output_text.delta", **location, delta=text, logprobs=logprobs)
            case "reasoning":
                grown = self._event("response.reasoning_text.delta", **location, content_index=0, delta=text)
                if self._response.summarizes:
                    kind = "response.reasoning_summary_text.delta"
                    grown += self._event(kind, **location, summary_index=0, delta=text)
                return grown
            case "call":
                if self._response.is_custom(part):  # the input of a custom tool is known only when the call is complete
                    return b""
                return self._event("response.function_call_arguments.delta", **location, delta=text)

    def _closed(self, part: Part, status: str = "completed") -> bytes:
        response, location = self._response, self._response.location(part)
        item = response.item(part, status)
        done = [self._done(part, location, item)]
        if part.kind != "call":
            content = response.content(part)
            done.append(self._event("response.content_part.done", **location, content_index=0, part=content))
        done.append(self._event("response.output_item.done", output_index=part.index, item=item))
        return b"".join(done)

    def _done(self, part: Part, location: Mapping[str, Any], item: Mapping[str, Any]) -> bytes:
        if self._response.is_custom(part):
            kind, text = "response.custom_tool_call_input", input_of(part)
            return self._event(f"{kind}.delta", **location, delta=text) + self._event(
                f"{kind}.done", **location, input=text
            )
        if part.kind == "call":
            kind = "response.function_call_arguments.done"
            return self._event(kind, **location, name=item["name"], arguments=part.text)
        if part.kind == "reasoning":
            done = self._event("response.reasoning_text.done", **location, content_index=0, text=part.text)
            if self._response.summarizes:
                place = {**location, "summary_index": 0}
                done += self._event("response.reasoning_summary_text.done", **place, text=part.text)
                done += self._event("response.reasoning_summary_part.done", **place, part=summary_of(part))
            return done
        logprobs = item["content"][0]["logprobs"]
        fields = {**location, "content_index": 0, "text": part.text, "logprobs": logprobs}
        return self._event("response.output_text.done", **fields)


def summary_of(part: Part) -> dict[str, Any]:
    """Return the complete reasoning in the format of a summary part."""
    return {"type": "summary_text", "text": part.text}


def input_of(part: Part) -> str:
    """Return the input of a custom tool's call. If the call was truncated, return its JSON text so far."""
    value = (part.arguments or {}).get("input")
    return value if isinstance(value, str) else part.text


def _usage(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt + usage.output,
    }


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False
