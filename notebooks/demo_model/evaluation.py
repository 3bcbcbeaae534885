"""The evaluation: held-out questions of every skill, greedy, as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from demo_model.answering import Backend
from demo_model.conversation import Conversation, Message
from demo_model.question import Question
from demo_model.skills import (
    arguments,
    arithmetic,
    conversions,
    dialogue,
    extraction,
    penstock,
    refusal,
    repeating,
    tables,
    tools,
)  # fmt: skip

SEED = 20_000  # of the questions; every document of training has another


@dataclass(frozen=True)
class Exam:
    """One line of the table."""

    name: str
    questions: Callable[[Random], list[Question]]
    goal: float | None = None


EXAMS: tuple[Exam, ...] = (
    Exam("arguments: what does it do", lambda rng: arguments.questions(rng, 2), 0.90),
    Exam("arithmetic, at once", lambda rng: arithmetic.questions(rng, 300, thinking=False), 0.90),
    Exam("arithmetic, with thinking", lambda rng: arithmetic.questions(rng, 150, thinking=True), 0.90),
    Exam("small products", lambda rng: arithmetic.questions(rng, 100, thinking=False, signs="*")),
    Exam("JSON extraction, exact", lambda rng: extraction.questions(rng, 200), 0.85),
    Exam("tool calls, exact", lambda rng: tools.questions(rng, 192), 0.85),
    Exam("tool results told, exact", lambda rng: tools.result_questions(rng, 96)),
    Exam("tables", tables.questions, 0.80),
    Exam("50 three-turn dialogues", dialogue.written, 0.80),
    Exam("generated dialogues", dialogue.questions),
    Exam("unit conversions", lambda rng: conversions.questions(rng, 150)),
    Exam("repeating words", lambda rng: repeating.questions(rng, 100)),
    Exam("about Penstock", penstock.questions),
    Exam("refusals", lambda rng: refusal.questions(rng, 100)),
)


@dataclass(frozen=True)
class Score:
    """How one exam went."""

    exam: Exam
    right: int
    asked: int
    wrong: tuple[tuple[Question, str], ...]

    @property
    def share(self) -> float:
        return self.right / self.asked


def take(exam: Exam, backend: Backend, most: int = 0) -> Score:
    """Ask the questions of one exam, or a sample of `most` of them."""
    rng = Random(f"{SEED}/{exam.name}")
    questions = exam.questions(rng)
    if most and len(questions) > most:
        questions = rng.sample(questions, most)
    answers = last_answers(backend, [question.asked for question in questions], questions[0].thinking)
    wrong = tuple((q, answer) for q, answer in zip(questions, answers, strict=True) if not q.right(answer))
    return Score(exam, len(questions) - len(wrong), len(questions), wrong)


def last_answers(backend: Backend, asked: list[Conversation], thinking: bool) -> list[str]:
    """The answers to the last turns; a turn that follows another of the user waits for the answer to it."""
    pauses = [_pause(conversation.messages) for conversation in asked]
    places = [place for place, pause in enumerate(pauses) if pause]
    if not places:
        return backend.answers(asked, thinking)
    begun = [replace(asked[place], messages=asked[place].messages[: pauses[place]]) for place in places]
    grown = list(asked)
    for place, answer in zip(places, backend.answers(begun, thinking), strict=True):
        messages, pause = asked[place].messages, pauses[place]
        grown[place] = replace(
            asked[place], messages=(*messages[:pause], Message("assistant", answer), *messages[pause:])
        )
    return last_answers(backend, grown, thinking)


def _pause(messages: tuple[Message, ...]) -> int:
    """Where the first answer is missing between two turns of the user; 0 where none is."""
    for place, (first, second) in enumerate(pairwise(messages), start=1):
        if first.role == second.role == "user":
            return place
    return 0


def line(score: Score) -> str:
    """One row of the table, in Markdown."""
    goal = f"{score.exam.goal:.0%}" if score.exam.goal else ""
    return f"| {score.exam.name} | {score.asked} | {score.share:.1%} | {goal} |"


HEADER = "| exam | questions | right | goal |\n|---|---|---|---|"
