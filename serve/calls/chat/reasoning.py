"""Reasoning blocks of outputs: the formats of `--reasoning-parser`, their reader, and the count of their tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from serve.calls.chat.scan.output import Output
from serve.calls.chat.scan.source import Marks, Reader, Sink, Source

NEAR_END = 4096  # number of characters at the end of a prompt that `_ends_with` looks at first


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """The marks that open and close the reasoning block, with which an output may begin."""

    open: str
    close: str
    forced: bool = False  # whether the output begins inside the block, unless the prompt ends with a closed block
    also_ends: tuple[str, ...] = ()  # other marks that end the block; they are part of the text after it

    @cached_property
    def opener(self) -> Marks:
        return Marks((self.open,))

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts of the format that may be special tokens."""
        return (self.open.strip(), self.close.strip(), *self.also_ends)

    def closes_unopened(self, text: str) -> bool:
        """Whether the closing mark is the output's first mark, which means that the prompt opened the block."""
        closed_at = text.find(self.close)
        return closed_at >= 0 and self.open not in text[:closed_at]

    def is_closed(self, prompt: str) -> bool:
        """Whether the prompt ends with a closed block. The output then has no reasoning."""
        return _ends_with(prompt, self.close.rstrip())

    def is_open(self, prompt: str, *, continues: bool = False) -> bool:
        """Whether an output after this prompt begins inside the block.

        `continues`: whether the output continues the prompt's last message.
        """
        if _ends_with(prompt, self.open.rstrip()):
            return True
        return self.forced and not continues and not self.is_closed(prompt)


def _ends_with(prompt: str, mark: str) -> bool:
    """Whether the prompt ends with the mark, followed by nothing but white space. Avoids a copy of a long prompt."""
    end = prompt[-NEAR_END:].rstrip()
    return (end if len(end) >= len(mark) else prompt.rstrip()).endswith(mark)


_THINK = ReasoningFormat(open="<think>", close="</think>")
_THINKS = ReasoningFormat(open="<think>", close="</think>", forced=True)

# Harmony is one format for reasoning and calls: serve.calls.chat.harmony.
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
    source: Source,
    output: Output,
    form: ReasoningFormat,
    *,
    is_open: bool,
    separate: bool,
    call_marks: tuple[str, ...] = (),
) -> Reader[None]:
    """Read the reasoning block and the line breaks after it, if the output has a block.

    `is_open`: the output begins inside the block. If `separate` is false, the block becomes content. A tool call, which
    begins with one of `call_marks`, also ends the block.
    """
    source.trace()
    yield from source.skip()
    has_mark = (yield from source.one_of(form.opener)) is not None
    leading = source.traced()
    if not has_mark and not is_open:
        output.content(leading)
        return
    sink: Sink = output.reasoning if separate else output.content
    if not separate:
        output.content(leading)
    elif has_mark:
        yield from source.skip(only_newlines=True)
    elif leading.strip("\n"):
        output.reasoning(leading.lstrip("\n"))
    also_ends = form.also_ends + call_marks
    mark = yield from source.until(Marks((form.close, *also_ends)), sink)
    if separate:
        output.end_reasoning(cut_off=mark is None)
    if mark is None:
        return
    if mark in also_ends:
        source.give_back(mark)
    elif separate:
        yield from source.skip(only_newlines=True)
    else:
        output.content(mark)


def tokens_between(
    ids: Sequence[int], token_bytes: Mapping[int, bytes], opening: str, close: str, *, is_open: bool
) -> int:
    """Return the number of tokens in the blocks between `opening` and `close`, including the marks.

    `is_open`: the tokens begin inside a block. A block that is not closed extends to the end. Takes about 1 ms for a
    few thousand tokens.
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
