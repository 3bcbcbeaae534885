"""Which steps are captured or compiled, and which options are refused if neither is possible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ops.machine import Machine
from runtime.config import Args
from runtime.config.plan import GraphPlan, Plan
from runtime.config.resolve import resolve
from runtime.config.resolve.graphs import within
from runtime.errors import ConfigurationError
from runtime.models.decoders import ARCHITECTURES
from small_facts import FACTS

CPU = replace(Machine.named("cpu"), compiler="/usr/bin/c++")
H200 = Machine.named("h200")


def plan(machine: Machine = H200, **keywords: Any) -> Plan:
    return resolve(Args.of(**{"model_path": "/models/small"} | keywords), machine, FACTS)


def refusals(machine: Machine = H200, **keywords: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        plan(machine, **keywords)
    return str(caught.value)


def test_gpu_captures_by_its_memory():
    assert plan().graphs.sizes[:5] == (1, 2, 4, 8, 16)
    assert plan().graphs.sizes[-1] == 256
    assert plan(Machine.named("l4")).graphs.sizes == (1, 2, 4, 8)


def test_asked_sizes_are_captured():
    assert plan(cuda_graph_bs=[3, 7]).graphs.sizes == (3, 7)
    assert plan(cuda_graph_max_bs=20).graphs.sizes == (1, 2, 4, 8, 16, 20)
    assert plan(max_running_requests=6).graphs.sizes == (1, 2, 4, 6)
    assert plan(disable_cuda_graph_padding=True).graphs.sizes[:32] == tuple(range(1, 33))
    assert plan(disable_cuda_graph=True).graphs.sizes == ()


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "fa3"])
def test_attention_on_gpus_is_captured(backend: str):
    assert plan(attention_backend=backend).graphs.sizes == plan().graphs.sizes


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"decode_attention_backend": "torch_native"}, "torch_native reads the lengths"),
        ({"triton_attention_split_tile_size": 512}, "the longest row decides"),
    ],
)
def test_attention_that_needs_the_host_is_not_captured(keywords: dict[str, Any], reason: str):
    made = plan(**keywords)
    assert made.graphs.sizes == ()
    assert reason in made.graphs.reasons["sizes"]
    assert reason in refusals(**keywords, cuda_graph_max_bs=8)


@pytest.mark.parametrize(
    "option",
    [
        {"cuda_graph_max_bs": 8},
        {"cuda_graph_bs": [8]},
        {"disable_cuda_graph_padding": True},
        {"enable_profile_cuda_graph": True},
        {"enable_cudagraph_gc": True},
    ],
)
def test_what_only_captures_read_is_refused_without_any(option: dict[str, Any]):
    [name] = option
    flag = "--" + name.replace("_", "-")
    assert f"{flag} has no effect here: CUDA graphs need an NVIDIA GPU" in refusals(CPU, **option)
    assert "--disable-cuda-graph is set too" in refusals(disable_cuda_graph=True, **option)
    assert plan(CPU, disable_cuda_graph=True).graphs.sizes == ()


def test_compilation_is_asked_for_and_needs_a_compiler():
    assert plan(CPU).graphs.compile_max_rows == 0
    assert plan(CPU, enable_torch_compile=True).graphs.compile_max_rows == 32
    assert plan(CPU, enable_torch_compile=True, torch_compile_max_bs=4).graphs.compile_max_rows == 4
    assert "needs a C++ compiler" in refusals(replace(CPU, compiler=None), enable_torch_compile=True)
    assert "triton" in refusals(replace(H200, packages={}), enable_torch_compile=True)
    assert "has no effect without --enable-torch-compile" in refusals(CPU, torch_compile_max_bs=4)


def test_several_ranks_capture_where_they_share_layers_and_never_compile():
    two = replace(H200, gpus=H200.gpus * 2)
    assert plan(two, tp_size=2).graphs.sizes == plan(two).graphs.sizes
    assert plan(two, pp_size=2).graphs.sizes == ()
    assert "pipeline parallelism" in refusals(two, pp_size=2, cuda_graph_bs=[1])
    assert "one rank only" in refusals(two, tp_size=2, enable_torch_compile=True)


def test_sizes_are_cut_to_what_the_pool_lets_run():
    assert within(GraphPlan(sizes=(1, 2, 4, 8, 16)), 6).sizes == (1, 2, 4, 6)
    assert within(GraphPlan(sizes=(1, 2), padding=False), 6).take(2) == 2


def test_prompts_are_captured_up_to_a_number_of_tokens_by_the_size_of_the_model():
    small, large = (
        resolve(Args.of(model_path="/models/small"), H200, replace(FACTS, num_layers=32, weight_bytes=size)).graphs
        for size in (1_200_000_000, 16_000_000_000)
    )
    assert small.prompt_sizes[:3] == large.prompt_sizes[:3] == (8, 16, 32)
    assert small.prompt_sizes[-1] == 2048
    assert large.prompt_sizes[-1] == 224  # by the estimate, 247 tokens take as long as launching 32 layers
    assert "estimated" in large.reasons["prompt_sizes"]


def test_experts_that_a_token_does_not_use_do_not_count_as_computed():
    mixture = replace(
        FACTS, num_layers=48, weight_bytes=61_000_000_000, config={"num_experts": 128, "num_experts_per_tok": 8}
    )
    assert resolve(Args.of(model_path="/models/small"), H200, mixture).graphs.prompt_sizes[-1] >= 512


def test_ranks_that_share_layers_capture_larger_steps_also_if_they_exchange_tokens():
    two = replace(H200, gpus=H200.gpus * 2)
    mixture = replace(
        FACTS, num_layers=48, weight_bytes=61_000_000_000, config={"num_experts": 128, "num_experts_per_tok": 8}
    )

    def graphs(**keywords: Any) -> GraphPlan:
        return resolve(Args.of(model_path="/models/small", **keywords), two, mixture).graphs

    assert graphs(tp_size=2).prompt_sizes[-1] > graphs().prompt_sizes[-1]
    made = graphs(tp_size=2, ep_size=2, moe_a2a_backend="all_to_all")
    assert made.prompt_sizes == graphs(tp_size=2, ep_size=2).prompt_sizes


def test_asked_numbers_of_tokens_are_captured():
    assert plan(piecewise_cuda_graph_tokens=[40, 7]).graphs.prompt_sizes == (7, 40)
    assert plan(piecewise_cuda_graph_max_tokens=20).graphs.prompt_sizes == (8, 16, 20)
    assert plan(piecewise_cuda_graph_tokens=[40, 7], piecewise_cuda_graph_max_tokens=20).graphs.prompt_sizes == (7,)
    assert plan(chunked_prefill_size=64, piecewise_cuda_graph_max_tokens=4096).graphs.prompt_sizes[-1] <= 64 + 2048


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"disable_cuda_graph": True}, "no CUDA graphs are captured"),
        ({"disable_piecewise_cuda_graph": True}, "--disable-piecewise-cuda-graph is set"),
    ],
)
def test_prompts_are_not_captured_with_a_reason(keywords: dict[str, Any], reason: str):
    two = replace(H200, gpus=H200.gpus * 2)
    made = plan(two, **keywords).graphs
    assert made.prompt_sizes == ()
    assert reason in made.reasons["prompt_sizes"]
    assert reason in refusals(two, **keywords, piecewise_cuda_graph_tokens=[8])
    assert "--piecewise-cuda-graph-max-tokens has no effect here" in refusals(
        two, **keywords, piecewise_cuda_graph_max_tokens=8
    )


@pytest.mark.parametrize("architecture", [name for name, entry in ARCHITECTURES.items() if not entry.headless])
def test_every_family_of_the_table_is_captured_or_the_plan_says_why_not(architecture: str):
    """On a GPU with Triton alone."""
    entry = ARCHITECTURES[architecture]
    facts = replace(FACTS, architecture=architecture, has_sinks=entry.sinks, recurrent=entry.recurrent)
    made = resolve(Args.of(model_path="/models/small"), H200, replace(facts, head_dim=576)).graphs
    assert made.sizes
    assert made.prompt_sizes
