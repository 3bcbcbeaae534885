"""What evaluation asks: a conversation that waits for its last answer, and how the answer is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from demo_model.conversation import Conversation


@dataclass(frozen=True)
class Question:
    """One item of the evaluation."""

    asked: Conversation
    right: Callable[[str], bool]
    expected: str
    thinking: bool = False


def says(expected: str) -> Callable[[str], bool]:
    """Right if the answer contains the expected words, whatever stands around them."""

    def check(answer: str) -> bool:
        return expected.lower() in answer.lower()

    return check
