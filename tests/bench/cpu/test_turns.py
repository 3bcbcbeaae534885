from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bench.cpu import turns
from bench.cpu.turns import Contest, Failure
from bench.cpu.work import OUTPUT, STREAMS, Ids, WorkError, concurrency, shared_prefix


class ScriptedContender:
    """Takes `token_s` per generated token, and writes a log that contenders may share."""

    def __init__(self, name: str, token_s: float, diary: list[str] | None = None) -> None:
        self.name = name
        self.url: str | None = None
        self.versions: Mapping[str, str] = {name: "1"}
        self.diary = [] if diary is None else diary
        self.asked: list[Sequence[Ids]] = []
        self.fails_at: int | None = None  # number of the call that fails
        self.running = self.paused = False
        self._token_s = token_s

    def start(self) -> None:
        self.running, self.paused = True, False
        self.diary.append(f"{self.name} starts")

    def generate(self, prompts: Sequence[Ids], new_tokens: int) -> float:
        if not self.running or self.paused:
            raise AssertionError(f"{self.name} was asked while it stood still")
        if self.fails_at == len(self.asked):
            raise WorkError("out of memory")
        self.asked.append(prompts)
        self.diary.append(f"{self.name} {len(prompts)} x {new_tokens}")
        return self._token_s * new_tokens * len(prompts)

    def ask(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"lag_s": 0.002} if job.get("lag") else {}

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def cpu_s(self) -> float:
        return 0.0

    def peak_bytes(self) -> int:
        return 3 * 2**20

    def stop(self) -> None:
        self.running = False


def contest(rounds: int = 2) -> Contest:
    return Contest(seed="1", vocab=500, rounds=rounds, say=lambda _: None)


def test_each_round_asks_everybody_in_turn_after_a_warm_up() -> None:
    diary: list[str] = []
    a, b = (ScriptedContender(name, 0.1, diary) for name in "ab")
    contest().measure_in_process([a, b], [concurrency(8)], starts=False)
    assert diary == ["a starts", "b starts", *["a 8 x 2", "b 8 x 2"], *["a 8 x 64", "b 8 x 64"] * 2]
    assert not a.running
    assert not b.running


def test_output_tokens_per_second_are_noted_for_each_round() -> None:
    found = contest()
    found.measure_in_process([ScriptedContender("a", 0.25)], [concurrency(8)], starts=False)
    assert [(turn.engine, turn.figure, turn.round, turn.value) for turn in found.turns] == [
        ("a", "concurrency 8", 0, 4.0),
        ("a", "concurrency 8", 1, 4.0),
    ]


def test_everybody_gets_the_same_prompts_and_no_prompt_twice() -> None:
    a, b = ScriptedContender("a", 0.1), ScriptedContender("b", 0.1)
    contest().measure_in_process([a, b], [concurrency(8)], starts=False)
    assert a.asked == b.asked
    prompts = [tuple(prompt) for asked in a.asked for prompt in asked]
    assert len(set(prompts)) == len(prompts) == 24


def test_a_shared_prefix_is_new_in_each_round_and_found_again_within_it() -> None:
    a = ScriptedContender("a", 0.1)
    contest().measure_in_process([a], [shared_prefix()], starts=False)
    begins = [{tuple(prompt[:1024]) for prompt in asked} for asked in a.asked[1:]]
    assert [len(one) for one in begins] == [1] * 4
    assert begins[0] == begins[1] != begins[2] == begins[3]


def test_who_fails_takes_no_further_part_and_is_reported() -> None:
    a, b = ScriptedContender("a", 0.1), ScriptedContender("b", 0.1)
    a.fails_at = 1
    found = contest()
    found.measure_in_process([a, b], [concurrency(8), concurrency(32)], starts=False)
    assert found.failures == [Failure("a", "concurrency 8", "out of memory")]
    assert {turn.engine for turn in found.turns} == {"b"}
    assert len(found.turns) == 4


def test_a_start_is_timed_in_each_round_and_memory_read_at_the_end() -> None:
    a = ScriptedContender("a", 0.1)
    found = contest(rounds=3)
    found.measure_in_process([a], [], starts=True)
    assert [turn.figure for turn in found.turns] == ["start to first token"] * 3 + ["peak memory"]
    assert found.turns[-1].value == 3
    assert a.diary.count("a starts") == 3


def test_our_streams_come_with_the_loops_lag_and_the_same_work_in_process() -> None:
    ours, peer = ScriptedContender("ours", 1 / 64), ScriptedContender("vllm", 0.1)
    ours.url = peer.url = "http://nowhere"
    sent: list[int] = []

    def stream(url: str, prompts: object) -> dict[str, float]:
        sent.append(len(prompts))  # pyright: ignore[reportArgumentType]
        return {"HTTP, 16 streams": 10.0}

    found = contest(rounds=1)
    found.measure_streams([(ours, stream), (peer, stream)])
    assert {(turn.engine, turn.figure): turn.value for turn in found.turns} == {
        ("ours", "HTTP, 16 streams"): 10.0,
        ("ours", "concurrency 16"): STREAMS * OUTPUT / (STREAMS * OUTPUT / 64),
        ("ours", "loop lag p99"): pytest.approx(2.0),
        ("vllm", "HTTP, 16 streams"): 10.0,
    }
    assert sent == [16] * 4


def test_who_does_not_serve_fails_in_the_streams() -> None:
    found = contest()
    found.measure_streams([(ScriptedContender("a", 0.1), lambda url, prompts: {})])
    assert [failure.reason for failure in found.failures] == ["a does not serve"]


def test_what_others_used_of_the_machine_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([(100.0, 1000.0), (103.0, 1010.0)])
    monkeypatch.setattr(turns, "machine_s", lambda: next(clock))
    monkeypatch.setattr(turns, "process_time", lambda: 0.0)
    assert turns.CpuWatch(ScriptedContender("a", 0.1)).others() == pytest.approx(0.3)
