"""Conversations as text for the model, in exactly the format of the chat template.

The template itself is `chat_template.jinja`. `render` writes the same text faster, and marks the parts that the model
must learn to produce. A test compares both. A question is a conversation without its last answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
Split = Literal["train", "held"]

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

TOOL_INTRODUCTION = "You can call these tools:"
TOOL_FORMAT = 'To call one, write <tool_call>\n{"name": the name, "arguments": {the arguments}}\n</tool_call>'


@dataclass(frozen=True)
class Message:
    """One message. `thought` is None if thinking is off."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thought: str | None = None
    calls: tuple[dict[str, Any], ...] = ()

    def as_chat(self) -> dict[str, Any]:
        """Return the message in the format of the chat-completions API."""
        chat: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thought is not None:
            chat["reasoning_content"] = self.thought
        if self.calls:
            chat["tool_calls"] = [{"type": "function", "function": call} for call in self.calls]
        return chat


@dataclass(frozen=True)
class Conversation:
    """Messages, and the tools that are offered with them."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = field(default=())


@dataclass(frozen=True)
class Prose:
    """Plain text without a chat. `pieces` marks the parts to learn; empty if the model learns the whole text."""

    text: str
    pieces: tuple[tuple[str, bool], ...] = ()


Document = Conversation | Prose


def call_text(call: dict[str, Any]) -> str:
    """Return a tool call in the format that the hermes and qwen25 parsers read."""
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _system(conversation: Conversation, text: str) -> str:
    parts = [text] if text else []
    if conversation.tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in conversation.tools)
        parts.append(f"{TOOL_INTRODUCTION}\n{lines}\n{TOOL_FORMAT}")
    return "<|im_start|>system\n" + "\n\n".join(parts) + "<|im_end|>\n" if parts else ""


def _answer(message: Message) -> Iterator[tuple[str, bool]]:
    yield "<|im_start|>assistant\n", False
    if message.thought is None:
        yield "<think>\n\n</think>\n\n", False
    else:
        yield f"<think>\n{message.thought}\n</think>\n\n", True
    calls = "\n".join(call_text(call) for call in message.calls)
    between = "\n" if message.content and calls else ""
    yield f"{message.content}{between}{calls}<|im_end|>", True
    yield "\n", False


def render(document: Document) -> Iterator[tuple[str, bool]]:
    """Yield pieces of text, each with whether the model must learn to write it."""
    if isinstance(document, Prose):
        yield from document.pieces or ((document.text, True),)
        yield "<|endoftext|>", True
        return
    messages = document.messages
    first = messages[0]
    if first.role == "system":
        yield _system(document, first.content), False
        messages = messages[1:]
    elif document.tools:
        yield _system(document, ""), False
    for message in messages:
        if message.role == "assistant":
            yield from _answer(message)
        elif message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            yield f"<|im_start|>user\n{text}<|im_end|>\n", False
        else:
            yield f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n", False


def ask(question: str, answer: str, thought: str | None = None, system: str = "") -> Conversation:
    """Return a conversation with one question and its answer."""
    opening = (Message("system", system),) if system else ()
    return Conversation((*opening, Message("user", question), Message("assistant", answer, thought)))


@dataclass(frozen=True)
class Question:
    """One item of the evaluation."""

    asked: Conversation
    right: Callable[[str], bool]
    expected: str
    thinking: bool = False


def says(expected: str) -> Callable[[str], bool]:
    """Return a check that is true if the answer contains the expected words, with any text around them."""

    def check(answer: str) -> bool:
        return expected.lower() in answer.lower()

    return check
