"""Parse the text of one output into chat events, independent of how the text is split into pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runtime.request import Chunk
from serve.calls.chat.events import ChatEvent, Content, Reasoning
from serve.calls.chat.harmony import THOUGHT_CLOSE, THOUGHT_OPEN, read_harmony
from serve.calls.chat.reasoning import ReasoningFormat, read_reasoning, tokens_between
from serve.calls.chat.scan.output import Output
from serve.calls.chat.scan.source import Marks, Reader, Source
from serve.calls.chat.tools.format import ToolFormat, read_calls
from serve.calls.chat.tools.offered import OfferedTools

_NO_MARKS = Marks(())


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSettings:
    """The formats that an output may use, and the parts that the client wants. Shared by a request's choices."""

    reasoning: ReasoningFormat | None = None
    is_open: bool = False  # whether the output begins inside the reasoning block
    close_id: int | None = None  # id of the closing mark of the reasoning block, or None if it is no single token
    open_id: int | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    include_reasoning: bool = True
    calls: ToolFormat | None = None
    tools: OfferedTools = field(default_factory=OfferedTools)
    harmony: bool = False
    max_calls: int | None = None
    token_bytes: Mapping[int, bytes] | None = None  # the bytes of each token id

    @property
    def parses(self) -> bool:
        return self.reasoning is not None or self.calls is not None or self.harmony


class OutputParser:
    """Parses the output of one choice, which may arrive in pieces or whole.

    The concatenated content, reasoning and calls do not depend on how the text is split. If the settings have no
    format, all text is content.
    """

    def __init__(self, settings: ParserSettings | None = None) -> None:
        self._settings = settings if settings is not None and settings.parses else None
        self._counter = _ReasoningCounter(settings) if self._settings else None
        if self._settings is not None:
            self._source = Source()
            self._output = Output(
                offers_tools=self._settings.calls is not None or self._settings.harmony,
                max_calls=self._settings.max_calls,
                holds_reasoning=not self._settings.stream_reasoning,
                shaped_id=self._settings.calls.shaped_id if self._settings.calls is not None else None,
            )
            self._reader: Reader[None] | None = _read(self._source, self._output, self._settings)

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""
        return self._output.num_calls if self._settings else 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens in the chunks so far."""
        return self._counter.num_tokens if self._counter else 0

    def feed(self, text: str, *, final: bool = False) -> list[ChatEvent]:
        """Parse further text, and return the new events that later text cannot change.

        `final`: the text ends here, and all remaining events are returned. Raises `ValueError` after the final text.
        """
        if self._settings is None:
            return [Content(text)] if text else []
        if self._reader is None:
            raise ValueError("text was fed after the final text")
        self._source.add(text, final=final)
        try:
            next(self._reader)
        except StopIteration:
            self._reader = None
        if final:
            self._reader = None
            self._output.end()
        events = self._output.take(final=final)
        if self._settings.include_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]

    def feed_chunk(self, chunk: Chunk) -> list[ChatEvent]:
        """Parse a chunk of an output stream, count its reasoning tokens, and return the new events, as `feed` does."""
        final = chunk.finish is not None
        events = self.feed(chunk.text, final=final)
        if self._counter is not None:
            self._counter.add(chunk.ids, final=final)
        return events


def _read(source: Source, output: Output, settings: ParserSettings) -> Reader[None]:
    """Read a complete answer with the readers of its formats, and write its parts to `output`."""
    if settings.harmony:
        yield from read_harmony(
            source,
            output,
            separate=settings.separate_reasoning,
            offers_tools=bool(settings.tools.by_name),
        )
        return
    if settings.reasoning is not None:
        yield from read_reasoning(
            source,
            output,
            settings.reasoning,
            is_open=settings.is_open,
            separate=settings.separate_reasoning,
            call_marks=settings.calls.distinct_openers if settings.calls is not None else (),
        )
    if settings.calls is not None:
        yield from read_calls(source, output, settings.tools, settings.calls)
    else:
        yield from source.until(_NO_MARKS, output.content)


class _ReasoningCounter:
    """Counts the tokens of the reasoning, including the closing token."""

    def __init__(self, settings: ParserSettings | None) -> None:
        self.num_tokens = 0
        self._settings = settings or ParserSettings()
        self._by_id = self._settings.close_id is not None and not self._settings.harmony
        self._is_open = self._settings.is_open
        self._is_done = False
        self._ids: list[int] = []

    def add(self, ids: Sequence[int], *, final: bool) -> None:
        if not self._by_id:
            self._ids += ids
            if final:
                self._count_bytes()
            return
        if self._is_done:
            return
        self._is_open = self._is_open or self._settings.open_id in ids
        if not self._is_open:
            return
        close_id = self._settings.close_id
        self._is_done = close_id in ids
        self.num_tokens += ids.index(close_id) + 1 if close_id is not None and self._is_done else len(ids)

    def _count_bytes(self) -> None:
        settings, form = self._settings, self._settings.reasoning
        if settings.token_bytes is None or (form is None and not settings.harmony):
            return
        self.num_tokens = tokens_between(
            self._ids,
            settings.token_bytes,
            THOUGHT_OPEN if form is None else form.open.strip(),
            THOUGHT_CLOSE if form is None else form.close.strip(),
            is_open=settings.is_open,
        )
