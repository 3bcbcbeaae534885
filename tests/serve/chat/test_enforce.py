"""Calls that must be made, as grammars: what llguidance then lets a model write, and that it is read as such."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as Library

from runtime.errors import InvalidRequest
from serve.chat.message import AssistantMessage, collect
from serve.chat.parser import OutputParser, ParserSettings
from serve.chat.reasoning.table import FORMATS as REASONING
from serve.chat.tools.choice import read_choice
from serve.chat.tools.enforce import Marks, calls_grammar
from serve.chat.tools.offered import read_tools
from serve.chat.tools.table import FORMATS
from serve.demo import demo_path

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"\n']}, "maxItems": 2},
    },
    "required": ["days", "city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
OFFERED = read_tools(TOOLS)
ENFORCED = [name for name, form in FORMATS.items() if form.rendered is not None]
each_format = pytest.mark.parametrize("name", ENFORCED)
END = 2
THINK = Marks({"<think>": 4090, "</think>": 4091, "<tool_call>": 4092, "</tool_call>": 4093})


@pytest.fixture(scope="module")
def library() -> Library:
    return Library.from_file(f"{demo_path()}/tokenizer.json")


@pytest.fixture(scope="module")
def tokens(library: Library) -> LLTokenizer:
    return LLTokenizer(library.to_str(), eos_token=END)


def write(tokens: LLTokenizer, library: Library, grammar: str, rng: Random, limit: int = 400) -> str:
    """A random text that the grammar lets a model write; each token is drawn among those that are allowed."""
    matcher = LLMatcher(tokens, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    while len(ids) < limit:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(4096) if mask[token // 8] >> (token % 8) & 1]
        assert allowed
        token = END if END in allowed and len(ids) > 40 else rng.choice(allowed)
        if token == END:
            return library.decode(ids, skip_special_tokens=False)
        assert matcher.consume_token(token)
        ids.append(token)
    raise AssertionError("it does not end")


def read(name: str, text: str) -> AssistantMessage:
    settings = ParserSettings(calls=FORMATS[name], tools=OFFERED, reasoning=REASONING["qwen3"])
    return collect(OutputParser(settings).feed(text, final=True))


@each_format
def test_what_must_be_called_is_called_and_valid(name: str, tokens: LLTokenizer, library: Library) -> None:
    rng = Random(name)
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        chosen = read_choice(choice, OFFERED)
        grammar = calls_grammar(FORMATS[name], chosen, THINK, parallel=False)
        message = read(name, write(tokens, library, grammar, rng))
        [call] = message.tool_calls
        assert message.content is None
        assert choice == "required" or call.name == "look"
        if call.name == "look":
            jsonschema.validate(json.loads(call.arguments), PARAMETERS)


def accepts(tokens: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether the whole text may be written and may end there."""
    matcher = LLMatcher(tokens, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'


def test_only_the_number_of_calls_that_is_wanted(tokens: LLTokenizer) -> None:
    chosen = read_choice("required", OFFERED)
    for parallel in (True, False):
        grammar = calls_grammar(FORMATS["qwen25"], chosen, THINK, parallel=parallel)
        assert accepts(tokens, grammar, CALL)
        assert accepts(tokens, grammar, "\n\n" + CALL)
        assert accepts(tokens, grammar, f"{CALL}\n{CALL}") is parallel
        assert not accepts(tokens, grammar, "No, I will not.")
        assert not accepts(tokens, grammar, CALL.replace("3", "30"))
        assert not accepts(tokens, grammar, CALL.replace("look", "other"))


def test_thoughts_may_come_first(tokens: LLTokenizer) -> None:
    chosen = read_choice("required", OFFERED)
    grammar = calls_grammar(FORMATS["qwen25"], chosen, THINK, parallel=True, think=REASONING["qwen3"])
    assert accepts(tokens, grammar, f"<think>\nLet me {{see}}.\n</think>\n\n{CALL}")
    assert accepts(tokens, grammar, CALL)
    assert not accepts(tokens, grammar, "<think>\nLet me see.\n</think>\n\nNo.")
    assert not accepts(tokens, grammar, "<think>\nLet me see.")


def test_strict_tools_are_held_to_their_schemas_once_a_call_has_begun(tokens: LLTokenizer) -> None:
    grammar = calls_grammar(FORMATS["qwen25"], read_choice("auto", OFFERED), THINK, parallel=True)
    assert accepts(tokens, grammar, "Just text, with a < and {}.")
    assert accepts(tokens, grammar, f"Let me look.\n{CALL}")
    assert not accepts(tokens, grammar, f"Let me look.\n{CALL.replace('3', '30')}")
    loose = '<tool_call>\n{"name": "stop", "arguments": {"any": 1}}\n</tool_call>'
    assert accepts(tokens, grammar, loose), "a tool that is not strict takes any object"
    bare = calls_grammar(FORMATS["llama3"], read_choice("auto", OFFERED), Marks({}), parallel=True)
    assert accepts(tokens, bare, "Just text, with {} in it.")
    assert accepts(tokens, bare, '{"name": "look", "parameters": {"city": "Rome", "days": 3}}')
    assert not accepts(tokens, bare, '{"name": "look", "parameters": {"city": "Bonn", "days": 3}}')


def test_answer_in_json_may_stand_beside_calls(tokens: LLTokenizer) -> None:
    chosen = read_choice("auto", OFFERED)
    schema = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}'
    grammar = calls_grammar(FORMATS["qwen25"], chosen, THINK, parallel=True, answer=schema)
    assert accepts(tokens, grammar, '{"ok": true}')
    assert accepts(tokens, grammar, CALL)
    assert not accepts(tokens, grammar, '{"ok": 1}')
    assert not accepts(tokens, grammar, "Yes.")


def test_harmonys_call_follows_its_thoughts(tokens: LLTokenizer) -> None:
    chosen = read_choice("required", OFFERED)
    grammar = calls_grammar(None, chosen, Marks({}), parallel=False)
    call = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "Oslo", "days": 1}'
    assert accepts(tokens, grammar, call)
    assert not accepts(tokens, grammar, "<|channel|>final<|message|>No.")


def test_what_cannot_be_enforced_is_refused() -> None:
    for name, choice in (("gemma4", "required"), ("gemma4", "auto"), ("pythonic", "auto")):
        with pytest.raises(InvalidRequest, match="cannot be enforced"):
            calls_grammar(FORMATS[name], read_choice(choice, OFFERED), Marks({}), parallel=True)
    odd = read_tools([{"function": {"name": "f", "parameters": {"minProperties": 1}}}])
    with pytest.raises(InvalidRequest, match="minProperties"):
        calls_grammar(FORMATS["pythonic"], read_choice("required", odd), Marks({}), parallel=True)
