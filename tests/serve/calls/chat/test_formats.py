"""Every format of tool calls: parsing for any division into pieces, without losing text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from runtime.config.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from serve.calls.chat.events import AssistantMessage, ToolCallArguments, ToolCallStart, collect
from serve.calls.chat.parser import OutputParser, ParserSettings
from serve.calls.chat.reasoning import FORMATS as REASONING
from serve.calls.chat.tools.offered import read_tools
from serve.calls.chat.tools.table import FORMATS
from tool_call_texts import ALIASES, CALLS, TEXTS, TOOLS, WITHOUT_TEXT

OFFERED = read_tools(TOOLS)
each_format = pytest.mark.parametrize("name", TEXTS)

LOOKALIKES = (
    "",
    " \n\n ",
    "plain text",
    "a < b and [1, 2] and {x} and `code` and ``` fences",
    "<tool_cal <tool_call <｜tool▁calls▁begin <| <|tool_call [TOOL_CALL functool",
    "<tool_call></tool_call>",
    "<tool_call>\n{}\n</tool_call>",
    '<tool_call>{"name": 3, "arguments": {}}</tool_call> and more',
    '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    '{"name": "nobody", "arguments": {}} is JSON',
    '{"city": {"deep": [1, 2, {"x": "\\"}"}]}}',
    "[TOOL_CALLS] and then nothing",
    "[TOOL_CALLS][{]}",
    "[nobody(a=1)] [get_weather] [get_weather(] [get_weather(city)]",
    "[get_weather(city='x', days=[1, {'a': (2, None)}, ), stop(",
    "<function=f><parameter=a>1</parameter></function> trailing </tool_call>",
    "<tool_call><function=f>rubbish</function></tool_call>",
    "<tool_call>name with spaces<arg_key>k</arg_key></tool_call>",
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>x",
    "<｜tool▁calls▁begin｜> words <｜tool▁calls▁end｜>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" + "long name " * 60,
    "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{<|tool_call_end|> x",
    "<|tool_call>call:f{a:{b:[1,2,<|\"|>x<|\"|>]},c:tr",
    "<|channel|>analysis<|message|>x<|end|>y<|start|>assistant<|channel|>final<|message|>z<|return|>",
    "<|channel|>" + "header " * 100,
    "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"a\":",
    "{" * 3000 + "}" * 3000,
    "[" * 3000,
    '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 3000,
    "<|python_start|>[get_weather(opt=" + "{'a': " * 500,
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": null}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    "<think>never\n\nclosed",
    "\n<think>\nclosed\n</think>\n\nanswer <think>again</think>",
)  # fmt: skip


def settings_of(name: str, **changes: Any) -> ParserSettings:
    if name == "gpt-oss":
        return ParserSettings(harmony=True, tools=OFFERED, **changes)
    return ParserSettings(calls=FORMATS[name], tools=OFFERED, **changes)


def read(settings: ParserSettings, pieces: Sequence[str]) -> tuple[AssistantMessage, list[tuple[str, str]]]:
    """Return the message without the calls' ids, and the calls as (name, arguments)."""
    parser = OutputParser(settings)
    events = []
    for index, piece in enumerate(pieces):
        events += parser.feed(piece, final=index == len(pieces) - 1)
    started: list[int] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(started)
            started.append(event.index)
        elif isinstance(event, ToolCallArguments):
            assert event.index == started[-1]
            assert event.text
    message = collect(events)
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    message.tool_calls = []
    json.dumps([message.content, message.reasoning, calls], ensure_ascii=False).encode()
    return message, calls


def cut(text: str, rng: Random) -> list[str]:
    """Divide a text into random pieces: few, some, or nearly single characters. Some pieces are empty."""
    count = rng.randint(0, min(len(text), rng.choice((1, 3, 10, 400))))
    places = sorted(rng.choices(range(len(text) + 1), k=count))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)])]


