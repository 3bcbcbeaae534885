"""The corpus depends only on its seed, and never contains questions of the evaluation."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from random import Random

import pytest

from demo_model.conversation import Conversation, Document, render
from demo_model.corpus import SKILLS, documents
from demo_model.evaluation import EXAMS
from demo_model.phrasing import Patterns
from demo_model.skills import arithmetic


def text_of(document: Document) -> str:
    return "".join(text for text, _ in render(document))


def patterns_in(value: object) -> Iterator[Patterns]:
    if isinstance(value, Patterns):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from patterns_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from patterns_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from patterns_in(getattr(value, field.name))


def all_patterns() -> list[Patterns]:
    modules = [importlib.import_module(module.__name__) for module in SKILLS.values()]
    return [found for module in modules for value in vars(module).values() for found in patterns_in(value)]


@pytest.mark.parametrize("skill", SKILLS)
def test_same_seed_gives_the_same_documents(skill: str) -> None:
    first = [text_of(document) for document in documents(skill, 5, 30)]
    assert first == [text_of(document) for document in documents(skill, 5, 30)]
    assert first != [text_of(document) for document in documents(skill, 6, 30)]


def test_no_pattern_is_both_trained_and_held() -> None:
    patterns = all_patterns()
    assert len(patterns) > 60
    for found in patterns:
        assert found.train
        assert found.held
        assert not set(found.train) & set(found.held)


def test_held_questions_do_not_occur_in_training_text() -> None:
    trained = {
        message.content
        for skill in SKILLS
        for document in documents(skill, 1, 1500)
        if isinstance(document, Conversation)
        for message in document.messages
        if message.role == "user"
    }

    for exam in EXAMS:
        for question in exam.questions(Random(1)):
            assert question.asked.messages[-1].content not in trained


def test_held_problems_are_not_in_training_text() -> None:
    held = {
        f"{a} {sign} {b} ="
        for sign in ("+", "-")
        for a in range(100, 200)
        for b in range(100, 200)
        if arithmetic.is_held(a, b, sign)
    }
    assert len(held) > 500
    for document in documents("arithmetic", 2, 2000):
        for line in text_of(document).splitlines():
            assert " ".join(line.split()[:4]) not in held


@pytest.mark.parametrize("skill", SKILLS)
def test_every_chat_ends_with_an_answer_to_learn(skill: str) -> None:
    for document in documents(skill, 3, 50):
        if isinstance(document, Conversation):
            assert document.messages[-1].role == "assistant"
            assert [wanted for _, wanted in render(document)][-2:] == [True, False]


@pytest.mark.parametrize(("a", "b", "sign"), [(478, 364, "+"), (999, 1, "+"), (500, 123, "-"), (12, 345, "-")])
def test_thought_ends_with_the_right_result(a: int, b: int, sign: arithmetic.Sign) -> None:
    last = arithmetic.thought(a, b, sign).splitlines()[-1]
    assert last == f"{a} {sign} {b} = {a + b if sign == '+' else a - b}"
