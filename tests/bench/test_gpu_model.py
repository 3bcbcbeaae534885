"""The model of GPU steps: bytes and operations of known shapes."""

from __future__ import annotations

import pytest

from bench.gpu_model import GPUS, MODELS, TABLES, lines, main, predict, step


def test_the_weights_of_a_known_model_are_read_once() -> None:
    kernels = step(MODELS["Llama-3.1-8B"], 1, 1)
    assert sum(kernel.bytes for kernel in kernels) == pytest.approx(2 * (8.03e9 - 128_256 * 4096), rel=0.005)
    assert sum(kernel.operations for kernel in kernels) == pytest.approx(2 * (8.03e9 - 128_256 * 4096), rel=0.005)


def test_a_few_rows_use_few_experts_and_many_rows_use_all() -> None:
    model = MODELS["Qwen3-30B-A3B"]
    read = [next(k.bytes for k in step(model, rows, 1) if k.name == "experts' down") for rows in (1, 4096)]
    expert = 2 * model.size * model.inner
    assert read[0] == pytest.approx(8 * expert, rel=0.02)
    assert read[1] > 128 * expert


def test_the_experts_of_gpt_oss_are_read_in_4_bits() -> None:
    model = MODELS["gpt-oss-20b"]
    read = next(kernel.bytes for kernel in step(model, 4096, 1) if kernel.name == "experts' down")
    rows = 2 * 4096 * 4 * (model.size + model.inner)
    assert read - rows == pytest.approx(32 * model.size * model.inner * 4.25 / 8)


@pytest.mark.parametrize(("name", "rows", "context"), TABLES)
def test_predictions_are_near_the_sums_of_measured_kernels(name: str, rows: int, context: int) -> None:
    least, most = TABLES[name, rows, context]
    assert 0.8 * least < 1e3 * predict(GPUS["h200"], step(MODELS[name], rows, context)).seconds < 1.2 * most


def test_fewer_bits_are_faster() -> None:
    model = MODELS["Llama-3.1-8B"]
    wide, narrow = (predict(GPUS["h100"], step(model, 4, 100, bits), bits) for bits in (16, 8))
    assert narrow.seconds < 0.7 * wide.seconds
    assert narrow.launches == wide.launches


def test_every_model_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "1", "64"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4 + 2 * len(MODELS)
    assert any("4.54" in line for line in lines("h200", [1], 1024, 16, 16))
