"""A record of an engine's schedule is repeated bit by bit, without and with the model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from fake_runner import Drive, make_plan, make_sequence
from greedy import GREEDY, model_path, prompts, reference
from runtime.errors import ConfigurationError
from runtime.replay.player import Difference, replay
from serve import Engine
from serve.cli.main import run

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1, "page_size": 4, "max_total_tokens": 400}
WORDS = ["--skip-tokenizer-init", "--random-seed", "1"]


async def record(path: Path, family: str = "llama", **more: Any) -> int:
    """Compute all prompts, record the schedule and return the number of generated tokens."""
    async with Engine(model_path(family), record=str(path), **{**OPTIONS, **more}) as engine:
        answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
        assert [answer["output_ids"] for answer in answers] == reference(family)
        sampled = {"temperature": 1.0, "max_new_tokens": 12, "n": 2, "ignore_eos": True, "logit_bias": {"5": -3.0}}
        await engine.generate(input_ids=prompts()[3], sampling_params=sampled)
        return engine.status().num_generated


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"max_running_requests": 3, "schedule_policy": "lpm", "enable_hierarchical_cache": True}),
        ("llama", {"speculative_algorithm": "NGRAM", "disable_overlap_schedule": True}),
        ("gemma3", {"max_total_tokens": 300}),
    ],
)
async def test_a_record_is_replayed(tmp_path: Path, family: str, more: dict[str, Any]):
    num_tokens = await record(tmp_path / "record", family, **more)
    counts = replay(tmp_path / "record")
    assert counts.tokens == num_tokens
    assert counts.requests == len(prompts()) + 1
    assert counts.failures == []


@pytest.mark.parametrize("more", [{}, {"speculative_algorithm": "NGRAM"}])
async def test_grammars_and_hidden_states_are_replayed(tmp_path: Path, more: dict[str, Any]):
    schema = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}'
    options = {"random_seed": 1, "enable_return_hidden_states": True, **more}
    async with Engine(record=str(tmp_path / "record"), **options) as engine:
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                sampling = {"json_schema": schema, "max_new_tokens": 40, "temperature": number / 2, "seed": number}
                call = partial(engine.generate, f"Number {number}:", sampling_params=sampling)
                tasks.start_soon(call)
            plain = {"max_new_tokens": 6, "temperature": 0}
            tasks.start_soon(
                partial(engine.generate, "a b a b a b a", sampling_params=plain, return_hidden_states=True)
            )
        num_tokens = engine.status().num_generated
    assert replay(tmp_path / "record").tokens == num_tokens


async def test_the_model_computes_the_recorded_tokens_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "record"
    num_tokens = await record(path, max_running_requests=4)
    words = ["replay", str(path), "--json", "--model-path", model_path("llama"), *WORDS]
    assert await anyio.to_thread.run_sync(run, words) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == num_tokens
    # one other token is found
    lines = path.read_bytes().split(b"\n")
    at = next(at for at, line in enumerate(lines) if line.startswith(b'["t"') and b",[]" not in line and at > 40)
    event = json.loads(lines[at])
    event[2][0] = (event[2][0] + 1) % 128
    path.write_bytes(b"\n".join([*lines[:at], json.dumps(event).encode(), *lines[at + 1 :]]))
    assert await anyio.to_thread.run_sync(run, words) == 1
    assert "the model chooses" in json.loads(capsys.readouterr().out)["difference"]


def schedule(path: Path, num_requests: int = 12) -> Drive:
    """Record a schedule with retractions, without a model."""
    plan = make_plan(max_running=4, new_token_ratio=0.0, min_new_token_ratio=0.0)
    drive = Drive(plan, num_pages=16, page_size=2, record=path)
    for number in range(num_requests):
        drive.add(make_sequence([number % 3] * 5, max_new_tokens=9, seed=number))
        drive.step()
    drive.run()
    return drive


def test_a_step_takes_about_100_bytes(tmp_path: Path):
    drive = schedule(tmp_path / "record")
    lines = (tmp_path / "record").read_bytes().splitlines()
    steps = [line for line in lines if line[:4] in (b'["f"', b'["t"', b'["s"')]
    assert drive.scheduler.num_retracted
    assert sum(map(len, steps)) / sum(line.startswith(b'["f"') for line in steps) < 120


def test_a_killed_process_leaves_a_record_up_to_its_last_line(tmp_path: Path):
    path = tmp_path / "record"
    schedule(path)
    whole = replay(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    assert 0 < replay(path).steps < whole.steps


def test_a_changed_decision_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from runtime.scheduler.retraction import Retraction

    path = tmp_path / "record"
    schedule(path)
    replay(path)
    real = Retraction.retract

    def another_number(self: Retraction, victim: Any) -> None:
        real(self, victim)
        victim.seed += 1

    monkeypatch.setattr(Retraction, "retract", another_number)
    with pytest.raises(Difference, match="recorded: "):
        replay(path)


def test_a_failing_schedule_becomes_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from runtime.scheduler.retraction import Retraction

    path = tmp_path / "record"

    def fails(self: Retraction, victim: Any) -> None:
        raise KeyError("the fault")

    real = Retraction.retract
    monkeypatch.setattr(Retraction, "retract", fails)
    with pytest.raises(KeyError):
        schedule(path)
    [failure] = replay(path).failures
    assert "KeyError: 'the fault'" in failure
    monkeypatch.setattr(Retraction, "retract", real)  # the fault is mended
    with pytest.raises(Difference, match="the record has KeyError"):
        replay(path)


def test_other_files_are_refused(tmp_path: Path):
    path = tmp_path / "record"
    for content in (b"", b"{}\n", b'{"penstock_record": 1}\n', b"\x00\xff\n", b'["f"]\n'):
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match="is not a record"):
            replay(path)
    assert run(["replay", str(path)]) == 2
    assert run(["replay", str(tmp_path / "none")]) == 2


def test_a_second_record_gets_a_number(tmp_path: Path):
    for _ in range(3):
        schedule(tmp_path / "record", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record", "record.2", "record.3"]
    # They have the tokens of prompts and answers.
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
