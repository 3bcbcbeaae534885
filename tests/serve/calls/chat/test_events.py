"""The complete message that results from an answer's events."""

from __future__ import annotations

from serve.calls.chat.events import (
    AssistantMessage,
    ChatEvent,
    Content,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    collect,
    new_call_id,
)
from serve.calls.chat.parser import OutputParser


def test_pieces_become_one_message() -> None:
    events: list[ChatEvent] = [
        Reasoning("first "),
        Reasoning("this"),
        Content("Let me "),
        Content("look."),
        ToolCallStart(0, "call_a", "find"),
        ToolCallArguments(0, '{"q":'),
        ToolCallStart(1, "call_b", "stop"),
        ToolCallArguments(0, " 1}"),
        ToolCallArguments(1, "{}"),
    ]
    calls = [ToolCall("call_a", "find", '{"q": 1}'), ToolCall("call_b", "stop", "{}")]
    assert collect(events) == AssistantMessage("Let me look.", "first this", calls)


def test_what_was_not_written_is_none() -> None:
    assert collect([]) == AssistantMessage(None, None, [])


def test_call_ids_are_unique() -> None:
    assert len({new_call_id() for _ in range(1000)}) == 1000


def test_without_a_format_all_text_is_content() -> None:
    parser = OutputParser()
    events = [*parser.feed("<tool_call>"), *parser.feed(""), *parser.feed("x", final=True)]
    assert events == [Content("<tool_call>"), Content("x")]
    assert parser.num_calls == 0
