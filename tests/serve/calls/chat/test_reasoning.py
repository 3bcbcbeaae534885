"""Separation of reasoning and answer."""

from __future__ import annotations

from random import Random

import pytest

from runtime.request import Chunk, Finish, Usage
from serve.calls.chat.events import Content, Reasoning, collect
from serve.calls.chat.parser import OutputParser, ParserSettings
from serve.calls.chat.reasoning import FORMATS, tokens_between
from serve.calls.chat.tools.offered import read_tools
from serve.calls.chat.tools.table import FORMATS as TOOL_FORMATS
from tool_call_texts import TEXTS, TOOLS

each_format = pytest.mark.parametrize("name", FORMATS)
THOUGHT = "Is it\n\n3 < 4? </thin [/THIN ◁/th"


def read(settings: ParserSettings, *pieces: str) -> tuple[str | None, str | None]:
    """Return (reasoning, content)."""
    parser = OutputParser(settings)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.feed("", final=True)
    message = collect(events)
    return message.reasoning, message.content


@each_format
def test_thoughts_are_kept_apart(name: str) -> None:
    form = FORMATS[name]
    text = f"{form.open}\n{THOUGHT}\n{form.close}\n\nYes.\n"
    settings = ParserSettings(reasoning=form)
    assert read(settings, text) == (THOUGHT, "Yes.\n")
    assert read(settings, *text) == (THOUGHT, "Yes.\n")
    assert read(ParserSettings(reasoning=form, is_open=True), *text) == (THOUGHT, "Yes.\n")


@each_format
def test_block_that_the_prompt_opened_is_reasoning(name: str) -> None:
    form = FORMATS[name]
    assert form.is_open(f"user\nassistant\n{form.open}\n")
    assert form.is_closed(f"assistant\n{form.open}\n\n{form.close}\n\n")
    assert not form.is_open(f"assistant\n{form.open}\n\n{form.close}\n\n")
    assert form.is_open("assistant\n") == form.forced
    assert not form.is_open("assistant\nIt is", continues=True)
    settings = ParserSettings(reasoning=form, is_open=True)
    assert read(settings, *f"{THOUGHT}\n{form.close}\n\nYes.") == (THOUGHT, "Yes.")
    assert read(settings, *f"{THOUGHT}\n") == (f"{THOUGHT}\n", None)


@each_format
def test_answer_without_thoughts_is_content(name: str) -> None:
    text = f" \nYes, {FORMATS[name].open} is a mark."
    assert read(ParserSettings(reasoning=FORMATS[name]), *text) == (None, text)


@each_format
def test_thoughts_stay_in_the_text_if_that_is_wanted(name: str) -> None:
    form = FORMATS[name]
    text = f"{form.open}\n{THOUGHT}\n{form.close}\n\nYes.\n"
    assert read(ParserSettings(reasoning=form, separate_reasoning=False), *text) == (None, text)


def test_thoughts_can_come_in_one_piece() -> None:
    parser = OutputParser(ParserSettings(reasoning=FORMATS["qwen3"], stream_reasoning=False))
    events = [event for letter in "<think>one two</think>three" for event in parser.feed(letter)]
    assert [event for event in events if isinstance(event, Reasoning)] == [Reasoning("one two")]
    assert "".join(event.text for event in events if isinstance(event, Content)) == "three"


@pytest.mark.parametrize(
    ("thoughts", "calls"),
    [("kimi_k2", "kimi_k2"), ("qwen3", "qwen25"), ("qwen3-thinking", "qwen3_coder"), ("deepseek-v3", "deepseekv31")],
)
def test_call_ends_thoughts_that_were_not_closed(thoughts: str, calls: str) -> None:
    settings = ParserSettings(
        reasoning=FORMATS[thoughts], is_open=True, calls=TOOL_FORMATS[calls], tools=read_tools(TOOLS)
    )
    text = TEXTS[calls].replace("Hi there.", "Let me see.\n")
    rng = Random(3)
    for _ in range(20):
        parser = OutputParser(settings)
        place = rng.randrange(len(text))
        message = collect([*parser.feed(text[:place]), *parser.feed(text[place:], final=True)])
        assert (message.reasoning, message.content) == ("Let me see.", None)
        assert [call.name for call in message.tool_calls] == ["get_weather", "stop"]


def chunk(ids: list[int], text: str, *, last: bool = False) -> Chunk:
    return Chunk(0, text, ids, Finish("stop") if last else None, Usage(1, 1, 0))


def test_tokens_of_reasoning_are_counted() -> None:
    settings = ParserSettings(reasoning=FORMATS["qwen3"], open_id=1, close_id=2)
    for chunks in (
        [chunk([1, 5, 5, 2, 7, 2], "<think>ab</think>c", last=True)],
        [chunk([1, 5], "<think>a"), chunk([5], "b"), chunk([2, 7], "</think>"), chunk([2], "c", last=True)],
    ):
        parser = OutputParser(settings)
        for each in chunks:
            parser.feed_chunk(each)
        assert parser.num_reasoning_tokens == 4


def bytes_of(*texts: str) -> dict[int, bytes]:
    return {index: text.encode() for index, text in enumerate(texts)}


def test_tokens_are_counted_by_their_bytes_where_no_token_ends_the_block() -> None:
    texts = ["ab", "c◁/th", "ink▷d", "e", "◁think▷"]
    settings = ParserSettings(reasoning=FORMATS["kimi"], is_open=True, token_bytes=bytes_of(*texts))
    for cut in ([0], [1, 2], [3]), ([0, 1, 2, 3],), ([0], [], [1], [2, 3]):
        parser = OutputParser(settings)
        for index, ids in enumerate(cut):
            text = "".join(texts[token_id] for token_id in ids)
            parser.feed_chunk(chunk(ids, text, last=index == len(cut) - 1))
        assert parser.num_reasoning_tokens == 3
    assert count(texts, [4, 0, 0, 1, 2, 3], is_open=False) == 5
    assert count(texts, [4, 0, 0], is_open=False) == 3, "cut off"
    assert count(texts, [0, 0, 3], is_open=False) == 0
    assert count(texts, [0, 0, 3], is_open=True) == 3
    assert count(texts, [], is_open=True) == 0


def count(texts: list[str], ids: list[int], *, is_open: bool) -> int:
    return tokens_between(ids, bytes_of(*texts), "◁think▷", "◁/think▷", is_open=is_open)


def test_tokens_of_harmonys_thoughts_are_counted() -> None:
    texts = ["<|channel|>", "analysis", "<|message|>", "Hm", "<|end|>", "<|start|>assistant", "final", "Yes"]
    parser = OutputParser(ParserSettings(harmony=True, token_bytes=bytes_of(*texts)))
    ids = [0, 1, 2, 3, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 6, 2, 7]
    parser.feed_chunk(chunk(ids, "".join(texts[token_id] for token_id in ids), last=True))
    assert parser.num_reasoning_tokens == 11


def test_harmonys_channels() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    for pieces in ([text], list(text)):
        assert read(ParserSettings(harmony=True), *pieces) == ("Hm.", "Yes.")
        assert read(ParserSettings(harmony=True, separate_reasoning=False), *pieces) == (None, "Hm.Yes.")
