"""An answer as a row of parts: text, reasoning, calls. Protocols that open and close each part are written from this.

parts = PartAssembler()
for event in parts.feed(chat_events): ...     # Opened, Grown, ..., Closed
for event in parts.end(): ...                 # Closed, if something is open
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from serve.chat.events import ChatEvent, Content, Reasoning, ToolCallArguments, ToolCallStart

PartKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Part:
    """One part of an answer. `index` counts all parts; `call_id` and `name` belong to calls."""

    kind: PartKind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text or reasoning so far; of a call the JSON text of its arguments."""
        return "".join(self.pieces)


class Opened(NamedTuple):
    part: Part


class Grown(NamedTuple):
    part: Part
    text: str  # what is new


class Closed(NamedTuple):
    part: Part


PartEvent = Opened | Grown | Closed


class PartAssembler:
    """Groups the events of one choice. `parts` holds what has begun; one part at most is open, the last."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._is_open = False

    def feed(self, events: Iterable[ChatEvent]) -> list[PartEvent]:
        """What these events open, extend and close."""
        found: list[PartEvent] = []
        for event in events:
            match event:
                case Content(text):
                    self._extend(found, "text", text)
                case Reasoning(text):
                    self._extend(found, "reasoning", text)
                case ToolCallStart(_, call_id, name):
                    self._open(found, Part("call", len(self.parts), call_id, name))
                case ToolCallArguments(_, text):
                    self._extend(found, "call", text)
        return found

    def end(self) -> list[PartEvent]:
        """Close what is open."""
        found: list[PartEvent] = []
        self._close(found)
        return found

    def _extend(self, found: list[PartEvent], kind: PartKind, text: str) -> None:
        if not text:
            return
        if not self._is_open or self.parts[-1].kind != kind:
            self._open(found, Part(kind, len(self.parts)))
        part = self.parts[-1]
        part.pieces.append(text)
        found.append(Grown(part, text))

    def _open(self, found: list[PartEvent], part: Part) -> None:
        self._close(found)
        self.parts.append(part)
        self._is_open = True
        found.append(Opened(part))

    def _close(self, found: list[PartEvent]) -> None:
        if self._is_open:
            self._is_open = False
            found.append(Closed(self.parts[-1]))


def parts_of(events: Iterable[ChatEvent]) -> list[Part]:
    """The parts of a whole answer."""
    assembler = PartAssembler()
    assembler.feed(events)
    return assembler.parts
