"""The limit of reasoning that may have several blocks, as in Harmony's analysis channel."""

from __future__ import annotations

import numpy as np

from runtime.constraint import HostData, Output
from runtime.grammar.matching.marker import Marker
from runtime.grammar.matching.thinking import LimitedThinking
from runtime.grammar_spec import ThinkingLimit

TEXTS = ("<think>", "</think>", "a", "b", "</", "think>")
OPEN, CLOSE, A, B, SLASH, THINK = range(6)


def forced(ids: list[int], limit: ThinkingLimit) -> list[bool]:
    """For each token and for the end, return whether only the closing marker is allowed."""
    token_bytes = {index: text.encode() for index, text in enumerate(TEXTS)}
    markers = tuple(Marker(text, token_bytes, len(TEXTS)) for text in TEXTS[:2])
    limited = LimitedThinking(limit, (markers[0], markers[1]), (CLOSE,), 1, None)
    found: list[bool] = []
    for place in range(len(ids) + 1):
        data = HostData()
        limited.host_data_after(0, Output(ids, 0, max(place - 1, 0), place), data)
        mask = data.bitmask
        found.append(mask is not None and bool(np.array_equal(mask, np.array([1 << CLOSE], np.int32))))
    return found


def test_blocks_share_one_budget_where_they_may_open_again() -> None:
    limit = ThinkingLimit(3, "<think>", "</think>", reopens=True)
    ids = [A, OPEN, A, CLOSE, B, B, OPEN, A, CLOSE, B, OPEN, CLOSE, A]
    wanted = [place in (8, 11) for place in range(len(ids) + 1)]
    assert forced(ids, limit) == wanted


def test_other_models_think_once() -> None:
    limit = ThinkingLimit(1, "<think>", "</think>")
    assert forced([OPEN, A, CLOSE, OPEN, A, A], limit) == [place == 2 for place in range(7)]


def test_a_mark_of_several_tokens_is_forced_as_a_whole_and_no_further_than_it_goes() -> None:
    token_bytes = {index: text.encode() for index, text in enumerate(TEXTS)}
    markers = None, Marker("</think>", token_bytes, len(TEXTS))
    limited = LimitedThinking(ThinkingLimit(2, None, "</think>"), markers, (SLASH, THINK, A), 1, None)
    found = []
    for output in (Output([A, B], 0, 0, 2), Output([A, B, SLASH, THINK], 0, 2, 4)):
        data = HostData()
        limited.host_data_after(0, output, data)
        found.append(data.forced)
    assert found == [(SLASH, THINK), ()]
