"""The model of GPU steps: bytes and operations of known shapes."""

from __future__ import annotations

import pytest

from bench import gpu_tables
from bench.gpu_model import ENGINES, GPUS, MODELS, Kernel, compared, main, predict, step, sums


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


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-8B"])
def test_predictions_of_whole_steps_are_near_the_sums_of_measured_kernels(name: str, rows: int) -> None:
    known = [sum(sums("h200")[engine][gpu_tables.case_name(name, rows, 16)].values()) / 1e3 for engine in ENGINES]
    assert 0.75 * min(known) < 1e3 * predict(GPUS["h200"], step(MODELS[name], rows, 1024)).seconds < 1.25 * max(known)


def test_a_known_sum_of_measured_kernels_is_found_again() -> None:
    """NVIDIA's own summary of the tables gives 4.54 ms."""
    parts = compared("h200", "Llama-3.1-8B", 1, 16)["sglang"]
    assert sum(parts.values()) == pytest.approx(4.54, rel=0.01)


def test_windows_shorten_attention() -> None:
    long, short = (compared("h200", name, 64, 16)["ours"]["attention"] for name in ("Llama-3.1-8B", "gpt-oss-20b"))
    assert short < 0.5 * long


def test_four_bit_experts_of_many_rows_are_limited_by_instructions() -> None:
    gpu, narrow = GPUS["h200"], MODELS["gpt-oss-20b"]
    kernel = next(each for each in step(narrow, 64, 1) if each.name == "experts' down")
    assert kernel.instructions / gpu.issue_per_s > kernel.bytes / gpu.bytes_per_s


def test_sums_interpolate_between_the_sizes_of_a_table() -> None:
    def row(n: int, k: int) -> dict[str, object]:
        return {"gemm_dtype": "bfloat16", "m": 4, "n": n, "k": k, "latency": (n + k) / 1e3}

    gemms = gpu_tables.Gemms([row(n, k) for n in (64, 128, 256) for k in (64, 128, 256)])
    assert gemms(4, 128, 64) == pytest.approx(192)
    assert gemms(4, 200, 100) == pytest.approx(300)
    assert gemms(4, 1000, 64) == pytest.approx(1064)
    with pytest.raises(KeyError):
        gemms(5, 64, 64)


def test_fewer_bits_are_faster() -> None:
    model = MODELS["Llama-3.1-8B"]
    wide, narrow = (predict(GPUS["h100"], step(model, 4, 100, bits), bits) for bits in (16, 8))
    assert narrow.seconds < 0.7 * wide.seconds
    assert narrow.launches == wide.launches


def test_every_model_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "1", "64"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4 + 2 * len(MODELS)
    assert main(["--compare", "--rows", "1", "--gpu", "h200"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*ENGINES.values(), *(name for name in MODELS if "DeepSeek" not in name)))
    with pytest.raises(SystemExit):
        main(["--compare", "--gpu", "a100"])


def test_a_gap_before_a_kernel_counts_whatever_limits_the_kernel() -> None:
    gpu = GPUS["h200"]
    products = Kernel("product", 1.0, operations=1e12), Kernel("convert", 1.0, instructions=1e12)
    seconds = [predict(gpu, [each]).seconds for each in products]
    assert seconds[0] == pytest.approx(gpu.kernel_s + 1e12 / (gpu.operations_per_s * gpu.peak_share))
    assert seconds[1] == pytest.approx(gpu.kernel_s + 1e12 / (gpu.issue_per_s * gpu.issue_share))
