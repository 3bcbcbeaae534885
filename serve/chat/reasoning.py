"""What an output thinks before it answers: the formats by the names that `--reasoning-parser` takes, how such an output
is read, and how many of its tokens are reasoning."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from serve.chat.scan.output import Output
from serve.chat.scan.source import Marks, Reader, Sink, Source

NEAR_END = 4096  # characters of a prompt: a mark, and white space behind it


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
        closed_at = text.find(self.close)
        return closed_at >= 0 and self.open not in text[:closed_at]

    def is_closed(self, prompt: str) -> bool:
        """Whether the prompt ends with a block, so that no other follows."""
        return _ends_with(prompt, self.close.rstrip())

    def is_open(self, prompt: str, *, continues: bool = False) -> bool:
        """Whether an output that follows this prompt begins within the block.

        `continues`: the output goes on with the prompt's last message.
        """
        if _ends_with(prompt, self.open.rstrip()):
            return True
        return self.forced and not continues and not self.is_closed(prompt)


def _ends_with(prompt: str, mark: str) -> bool:
    """Whether the mark stands at the end but for white space, found without a copy of all that is before it."""
    end = prompt[-NEAR_END:].rstrip()
    return (end if len(end) >= len(mark) else prompt.rstrip()).endswith(mark)


_THINK = ReasoningFormat(open="<think>", close="</think>")
_THINKS = ReasoningFormat(open="<think>", close="</think>", forced=True)

# Harmony is one format of reasoning and calls together: serve.chat.harmony.
FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek-r1": _THINKS,
    "deepseek-v3": _THINK,
    "glm45": ReasoningFormat(open="<think>", close="</think>", also_ends=("<tool_call>",)),
    "kimi": ReasoningFormat(open="◁think▷", close="◁/think▷"),
    "qwen3": _THINK,
    "qwen3-thinking": _THINKS,
    "step3": _THINKS,
    "command_r": ReasoningFormat(open="<|START_THINKING|>", close="<|END_THINKING|>"),
    "gemma4": ReasoningFormat(open="<|channel>thought\n", close="<channel|>"),
    "granite": ReasoningFormat(open="Here is my thought process:", close="Here is my response:"),
    "interns1": _THINK,
    "kimi_k2": ReasoningFormat(open="<think>", close="</think>", also_ends=("<|tool_calls_section_begin|>",)),
    "minimax": ReasoningFormat(open="<think>", close="</think>", also_ends=("<minimax:tool_call>",)),
    "mistral": ReasoningFormat(open="[THINK]", close="[/THINK]"),
    "nemotron_3": _THINK,
    "seed_oss": ReasoningFormat(open="<seed:think>", close="</seed:think>"),
    "step3p5": _THINKS,
}


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


def tokens_between(
    ids: Sequence[int], token_bytes: Mapping[int, bytes], opening: str, close: str, *, is_open: bool
) -> int:
    """The tokens of the blocks between these marks, with the marks.

    Without encoding anything: a millisecond for each few thousand tokens. `is_open`: the output begins within a block.
    A block that is not closed reaches to the end.
    """
    pieces = [token_bytes[token_id] for token_id in ids]
    ends = list(accumulate(map(len, pieces)))
    whole = b"".join(pieces)
    first, last = opening.encode(), close.encode()
    total = at = 0
    while True:
        if is_open:
            is_open, start, inside = False, 0, 0
        else:
            start = whole.find(first, at)
            if start < 0:
                return total
            inside = start + len(first)
        end = whole.find(last, inside)
        if end < 0:
            return total + len(ids) - bisect_left(ends, start + 1)
        at = end + len(last)
        total += bisect_left(ends, at) + 1 - bisect_left(ends, start + 1)