def texts_of(name: str) -> Iterator[str]:
    whole = TEXTS[name]
    yield whole
    yield whole + whole
    yield "Before.\n\n" + whole + "\nAfter."
    yield from LOOKALIKES


def test_both_sides_know_the_same_names() -> None:
    assert {*FORMATS, "gpt-oss"} == set(TOOL_CALL_PARSERS)
    assert {*REASONING, "gpt-oss"} == set(REASONING_PARSERS)
    assert {*TEXTS, *ALIASES} == set(TOOL_CALL_PARSERS)
    assert all(FORMATS[alias] is FORMATS[name] for alias, name in ALIASES.items())


@each_format
def test_content_and_calls_are_read(name: str) -> None:
    message, calls = read(settings_of(name), [TEXTS[name]])
    assert [(called, json.loads(arguments)) for called, arguments in calls] == CALLS
    assert message.content == (None if name in WITHOUT_TEXT else "Hi there.")
    assert message.reasoning is None


@each_format
def test_arguments_come_before_the_call_ends(name: str) -> None:
    parser = OutputParser(settings_of(name))
    text = TEXTS[name]
    place = text.index("Paulo")
    early = [event for letter in text[:place] for event in parser.feed(letter)]
    assert any(isinstance(event, ToolCallStart) for event in early)
    assert "".join(event.text for event in early if isinstance(event, ToolCallArguments)).startswith('{"city')


@each_format
def test_every_beginning_of_a_text_is_read_alike_however_it_is_cut(name: str) -> None:
    rng = Random(name)
    whole_calls = read(settings_of(name), [TEXTS[name]])[1]
    for end in range(len(TEXTS[name]) + 1):
        text = TEXTS[name][:end]
        whole = read(settings_of(name), [text])
        assert read(settings_of(name), cut(text, rng)) == whole
        assert read(settings_of(name), [*text, ""]) == whole
        message, calls = whole
        for (called, arguments), (full_name, full) in zip(calls, whole_calls):
            assert called == full_name
            assert full.startswith(arguments) or "days" in full  # a value that is not a string may be truncated
        if not calls and name != "gpt-oss":
            assert (message.content or "") == text, "lost without a call"


def check_cuts(name: str, rounds: int) -> None:
    rng = Random(f"{name} {rounds}")
    texts = list(texts_of(name))
    while len(texts) < 200:
        text = rng.choice(texts)
        texts.append(text[: rng.randint(0, len(text))] + rng.choice(("", "", rng.choice(texts))))
    settings = [settings_of(name)]
    if name != "gpt-oss":
        settings += [
            settings_of(name, reasoning=REASONING["qwen3"]),
            settings_of(name, reasoning=REASONING["kimi_k2"], is_open=True, stream_reasoning=False),
        ]
    else:
        settings.append(settings_of(name, separate_reasoning=False, stream_reasoning=False))
    wholes = [[read(one, [text]) for text in texts] for one in settings]
    for _ in range(rounds):
        which, number = rng.randrange(len(settings)), rng.randrange(len(texts))
        pieces = cut(texts[number], rng)
        assert read(settings[which], pieces) == wholes[which][number], pieces


@each_format
def test_random_cuts_change_nothing(name: str) -> None:
    check_cuts(name, 200)


@pytest.mark.slow
@each_format
def test_more_random_cuts_change_nothing(name: str) -> None:
    check_cuts(name, 1_000)


@pytest.mark.long
@pytest.mark.timeout(1200)
@each_format
def test_many_random_cuts_change_nothing(name: str) -> None:
    check_cuts(name, 100_000)


@each_format
def test_what_is_no_call_is_text(name: str) -> None:
    for text in ("Say <b>hello</b> [1] {2} `x` 3 < 4.", '[nobody(a=1)] {"a": 1} is not a call.', "<tool"):
        message, calls = read(settings_of(name), [text])
        assert (message.content, calls) == (text, [])


