"""What an answer in chat consists of, in the order in which it is written."""

from __future__ import annotations

from typing import NamedTuple
from uuid import uuid4


class Content(NamedTuple):
    """The next piece of the answer's text."""

    text: str


class Reasoning(NamedTuple):
    """The next piece of what the model thinks before it answers."""

    text: str


class ToolCallStart(NamedTuple):
    """A tool call begins. Its arguments follow in pieces; the next start, or the end, ends them."""

    index: int  # among the calls of this answer, from 0
    id: str  # unique
    name: str


class ToolCallArguments(NamedTuple):
    """The next piece of the JSON text of a call's arguments."""

    index: int
    text: str


ChatEvent = Content | Reasoning | ToolCallStart | ToolCallArguments


def new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"
