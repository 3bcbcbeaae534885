from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.tokenizer.stop import StopMatcher

letters = st.text("ab", max_size=30)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def whole(text: str, stops: tuple[str, ...], keep: bool) -> tuple[str, str | None]:
    """Read character by character, and end the text as soon as it ends with a stop string."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[:end] if keep else text[: end - len(longest)], longest
    return text, None


def feed(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    sent = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        sent += text
        if matched is not None:
            return sent, matched
    return sent + matcher.flush(), None


@given(letters, stop_strings, st.lists(st.integers(0, 30)), st.booleans())
def test_any_chunking_gives_what_the_whole_text_gives(text, stops, cuts, keep):
    borders = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(borders)]
    assert feed(StopMatcher(stops, keep), pieces) == whole(text, stops, keep)


@given(letters, stop_strings)
def test_no_more_is_held_back_than_may_become_a_stop(text, stops):
    matcher = StopMatcher(stops, keep=False)
    seen = sent = ""
    for character in text:
        seen += character
        new, matched = matcher.push(character)
        sent += new
        if matched is not None:
            return
        held = seen[len(sent) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_everything_behind_a_match_is_dropped():
    matcher = StopMatcher(("END",), keep=False)
    assert matcher.push("one EN") == ("one ", None)
    assert matcher.push("D two END") == ("", "END")
    assert matcher.push("three") == ("", "END")
    assert matcher.flush() == ""


@pytest.mark.parametrize(("keep", "text"), [(False, "one "), (True, "one END")])
def test_stop_stays_in_the_text_only_when_kept(keep, text):
    assert StopMatcher(("END",), keep).push("one END two") == (text, "END")


def test_stop_that_is_complete_first_wins_and_the_longest_of_several():
    assert StopMatcher(("abcd", "bc"), keep=False).push("xabcd") == ("xa", "bc")
    assert StopMatcher(("bc", "abc"), keep=False).push("xabcd") == ("x", "abc")


def test_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("",), keep=False)
