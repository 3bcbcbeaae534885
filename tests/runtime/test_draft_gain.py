"""Drafts go on where they bring more tokens per second, and are tried again where they did not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fake_runner import Drive, make_sequence
from runtime.actors import step_times
from runtime.speculative.gain import LONGEST_INTERVAL, TRIAL, DraftGain


def share_with_drafts(gain: DraftGain, *, drafted_s: float, tokens: int, num_steps: int = 4000, rows: int = 1) -> float:
    """Return the share of steps with drafts, if they take `drafted_s` and others 1 s for each token."""
    count = 0
    for _ in range(num_steps):
        drafted = gain.allows(rows)
        count += drafted
        seconds = drafted_s if drafted else 1.0
        gain.note(rows, drafted=drafted, num_tokens=tokens if drafted else 1, seconds=seconds)
    return count / num_steps


@pytest.mark.parametrize(("drafted_s", "tokens", "low", "high"), [(1.5, 2, 0.97, 1.0), (2.5, 2, 0.0, 0.03)])
def test_the_faster_kind_of_steps_prevails(drafted_s: float, tokens: int, low: float, high: float) -> None:
    assert low <= share_with_drafts(DraftGain(), drafted_s=drafted_s, tokens=tokens) <= high


@pytest.mark.parametrize(("late_s", "low", "high"), [(0.0, 0.97, 1.0), (0.9, 0.0, 0.03)])
def test_a_late_step_after_drafts_is_charged_to_them(late_s: float, low: float, high: float) -> None:
    """Steps with drafts alone would be faster: 2 tokens in 1.8 s. With the next step, 3 tokens take 2.8 s or 3.7 s."""
    gain, follows, count = DraftGain(), False, 0
    for _ in range(4000):
        drafted = gain.allows(1) and not follows
        count += drafted or (follows and gain.allows(1))
        seconds = 1.8 if drafted else 1.0 + late_s * follows
        gain.note(1, drafted=drafted, num_tokens=1 + drafted, seconds=seconds, follows=follows)
        follows = drafted
    assert low <= count / 4000 <= high


def test_the_time_until_a_launch_is_measured_while_sequences_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(step_times, "time", SimpleNamespace(monotonic=lambda: now.s))
    drive = Drive()
    drive.add(make_sequence([1, 2, 3], max_new_tokens=20))
    progress = step_times.Progress(drive.scheduler, 1000)
    found = []
    for wait_s in (5.0, 0.5):  # the engine is idle before the prompt, but the decode step is late
        batch = drive.scheduler.fill()
        assert batch is not None
        now.s += wait_s
        progress.note_first_launch(batch)
        drive.runner.launch(batch)
        now.s += 2.0
        found.append(progress.note_applied(batch, []))
        drive.apply()
    now.s += 1.0
    found.append(progress.note_applied(batch, []))  # it was launched while the step before it was in flight
    assert found == [(2.0, 0.0, 0), (2.0, 0.5, 0), (1.0, 0.0, 0)]


def test_loads_are_measured_separately() -> None:
    gain = DraftGain()
    assert share_with_drafts(gain, drafted_s=5.0, tokens=2, rows=8) < 0.05
    assert gain.allows(1)
    assert share_with_drafts(gain, drafted_s=1.0, tokens=2, rows=1) > 0.95


def test_a_change_is_noticed_within_the_longest_interval() -> None:
    gain = DraftGain()
    share_with_drafts(gain, drafted_s=5.0, tokens=2)
    steps = LONGEST_INTERVAL + 8 * TRIAL
    share_with_drafts(gain, drafted_s=1.0, tokens=3, num_steps=steps)
    assert share_with_drafts(gain, drafted_s=1.0, tokens=3) > 0.95


def test_a_delayed_step_does_not_decide() -> None:
    gain = DraftGain()
    share_with_drafts(gain, drafted_s=1.0, tokens=2, num_steps=200)
    for _ in range(3):
        gain.note(1, drafted=True, num_tokens=2, seconds=1000.0)
        share_with_drafts(gain, drafted_s=1.0, tokens=2, num_steps=30)
    assert share_with_drafts(gain, drafted_s=1.0, tokens=2, num_steps=1000) > 0.8


def test_a_higher_gain_may_be_asked_for() -> None:
    assert share_with_drafts(DraftGain(min_gain=2.0), drafted_s=1.5, tokens=2) < 0.05


def test_trials_that_lose_much_are_rare() -> None:
    gain = DraftGain()
    share_with_drafts(gain, drafted_s=4.0, tokens=2, num_steps=200)
    share = share_with_drafts(gain, drafted_s=4.0, tokens=2, num_steps=16_000)
    assert 0 < share * (4.0 - 2.0) <= 0.01


def test_a_larger_load_begins_like_a_smaller_one_where_drafts_did_not_pay_off() -> None:
    gain = DraftGain()
    assert not gain.is_off(4)  # nothing is known
    share_with_drafts(gain, drafted_s=5.0, tokens=2, rows=4, num_steps=TRIAL)
    assert gain.measures_plain(4)
    assert not gain.is_off(4)
    share_with_drafts(gain, drafted_s=5.0, tokens=2, rows=4, num_steps=40)
    assert gain.is_off(4)
    assert gain.is_off(64)
    assert not gain.allows(64)
    assert gain.allows(1)
    assert not gain.is_off(1)
    share_with_drafts(gain, drafted_s=1.0, tokens=2, rows=1, num_steps=40)
    assert not gain.is_off(64)  # a draft head must read the steps of sequences that may have drafts later
