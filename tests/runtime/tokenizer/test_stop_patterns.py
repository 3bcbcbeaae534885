"""`stop_regex` ends texts where Python's `re` finds the match that ends first, however the text is cut."""

from __future__ import annotations

import random
import re
import threading
import time
from typing import Any

import pytest

from runtime.actors.tokenizer import TokenizerActor
from runtime.errors import InvalidRequest
from runtime.grammar.patterns import stop_patterns as compiling
from runtime.grammar.patterns.automata import exact_automaton
from runtime.grammar.patterns.stop_patterns import stop_pattern, stop_patterns
from runtime.tokenizer.stop import StopMatcher
from serve import Engine


def first_match(pattern: str, text: str) -> tuple[int, int] | None:
    """(end, begin) of the match that ends first and, of these, begins first, by trying all substrings."""
    spans = ((end, begin) for end in range(1, len(text) + 1) for begin in range(end))
    return next((span for span in spans if re.fullmatch(pattern, text[span[1] : span[0]])), None)


@pytest.mark.parametrize("pattern", ["ab+c", "[ab]{3}", "a.c|bb", "(ab|ba)+c", r"\d\d", "c(a|b)*c", "aab|ab"])
def test_matches_are_those_of_re(pattern: str) -> None:
    draw = random.Random(pattern)
    for _ in range(150):
        text = "".join(draw.choice("abc1é") for _ in range(draw.randrange(1, 14)))
        expected = first_match(pattern, text)
        for keep in (False, True):
            matcher, sent, matched, rest = StopMatcher((), keep, [stop_pattern(pattern)]), "", None, text
            while rest and matched is None:
                size = draw.randrange(1, 5)
                more, matched = matcher.push(rest[:size])
                sent, rest = sent + more, rest[size:]
            if expected is None:
                assert (sent + matcher.flush(), matched) == (text, None)
            else:
                assert (sent, matched) == (text[: expected[0] if keep else expected[1]], pattern)


def test_strings_and_patterns_end_a_text_together() -> None:
    for text, left in (("one two; three", "one "), ("one, two; three", "one")):
        matcher = StopMatcher((",",), False, [stop_pattern("t[a-z]o"), stop_pattern(";")])
        assert "".join(matcher.push(letter)[0] for letter in text) == left


def test_text_is_held_back_no_longer_than_a_match_may_be() -> None:
    matcher = StopMatcher((), False, [stop_pattern("a[^z]*z")])
    assert matcher.push("xxa")[0] == "xx"
    assert matcher.push("b" * 1023)[0] == ""
    assert len(matcher.push("b" * 2)[0]) == 1026


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "stop_regex"),
        ("a*", "empty text"),
        ("^a", "anchor"),
        ("a$|b", "anchor"),
        (r"(a)\1", "stop_regex"),
        ("(?:[ab]*a[ab]{20})", "too complex"),
    ],
)
def test_refusals_name_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        stop_pattern(pattern)
    assert refused.value.param == "stop_regex"


def test_a_hostile_pattern_costs_little_per_character() -> None:
    matcher = StopMatcher((), False, [stop_pattern("(a|aa)*b"), stop_pattern("(a*)*c"), stop_pattern(".{0,99}d")])
    began = time.process_time()
    matcher.push("a" * 2000)
    assert time.process_time() - began < 2


async def test_engine_stops_at_a_pattern() -> None:
    async with Engine() as engine:
        params = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
        whole = (await engine.generate("Hello", params))["text"]
        pattern = r"[a-z]{3}"
        ends = first_match(pattern, whole)
        answers = await engine.generate(["Hello"] * 2, [{**params, "stop_regex": pattern}, params])
        assert ends is not None
        assert answers[0]["text"] == whole[: ends[1]]
        assert answers[0]["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
        assert answers[1]["text"] == whole
        with pytest.raises(InvalidRequest, match="anchor") as refused:
            await engine.generate("Hello", {**params, "stop_regex": "^a"})
        assert refused.value.param in ("stop_regex", "sampling_params.stop_regex")


def test_the_patterns_of_a_request_have_a_limit_together() -> None:
    pattern = r"\w{100}"
    assert len(stop_patterns([pattern] * 2)) == 2
    with pytest.raises(InvalidRequest, match="306 states, up to 256 are allowed together"):
        stop_patterns([pattern] * 3)


async def test_the_event_loop_compiles_no_pattern_that_the_cache_forgot(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    admit = TokenizerActor._admit

    def noted(pattern: str) -> Any:
        threads.append(threading.get_ident())
        return exact_automaton(pattern)

    def forgetting(self: TokenizerActor, live: Any, ids: Any) -> None:
        stop_pattern.cache_clear()
        admit(self, live, ids)

    monkeypatch.setattr(compiling, "exact_automaton", noted)
    monkeypatch.setattr(TokenizerActor, "_admit", forgetting)
    stop_pattern.cache_clear()
    async with Engine(random_seed=1) as engine:
        await engine.generate("Hello", {"max_new_tokens": 4, "stop_regex": "q[0-9]q"})
    assert threads
    assert threading.get_ident() not in threads


async def test_one_thread_reads_the_patterns_of_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0

    def slow(self: TokenizerActor, live: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1

    monkeypatch.setattr(TokenizerActor, "_read_texts", slow)
    async with Engine(random_seed=1) as engine:
        await engine.generate(["a"] * 4, {"max_new_tokens": 1, "stop_regex": "q"})
    assert most == 1
