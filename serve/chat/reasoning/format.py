"""What a format of reasoning is, and how an output that may begin with reasoning is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from serve.chat.scan.output import Output
from serve.chat.scan.source import Marks, Reader, Sink, Source


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """The marks around the block that an output may begin with."""

    open: str
    close: str
    forced: bool = False  # the block is open from the first token on, unless the template closed it
    also_ends: tuple[str, ...] = ()  # marks that end the block too, and belong to what follows

    @cached_property
    def opener(self) -> Marks:
        return Marks((self.open,))

    @cached_property
    def ends(self) -> Marks:
        return Marks((self.close, *self.also_ends))

    @property
    def marks(self) -> tuple[str, ...]:
        """Every text of the format that may be a special token."""
        return (self.open.strip(), self.close.strip(), *self.also_ends)

    def closes_unopened(self, text: str) -> bool:
        """Whether a block ends in an output that did not open it, which then its prompt did."""
        place = text.find(self.close)
        return place >= 0 and self.open not in text[:place]

    def is_closed(self, prompt: str) -> bool:
        """Whether the prompt ends with a block, so that no other follows."""
        return prompt.rstrip().endswith(self.close.rstrip())

    def is_open(self, prompt: str, *, continues: bool = False) -> bool:
        """Whether an output that follows this prompt begins within the block.

        `continues`: the output goes on with the prompt's last message.
        """
        end = prompt.rstrip()
        if end.endswith(self.open.rstrip()):
            return True
        return self.forced and not continues and not self.is_closed(prompt)


def read_reasoning(
    source: Source, output: Output, form: ReasoningFormat, *, is_open: bool, separate: bool
) -> Reader[None]:
    """Read the block if there is one, and the line breaks behind it. Unless `separate` all of it is content."""
    source.trace()
    yield from source.skip()
    has_mark = (yield from source.one_of(form.opener)) is not None
    taken = source.traced()
    if not has_mark and not is_open:
        output.content(taken)
        return
    sink: Sink = output.reasoning if separate else output.content
    if not separate:
        output.content(taken)
    elif has_mark:
        yield from source.skip(only_newlines=True)
    elif taken.strip("\n"):
        output.reasoning(taken.lstrip("\n"))
    mark = yield from source.until(form.ends, sink)
    if separate:
        output.end_reasoning(cut_off=mark is None)
    if mark is None:
        return
    if mark in form.also_ends:
        source.give_back(mark)
    elif separate:
        yield from source.skip(only_newlines=True)
    else:
        output.content(mark)
