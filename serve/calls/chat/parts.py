"""Group the events of an answer into parts (text, reasoning, calls), for protocols that open and close each part.

parts = PartAssembler()
for event in parts.feed(chat_events): ...     # Opened, Grown, ..., Closed
for event in parts.end(): ...                 # Closed, if a part is open
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import orjson

from serve.calls.chat.events import ChatEvent, Content, Reasoning, ToolCallArguments, ToolCallStart

PartKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Part:
    """One part of an answer. `index` is its position among all parts. Only calls have `call_id` and `name`."""

    kind: PartKind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text or reasoning so far; for a call, the JSON text of its arguments."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The parsed arguments of a call. None if they were truncated."""
        try:
            arguments = orjson.loads(self.text or "{}")
        except orjson.JSONDecodeError:
            return None
        return arguments if isinstance(arguments, dict) else None


class Opened(NamedTuple):
    part: Part


class Grown(NamedTuple):
    part: Part
    text: str  # the added text


class Closed(NamedTuple):
    part: Part


PartEvent = Opened | Grown | Closed


class PartAssembler:
    """Groups the events of one choice into parts. `parts` holds all parts so far. Only the last part can be open."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._is_open = False

    def feed(self, events: Iterable[ChatEvent]) -> list[PartEvent]:
        """Add chat events, and return the part events (`Opened`, `Grown`, `Closed`) that they cause."""
        part_events: list[PartEvent] = []
        for event in events:
            match event:
                case Content(text):
                    self._extend(part_events, "text", text)
                case Reasoning(text):
                    self._extend(part_events, "reasoning", text)
                case ToolCallStart(_, call_id, name):
                    self._open(part_events, Part("call", len(self.parts), call_id, name))
                case ToolCallArguments(_, text):
                    self._extend(part_events, "call", text)
        return part_events

    def end(self) -> list[PartEvent]:
        """Close the open part, if any."""
        part_events: list[PartEvent] = []
        self._close(part_events)
        return part_events

    def _extend(self, part_events: list[PartEvent], kind: PartKind, text: str) -> None:
        if not text:
            return
        if not self._is_open or self.parts[-1].kind != kind:
            self._open(part_events, Part(kind, len(self.parts)))
        part = self.parts[-1]
        part.pieces.append(text)
        part_events.append(Grown(part, text))

    def _open(self, part_events: list[PartEvent], part: Part) -> None:
        self._close(part_events)
        self.parts.append(part)
        self._is_open = True
        part_events.append(Opened(part))

    def _close(self, part_events: list[PartEvent]) -> None:
        if self._is_open:
            self._is_open = False
            part_events.append(Closed(self.parts[-1]))


def parts_of(events: Iterable[ChatEvent]) -> list[Part]:
    """Return the parts of a complete answer."""
    assembler = PartAssembler()
    assembler.feed(events)
    return assembler.parts
