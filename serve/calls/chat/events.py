"""Events of a chat answer (text, reasoning, tool calls), and the complete message that they form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import uuid4


class Content(NamedTuple):
    """The next piece of the answer's text."""

    text: str


class Reasoning(NamedTuple):
    """The next piece of the model's reasoning."""

    text: str


class ToolCallStart(NamedTuple):
    """The start of a tool call. Its arguments follow in pieces, until the next call starts or the answer ends."""

    index: int  # number of the call within this answer, from 0
    id: str  # unique
    name: str


class ToolCallArguments(NamedTuple):
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


ChatEvent = Content | Reasoning | ToolCallStart | ToolCallArguments


def new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


@dataclass(slots=True)
class ToolCall:
    """One complete call. `arguments` is JSON text, which is incomplete if the output was truncated."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class AssistantMessage:
    """The complete answer of one choice. `content` or `reasoning` is None if the answer has none."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


def collect(events: Iterable[ChatEvent]) -> AssistantMessage:
    """Return the message that these events form."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, tuple[ToolCallStart, list[str]]] = {}
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart(index):
                calls[index] = (event, [])
            case ToolCallArguments(index, text):
                calls[index][1].append(text)
    return AssistantMessage(
        "".join(content) or None,
        "".join(reasoning) or None,
        [ToolCall(start.id, start.name, "".join(pieces)) for start, pieces in calls.values()],
    )
