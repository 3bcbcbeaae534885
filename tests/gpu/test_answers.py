"""Engines on the device generate the tokens of transformers with every backend and option."""

from __future__ import annotations

from typing import Any

import pytest

# families that are tested with all options; other families are tested with the usual ones
THOROUGHLY = ("llama", "qwen3")
LATENT = "deepseek_v3"
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no graphs": {"disable_cuda_graph": True},
    "no overlap": {"disable_overlap_schedule": True},
    "no graphs, no overlap": {"disable_cuda_graph": True, "disable_overlap_schedule": True},
    "plain torch": {"attention_backend": "torch_native"},
    "sampling in torch": {"sampling_backend": "pytorch"},
    "pages of one": {"page_size": 1},
    "chunks of 16": {"page_size": 16, "chunked_prefill_size": 16},
    "three at a time": {"max_running_requests": 3},
}


def skip_what_cannot_run(backend: str, device: str) -> None:
    from on_device.operations import compiles_flashinfer

    if device == "cpu" and backend == "triton":
        pytest.skip("Triton's kernels need a GPU")
    if backend not in ("triton", "torch_native") and not compiles_flashinfer():
        pytest.skip("FlashInfer has neither its kernels nor a compiler here")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", THOROUGHLY)
async def test_greedy_tokens_are_those_of_transformers_in_every_way(family: str, way: str, device: str) -> None:
    from greedy import model_path, reference
    from on_device.greedy_tokens import answers

    if device == "cpu" and WAYS[way].keys() & {"sampling_backend", "disable_cuda_graph"}:
        pytest.skip("neither Triton's kernels nor CUDA graphs are on a CPU")
    assert await answers(model_path(family), device, **WAYS[way]) == reference(family)


async def test_greedy_tokens_are_those_of_transformers(family: str, device: str) -> None:
    from greedy import model_path, reference
    from on_device.greedy_tokens import answers

    assert await answers(model_path(family), device) == reference(family)


@pytest.mark.parametrize("backend", ["triton", "torch_native", "flashinfer", "fa3", "trtllm_mha", "trtllm_mla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", [*THOROUGHLY, LATENT])
async def test_in_16_bits_every_token_is_nearly_the_best_with_every_backend(
    model: str, dtype: str, backend: str, device: str
) -> None:
    from on_device.greedy_tokens import answers, assert_nearly_the_best, wide_path
    from runtime.errors import ConfigurationError

    skip_what_cannot_run(backend, device)
    path = wide_path(model)
    try:
        found = await answers(path, device, dtype=dtype, attention_backend=backend)
    except ConfigurationError as refusal:
        assert backend not in ("triton", "torch_native")
        pytest.skip(str(refusal))
    assert_nearly_the_best(path, device, dtype, found)


async def test_in_16_bits_every_token_is_nearly_the_best(family: str, device: str) -> None:
    from on_device.greedy_tokens import answers, assert_nearly_the_best, wide_path

    path = wide_path(family)
    assert_nearly_the_best(path, device, "bfloat16", await answers(path, device, dtype="bfloat16"))


@pytest.mark.parametrize("backend", ["triton", "torch_native", "flashinfer"])
@pytest.mark.parametrize("cache", ["fp8_e4m3", "fp8_e5m2"])
async def test_over_a_cache_of_8_bits_tokens_are_good_on_the_whole(cache: str, backend: str, device: str) -> None:
    from on_device.greedy_tokens import MEAN_MARGIN, answers, shortfalls, wide_path
    from runtime.errors import ConfigurationError

    skip_what_cannot_run(backend, device)
    path = wide_path("llama")
    ways: dict[str, Any] = {"kv_cache_dtype": cache, "attention_backend": backend}
    try:
        found = await answers(path, device, dtype="bfloat16", **ways)
    except ConfigurationError as refusal:
        assert backend != "torch_native"
        pytest.skip(str(refusal))
    below = shortfalls(path, device, "bfloat16", found)
    assert sum(below) / len(below) < MEAN_MARGIN


async def test_replayed_graphs_give_the_tokens_of_eager_steps(family: str, device: str) -> None:
    from greedy import model_path
    from on_device.graphs import eager_and_replayed

    if device == "cpu" and family != THOROUGHLY[0]:
        pytest.skip("nothing is replayed on a CPU")
    eager, replayed = await eager_and_replayed(model_path(family), device)
    assert replayed == eager


@pytest.mark.parametrize("backend", ["triton", "pytorch"])
@pytest.mark.parametrize("model", THOROUGHLY)
async def test_graphs_that_choose_give_the_tokens_that_a_seed_gives_without(
    model: str, backend: str, device: str
) -> None:
    from greedy import model_path
    from on_device.graphs import eager_and_replayed
    from on_device.greedy_tokens import SEEDED

    if device == "cpu" and backend == "triton":
        pytest.skip("Triton's kernels need a GPU")
    path = model_path(model)
    eager, replayed = await eager_and_replayed(path, device, sampling=SEEDED, sampling_backend=backend)
    assert replayed == eager


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "trtllm_mha", "trtllm_mla"])
@pytest.mark.parametrize("model", ["llama", "gemma3", LATENT])  # one kind of layer; two kinds; latent vectors
async def test_replayed_graphs_of_planned_attention_give_nearly_the_best_tokens(
    model: str, backend: str, device: str
) -> None:
    from on_device.graphs import eager_and_replayed
    from on_device.greedy_tokens import assert_nearly_the_best, wide_path
    from runtime.errors import ConfigurationError

    skip_what_cannot_run(backend, device)
    path = wide_path(model)
    try:
        _, replayed = await eager_and_replayed(path, device, dtype="bfloat16", attention_backend=backend)
    except ConfigurationError as refusal:
        pytest.skip(str(refusal))
    assert_nearly_the_best(path, device, "bfloat16", replayed)
