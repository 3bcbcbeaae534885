"""Parse Harmony, the output format of gpt-oss: messages on channels for reasoning, calls and the final answer.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re

from serve.calls.chat.scan.json_text import read_value
from serve.calls.chat.scan.output import Output
from serve.calls.chat.scan.source import Marks, Reader, Source

MAX_HEADER_CHARS = 512
THOUGHT_OPEN, THOUGHT_CLOSE = "<|channel|>analysis<|message|>", "<|end|>"
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.:/-]{1,128})")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER_WORDS = re.compile("|".join(map(re.escape, MARKS)) + r"|\b(?:assistant|analysis|commentary|final|json|code)\b")
_HEADER_ENDS = Marks(("<|message|>",))
_ENDS = Marks(("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"))
_LEAD = Marks(("to=",))
_BEGINS = Marks(("<|start|>", "<|channel|>"))


def read_harmony(source: Source, output: Output, *, separate: bool, offers_tools: bool) -> Reader[None]:
    """Read messages until the text ends. Text outside messages is content.

    The prompt ends inside the header of the first message. In this header, the recipient may precede the channel.
    """
    source.trace()
    yield from source.skip()
    lead = yield from source.one_of(_LEAD)
    if lead is not None:
        yield from source.short(_BEGINS, MAX_HEADER_CHARS)
    lead = source.traced()
    mark = next((mark for mark in ("<|start|>", "<|channel|>") if lead.endswith(mark)), None)
    if mark is None:
        output.content(lead)
        mark, lead = (yield from source.until(_BEGINS, output.content)), ""
    while mark is not None:
        source.trace(lead or mark)
        lead = ""
        header_end = yield from source.short(_HEADER_ENDS, MAX_HEADER_CHARS)
        header = source.traced()
        if header_end is None:
            output.content(header)
            mark = yield from source.until(_BEGINS, output.content)
            continue
        mark = yield from _read_message(source, output, header, separate=separate, offers_tools=offers_tools)


def _read_message(
    source: Source, output: Output, header: str, *, separate: bool, offers_tools: bool
) -> Reader[str | None]:
    """Read a message's body, and return the mark that begins the next message (None at the end of the text)."""
    channels = _CHANNEL.findall(header)
    recipient = _RECIPIENT.search(header)
    is_call = recipient is not None and offers_tools and recipient[0].startswith("to=functions.")
    is_reasoning = not is_call and channels[-1:] == ["analysis"] and separate
    without_recipient = header.replace(recipient[0], "", 1) if is_call and recipient is not None else header
    if any(
        map(str.isalnum, _HEADER_WORDS.sub("", without_recipient))
    ):  # unexpected text in the header becomes content or reasoning
        (output.reasoning if is_reasoning else output.content)(header)
    if is_call and recipient is not None:
        output.start(recipient[1])
        yield from source.skip()
        is_whole = True
        if (yield from source.peek()) == "{":
            is_whole = yield from read_value(source, output.arguments, _ENDS)
        end = yield from source.until(_ENDS, output.content if is_whole else output.arguments)
        if end is not None:
            output.end_call()
    elif is_reasoning:
        end = yield from source.until(_ENDS, output.reasoning)
        output.end_reasoning(cut_off=end is None)
    else:
        end = yield from source.until(_ENDS, output.content)
    while end is not None and end not in ("<|start|>", "<|channel|>"):
        yield from source.skip()
        end = yield from source.one_of(_ENDS)
        if end is None:
            end = yield from source.until(_BEGINS, output.content)
    return end
