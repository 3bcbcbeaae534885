"""The threads that compute masks: their order, and the cost of a failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from runtime.constraint import FEW_ROWS, HostData, Output, allow, only_tokens
from runtime.grammar.backends import with_llguidance
from runtime.grammar.matching.masks import MaskThread
from runtime.grammar.matching.position import Ends, Position
from serve import Engine

ENDS = Ends(frozenset(), frozenset(), 0, avoid=False)


class Matcher:
    """A fake matcher that allows two tokens, or fails."""

    error = ""

    def __init__(self, *, breaks: bool = False) -> None:
        self.breaks = breaks
        self.threads: list[str] = []
        self.consumed: list[int] = []

    def consume(self, token_ids: Sequence[int]) -> bool:
        self.consumed += token_ids
        return True

    def copy(self) -> Matcher:
        return self


class Backend:
    num_words = 1

    def __init__(self) -> None:
        self.sizes: list[int] = []  # number of masks computed together in each call
        self.go = threading.Event()
        self.go.set()
        self.allowed = 3  # tokens 0 and 1

    def fill_masks(self, matchers: Sequence[Any], masks: np.ndarray) -> None:
        self.go.wait(30)
        self.sizes.append(len(matchers))
        for matcher in matchers:
            matcher.threads.append(threading.current_thread().name)
        if any(matcher.breaks for matcher in matchers):
            raise RuntimeError("Already borrowed")
        masks[:] = self.allowed


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def thread(backend: Backend) -> Iterator[MaskThread]:
    made = MaskThread(backend)  # pyright: ignore[reportArgumentType]
    yield made
    made.close()


def position(matcher: Matcher) -> Position:
    return Position(matcher, ENDS, None)  # pyright: ignore[reportArgumentType]


def there(data: HostData) -> HostData:
    came = threading.Event()
    data.when_there(came.set)
    assert came.wait(30)
    return data


def test_what_is_asked_twice_is_answered_in_order_by_one_thread(backend: Backend, thread: MaskThread) -> None:
    """A run of forced tokens is requested while the mask before it is still being computed."""
    matcher = Matcher()
    asked, answers = position(matcher), [HostData() for _ in range(3)]
    backend.go.clear()
    thread.submit(asked, Output([], 0, 0, 0), answers[0])
    asked.slow = True  # as the thread sets it after a slow mask
    thread.submit(asked, Output([5, 6], 0, 0, 2), answers[1])
    backend.go.set()
    for answer in answers[:2]:
        assert there(answer).bitmask is not None
    assert matcher.threads == ["penstock-masks"] * 2
    while asked.num_done < asked.num_submitted:
        pass
    asked.slow = True
    thread.submit(asked, Output([5, 6, 7], 0, 2, 3), answers[2])
    assert there(answers[2]).bitmask is not None
    assert matcher.threads[2:] == ["penstock-masks-slow"]


def test_a_matcher_that_breaks_costs_its_own_output_only(backend: Backend, thread: MaskThread) -> None:
    matchers = [Matcher(), Matcher(breaks=True), Matcher()]
    answers = [HostData() for _ in matchers]
    backend.go.clear()
    first = HostData()
    thread.submit(position(Matcher()), Output([], 0, 0, 0), first)  # the other requests wait together after this one
    for matcher, answer in zip(matchers, answers, strict=True):
        thread.submit(position(matcher), Output([], 0, 0, 0), answer)
    backend.go.set()
    assert there(first).bitmask is not None
    assert [there(answer).failed for answer in answers] == [False, True, False]


async def test_what_the_loop_asks_in_one_turn_is_computed_together(backend: Backend, thread: MaskThread) -> None:
    for _ in range(3):
        answers = [HostData() for _ in range(7)]
        for answer in answers:
            thread.submit(position(Matcher()), Output([], 0, 0, 0), answer)
        while not all(answer.is_there for answer in answers):
            await asyncio.sleep(0)
    assert backend.sizes == [7, 7, 7]


@pytest.mark.parametrize("wants_forced", [True, False])
def test_masks_behind_forced_tokens_are_computed_only_for_who_wants_to_know_them(
    backend: Backend, *, wants_forced: bool
) -> None:
    thread = MaskThread(backend, max_forced=3)  # pyright: ignore[reportArgumentType]
    matchers, answers = [Matcher(), Matcher()], [HostData(), HostData()]
    backend.allowed = 16
    for matcher, answer in zip(matchers, answers, strict=True):
        thread.submit(position(matcher), Output([], 0, 0, 0, wants_forced), answer)
    assert [there(answer).forced for answer in answers] == [(4, 4, 4) if wants_forced else ()] * 2
    assert [len(matcher.consumed) for matcher in matchers] == [3 if wants_forced else 0] * 2
    thread.close()


async def test_an_output_without_a_matcher_fails_and_shifts_no_other_mask(
    backend: Backend, thread: MaskThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter that dropped its row would give each later output the mask of the output before it."""
    positions = [position(Matcher()) for _ in range(3)]
    for number, each in enumerate(positions):
        each.matcher = Matcher() if number else None  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(Position, "advance", lambda self, output: True)

    def fill(matchers: Sequence[Any], masks: np.ndarray) -> None:
        masks[: len(matchers), 0] = [8 + 16 * (matcher is positions[2].matcher) for matcher in matchers]

    monkeypatch.setattr(backend, "fill_masks", fill)
    answers = [HostData() for _ in positions]
    for each, answer in zip(positions, answers, strict=True):
        thread.submit(each, Output([], 0, 0, 0), answer)
    while not all(answer.is_there for answer in answers):
        await asyncio.sleep(0)
    assert [answer.failed for answer in answers] == [True, False, False]
    assert [answer.bitmask.tolist() for answer in answers[1:] if answer.bitmask is not None] == [[8], [24]]


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS, FEW_ROWS + 1, 32])
def test_the_only_token_of_a_mask_is_found_in_any_word(num_rows: int) -> None:
    masks = np.zeros((num_rows, 5), np.int32)
    for token_id in (0, 31, 32, 95, 159):
        masks[:] = 6
        assert only_tokens(masks) == {}
        masks[-1] = 0
        assert only_tokens(masks) == {}
        allow(masks[-1], [token_id])
        assert only_tokens(masks) == {num_rows - 1: token_id}
        allow(masks[-1], [64])
        assert only_tokens(masks) == {}


async def test_an_output_beyond_the_limits_of_its_grammar_costs_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies of a matcher share the states of a lexer, which never decrease."""
    monkeypatch.setitem(with_llguidance.LIMITS, "max_lexer_states", 400)
    sampling = {
        "regex": "(.|\n)*a(.|\n){0,16}|[b-z]*",
        "max_new_tokens": 40,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    async with Engine(grammar_backend="llguidance", log_level="error") as engine:
        ends = []
        for seed in range(12):
            asked = {**sampling, "seed": seed}
            ends.append((await engine.generate("Once", asked))["meta_info"]["finish_reason"]["type"])
    assert set(ends) == {"length"}
