from __future__ import annotations

import json

import pytest

import tiny_checkpoints
from bench import step
from runtime.errors import ConfigurationError


def test_both_kernels_are_timed_as_often_as_asked(tmp_path, capsys) -> None:
    path, file = tiny_checkpoints.cached(), tmp_path / "step.json"
    command = ["--model-path", path, "--skip-tokenizer-init", "--batch-size", "1", "3", "--context-len", "5"]
    assert step.main([*command, "--repetitions", "2", "--output-file", str(file)]) == 0
    pairs = json.loads(file.read_bytes())["results"]["pairs"]
    assert [pair["batch_size"] for pair in pairs] == [1, 3]
    assert all(len(pair[name]) == 2 for pair in pairs for name in ("native_ms", "chosen_ms"))
    assert "matmul" in capsys.readouterr().out


def test_the_ratio_says_how_many_times_faster_the_chosen_kernels_are() -> None:
    assert step.Pair(1, (9.0, 4.0, 4.0), (2.0, 2.0, 1.0)).ratio == 2


def test_rows_have_pages_of_their_own_and_compute_as_many_tokens_as_asked() -> None:
    batch = step.make_batch(2, 30, 3, 16)
    assert batch.page_table.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (batch.starts.tolist(), batch.counts.tolist(), len(batch.token_ids)) == ([30, 29], [3, 3], 6)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        step.main(["--model-path", tiny_checkpoints.cached(), "--batch-size", "0"])
