"""No template exceeds its limits of time and memory, whatever a client sends. Ordinary templates are not refused."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import pytest

import tiny_tokenizers
from runtime.errors import InvalidRequest, TakesLong
from runtime.tokenizer.chat_template import ChatTemplate

BIG = 10**9
BOMB = "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
HOSTILE = {
    "loops in loops": "{% for i in range(n) %}{% for j in range(n) %}{% for k in range(n) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "loops without a body's value": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(100) }}",
    "text in a macro's loop": "{% macro f() %}{% for i in range(99999) %}" + "x" * 10000 + "{% endfor %}{% endmacro %}"
    "{{ f() | length }}",
    "doubling": "{% set ns = namespace(x='xx') %}{% for i in range(90) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(x='xx') %}{% for i in range(90) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by join": "{% set ns = namespace(x='xx') %}{% for i in range(90) %}{% set ns.x = [ns.x, ns.x] | join %}"
    "{% endfor %}",
    "doubling by format": "{% set ns = namespace(x='xx') %}{% for i in range(90) %}"
    "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "squaring": "{% set ns = namespace(x=9) %}{% for i in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "keeping slices": "{% set ns = namespace(a=[]) %}{% for i in range(99999) %}{% set ns.a = [ns.a, text[1:]] %}"
    "{% endfor %}",
    "a tree of one leaf, written": BOMB + "{{ ns.a }}",
    "a tree of one leaf, as JSON": BOMB + "{{ ns.a | tojson }}",
    "a tree of one leaf, compared": BOMB + BOMB.replace("ns", "other") + "{{ ns.a == other.a }}",
    "a tree of one leaf, joined": BOMB + "{{ ['x', ns.a] | join }}{{ 'x' ~ ns.a }}",
    "a namespace, written": BOMB + "{{ ns }}",
    "indented JSON": "{% set ns = namespace(a=(text | list)[:99999]) %}{% for i in range(400) %}{% set ns.a = [ns.a] %}"
    "{% endfor %}{{ ns.a | tojson(indent=64) }}",
    **{
        expression: "{{ (" + expression + ") | length }}"
        for expression in (
            "'x' * big",
            "[1] * big",
            "big * 'x'",
            "10 ** big",
            "2 ** 10 ** 5 ** 9",
            "'x' | center(big)",
            "'x'.center(big)",
            "'x'.ljust(width=1) ~ 'x'.rjust(big)",
            "'x'.zfill(big)",
            "'\t'.expandtabs(big)",
            "'%1000000000d' % 1",
            "'%.1000000000f' % 1",
            "'%*d' % (big, 1)",
            "'%1000000000d' | format(1)",
            "'{:1000000000}'.format(1)",
            "'{:{}}'.format(1, big)",
            "'{x:1000000000}'.format_map({'x': 1})",
            "['x'] | map('center', big) | list",
            "text.replace('x', text)",
            "text | replace('x', text)",
            "text.replace('', text)",
            "text.join(text | list)",
            "text | list | join(text)",
            "text.translate({120: text})",
            "(text ~ '\n') | replace('x', '\n') | indent(99999)",
            "text | indent(text, first=true) | indent(big, first=true)",
            "(text * 20) | batch(1) | list",
            "[1] | batch(big, 1) | list",
            "[1] | slice(big) | list",
            "1.5 | round(big, 'ceil')",
            "range(big)",
            "range(99999) | map('string') | map('center', 9999) | list",
            "[[1]] * 9999 | sum(start=[])",
            "range(9999) | map('list') | sum(start=[])",
            "(1).to_bytes(big, 'big')",
            "lipsum(n=big)",
            "{'a': 1} | tojson(indent=big)",
        )
    },
}
HELLO = [{"role": "user", "content": "hello"}]


def rendered(source: str, **variables: Any) -> str:
    return ChatTemplate({"default": source}, {}).render(HELLO, **variables)


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_work_is_refused_in_bounded_time_and_memory(source: str) -> None:
    before = peak_mb()
    with pytest.raises(InvalidRequest) as caught:
        rendered(source, n=99999, big=BIG, text="x" * 200_000)
    assert caught.value.param == "messages"
    assert peak_mb() - before < 128


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_the_refusal_says_what_is_too_much() -> None:
    with pytest.raises(InvalidRequest, match=r"^The chat template would take more than 1 s or 64 MiB"):
        rendered(HOSTILE["doubling"])


async def test_on_a_loop_long_work_is_sent_to_a_thread() -> None:
    template = ChatTemplate({"default": "{% for i in range(n) %}{% endfor %}{{ n }}"}, {})
    with pytest.raises(TakesLong):
        template.render(HELLO, n=90_000)
    assert await asyncio.to_thread(template.render, HELLO, n=90_000) == "90000"
    assert template.render(HELLO, n=9) == "9"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('{{ {"a": "ü"} | tojson(ensure_ascii=False, sort_keys=True) }}', '{"a": "ü"}'),  # used by GLM
        ("{{ [1, 2] | join(d='-') }}", "1-2"),
        ("{{ [1, 2, 3] | batch(linecount=2, fill_with=0) | list }}", "[[1, 2], [3, 0]]"),
        ("{{ [1, 2] | slice(slices=2) | list }}", "[[1], [2]]"),
        ("{{ 'a b' | wordwrap(width=1, wrapstring='|') }}", "a|b"),
        ("{{ 'a' | indent(width=2, first=true) }}", "  a"),
        ("{{ '\ta'.expandtabs(tabsize=2) }}", "  a"),
        ("{{ (1).to_bytes(length=1, byteorder='big') }}", "b'\\x01'"),
    ],
)
def test_arguments_of_filters_may_be_named(source: str, text: str) -> None:
    assert rendered(source) == text


def test_long_honest_chats_are_rendered() -> None:
    source = tiny_tokenizers.chat_template("byte_bpe")
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 200} for i in range(1999)]
    text = ChatTemplate({"default": source}, {"bos_token": "", "eos_token": ""}).render(messages)
    assert text.count("word") == 1999 * 200
    one = ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "字" * 1_500_000}])
    assert one.count("字") == 1_500_000
