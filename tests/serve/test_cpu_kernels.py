"""An engine on a CPU with C++ kernels, and without them."""

from __future__ import annotations

import gc
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoints
from cpp_kernels import library
from greedy import FAMILIES, GREEDY, model_path, prompts, reference
from serve import Engine

PLAIN: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1}
WAYS: dict[str, dict[str, Any]] = {  # test_greedy.py has more options, and uses C++ if possible
    "page size 1": {"page_size": 1},
    "chunks of 16, page size 16": {"page_size": 16, "chunked_prefill_size": 16},
    "retracted": {"max_total_tokens": 288, "schedule_conservativeness": 0.0, "page_size": 16},
}
WARNING = "kernels in C++ cannot be used"


def has_cpu_graph(engine: Engine) -> bool:
    """Whether whole steps run in C++."""
    return engine.core.runners[0]._executor._cpu_graph is not None  # pyright: ignore[reportAttributeAccessIssue]


def num_os_threads() -> int:
    """Return the number of this process's threads, without anyio's worker threads, which come and go."""
    workers = [thread for thread in threading.enumerate() if thread.name == "AnyIO worker thread"]
    return len(os.listdir("/proc/self/task")) - len(workers)


async def outputs(engine: Engine, **options: Any) -> list[list[int]]:
    answers = await engine.generate(input_ids=prompts(), sampling_params={**GREEDY, **options})
    return [answer["output_ids"] for answer in answers]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def broken_compiler(no_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: I am broken' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("family", FAMILIES)
async def test_with_a_compiler_whole_steps_run_in_cpp(family: str, caplog: pytest.LogCaptureFixture) -> None:
    library()
    async with Engine(model_path(family), **PLAIN) as engine:
        assert has_cpu_graph(engine)
        assert await outputs(engine) == reference(family)
    assert WARNING not in caplog.text


@pytest.mark.parametrize(("head_dim", "captured"), [(8, False), (16, True)])
async def test_a_model_of_which_torch_computes_a_part_has_no_cpu_graph(head_dim: int, captured: bool) -> None:
    library()
    path = tiny_checkpoints.cached("qwen3", head_dim=head_dim)
    async with Engine(path, dtype="float32", kv_cache_dtype="fp8_e5m2", **PLAIN) as engine:
        assert has_cpu_graph(engine) is captured
        assert len(await outputs(engine)) > 0


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=[] if number % len(WAYS) == turn else [pytest.mark.slow])
        for number, family in enumerate(FAMILIES)
        for turn, way in enumerate(WAYS)
    ],
)
@pytest.mark.usefixtures("no_compiler")
async def test_without_a_compiler_answers_are_the_same(family: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    async with Engine(model_path(family), **PLAIN, **WAYS[way]) as engine:
        assert not has_cpu_graph(engine)
        assert await outputs(engine) == reference(family)
        assert await outputs(engine) == reference(family)  # now with cached prefixes
        assert (engine.status().num_retracted > 0) is (way == "retracted")
    assert WARNING not in caplog.text  # this is not an error


@pytest.mark.parametrize("quantization", [None, "w8a8_int8"])
@pytest.mark.usefixtures("broken_compiler")
async def test_a_compiler_that_fails_costs_speed_only(
    quantization: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine(model_path("llama"), **PLAIN, quantization=quantization, wait_for_kernels=True) as engine:
        assert not has_cpu_graph(engine)
        found = await outputs(engine)
    if quantization is None:
        assert found == reference("llama")
    else:
        assert agreement(found, reference("llama")) > 0.3
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in warnings if WARNING in text and "error: I am broken" in text]


def agreement(found: list[list[int]], wanted: list[list[int]]) -> float:
    """Return the mean share of an answer before its first difference."""
    same = 0
    for one, other in zip(found, wanted, strict=True):
        same += next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), len(other))
    return same / sum(map(len, wanted))


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"quantization": "w8a8_int8"}, {"quantization": "w4a16"}], ids=str
)
async def test_answers_do_not_depend_on_the_number_of_threads(options: dict[str, Any]) -> None:
    library()
    found = []
    for cpu_threads in (1, 2):
        async with Engine(model_path("qwen3"), **PLAIN, **options, cpu_threads=cpu_threads) as engine:
            assert has_cpu_graph(engine)
            found.append(await outputs(engine))
            alone = await engine.generate(input_ids=prompts()[6], sampling_params=GREEDY)
            assert alone["output_ids"] == found[-1][6]  # bit for bit the same, whether or not it is batched
    assert found[0] == found[1]


@pytest.mark.parametrize("hidden", [False, True])
async def test_8_bits_answer_mostly_as_float32(hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if hidden:
        monkeypatch.setenv("PATH", os.devnull)
    else:
        library()
    async with Engine(model_path("mistral"), **PLAIN, quantization="w8a8_int8") as engine:
        assert has_cpu_graph(engine) is not hidden
        found = await outputs(engine)
    assert 0.3 < agreement(found, reference("mistral")) < 1  # with random weights, many tokens are near ties


async def test_sampling_beyond_greedy_is_that_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    params = {
        "max_new_tokens": 12,
        "temperature": 0.7,
        "seed": 5,
        "frequency_penalty": 0.5,
        "ignore_eos": True,
    }
    found = []
    for path in (os.environ["PATH"], os.devnull):
        monkeypatch.setenv("PATH", path)
        async with Engine(model_path("llama"), **PLAIN) as engine:
            answers = await engine.generate(
                input_ids=prompts(), sampling_params=params, return_logprob=True, logprob_start_len=0
            )
        found.append(answers)
    for one, other in zip(*found, strict=True):
        assert one["output_ids"] == other["output_ids"]
        for name in ("input_token_logprobs", "output_token_logprobs"):
            ours, plain = ([entry[0] for entry in answer["meta_info"][name]] for answer in (one, other))
            assert ours[1:] == pytest.approx(plain[1:], abs=1e-4)


@pytest.mark.parametrize("head_dim", [16, 8])
async def test_a_closed_engine_leaves_no_threads(head_dim: int) -> None:
    library()
    path = tiny_checkpoints.cached("llama", head_dim=head_dim)
    counts = []
    for _ in range(3):
        async with Engine(path, **PLAIN, cpu_threads=8) as engine:
            await engine.generate(input_ids=[3, 4, 5], sampling_params=GREEDY)
            assert num_os_threads() > 7
        del engine
        counts.append(num_os_threads())
    gc.collect()
    # Fewer than the seven kernel threads of one engine, because libraries of other tests may start threads at any time.
    assert counts[2] - counts[0] < 7


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
async def test_two_ranks_with_cpp_kernels_give_the_same_tokens(family: str) -> None:
    library()
    async with Engine(model_path(family), **PLAIN, tp_size=2) as engine:
        assert await outputs(engine) == reference(family)
