from __future__ import annotations

from pathlib import Path

import pytest

from bench.checkpoints import Shape, write_checkpoint
from bench.cpu.engines import OURS, our_command, our_environment
from bench.cpu.process import Runner
from bench.cpu.streams import stream_all
from bench.cpu.turns import Contest
from bench.cpu.work import LAG, STREAMED, decode
from serve.bench.workload import Vocabulary

TINY = Shape(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, mlp=48, vocab=320, tied=True, context=256)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(TINY, directory)
    return directory


def runner(model: Path, log: Path, *more: str) -> Runner:
    command = our_command(model, "bf16", 1, "--max-total-tokens 8192")
    return Runner(OURS, [*command, *more], our_environment(1), log)


def contest(rounds: int = 1) -> Contest:
    return Contest(seed="1", vocab=TINY.vocab, rounds=rounds, say=lambda _: None)


@pytest.mark.slow
def test_ours_takes_part_in_process(model: Path, tmp_path: Path) -> None:
    found = contest()
    found.measure_in_process([runner(model, tmp_path / "log")], [decode()], starts=True)
    assert found.failures == []
    values = {turn.figure: turn.value for turn in found.turns}
    assert values.keys() == {"start to first token", "decode, batch 1", "peak memory"}
    assert values["decode, batch 1"] > 1
    assert values["peak memory"] > 50


def test_ours_serves_streams_and_says_its_loops_lag(model: Path, tmp_path: Path) -> None:
    vocabulary = Vocabulary.of_tokenizer(str(model))
    found = contest()
    found.measure_streams(
        [
            (
                runner(model, tmp_path / "log", "--serve"),
                lambda url, prompts: stream_all(url, prompts, vocabulary, as_text=False),
            )
        ]
    )
    assert found.failures == []
    values = {turn.figure: turn.value for turn in found.turns}
    assert values[STREAMED.name] > 1
    assert 0 <= values[LAG.name] < 10_000
    assert values["HTTP, first token p50"] <= values["HTTP, first token p99"]


def test_options_of_the_engine_that_it_refuses_end_the_runner(model: Path, tmp_path: Path) -> None:
    found = contest()
    command = our_command(model, "bf16", 1, "--no-such-option 1")
    found.measure_in_process([Runner(OURS, command, our_environment(1), tmp_path / "log")], [decode()], starts=False)
    [failure] = found.failures
    assert "no-such-option" in failure.reason
