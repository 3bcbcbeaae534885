"""Collect the chat events that readers write, and drop the white space around calls and reasoning."""

from __future__ import annotations

from collections.abc import Callable

from serve.calls.chat.events import (
    ChatEvent,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    new_call_id,
)


class Output:
    """Collects the events of one answer.

    White space next to a call is part of the call format and is dropped. Therefore white space at the end of a text is
    not written until further text follows.
    """

    def __init__(
        self,
        *,
        offers_tools: bool,
        max_calls: int | None = None,
        holds_reasoning: bool = False,
        shaped_id: Callable[[str, str, int], str] | None = None,
    ) -> None:
        self.num_calls = 0
        self._events: list[ChatEvent] = []
        self._pieces: list[str] = []  # texts of the last event, to which text may still be added
        self._kind: type[Content] | type[Reasoning] | type[ToolCallArguments] | None = None
        self._offers_tools = offers_tools
        self._max_calls = max_calls
        self._holds_reasoning = holds_reasoning  # whether reasoning is returned only when it is complete
        self._shaped_id = shaped_id  # computes a call's id from a new id, the call's name and its index
        self._space: list[str] = []
        self._wrote_arguments = False
        self._ids: set[str] = set()

    def take(self, *, final: bool = True) -> list[ChatEvent]:
        """Return the events since the last `take`. Adjacent events of one kind are merged."""
        if final or not (self._holds_reasoning and self._kind is Reasoning):
            self._end_event()
        events, self._events = self._events, []
        return events

    def _write(self, kind: type[Content] | type[Reasoning] | type[ToolCallArguments], text: str) -> None:
        if kind is not self._kind:
            self._end_event()
            self._kind = kind
        self._pieces.append(text)

    def _end_event(self) -> None:
        text = "".join(self._pieces)
        kind, self._kind = self._kind, None
        self._pieces = []
        if not text:
            return
        if kind is ToolCallArguments:
            self._events.append(ToolCallArguments(self.num_calls - 1, text))
        else:
            self._events.append(Reasoning(text) if kind is Reasoning else Content(text))

    # --- text ---

    def content(self, text: str) -> None:
        if not self._offers_tools:
            self._write(Content, text)
            return
        shown = text.rstrip()
        if shown:
            for space in self._space:
                self._write(Content, space)
            self._space.clear()
            self._write(Content, shown)
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def reasoning(self, text: str) -> None:
        shown = text.rstrip("\n")
        if shown:
            for space in self._space:
                self._write(Reasoning, space)
            self._space.clear()
            self._write(Reasoning, shown)
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def end_reasoning(self, *, cut_off: bool) -> None:
        """End the reasoning, and drop the line breaks before its closing mark.

        `cut_off`: no closing mark follows, so the line breaks are kept.
        """
        if cut_off:
            for space in self._space:
                self._write(Reasoning, space)
        self._space.clear()

    # --- calls ---

    @property
    def is_full(self) -> bool:
        """Whether the current call exceeds the maximum number of calls. Such calls are read but dropped."""
        return self._max_calls is not None and self.num_calls > self._max_calls

    def start(self, name: str, call_id: str | None = None) -> None:
        self._space.clear()
        self._end_event()
        self.num_calls += 1
        self._wrote_arguments = False
        if self.is_full:
            return
        if call_id is None or call_id in self._ids:
            call_id = new_call_id()
            if self._shaped_id is not None:
                call_id = self._shaped_id(call_id, name, self.num_calls - 1)
        self._ids.add(call_id)
        self._events.append(ToolCallStart(self.num_calls - 1, call_id, name))

    def arguments(self, text: str) -> None:
        if text and not self.is_full:
            self._wrote_arguments = True
            self._write(ToolCallArguments, text)

    def end_call(self) -> None:
        """End a call. If no arguments were written, write an empty object."""
        if not self._wrote_arguments:
            self.arguments("{}")

    def end(self) -> None:
        """End the answer. White space at its end is written if the answer has no calls, and dropped otherwise."""
        if not self.num_calls:
            for space in self._space:
                self._write(Content, space)
        self._space.clear()