@each_format
def test_time_is_linear_in_what_looks_like_a_call(name: str) -> None:
    """Counts steps of the parser, not seconds: one per piece, and a few at the end."""
    parser = OutputParser(settings_of(name))
    opening = TEXTS[name][: TEXTS[name].index("Paulo")]
    parser.feed(opening)
    held = 0
    for _ in range(3000):
        parser.feed("x")
        held = max(held, len(parser._source._text))
    assert held <= 64


@each_format
def test_only_one_call_is_told_where_calls_may_not_be_parallel(name: str) -> None:
    _, calls = read(settings_of(name, max_calls=1), [TEXTS[name]])
    assert [called for called, _ in calls] == ["get_weather"]


def test_parameters_have_the_types_of_the_schema() -> None:
    properties = {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "whole": {"type": "integer"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "kind": {"enum": ["1", "2"]},
        "pointed": {"$ref": "#/$defs/size"},
    }
    parameters = {"type": "object", "properties": properties, "$defs": {"size": {"type": "integer"}}}
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    given = {
        "text": ("3", "3"),
        "number": ("3", 3),
        "whole": ("4.0", 4),
        "flag": ("True", True),
        "list": ("[1, 'two']", [1, "two"]),
        "maybe": ("null", None),
        "kind": ("1", "1"),
        "pointed": ("7", 7),
        "unknown": ('{"a": 1}', {"a": 1}),
        "words": ("not JSON", "not JSON"),
        "broken": ("[1, 2", "[1, 2"),
        "endless": ("[NaN]", "[NaN]"),
        "large": ("[1e999]", [float("inf")]),
    }
    body = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, (text, _) in given.items())
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    settings = ParserSettings(calls=FORMATS["qwen3_coder"], tools=tools)
    _, [(_, arguments)] = read(settings, [text])
    assert json.loads(arguments) == {key: value for key, (_, value) in given.items()}


def test_members_that_belong_to_no_call_are_text() -> None:
    call = '{"why": "cold", "name": "stop", "arguments": {}, "id": "1", "sure": [1]}'
    message, calls = read(settings_of("qwen25"), [f"<tool_call>{call}</tool_call>"])
    assert (message.content, calls) == ('"why": "cold", "sure": [1]', [("stop", "{}")])
    message, calls = read(settings_of("qwen25"), [f"<tool_call>{call[:-7]}"])
    assert (message.content, calls) == ('"why": "cold", "sure', [("stop", "{}")])


def test_python_strings_become_json() -> None:
    text = r"""[get_weather(city='a\'b\n\x41\u00e9\ud83d\ude80\q"', opt={"k": None, 'l': (True, -1.5e3)})]"""
    _, [(_, arguments)] = read(settings_of("pythonic"), [text])
    expected = {"city": "a'b\nAé🚀\\q\"", "opt": {"k": None, "l": [True, -1500.0]}}
    assert json.loads(arguments) == expected


