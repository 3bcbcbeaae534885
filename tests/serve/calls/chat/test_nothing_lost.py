"""No text of a model is lost: content, reasoning and calls account for every character of any output.

The format's own words are removed from the text (marks, keys of a call's object, words of a header), and so are
whitespace and the punctuation of JSON, Python and tags. Each remaining character must occur in the content, in the
reasoning, or in a call's name, id or arguments, as often as in the text.
"""

from __future__ import annotations

import re
from collections import Counter
from random import Random
from typing import Any

import pytest

from serve.calls.chat.events import Content, Reasoning, ToolCallArguments, ToolCallStart
from serve.calls.chat.harmony import MARKS as HARMONY_MARKS
from serve.calls.chat.parser import OutputParser, ParserSettings
from serve.calls.chat.reasoning import FORMATS as REASONING
from serve.calls.chat.scan.source import Marks
from serve.calls.chat.tools.offered import read_tools
from serve.calls.chat.tools.table import FORMATS
from tool_call_texts import TEXTS, TOOLS

OFFERED = read_tools(TOOLS)
each_format = pytest.mark.parametrize("name", TEXTS)

_PUNCTUATION = re.compile(r"""[\s{}\[\]()<>,:;='"\\/|｜▁`.]""")
_WORDS: dict[str, tuple[str, ...]] = {
    "deepseekv3": ("function<｜tool▁sep｜>", "```json"),
    "deepseekv31": ("<｜tool▁sep｜>",),
    "deepseekv32": ("<｜DSML｜parameter name=", "</｜DSML｜parameter>", 'string="true"', 'string="false"'),
    "kimi_k2": ("functions.", "<|tool_call_argument_begin|>"),
    "qwen3_coder": ("<parameter=", "</parameter>"),
    "seed_oss": ("<parameter=", "</parameter>"),
    "glm45": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "step3": ("function<｜tool_sep｜>", "<steptml:invoke name=", "</steptml:invoke>", "<steptml:parameter name=",
              "</steptml:parameter>"),
    "minimax-m2": ("<parameter name=", "</parameter>"),
    "gemma4": ("call:",),
    "mistral": ("[ARGS]",),
    "mistral-list": ("[ARGS]",),
    "gpt-oss": (*HARMONY_MARKS, "to=functions.", "assistant", "commentary", "analysis", "final", "json"),
}  # fmt: skip
# Members of a call's object that add no information.
_LABEL = re.compile(r'"(?:id|type|tool_call_id)"\s*:\s*(?:"[^"\\]*"|\d+)')
_SHARED = ('"name"', '"arguments"', '"parameters"', '"tool_name"', "<think>", "</think>")


def substance(name: str, text: str) -> Counter[str]:
    """Return the characters that must be accounted for."""
    form = FORMATS.get(name)
    text = _LABEL.sub(" ", text)
    for mark in sorted({*_WORDS.get(name, ()), *(form.marks if form else ()), *_SHARED}, key=len, reverse=True):
        text = text.replace(mark, " ")
    return Counter(_PUNCTUATION.sub("", text).casefold())


def told(settings: ParserSettings, text: str) -> str:
    """Return all text of an answer."""
    pieces: list[str] = []
    for event in OutputParser(settings).feed(text, final=True):
        match event:
            case Content(text) | Reasoning(text) | ToolCallArguments(_, text):
                pieces.append(text)
            case ToolCallStart(_, call_id, called):
                pieces += (call_id, called)
    return "".join(pieces)


def settings_of(name: str, *, thinks: bool) -> ParserSettings:
    if name == "gpt-oss":
        return ParserSettings(harmony=True, tools=OFFERED, separate_reasoning=thinks)
    return ParserSettings(calls=FORMATS[name], tools=OFFERED, reasoning=REASONING["qwen3"] if thinks else None)


def assert_nothing_lost(name: str, text: str) -> None:
    for thinks in (False, True):
        lost = substance(name, text) - Counter(told(settings_of(name, thinks=thinks), text).casefold())
        assert not lost, f"lost {''.join(sorted(lost.elements()))!r} of {text!r}"


def mutant(name: str, text: str, rng: Random) -> str:
    """Return the text with one to three changes: a piece removed, repeated, moved or inserted."""
    form = FORMATS.get(name)
    marks = form.marks if form else HARMONY_MARKS
    put_in = (
        "ω",
        " ωψξ ",
        '"ω": "ψ", ',
        ', "ω": ["ψ", {"ξ": 1}]',
        "ω=ψ, ",
        "ω(",
        "λ=",
        '"',
        "'",
        "\\",
        *"{}[](),:<",
        *marks,
    )
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((1, 1, 2, 8, 30)))
        way = rng.randrange(4)
        if way == 0:
            text = text[:start] + text[end:]
        elif way == 1:
            text = text[:end] + text[start:]
        elif way == 2:
            text = text[:start] + rng.choice(put_in) + text[start:]
        else:
            place = rng.randrange(len(text) + 1)
            text = text[:place] + text[start:end] + text[place:]
    return text if rng.random() < 0.7 else text[: rng.randrange(len(text) + 1)]


@each_format
def test_beginnings_of_a_text_are_accounted_for(name: str) -> None:
    for end in range(len(TEXTS[name]) + 1):
        assert_nothing_lost(name, TEXTS[name][:end])


def check_mutants(name: str, rounds: int) -> None:
    rng = Random(f"{name} {rounds}")
    for _ in range(rounds):
        assert_nothing_lost(name, mutant(name, rng.choice(("", "<think>ζ</think>")) + TEXTS[name], rng))


@each_format
def test_malformed_texts_are_accounted_for(name: str) -> None:
    check_mutants(name, 100)


@pytest.mark.slow
@each_format
def test_more_malformed_texts_are_accounted_for(name: str) -> None:
    check_mutants(name, 1000)


def test_many_beginnings_do_not_each_search_all_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the end of a name once read the whole rest: 1.5 MB of `<tool_call>` took 25 s."""
    looked = 0
    find = Marks.find

    def counted(self: Marks, text: str, start: int, end: int = len(TEXTS) << 40) -> Any:
        nonlocal looked
        match = find(self, text, start, end)
        looked += (match.end() if match else min(end, len(text))) - start
        return match

    monkeypatch.setattr(Marks, "find", counted)
    text = "<tool_call>" * 3000
    for name in ("glm45", "qwen3_coder", "kimi_k2", "deepseekv3", "gemma4"):
        looked = 0
        OutputParser(ParserSettings(calls=FORMATS[name], tools=OFFERED)).feed(text, final=True)
        assert looked < 60 * len(text), name
