"""Added tokens such as <think> are generated if a grammar requires their text. Special tokens never are."""

from __future__ import annotations

import json
from time import thread_time
from typing import Any

import pytest

import grammars
from runtime.grammar.backends.added_tokens import marks_in
from runtime.grammar.backends.grammar_text import for_llguidance, texts_of
from runtime.grammar.backends.with_llguidance import LLGuidanceMatcher
from runtime.grammar_spec import Grammar, InvalidGrammar

THINK, END = "<think>", "<|im_end|>"


def token_of(text: str) -> int:
    [[token_id]] = grammars.tokenizer().encode_batch([text], add_special_tokens=False)
    return token_id


def written(matcher: LLGuidanceMatcher, tokens: int = 40) -> str:
    """Return the output of always choosing the first allowed token, added tokens first."""
    found, ids = matcher.copy(), list[int]()
    ends = grammars.tokenizer().eos_ids
    while len(ids) < tokens:
        choices = grammars.allowed(found)
        assert choices, found.error
        if choices & ends:
            break
        ids.append(max(choices))
        assert found.consume(ids[-1:])
    return "".join(grammars.tokenizer().bytes_of.rest[each].decode() for each in ids)  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("regex", "<think>x</think>", "<think>x</think>"),
        ("ebnf", 'root ::= "<think>" "x"', "<think>x"),
        ("choice", ["<tool_call>"], "<tool_call>"),
        ("json_schema", {"const": "<think>"}, '"<think>"'),
        ("json_schema", {"type": "string", "pattern": "^a<think>$"}, '"a<think>"'),
        ("lark", 'start: "<think>" <think> "x"', "<think><think>x"),
    ],
)
def test_the_text_of_an_added_token_is_written_with_it(kind: str, source: Any, text: str) -> None:
    matcher = grammars.compiled(kind, source)
    assert written(matcher) == text
    assert grammars.accepts(matcher, text)


def test_a_tag_begins_with_an_added_token_or_with_its_text() -> None:
    tag = {
        "structures": [{"begin": "<tool_call>", "schema": {"const": 1}, "end": "</tool_call>"}],
        "triggers": ["<tool_call>"],
    }
    matcher = grammars.compiled("structural_tag", tag)
    for text in ("so <tool_call>1</tool_call> and", "<tool_call>1</tool_call>", "none"):
        assert grammars.accepts(matcher, text)
    begun = matcher.copy()
    assert begun.consume([token_of(letter) for letter in "<tool_call>"])
    assert grammars.allowed(begun) == {token_of("1")}
    assert not grammars.accepts(matcher, "so <tool_call>2</tool_call>")
    assert not grammars.accepts(matcher, "so <tool_call>1 and")


def test_added_tokens_are_not_allowed_elsewhere() -> None:
    think = token_of(THINK)
    for kind, source in (
        ("regex", ".*"),
        ("json_schema", {"enum": ["<think>", "a"]}),
        ("ebnf", "root ::= .*"),
    ):
        assert think not in grammars.allowed(grammars.compiled(kind, source))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", r"a<\|im_end\|>b"),
        ("ebnf", f'root ::= "{END}" "x"'),
        ("choice", ["yes", f"no{END}"]),
        ("json_schema", {"enum": ["a", f"b{END}"]}),
        ("json_schema", {"type": "string", "pattern": r"<\|im_end\|>"}),
        ("json_schema", {"properties": {END: True}}),
        ("structural_tag", {"structures": [{"begin": "a", "end": END}], "triggers": ["a"]}),
        ("lark", f'start: <think> %json {{"const": "{END}"}}'),
        ("lark", f'start: "a" "{END}"'),
    ],
)
def test_a_special_token_is_no_text(kind: str, source: Any) -> None:
    with pytest.raises(InvalidGrammar, match=r"<\|im_end\|> is a special token"):
        grammars.compiled(kind, source)


def test_a_special_token_is_named_in_lark() -> None:
    matcher = grammars.compiled("lark", 'start: "a" <|im_start|> "b"  // not "<|im_end|>"')
    assert written(matcher) == "a<|im_start|>b"


@pytest.mark.parametrize("source", [r"<\|im_(end|end)\|>x", r"[<]\|im_end\|>x"])
def test_an_end_that_is_forced_as_text_ends_nothing(source: str) -> None:
    matcher = grammars.compiled("regex", source)
    assert not grammars.allowed(matcher) & grammars.tokenizer().eos_ids


def test_alternatives_of_the_letters_of_a_special_token_are_none() -> None:
    assert grammars.accepts(grammars.compiled("regex", "(<|im_end|>)"), ">")
    assert grammars.accepts(grammars.compiled("json_schema", {"const": "List<int>"}), json.dumps("List<int>"))


@pytest.mark.parametrize(
    "source", ["\\" * 500_000, "a" + "\\" * 500_000, "<a" * 250_000, r"\x{" * 150_000, r"\u" * 250_000]
)
def test_what_a_grammar_writes_is_found_in_one_pass(source: str) -> None:
    began_s = thread_time()
    assert marks_in(source + r" \\x{3c}a\\x{3e} <b>") == {"<a>", "<b>"}
    assert thread_time() - began_s < 2  # trying all 500,000 backslashes one by one would take minutes


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "<｜begin▁call｜>"),
        ("ebnf", 'root ::= "<｜begin▁call｜>"'),
        ("lark", 'start: "<｜begin▁call｜>"'),
        ("lark", 'start: %json {"const": "<｜begin▁call｜>"}'),
        ("choice", '["<｜begin▁call｜>"]'),
        ("json_schema", '{"enum": ["<｜begin▁call｜>"]}'),
        ("json_schema", '{"type": "string", "pattern": "^<｜begin▁call｜>$"}'),
        (
            "structural_tag",
            '{"structures": [{"begin": "<｜begin▁call｜>"}], "triggers": ["<｜begin▁call｜>"]}',
        ),
    ],
)
def test_marks_beyond_ascii_are_found_in_every_kind_of_grammar(kind: Any, source: str) -> None:
    assert "<｜begin▁call｜>" in marks_in(texts_of(for_llguidance(Grammar(kind, source))))


def test_a_character_beyond_all_is_none() -> None:
    assert marks_in(r"\x{110000} \x{ffffffffffff} \x{10ffff}<b>") == {"<b>"}
    with pytest.raises(InvalidGrammar, match="invalid regex"):
        grammars.compiled("lark", r"start: /\x{ffffffffffff}/")