def test_kimis_own_ids_are_kept() -> None:
    parser = OutputParser(settings_of("kimi_k2"))
    message = collect(parser.feed(TEXTS["kimi_k2"], final=True))
    assert [call.id for call in message.tool_calls] == ["functions.get_weather:0", "functions.stop:1"]


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n3\n</function>\n</tool_call>",
            [("get_weather", '{"city": "Rome", "days": 3}')],
            None,
        ),
        (
            "minimax-m2",
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome\n<parameter name="days">3'
            "</parameter>\n</invoke>\n</minimax:tool_call>",
            [("get_weather", '{"city": "Rome", "days": 3}')],
            None,
        ),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days\n</tool_call>",
            [("get_weather", '{"city": "Rome"}')],
            "\n<arg_key>days\n</tool_call>",
        ),
        ("pythonic", "[get_weather(city='Rome'),", [("get_weather", '{"city": "Rome"}')], None),
        (
            "lfm2",
            "<|tool_call_start|>[f(a='x 'y, z' w', b=1)]<|tool_call_end|>",
            [("f", """{"a": "x 'y, z' w", "b": 1}""")],
            None,
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "x\ny\\\'\\d\t"}}</tool_call>',
            [("f", r"""{"a": "x\ny'\\d\t"}""")],
            None,
        ),
        ("hermes", '<tool_call>\n{"name": "stop", "arguments": {}}}\n</tool_call>', [("stop", "{}")], None),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}}\n{"name": "stop"}\n</tool_call>',
            [("f", "{}"), ("stop", "{}")],
            None,
        ),
        (
            "deepseekv31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [("f", "{}")],
            None,
        ),
        (
            "hermes",
            '<tool_call>[{"name": "stop", "arguments": {}}, ',
            [("stop", "{}")],
            None,
        ),
    ],
)
def test_calls_are_whole_where_a_model_errs_in_writing_them(
    name: str, text: str, calls: list[tuple[str, str]], content: str | None
) -> None:
    """A value ends where the next value begins. A string ends at a quote after which a valid text follows. Arguments
    are valid JSON. Surplus brackets and commas are not content.
    """
    for pieces in ([text], list(text)):
        parser = OutputParser(ParserSettings(calls=FORMATS[name], tools=OFFERED))
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.feed("", final=True)
        message = collect(events)
        assert [(call.name, call.arguments) for call in message.tool_calls] == calls
        assert message.content == content


BROKEN: list[tuple[str, str, Any]] = [
    ("llama3", '{"name": "stop", "parameters": {invalid json}}', {"invalid json": None}),
    (
        "qwen25",
        '<tool_call>{"name": "stop", "arguments": {city: Oslo, "days": 3,}}</tool_call>',
        {"city": "Oslo", "days": 3},
    ),
    ("qwen25", '<tool_call>{"name": "stop", "arguments": {"city": "Oslo"</tool_call>', {"city": "Oslo"}),
    ("deepseekv3", 'function<｜tool▁sep｜>stop\n```json\n{"days": [1, 2\n```<｜tool▁call▁end｜>', {"days": [1, 2]}),
    ("phi4", 'functools[{"name": "stop", "arguments": {"days" 01 "city": }}]', {"days": "01", "city": None}),
    ("phi4", '<|tool_call|>[{"name": "stop", "arguments": nothing}]<|/tool_call|>', "nothing"),
    (
        "glm45",
        '<tool_call>get_weather\n<arg_key>opt</arg_key>\n<arg_value>{\\"a\\": 1}</arg_value></tool_call>',
        {"opt": {"a": 1}},
    ),
    ("lfm2", "<|tool_call_start|>[stop(days 3)]<|tool_call_end|>", {}),
]


@pytest.mark.parametrize(("name", "text", "arguments"), BROKEN)
def test_arguments_of_broken_calls_are_json(name: str, text: str, arguments: Any) -> None:
    offered = read_tools(TOOLS)
    text = f"<｜tool▁call▁begin｜>{text}" if name == "deepseekv3" else text
    for pieces in ([text], list(text)):
        parser = OutputParser(ParserSettings(calls=FORMATS[name], tools=offered))
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.feed("", final=True)
        [call] = collect(events).tool_calls
        assert json.loads(call.arguments) == arguments


def test_arguments_are_json_whatever_is_written() -> None:
    rng = Random(4)
    words = ["{", "}", "[", "]", ",", ":", '"a"', " ", "-0.5", "01", "true", "None", "x y", "```js", "<", "\n", "'b'"]
    for _ in range(3000):
        body = "{" + "".join(rng.choices(words, k=rng.randint(0, 12)))
        text = f'<tool_call>{{"name": "get_weather", "arguments": {body}</tool_call>'
        parser = OutputParser(ParserSettings(calls=FORMATS["qwen25"], tools=read_tools(TOOLS)))
        place = rng.randrange(len(text))
        message = collect([*parser.feed(text[:place]), *parser.feed(text[place:], final=True)])
        for call in message.tool_calls:
            assert isinstance(json.loads(call.arguments), dict), text
