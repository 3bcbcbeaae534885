"""What a format of tool calls is, and how an output with calls is read, whatever the format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from serve.chat.scan.output import Output
from serve.chat.scan.source import Marks, Reader, Source
from serve.chat.tools.offered import OfferedTools

Rendered = tuple[str, str]  # what stands before and behind the JSON of the arguments


@dataclass(frozen=True, slots=True)
class CallContext:
    """What the reader of one call needs beside its text."""

    source: Source
    output: Output
    tools: OfferedTools
    ends: Marks  # where a call that was not completed ends


# The id that a chat template takes for a call: from an id, the call's name, and its index among the calls.
ShapedId = Callable[[str, str, int], str]
# Reads one call behind its opening mark. False: it is none, and nothing was written.
CallReader = Callable[[CallContext], Reader[bool]]


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How calls are written. The texts of `section` stand around all calls, those of `call` around each of them."""

    read: CallReader
    section_open: tuple[str, ...] = ()
    section_close: tuple[str, ...] = ()
    call_open: tuple[str, ...] = ()
    call_close: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()  # between two calls
    bare: bool = False  # a call may also begin the output without any mark
    # For enforcing calls by grammar: the texts around the arguments of a call to a tool.
    rendered: Callable[[str], Rendered]
    rendered_all: tuple[str, str, str] = ("", "", "")  # before, between and behind all calls
    vague: tuple[str, ...] = ()  # opening marks that are words as well, without an object behind them
    arguments: str = "json"  # or how parameters are written instead
    parameters: Any = None  # of the format's family, where arguments are not JSON
    shaped_id: ShapedId | None = None  # where the chat template takes no other ids of calls
    shown: tuple[str, ...] = field(default=())  # marks beside those above that must stay in the text

    @cached_property
    def openers(self) -> Marks:
        return Marks(tuple(dict.fromkeys(self.section_open + self.call_open)))

    @cached_property
    def section_openers(self) -> Marks:
        return Marks(self.section_open)

    @cached_property
    def call_openers(self) -> Marks:
        return Marks(self.call_open)

    @cached_property
    def call_closers(self) -> Marks:
        return Marks(self.call_close)

    @cached_property
    def section_closers(self) -> Marks:
        return Marks(self.section_close)

    @cached_property
    def between(self) -> Marks:
        return Marks(self.separators)

    @cached_property
    def ends(self) -> Marks:
        return Marks(tuple(dict.fromkeys(self.call_close + self.section_close)))

    @property
    def marks(self) -> tuple[str, ...]:
        """Every text of the format that may be a special token."""
        return (
            self.section_open
            + self.section_close
            + self.call_open
            + self.call_close
            + self.separators
            + self.shown
        )


def read_calls(source: Source, output: Output, tools: OfferedTools, form: ToolFormat) -> Reader[None]:
    """Read content and calls until the text ends. What looks like a call and is none is content."""
    context = CallContext(source, output, tools, form.ends)
    if form.bare:
        source.trace()
        yield from source.skip()
        first = yield from source.peek()
        if first == "{" or (first == "[" and first not in form.call_open):
            yield from _read_section(context, form, has_begun=True)
        else:
            output.content(source.traced())
    while True:
        mark = yield from source.until(form.openers, output.content)
        if mark is None:
            return
        source.trace(mark)
        yield from _read_section(context, form, has_begun=mark in form.call_open)


def _read_section(context: CallContext, form: ToolFormat, *, has_begun: bool) -> Reader[None]:
    """Read calls that follow each other. The source traces from the first mark on; `has_begun`: so has a call."""
    source, output = context.source, context.output
    while True:
        if not has_begun:
            yield from source.skip()
            while (yield from source.one_of(form.section_openers)) is not None:
                yield from source.skip()
            is_bare = form.bare and (yield from source.peek()) == "{"
            if form.call_open and not is_bare and (yield from source.one_of(form.call_openers)) is None:
                break
        if not (yield from form.read(context)):
            break
        yield from source.skip()
        if (yield from source.one_of(form.call_closers)) is None and form.call_close:
            yield from _too_many_brackets(context, form)
        source.trace()
        yield from source.skip()
        separator = yield from source.one_of(form.between)
        if separator is not None:
            yield from source.skip()
            has_begun = (yield from source.one_of(form.call_openers)) is not None or form.bare
            if has_begun:
                continue
            break
        has_begun = (yield from source.one_of(form.call_openers)) is not None
        has_begun = has_begun or (form.bare and (yield from source.peek()) == "{")
        if has_begun:
            continue
        if (yield from source.one_of(form.section_closers)) is not None:
            source.traced()
            return
        break
    output.content(source.traced())


def _too_many_brackets(context: CallContext, form: ToolFormat) -> Reader[None]:
    """Those between the end of a call and its closing mark say nothing; without the mark they are text."""
    source = context.source
    source.trace()
    while (yield from source.peek()) in ("}", "]"):
        yield from source.next()
        yield from source.skip()
    is_closed = (yield from source.one_of(form.call_closers)) is not None
    rest = source.traced()
    if rest and not is_closed:
        context.output.content(rest)
