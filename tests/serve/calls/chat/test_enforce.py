"""Required calls as grammars: what llguidance allows a model to generate, and that the output is parsed as calls."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as Library

from runtime.errors import InvalidRequest
from serve.calls.chat.events import AssistantMessage, collect
from serve.calls.chat.harmony import MARKS as HARMONY_MARKS
from serve.calls.chat.parser import OutputParser, ParserSettings
from serve.calls.chat.reasoning import FORMATS as REASONING
from serve.calls.chat.tools.choice import ToolChoice, read_choice
from serve.calls.chat.tools.enforce import Marks, calls_grammar, names_grammar
from serve.calls.chat.tools.offered import read_tools
from serve.calls.chat.tools.table import FORMATS
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
each_format = pytest.mark.parametrize("name", FORMATS)
END = 2
THINK = Marks({"<think>": 4090, "</think>": 4091, "<tool_call>": 4092, "</tool_call>": 4093})


class Bytes:
    """A tokenizer whose tokens are bytes and these marks."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256

    def __init__(self, *marks: str) -> None:
        self.marks = Marks({mark: 257 + index for index, mark in enumerate(marks)})
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *(mark.encode() for mark in marks)]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.library = LLTokenizer(self, n_vocab=len(self.tokens), eos_token=256)  # pyright: ignore[reportArgumentType]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def fits(self, grammar: str, text: str) -> bool:
        """Whether the grammar accepts the whole text as a complete output."""
        pieces = re.split("(" + "|".join(map(re.escape, self.marks.ids)) + ")", text) if self.marks.ids else [text]
        ids = [
            token_id
            for piece in pieces
            for token_id in ([self.marks.ids[piece]] if piece in self.marks.ids else piece.encode())
        ]
        matcher = LLMatcher(self.library, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def library() -> Library:
    return Library.from_file(f"{demo_path()}/tokenizer.json")


@pytest.fixture(scope="module")
def tokens(library: Library) -> LLTokenizer:
    return LLTokenizer(library.to_str(), eos_token=END)


def write(tokens: LLTokenizer, library: Library, grammar: str, rng: Random, limit: int = 400) -> str:
    """Return a random text that the grammar accepts. Each token is drawn from the allowed tokens."""
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
    """Whether the grammar accepts the whole text as a complete output."""
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


FREE_TEXTS = ("", "Just text, with < and {} and [1, look] in it.", "\n\nlook(at=1) <tool", "a functools [x]")


@pytest.mark.parametrize("marks", [True, False], ids=["tokens", "text"])
@each_format
def test_strict_tools_stand_in_free_text_in_every_format(name: str, marks: bool) -> None:
    """Plain answers stay unconstrained, but of two calls at any position each must follow its schema."""
    form = FORMATS[name]
    shown = [mark for mark in form.marks if mark[0] in "<[" and mark != "["] if marks else []
    model = Bytes(*dict.fromkeys(shown))
    grammar = calls_grammar(form, read_choice("auto", OFFERED), model.marks, parallel=True)
    for text in FREE_TEXTS[1:] if form.bare else FREE_TEXTS:
        assert model.fits(grammar, text), text
    before, between, behind = form.rendered_all

    def calls(days: int, last: str = "") -> str:
        arguments = f'{{"city": "Rome", "days": {days}}}'
        loose = '{"any": [1, null]}'
        if form.arguments == "python":
            arguments, loose = f'days={days}, city="Rome"', "any=[1, None, {'k': (True, -1.5)}]"
        written = [arguments.join(form.rendered("look")), loose.join(form.rendered("stop"))]
        return before + between.join([*written, written[0]]) + behind + last

    text = "" if form.bare else "Let me look.\n"
    assert model.fits(grammar, text + calls(3))
    message = read(name, text + calls(3))
    assert [call.name for call in message.tool_calls] == ["look", "stop", "look"]
    for call in message.tool_calls:
        json.loads(call.arguments)
    assert not model.fits(grammar, text + calls(30))
    assert not model.fits(grammar, text + calls(3, "\n" + calls(30)))
    if not form.bare:
        assert model.fits(grammar, text + calls(3, "\nAnd more.\n" + calls(4)))
        assert not model.fits(grammar, text + calls(3, "\nAnd more.\n" + calls(30)))


@each_format
def test_calls_that_were_drawn_beside_text_are_valid(name: str, tokens: LLTokenizer, library: Library) -> None:
    rng = Random(name)
    grammar = calls_grammar(FORMATS[name], read_choice("auto", OFFERED), THINK, parallel=True)
    for _ in range(3):
        message = read(name, write(tokens, library, grammar, rng))
        for call in message.tool_calls:
            if call.name == "look":
                jsonschema.validate(json.loads(call.arguments), PARAMETERS)


LOOSE = read_tools([{"function": {"name": name}} for name in ("look", "look_up")])
NAMED_BY_THEIR_READERS = {"json", "llama3", "llama4", "pythonic", "gemma3"}
OWN_SYNTAX = {  # arguments in the formats with parameters between tags
    "deepseekv32": '\n<｜DSML｜parameter name="at" string="true">a</b</｜DSML｜parameter>\n</｜DSML｜invoke>',
    "gemma4": '{at:<|"|>a{b<|"|>}<tool_call|>',
    "glm45": "\n<arg_key>at</arg_key>\n<arg_value>a</b</arg_value>\n</tool_call>",
    "glm47": "<arg_key>at</arg_key><arg_value>a</b</arg_value></tool_call>",
    "minimax-m2": '\n<parameter name="at">a</b</parameter>\n</invoke>',
    "qwen3_coder": "\n<parameter=at>\na</b\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "\n<parameter=at>a</b</parameter>\n</function>\n</seed:tool_call>",
    "step3": '\n<steptml:parameter name="at">a</b</steptml:parameter></steptml:invoke><｜tool_call_end｜>',
    "step3p5": "\n<parameter=at>\na</b\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("marks", [True, False], ids=["tokens", "text"])
@each_format
def test_call_that_has_begun_names_a_tool_of_the_request(name: str, marks: bool) -> None:
    form = FORMATS[name]
    shown = [mark for mark in form.marks if mark[0] in "<[｜" and mark != "["] if marks else []
    model = Bytes(*dict.fromkeys(shown))
    made = names_grammar(form, read_choice("auto", LOOSE), model.marks, parallel=True)
    if name in NAMED_BY_THEIR_READERS:
        assert made is None
        return
    assert made is not None
    mark, grammar = made
    before, between, behind = form.rendered_all

    def calls(*names: str) -> str:
        own = OWN_SYNTAX.get(name)
        values = "any=[1, None]" if form.arguments == "python" else '{"any": [1, null]}'
        written = [form.rendered(each)[0].rstrip() + own if own else values.join(form.rendered(each)) for each in names]
        return before + between.join(written) + behind

    assert calls("look").startswith(mark)
    for text in (calls("look"), calls("look_up", "look"), calls("look") + "\nAnd more.\n" + calls("look_up")):
        assert model.fits(grammar, text.removeprefix(mark)), text
        message = collect(OutputParser(ParserSettings(calls=form, tools=LOOSE)).feed(text, final=True))
        assert {call.name for call in message.tool_calls} <= {"look", "look_up"}
        assert all(json.loads(call.arguments) for call in message.tool_calls)
    for names in (("stop",), ("lookx",), ("loo",), ("look", "stop")):
        assert not model.fits(grammar, calls(*names).removeprefix(mark)), names
    assert not model.fits(grammar, "Just text.")


def test_harmonys_call_names_a_tool_of_the_request() -> None:
    model = Bytes(*HARMONY_MARKS)
    made = names_grammar(None, read_choice("auto", LOOSE), model.marks, parallel=True)
    assert made is not None
    turn = "<|end|><|start|>assistant<|channel|>final<|message|>So."
    for header in (" <|constrain|>json<|message|>", "<|message|>"):
        assert model.fits(made[1], f'look{header}{{"a": 1}}')
        assert model.fits(made[1], f'look_up{header}{{"a": 1}}{turn}')
        assert not model.fits(made[1], f'stop{header}{{"a": 1}}')
    assert names_grammar(None, read_choice("auto", LOOSE), Marks({}), parallel=True) is None


def test_harmonys_messages_are_free_but_for_the_calls() -> None:
    model = Bytes(*HARMONY_MARKS)
    grammar = calls_grammar(None, read_choice("auto", OFFERED), model.marks, parallel=True)
    thought = "<|channel|>analysis<|message|>Let me {see}.<|end|><|start|>assistant"
    header = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
    assert model.fits(grammar, thought + "<|channel|>final<|message|>No.")
    assert model.fits(grammar, thought + header + '{"city": "Rome", "days": 3}')
    assert not model.fits(grammar, thought + header + '{"city": "Rome", "days": 30}')
    assert not model.fits(grammar, thought + header + "What?")
    assert not model.fits(grammar, "No.")
    with pytest.raises(InvalidRequest, match="tokens"):
        calls_grammar(None, read_choice("auto", OFFERED), Marks({}), parallel=True)


def test_harmonys_answer_in_json_stands_on_its_channel() -> None:
    model = Bytes(*HARMONY_MARKS)
    chosen = read_choice("auto", OFFERED)
    grammar = calls_grammar(None, chosen, model.marks, parallel=True, answer='{"type": "integer"}')
    alone = calls_grammar(None, ToolChoice(), model.marks, parallel=True, answer='{"type": "integer"}')
    for each in (grammar, alone):
        assert model.fits(each, "<|channel|>final<|message|>7")
        assert not model.fits(each, "7")


def test_mark_may_hold_a_token() -> None:
    """In <｜DSML｜function_calls> only the part between the bars is a token."""
    model, form = Bytes("｜DSML｜"), FORMATS["deepseekv32"]
    grammar = calls_grammar(form, read_choice("auto", OFFERED), model.marks, parallel=True)
    before, _, behind = form.rendered_all
    call = '{"city": "Rome", "days": 3}'.join(form.rendered("look"))
    assert model.fits(grammar, "1 < 2.\n" + before + call + behind + " a < b")
    assert not model.fits(grammar, "1 < 2.\n" + before + call.replace("3", "30") + behind)


def test_what_cannot_be_enforced_is_refused() -> None:
    odd = read_tools([{"function": {"name": "f", "strict": True, "parameters": {"minProperties": 1}}}])
    for choice in ("required", "auto"):
        with pytest.raises(InvalidRequest, match="minProperties"):
            calls_grammar(FORMATS["pythonic"], read_choice(choice, odd), Marks({}), parallel=True)
