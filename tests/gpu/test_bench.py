"""The benchmark on the device, and a cold server's time to the first token."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import pytest

FIRST_TOKEN_S, FIRST_TOKEN_EVER_S = 15.0, 60.0


def test_the_benchmark_measures_every_row(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    from bench.__main__ import main

    assert main(["gpu", "--device", device, "--shape", "tiny"]) == 0
    assert "not measured" not in capsys.readouterr().out


def test_a_cold_server_of_8_billion_weights_gives_a_token_in_time(device: str, tmp_path: Path) -> None:
    """The server starts twice with the same cache folder, because the first start compiles kernels."""
    import anyio

    from bench.checkpoints import SHAPES, write_description
    from bench.gpu.cold_row import first_token

    write_description(SHAPES["L8"], tmp_path)
    words = ["--model-path", str(tmp_path), "--load-format", "dummy", "--device", device]
    with tempfile.TemporaryDirectory() as kernels:
        start = partial(first_token, [*words, "--skip-server-warmup"], kernels, FIRST_TOKEN_EVER_S)
        assert anyio.run(start) < FIRST_TOKEN_EVER_S
        assert anyio.run(start) < FIRST_TOKEN_S
