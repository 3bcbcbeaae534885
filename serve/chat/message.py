"""A whole answer: what its events add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from serve.chat.events import ChatEvent, Content, Reasoning, ToolCallArguments, ToolCallStart


@dataclass(slots=True)
class ToolCall:
    """One complete call. `arguments` is JSON text unless the output was cut off."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class AssistantMessage:
    """The answer of one choice. None: there was none."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


def collect(events: Iterable[ChatEvent]) -> AssistantMessage:
    """The message that these events write."""
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
