from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny_checkpoints
from bench import kernels, step
from cpp_kernels import library
from runtime.config import Args
from runtime.errors import ConfigurationError


def test_every_kernel_of_a_step_is_timed(tmp_path: Path) -> None:
    library()
    path, result = tiny_checkpoints.cached("llama", head_dim=16), tmp_path / "result.json"
    command = ["--model-path", path, "--batch-size", "1", "3", "--context-len", "20", "--repetitions", "2"]
    assert kernels.main([*command, "--output-file", str(result)]) == 0
    one, three = json.loads(result.read_text())["results"]["profiles"]
    assert (one["batch_size"], three["batch_size"]) == (1, 3)
    layers = one["counts"]["attend"]
    assert one["counts"] == three["counts"]
    assert one["counts"]["product"] == 4 * layers
    assert one["counts"]["norm"] == 2 * layers + 1
    assert min(one["kernels_ms"].values()) > 0


def test_the_cache_that_is_read_is_written() -> None:
    """Unwritten memory is one page of zeros, whose reading says nothing."""
    options = {"model_path": tiny_checkpoints.cached("llama", head_dim=16), "page_size": 4}
    facts, plan = step.one_process_plan(Args.of(**options))
    pool = step.written_pool(facts, plan, num_rows=3, length=9)
    assert pool.num_pages == 9
    for layer in pool.values():
        assert (layer.k.std((1, 2, 3)) > 0.5).all()
        assert (layer.v.std((1, 2, 3)) > 0.5).all()


def test_a_model_of_which_torch_computes_a_part_is_refused() -> None:
    library()
    with pytest.raises(ConfigurationError, match="C\\+\\+ kernels alone"):
        kernels.main(["--model-path", tiny_checkpoints.cached("llama", head_dim=8)])
