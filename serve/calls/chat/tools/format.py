"""Define the formats of tool calls, and read outputs that contain calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from serve.calls.chat.scan.output import Output
from serve.calls.chat.scan.source import Marks, Reader, Source
from serve.calls.chat.tools.offered import OfferedTools

Rendered = tuple[str, str]  # the text before and after the JSON of the arguments


@dataclass(frozen=True, slots=True)
class CallContext:
    """The source, output and tools that a `CallReader` works with."""

    source: Source
    output: Output
    tools: OfferedTools
    ends: Marks  # marks that end an incomplete call


# Converts a call's id to the form that the chat template requires. Arguments: an id, the call's name and its index.
ShapedId = Callable[[str, str, int], str]
# Reads one call, whose opening mark is already consumed. If the text is not a call, it returns False and writes
# nothing.
CallReader = Callable[[CallContext], Reader[bool]]


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """A format of tool calls. The `section` marks enclose all calls, the `call` marks enclose each call."""

    read: CallReader
    section_open: tuple[str, ...] = ()
    section_close: tuple[str, ...] = ()
    call_open: tuple[str, ...] = ()
    call_close: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()  # marks between two calls
    bare: bool = False  # whether the output may begin with a call without an opening mark
    # For grammars: the text before and after the arguments of a call to the named tool.
    rendered: Callable[[str], Rendered]
    # For grammars: the text before the first call, between two calls, and after the last call.
    rendered_all: tuple[str, str, str] = ("", "", "")
    vague: tuple[str, ...] = ()  # opening marks that begin a call only if an object follows
    arguments: str = "json"  # syntax of the arguments: "json", "python" or "tags" (the format's own syntax)
    parameters: Any = None  # the `Parameters` of the format if `arguments` is "tags"
    shaped_id: ShapedId | None = None  # None: the chat template accepts any id
    shown: tuple[str, ...] = field(default=())  # other special tokens whose text the parser needs

    @cached_property
    def openers(self) -> Marks:
        return Marks(tuple(dict.fromkeys(self.section_open + self.call_open)))

    @cached_property
    def distinct_openers(self) -> tuple[str, ...]:
        """The opening marks that do not occur in ordinary text, such as <tool_call>."""
        return tuple(
            mark for mark in dict.fromkeys(self.section_open + self.call_open) if mark[0] in "<[" and len(mark) > 1
        )

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
        return Marks(tuple(dict.fromkeys((*self.call_close, *self.section_close, "```"))))

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts of the format that may be special tokens."""
        return self.section_open + self.section_close + self.call_open + self.call_close + self.separators + self.shown


def read_calls(source: Source, output: Output, tools: OfferedTools, form: ToolFormat) -> Reader[None]:
    """Read content and calls until the text ends. Text that only looks like a call is content."""
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
    """Read a sequence of calls, and the section marks around it.

    The caller has started the source's trace at the first mark. `has_begun`: whether the first call's opening mark is
    already consumed.
    """
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
            yield from _skip_extra_brackets(context, form)
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


def _skip_extra_brackets(context: CallContext, form: ToolFormat) -> Reader[None]:
    """Skip brackets between the end of a call and its closing mark. If no mark follows, the brackets are content."""
    source = context.source
    source.trace()
    while (yield from source.peek()) in ("}", "]"):
        yield from source.next()
        yield from source.skip()
    is_closed = (yield from source.one_of(form.call_closers)) is not None
    rest = source.traced()
    if rest and not is_closed:
        context.output.content(rest)
