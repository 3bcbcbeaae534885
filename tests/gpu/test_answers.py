"""Engines on the device give the tokens of transformers, however the work is done."""

from __future__ import annotations

from typing import Any

import pytest

FAMILIES = ("gemma", "gemma2", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe")
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no graphs": {"disable_cuda_graph": True},
    "no overlap": {"disable_overlap_schedule": True},
    "no graphs, no overlap": {"disable_cuda_graph": True, "disable_overlap_schedule": True},
    "plain torch": {"attention_backend": "torch_native"},
    "sampling in Triton": {"sampling_backend": "triton"},
    "pages of one": {"page_size": 1},
    "chunks of 16": {"page_size": 16, "chunked_prefill_size": 16},
    "three at a time": {"max_running_requests": 3},
}


def skip_without_compiler(backend: str) -> None:
    from on_device.operations import compiles_flashinfer

    if backend not in ("triton", "torch_native") and not compiles_flashinfer():
        pytest.skip("FlashInfer has neither its kernels nor a compiler here")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_tokens_are_those_of_transformers(family: str, way: str, device: str) -> None:
    from greedy import model_path, reference
    from on_device.greedy_tokens import answers

    assert await answers(model_path(family), device, **WAYS[way]) == reference(family)


@pytest.mark.parametrize("backend", ["triton", "torch_native", "flashinfer", "fa3", "trtllm_mha"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_in_16_bits_every_token_is_nearly_the_best(
    family: str, dtype: str, backend: str, device: str
) -> None:
    from on_device.greedy_tokens import MARGINS, answers, shortfalls, wide_path
    from runtime.errors import ConfigurationError

    skip_without_compiler(backend)
    path = wide_path(family)
    try:
        found = await answers(path, device, dtype=dtype, attention_backend=backend)
    except ConfigurationError as refusal:
        assert backend not in ("triton", "torch_native")
        pytest.skip(str(refusal))
    assert max(shortfalls(path, device, dtype, found)) < MARGINS[dtype]


@pytest.mark.parametrize("backend", ["triton", "torch_native", "flashinfer"])
@pytest.mark.parametrize("cache", ["fp8_e4m3", "fp8_e5m2"])
async def test_over_a_cache_of_8_bits_tokens_are_good_on_the_whole(
    cache: str, backend: str, device: str
) -> None:
    from on_device.greedy_tokens import MEAN_MARGIN, answers, shortfalls, wide_path
    from runtime.errors import ConfigurationError

    skip_without_compiler(backend)
    path, ways = wide_path("llama"), {"kv_cache_dtype": cache, "attention_backend": backend}
    try:
        found = await answers(path, device, dtype="bfloat16", **ways)
    except ConfigurationError as refusal:
        assert backend != "torch_native"
        pytest.skip(str(refusal))
    below = shortfalls(path, device, "bfloat16", found)
    assert sum(below) / len(below) < MEAN_MARGIN


@pytest.mark.parametrize("family", FAMILIES)
async def test_replayed_graphs_give_the_tokens_of_eager_steps(family: str, device: str) -> None:
    from greedy import model_path
    from on_device.graphs import eager_and_replayed

    eager, replayed = await eager_and_replayed(model_path(family), device)
    assert replayed == eager


def test_the_families_are_all_there_are(device: str) -> None:
    import greedy

    assert FAMILIES == greedy.FAMILIES
