"""The checks of the evaluation accept right answers and reject wrong ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import httpx
import pytest

from demo_model import evaluation
from demo_model.conversation import Conversation, Message, says
from demo_model.evaluation import Server, without_thought
from demo_model.skills import arguments, arithmetic, dialogue, extraction, tables, tools


def test_an_argument_answer_is_right_only_for_its_own_argument() -> None:
    facts = arguments.facts()
    right = [arguments.states(fact)(fact.answer) for fact in facts]
    assert all(right)
    wrong = [arguments.states(fact)(other.answer) for fact, other in pairwise(facts) if fact.sentence != other.sentence]
    assert not any(wrong)


def test_the_flag_alone_is_no_answer() -> None:
    fact = next(fact for fact in arguments.facts() if fact.flag == "--page-size")
    assert not arguments.states(fact)("--page-size: I do not know.")


@pytest.mark.parametrize(
    ("answer", "right"),
    [("4 + 5 = 9", True), ("It is 9.", True), ("4 + 5 = 19", False), ("", False), ("9 = 4", False)],
)
def test_arithmetic_is_judged_by_the_last_number(answer: str, right: bool) -> None:
    assert arithmetic.ends_with(9)(answer) is right


def test_extraction_wants_exactly_the_object() -> None:
    check = extraction.equals({"name": "Ada", "age": 3})
    assert check('{"age": 3, "name": "Ada"}')
    assert not check('{"name": "Ada", "age": "3"}')
    assert not check('Here: {"name": "Ada", "age": 3}')


def test_tool_calls_want_name_and_arguments() -> None:
    check = tools.calls({"name": "f", "arguments": {"x": 1}})
    assert check('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>')
    assert not check('<tool_call>\n{"name": "f", "arguments": {"x": 2}}\n</tool_call>')
    assert not check("f(1)")


def test_tables_are_asked_completely() -> None:
    asked = tables.questions(Random(0))
    assert len(asked) == sum(len(table.rows) for table in tables.TABLES.values())


def test_says_ignores_case() -> None:
    assert says("Oslo")("it is oslo.")
    assert not says("Oslo")("it is Rome.")


def test_scores_count_right_answers() -> None:
    class Silent:
        def answers(self, asked: Sequence[Conversation], thinking: bool) -> list[str]:
            return [""] * len(asked)

    class Knowing:
        def answers(self, asked: Sequence[Conversation], thinking: bool) -> list[str]:
            return ["I am a small demo model and do not know that."] * len(asked)

    exam = next(exam for exam in evaluation.EXAMS if exam.name == "refusals")
    assert evaluation.take(exam, Silent(), most=10).share == 0
    assert evaluation.take(exam, Knowing(), most=10).share == 1


def test_thoughts_do_not_count_as_answers() -> None:
    assert without_thought("<think>\n3\n</think>\n\n4") == "4"


def test_a_server_is_asked_with_tools_and_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict] = []

    def reply(request: httpx.Request) -> httpx.Response:

        seen.append(json.loads(request.content))
        call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
        return httpx.Response(200, json={"choices": [{"message": {"content": None, "tool_calls": [call]}}]})

    server = Server("http://test")
    server.client = httpx.Client(base_url="http://test", transport=httpx.MockTransport(reply))
    asked = Conversation((Message("user", "hi"),), ({"name": "f"},))
    (answer,) = server.answers([asked], thinking=True)
    assert tools.calls({"name": "f", "arguments": {"x": 1}})(answer)
    assert seen[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert seen[0]["tools"][0]["function"] == {"name": "f"}


def test_a_written_dialogue_is_answered_turn_by_turn() -> None:
    seen: list[list[str]] = []

    class Counting:
        def answers(self, asked: Sequence[Conversation], thinking: bool) -> list[str]:
            seen.append([message.content for message in asked[0].messages])
            return [f"answer {len(seen)}"] * len(asked)

    asked = [Conversation((Message("user", "a"), Message("user", "b"), Message("user", "c")))]
    assert evaluation.last_answers(Counting(), asked, thinking=False) == ["answer 3"]
    assert seen[-1] == ["a", "answer 1", "b", "answer 2", "c"]


def test_fifty_dialogues_are_written_and_none_tells_the_answer_last() -> None:
    written = dialogue.written(Random(0))
    assert len(written) == 50
    for question in written:
        first, middle, last = (message.content for message in question.asked.messages)
        assert question.right(first)
        assert not question.right(middle)
        assert not question.right(last)
