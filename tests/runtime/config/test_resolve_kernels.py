"""Which kernels a machine gets, and why it does not get others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ops.backends import ATTENTION, BLOCK_PRODUCTS, SAMPLING, AttentionBackend
from ops.machine import KNOWN_GPUS, Machine
from runtime.config import Args, options
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import KernelPlan
from runtime.config.resolve import ANY_MODEL, decide

ROOT = Path(__file__).parents[3]
MACHINES = ("cpu", *KNOWN_GPUS)
H200 = Machine.named("h200")


def decided(machine: Machine, **keywords: Any) -> tuple[KernelPlan, Mapping[str, str], dict[str, str]]:
    """Return the kernel plan, its reasons and the refusals."""
    plan, builder = decide(Args.of(**{"model_path": "/models/small"} | keywords), machine, ANY_MODEL)
    return plan.kernels, plan.kernels.reasons, builder.refusals


def test_a_cpu_runs_plain_torch_and_says_why() -> None:
    kernels, reasons, refusals = decided(Machine.named("cpu"))
    assert {kernels.choices[operation] for operation in kernels.choices if operation != "matmul"} == {"native"}
    assert kernels.attention_backend == "torch_native"
    assert "triton needs an NVIDIA GPU" in reasons["attention_backend"]
    assert not refusals


@pytest.mark.parametrize(
    ("asked", "stored", "file"),
    [
        ({}, None, "native"),
        ({}, "gptq", "with_triton"),
        ({}, "fp8", "with_triton"),
        ({}, "mxfp4", "with_triton"),
        ({"quantization": "modelopt_fp4"}, "modelopt", "with_triton"),
        ({}, "bitsandbytes", "native"),
        ({"quantization": "fp8"}, None, "with_triton"),
        ({"quantization": "fp8"}, "compressed-tensors", "with_triton"),
        ({"quantization": "w4a16"}, None, "with_triton"),
        ({"torchao_config": "int4wo-128"}, None, "with_triton"),
        ({"torchao_config": "int8wo"}, None, "native"),
        ({"enable_torch_compile": True}, "gptq", "native"),
    ],
)
def test_a_gpu_multiplies_weights_of_4_bits_and_float8_in_triton(
    asked: dict[str, Any], stored: str | None, file: str
) -> None:
    facts = replace(ANY_MODEL, quantization=stored)
    plan, builder = decide(Args.of(model_path="/models/small", **asked), H200, facts)
    assert plan.kernels.choices["matmul"] == file
    assert not builder.refusals


@pytest.mark.parametrize("name", ["a100", "l4", "h100", "h200", "b200"])
def test_a_gpu_runs_triton(name: str) -> None:
    kernels, _, _ = decided(Machine.named(name))
    assert kernels.attention_backend == kernels.decode_attention_backend == "triton"
    assert {
        kernels.choices[operation] for operation in ("attention", "norm", "kv", "embedding", "moe", "recurrence")
    } == {"with_triton"}
    assert kernels.sampling_backend == "triton"


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (Machine.named("cpu"), "this model runs on the CPU"),
        (Machine.named("t4"), "Tesla T4 has 7.5"),
        (replace(H200, packages={}), "pip install 'penstock[cuda]'"),
    ],
)
@pytest.mark.parametrize(
    "option",
    ["attention_backend", "prefill_attention_backend", "decode_attention_backend", "sampling_backend"],
)
def test_triton_is_refused_with_what_it_needs(option: str, machine: Machine, reason: str) -> None:
    _, _, refusals = decided(machine, **{option: "triton"})
    assert reason in refusals[option]
    assert "use torch_native" in refusals[option] or "use pytorch" in refusals[option]


def test_a_gpu_that_is_not_used_does_not_count() -> None:
    _, _, refusals = decided(H200, device="cpu", attention_backend="triton")
    assert "this model runs on the CPU" in refusals["attention_backend"]


@pytest.mark.parametrize("name", ["flashmla", "cutlass_mla", "aiter"])
def test_what_is_not_built_is_refused_with_what_it_needs(name: str) -> None:
    _, _, refusals = decided(H200, attention_backend=name)
    assert f"{name} is refused: Penstock has no code for it, and it needs" in refusals["attention_backend"]
    assert name == "aiter" or "latent attention (which other backends" in refusals["attention_backend"]


def test_flashinfer_does_not_sample_and_the_reason_is_said() -> None:
    _, _, refusals = decided(H200, sampling_backend="flashinfer")
    assert "seeds give the same tokens with every implementation" in refusals["sampling_backend"]


@pytest.mark.parametrize(
    ("name", "machines"),
    [("fa3", {"h100", "h200"}), ("trtllm_mha", {"b200"}), ("flashinfer", {*KNOWN_GPUS} - {"t4"})],
)
def test_each_generation_has_its_kernels(name: str, machines: set[str]) -> None:
    for machine in MACHINES:
        kernels, _, refusals = decided(Machine.named(machine), attention_backend=name)
        assert ("attention_backend" not in refusals) == (machine in machines)
        if machine in machines:
            assert kernels.choices["attention"] == ATTENTION[name].file


@pytest.mark.parametrize(
    ("name", "keywords", "told"),
    [
        ("trtllm_mha", {"page_size": 1}, "reads pages of 16, 32, 64 tokens, and --page-size is 1;"),
        (
            "trtllm_mha",
            {"kv_cache_dtype": "fp8_e4m3"},
            "a cache of the model's dtype only, and this one is in float8_e4m3fn",
        ),
        ("trtllm_mha", {"page_size": 64}, None),
    ],
)
def test_a_cache_that_the_kernels_cannot_read_is_refused(name: str, keywords: dict[str, Any], told: str | None) -> None:
    _, _, refusals = decided(
        Machine.named("b200"), attention_backend="triton", decode_attention_backend=name, **keywords
    )
    assert (told is None) == ("decode_attention_backend" not in refusals)
    assert told is None or told in refusals["decode_attention_backend"]


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"head_dim": 128, "dtype": "bfloat16"}, ""),
        (
            {"head_dim": 80, "dtype": "bfloat16"},
            "takes heads of 64, 128, 256 dimensions, and this model has 80; use triton",
        ),
        (
            {"head_dim": 128, "dtype": "float32"},
            "computes in float16 or bfloat16, and this model in float32; use triton",
        ),
    ],
)
def test_flashinfer_is_refused_for_heads_that_it_lacks(facts: dict[str, Any], told: str) -> None:
    model = replace(ANY_MODEL, architecture="LlamaForCausalLM", **facts)
    args = Args.of(model_path="/models/small", attention_backend="flashinfer", dtype=facts["dtype"])
    plan, builder = decide(args, H200, model)
    assert plan.kernels.choices["attention"] == ("with_triton" if told else "with_flashinfer")
    assert told in builder.refusals.get("attention_backend", "")
    assert bool(builder.refusals) == bool(told)


def test_a_soft_cap_is_refused_where_kernels_have_none() -> None:
    model = replace(ANY_MODEL, architecture="Gemma2ForCausalLM", head_dim=256, dtype="bfloat16")
    model = replace(model, config={"attn_logit_softcapping": 50.0, "sliding_window": 4096})
    args = Args.of(model_path="/models/small", attention_backend="trtllm_mha")
    _, builder = decide(args, Machine.named("b200"), model)
    assert "it has no soft cap, which this model has; use triton" in builder.refusals["attention_backend"]
    _, builder = decide(Args.of(model_path="/m", attention_backend="flashinfer"), H200, model)
    assert not builder.refusals


MLA = replace(
    ANY_MODEL,
    architecture="DeepseekV3ForCausalLM",
    head_dim=576,
    num_kv_heads=1,
    latent_dims=(512, 64),
    dtype="bfloat16",
)
SMALL_MLA = replace(MLA, architecture="MiniCPM3ForCausalLM", head_dim=288, latent_dims=(256, 32))


@pytest.mark.parametrize(
    ("machine", "facts", "asked", "told"),
    [
        ("h200", MLA, {"attention_backend": "flashinfer"}, ""),
        ("h200", MLA, {"attention_backend": "fa3"}, ""),
        ("b200", MLA, {"attention_backend": "trtllm_mla", "page_size": 32}, ""),
        ("b200", MLA, {"attention_backend": "trtllm_mla"}, ""),  # the page size follows
        ("b200", MLA, {"attention_backend": "flashinfer"}, ""),
        ("h200", SMALL_MLA, {"attention_backend": "flashinfer"}, "takes latent vectors of 512 + 64 dimensions"),
        (
            "h200",
            MLA,
            {"attention_backend": "flashinfer", "kv_cache_dtype": "fp8_e4m3"},
            "reads latent vectors in the model's dtype only",
        ),
        ("b200", MLA, {"attention_backend": "trtllm_mla", "page_size": 16}, "reads pages of 32, 64 tokens"),
        ("b200", MLA, {"attention_backend": "trtllm_mla", "page_size": 64, "dtype": "float16"}, "computes in bfloat16"),
        ("h200", MLA, {"attention_backend": "trtllm_mla", "page_size": 64}, "an NVIDIA Blackwell GPU"),
        ("b200", MLA, {"attention_backend": "trtllm_mha", "page_size": 64}, "takes heads of 64, 128, 256 dimensions"),
        (
            "b200",
            replace(MLA, head_dim=128, latent_dims=None),
            {"attention_backend": "trtllm_mla", "page_size": 64},
            "computes multi-head latent attention only",
        ),
    ],
)
def test_kernels_for_latent_attention_are_used_or_refused(
    machine: str, facts: ModelFacts, asked: dict[str, Any], told: str
) -> None:
    plan, builder = decide(Args.of(model_path="/models/small", **asked), Machine.named(machine), facts)
    assert told in builder.refusals.get("attention_backend", "")
    assert bool(builder.refusals) == bool(told)
    assert plan.kernels.attention_backend == ("triton" if told else asked["attention_backend"])


@pytest.mark.parametrize(
    ("facts", "asked", "backend"),
    [(MLA, {}, "fa3"), (MLA, {"kv_cache_dtype": "fp8_e4m3"}, "triton"), (SMALL_MLA, {}, "triton")],
)
def test_latent_attention_has_the_default_of_other_attention(
    facts: ModelFacts, asked: dict[str, Any], backend: str
) -> None:
    machine = replace(H200, packages=COMPILED)
    plan, builder = decide(Args.of(model_path="/models/small", **asked), machine, facts)
    assert plan.kernels.attention_backend == backend
    assert not builder.refusals


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "trtllm_mha"])
def test_kernels_without_alibi_are_refused_by_name(backend: str) -> None:
    model = replace(ANY_MODEL, architecture="BloomForCausalLM", head_dim=128, dtype="bfloat16", alibi=True)
    args = Args.of(model_path="/models/small", attention_backend=backend, page_size=16)
    machine = Machine.named("b200") if backend == "trtllm_mha" else H200
    plan, builder = decide(args, machine, model)
    assert "it has no ALiBi, which this model has; use triton" in builder.refusals["attention_backend"]
    plan, builder = decide(Args.of(model_path="/models/small"), machine, model)
    assert (plan.kernels.choices["attention"], builder.refusals) == ("with_triton", {})


BLOCKS = {"quantization": "fp8", "config": {"quantization_config": {"weight_block_size": [128, 128]}}}


def test_experts_by_triton_are_refused_where_it_does_not_run() -> None:
    assert not decided(H200, moe_runner_backend="triton")[2]
    for machine in ("cpu", "t4"):
        _, _, refusals = decided(Machine.named(machine), moe_runner_backend="triton")
        assert "cannot be used: it needs an NVIDIA GPU" in refusals["moe_runner_backend"]


GPT_OSS = {"architecture": "GptOssForCausalLM", "quantization": "mxfp4", "config": {"hidden_act": "silu"}}
NVFP4 = {"quantization": "modelopt", "config": {"quantization_config": {"quant_algo": "NVFP4"}}}
ARGS_OF_NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}
GROUPS = {"group_0": {"weights": ARGS_OF_NVFP4, "input_activations": ARGS_OF_NVFP4}}
PACKED_NVFP4 = {"quantization": "compressed-tensors", "config": {"quantization_config": {"config_groups": GROUPS}}}
ONLY_WEIGHTS = {"config_groups": {"group_0": {"weights": ARGS_OF_NVFP4, "input_activations": None}}}
NVFP4A16 = {"quantization": "compressed-tensors", "config": {"quantization_config": ONLY_WEIGHTS}}
SEEING = {"text_config": {"hidden_act": "gelu"}}
CUTLASS, MXFP4, TRTLLM = ({"moe_runner_backend": f"flashinfer_{name}"} for name in ("cutlass", "mxfp4", "trtllm"))


@pytest.mark.parametrize(
    ("machine", "facts", "asked", "told"),
    [
        ("h200", {}, CUTLASS, ""),
        ("b200", {}, CUTLASS, ""),
        ("a100", {}, CUTLASS, "it needs an NVIDIA Hopper or Blackwell GPU (compute capability 9.x or 10.x)"),
        ("cpu", {}, CUTLASS, "this model runs on the CPU; use auto"),
        ("h200", {"quantization": "fp8", "config": {"a": 1}}, CUTLASS, "are in another format (fp8)"),
        ("h200", {"config": {"a": 1}}, {**CUTLASS, "quantization": "fp8"}, "are in other formats, by --quantization"),
        ("h200", BLOCKS, CUTLASS, ""),
        ("h200", BLOCKS, {**CUTLASS, "quantization": "w4a16"}, "in other formats, by --quantization"),
        ("h200", BLOCKS, {**CUTLASS, "enable_torch_compile": True}, "which --enable-torch-compile dequantises"),
        ("b200", BLOCKS, CUTLASS, "in 16 bits or NVFP4 on this GPU, and this model's are in float8 blocks"),
        (
            "h200",
            {"dtype": "float32"},
            {**CUTLASS, "dtype": "float32"},
            "in float16 or bfloat16, and this model in",
        ),
        ("h200", {}, {**CUTLASS, "tp_size": 2, "ep_size": 2}, "all experts of a layer, and --ep-size divides them"),
        ("h200", {"config": {"hidden_act": "gelu"}}, CUTLASS, "with silu or clamped_swiglu, and this model has gelu"),
        ("h200", {"config": {**SEEING, "hidden_act": "silu"}}, CUTLASS, "and this model has gelu"),
        ("h200", {**GPT_OSS, "quantization": None}, CUTLASS, ""),
        ("h200", GPT_OSS, CUTLASS, ""),
        ("h200", GPT_OSS, MXFP4, ""),
        ("b200", GPT_OSS, MXFP4, ""),
        ("b200", GPT_OSS, TRTLLM, ""),
        ("b200", GPT_OSS, {**MXFP4, "flashinfer_mxfp4_moe_precision": "bf16"}, ""),
        (
            "b200",
            {**GPT_OSS, "dtype": "float16"},
            {**MXFP4, "dtype": "float16"},
            "in bfloat16, and this model in",
        ),
        ("b200", {"config": {"a": 1}}, MXFP4, "computes experts in MXFP4 on this GPU, and this model's are in 16 bits"),
        ("h200", GPT_OSS, TRTLLM, "it needs an NVIDIA Blackwell GPU"),
        ("b200", BLOCKS, TRTLLM, ""),
        ("b200", NVFP4, TRTLLM, ""),
        ("b200", NVFP4, {**TRTLLM, "quantization": "modelopt_fp4"}, ""),
        ("b200", PACKED_NVFP4, CUTLASS, ""),
        ("b200", NVFP4A16, CUTLASS, "in 16 bits or NVFP4 on this GPU, and this model's are in another format (c"),
        ("h200", NVFP4, CUTLASS, "on this GPU, and this model's are in NVFP4"),
        ("b200", {**NVFP4, "config": {**NVFP4["config"], "hidden_act": "gelu"}}, TRTLLM, "experts with silu, and"),
        ("b200", {**BLOCKS, "config": {**BLOCKS["config"], "hidden_act": "gelu"}}, TRTLLM, "experts with silu, and"),
    ],
)
def test_experts_by_flashinfer_are_used_or_refused(
    machine: str, facts: dict[str, Any], asked: dict[str, Any], told: str
) -> None:
    args = Args.of(model_path="/models/small", **asked)
    plan, builder = decide(args, Machine.named(machine), replace(ANY_MODEL, **facts))
    assert told in builder.refusals.get("moe_runner_backend", "")
    assert ("moe_runner_backend" in builder.refusals) == bool(told)
    by_cutlass = asked is CUTLASS or machine == "h200"
    file = "with_flashinfer" if by_cutlass else "with_trtllm_gen"
    assert (plan.kernels.choices.get("moe") == file) == (not told)
    assert plan.kernels.settings["with_trtllm_gen"]["rounds"] == ("flashinfer_mxfp4_moe_precision" not in asked)


def test_the_precision_of_inputs_needs_kernels_that_have_one() -> None:
    _, _, refusals = decided(H200, flashinfer_mxfp4_moe_precision="bf16")
    assert "flashinfer_mxfp4 or flashinfer_trtllm only, which is auto" in refusals["flashinfer_mxfp4_moe_precision"]
    args = Args.of(model_path="/m", moe_runner_backend="flashinfer_trtllm", flashinfer_mxfp4_moe_precision="bf16")
    _, builder = decide(args, Machine.named("b200"), replace(ANY_MODEL, **NVFP4))
    assert "with experts in MXFP4 only" in builder.refusals["flashinfer_mxfp4_moe_precision"]


@pytest.mark.parametrize(
    ("machine", "facts", "asked", "told"),
    [
        ("h200", BLOCKS, "flashinfer_deepgemm", ""),
        ("b200", BLOCKS, "flashinfer_cutlass", ""),
        ("b200", BLOCKS, "flashinfer_deepgemm", "it needs an NVIDIA Hopper GPU (compute capability 9.x), and"),
        ("h200", BLOCKS, "flashinfer_cutlass", "it needs an NVIDIA Blackwell GPU (compute capability 10.x), and"),
        ("cpu", BLOCKS, "flashinfer_cutlass", "and this model runs on the CPU; use auto"),
        (
            "h200",
            BLOCKS | {"dtype": "float16"},
            "flashinfer_deepgemm",
            "computes in bfloat16 only, and this model in f",
        ),
        ("h200", {"quantization": "fp8", "config": {"a": 1}}, "flashinfer_deepgemm", "which this model does not have"),
        ("h200", {"config": {"a": 1}}, "flashinfer_deepgemm", "which this model does not have"),
        ("h200", BLOCKS, "triton", ""),
    ],
)
def test_products_by_flashinfer_are_used_or_refused(machine: str, facts: dict[str, Any], asked: str, told: str) -> None:
    args = Args.of(model_path="/models/small", fp8_gemm_backend=asked)
    plan, builder = decide(args, Machine.named(machine), replace(ANY_MODEL, **facts))
    assert told in builder.refusals.get("fp8_gemm_backend", "")
    assert ("fp8_gemm_backend" in builder.refusals) == bool(told)
    if not told:
        assert plan.kernels.choices["matmul"] == BLOCK_PRODUCTS[asked].file


@pytest.mark.parametrize(
    ("machine", "facts", "asked", "told"),
    [
        ("b200", NVFP4, {}, ""),
        ("b200", PACKED_NVFP4, {}, ""),
        ("b200", NVFP4, {"quantization": "modelopt_fp4"}, ""),
        ("b200", NVFP4A16, {}, "scales of the inputs, which this model does not have"),
        ("b200", BLOCKS, {}, "which this model does not have"),
        ("b200", NVFP4, {"quantization": "w4a16"}, "which this model does not have or which other options change"),
        (
            "b200",
            NVFP4 | {"dtype": "float32"},
            {"dtype": "float32"},
            "in float16 or bfloat16, and this model in float32",
        ),
        ("b200", NVFP4, {"fp8_gemm_backend": "flashinfer_cutlass"}, "beside --fp8-gemm-backend flashinfer_cutlass"),
        ("h200", NVFP4, {}, "it needs an NVIDIA Blackwell GPU (compute capability 10.x), and"),
        ("cpu", NVFP4, {}, "and this model runs on the CPU; use auto"),
    ],
)
def test_products_in_nvfp4_are_used_or_refused(
    machine: str, facts: dict[str, Any], asked: dict[str, Any], told: str
) -> None:
    args = Args.of(model_path="/models/small", fp4_gemm_backend="flashinfer_cutlass", **asked)
    plan, builder = decide(args, Machine.named(machine), replace(ANY_MODEL, **facts))
    assert told in builder.refusals.get("fp4_gemm_backend", "")
    assert ("fp4_gemm_backend" in builder.refusals) == bool(told)
    assert (plan.kernels.choices["matmul"] == "with_fp4") == (not told)
    by_default, _ = decide(Args.of(model_path="/m", fp4_gemm_backend="auto"), Machine.named(machine), ANY_MODEL)
    assert by_default.kernels.choices["matmul"] != "with_fp4"


def test_products_in_nvfp4_are_mentioned_where_they_are_possible() -> None:
    for machine, said in (("b200", True), ("h200", False)):
        plan, _ = decide(Args.of(model_path="/m"), Machine.named(machine), replace(ANY_MODEL, **NVFP4))
        assert plan.kernels.choices["matmul"] == "with_triton"
        assert ("--fp4-gemm-backend flashinfer_cutlass" in plan.kernels.reasons["choices"]) == said
        assert not decided(Machine.named(machine), fp4_gemm_backend="triton")[2]


@pytest.mark.parametrize(("machine", "name"), [("h200", "flashinfer_deepgemm"), ("b200", "flashinfer_cutlass")])
def test_flashinfers_products_are_mentioned_where_they_are_possible(machine: str, name: str) -> None:
    for facts, said in ((BLOCKS, True), ({"quantization": "fp8"}, False)):
        plan, _ = decide(Args.of(model_path="/m"), Machine.named(machine), replace(ANY_MODEL, **facts))
        assert plan.kernels.choices["matmul"] == "with_triton"
        assert (f"--fp8-gemm-backend {name}" in plan.kernels.reasons["choices"]) == said


def test_prompts_and_output_may_differ() -> None:
    kernels, reasons, _ = decided(H200, prefill_attention_backend="torch_native")
    assert kernels.choices["prefill_attention"] == "native"
    assert kernels.choices["attention"] == "with_triton"
    assert reasons["decode_attention_backend"] == "the value of --attention-backend"


def test_splitting_reaches_the_plan_and_is_refused_where_nobody_reads_it() -> None:
    asked = {"triton_attention_num_kv_splits": 4, "triton_attention_split_tile_size": 256}
    kernels, _, refusals = decided(H200, **asked)
    assert kernels.settings["with_triton"] == {"num_kv_splits": 4, "split_tile_tokens": 256}
    assert not refusals
    _, _, refusals = decided(H200, decode_attention_backend="torch_native", **asked)
    assert set(refusals) == set(asked)


def backends_of(option: str) -> list[str]:
    """Return every value of the option, supported values first."""
    named = next(each for each in options() if each.name == option).spec.choices
    built = ATTENTION if option == "attention_backend" else SAMPLING
    return [*built, *(name for name in named if name not in built)]


def table() -> str:
    """Return a table of backends by machine: chosen, possible, or the missing requirement."""
    lines = ["| option | backend | " + " | ".join(MACHINES) + " |", "|---" * (2 + len(MACHINES)) + "|"]
    for option in ("attention_backend", "sampling_backend"):
        for backend in backends_of(option):
            cells = [_cell(option, backend, Machine.named(name)) for name in MACHINES]
            lines.append(f"| `--{option.replace('_', '-')}` | {backend} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(option: str, backend: str, machine: Machine) -> str:
    _, _, refusals = decided(machine, **{option: backend})
    chosen, _, _ = decided(machine)
    if option in refusals:
        return "refused"
    return "**default**" if getattr(chosen, option) == backend else "works"


def capabilities() -> str:
    """Return a table of the requirements and features of each attention backend."""

    def any_of(values: tuple[object, ...]) -> str:
        return ", ".join(map(str, values)) or "any"

    rows: dict[str, Callable[[AttentionBackend], str]] = {
        "kernels": lambda backend: backend.kernels,
        "GPU": lambda backend: str(backend.needs or "none needed"),
        "package": lambda backend: backend.needs.package if backend.needs else "",
        "head dimensions": lambda backend: "none" if backend.only_latent else any_of(backend.head_dims),
        "latent vectors (MLA)": lambda backend: (
            ", ".join(f"{rank} + {rope}" for rank, rope in backend.latent_dims)
            or ("none" if backend.head_dims else "any")
        ),
        "dtypes": lambda backend: any_of(backend.dtypes),
        "pages of": lambda backend: any_of(backend.page_sizes),
        "cache in float8": lambda backend: "yes" if backend.float8_cache else "no",
        "does not compute": lambda backend: ", ".join(sorted(backend.lacks)),
        "CUDA graphs": lambda backend: "yes" if backend.captured else "no",
    }
    lines = [
        "| | " + " | ".join(f"`{name}`" for name in ATTENTION) + " |",
        "|---" * (1 + len(ATTENTION)) + "|",
    ]
    lines += [f"| {row} | " + " | ".join(map(cell, ATTENTION.values())) + " |" for row, cell in rows.items()]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("written", [table, capabilities])
def test_the_documentation_has_the_tables(written: Callable[[], str]) -> None:
    assert written() in (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")


COMPILED = {**H200.packages, "flashinfer-jit-cache": "0.6.13"}


@pytest.mark.parametrize(
    ("name", "asked", "backend", "reason"),
    [
        ("h200", {}, "fa3", "compiled kernels are installed"),
        ("h200", {"kv_cache_dtype": "fp8_e4m3"}, "flashinfer", "compiled kernels are installed"),
        ("h200", {"triton_attention_num_kv_splits": 4}, "triton", "does not have --triton-attention-num-kv-splits"),
        ("h200", {"speculative_algorithm": "NGRAM"}, "triton", "steps with drafts would not overlap"),
        ("h200", {"attention_backend": "triton"}, "triton", "as asked"),
        ("a100", {}, "triton", "the first choice"),
        ("b200", {}, "triton", "the first choice"),
    ],
)
def test_compiled_kernels_are_the_default_on_hopper(
    name: str, asked: dict[str, Any], backend: str, reason: str
) -> None:
    kernels, reasons, refusals = decided(replace(Machine.named(name), packages=COMPILED), **asked)
    assert kernels.decode_attention_backend == kernels.prefill_attention_backend == backend
    assert reason in reasons["attention_backend"]
    assert not refusals


def test_a_model_that_flashinfer_does_not_compute_uses_triton() -> None:
    facts = replace(ANY_MODEL, architecture="LlamaForCausalLM", head_dim=80, dtype="bfloat16")
    plan, builder = decide(Args.of(model_path="/models/small"), replace(H200, packages=COMPILED), facts)
    assert plan.kernels.attention_backend == "triton"
    assert "fa3 takes heads of 64, 128, 256 dimensions" in plan.kernels.reasons["attention_backend"]
    assert not builder.refusals


def test_kernels_that_would_be_compiled_are_not_the_default() -> None:
    kernels, reasons, _ = decided(H200)
    assert kernels.attention_backend == "triton"
    assert "fa3 is the default if its compiled kernels are installed" in reasons["attention_backend"]


@pytest.mark.parametrize("backend", ["flashinfer", "fa3"])
def test_kernels_that_cannot_be_compiled_are_refused_at_start(backend: str) -> None:
    no_compiler = replace(H200, cuda_compiler=None)
    _, _, refusals = decided(no_compiler, attention_backend=backend)
    assert "there is no nvcc" in refusals["attention_backend"]
    assert "pip install flashinfer-jit-cache==0.6.13" in refusals["attention_backend"]
    compiled = replace(no_compiler, packages={**H200.packages, "flashinfer-jit-cache": "0.6.13"})
    for machine in (H200, compiled):
        assert not decided(machine, attention_backend=backend)[2]
