"""Kernels for experts and quantised weights on a GPU, and the refusal of options that select other kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ops.backends import BLOCK_PRODUCTS, EXPERTS, FLASHINFER_DTYPES, FP4_PRODUCTS
from ops.machine import Gpu, Machine
from runtime.config.model_facts import ModelFacts
from runtime.config.quantization import FORMATS, GROUPED, METHODS
from runtime.config.resolve.plan_builder import PlanBuilder

ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
# Backends for which the precision of MXFP4 experts' inputs can be selected.
PRECISE = ("flashinfer_mxfp4", "flashinfer_trtllm")
ASKED_NVFP4 = ("modelopt_fp4", "petit_nvfp4")  # values of --quantization that name ModelOpt's NVFP4
BLOCK = [128, 128]  # outputs and inputs of a float8 block, which has one scale, in FlashInfer's kernels


def experts_on_gpu(
    builder: PlanBuilder, machine: Machine, gpu: Gpu | None, dtype: str, facts: ModelFacts, otherwise: str
) -> str:
    """Return the file that computes experts: the requested backend's file, or `otherwise` if none is requested."""
    asked, option = builder.args.moe.moe_runner_backend, "flashinfer_mxfp4_moe_precision"
    precision = builder.args.moe.flashinfer_mxfp4_moe_precision
    if precision != "default" and asked not in PRECISE:
        builder.refuse(
            option,
            f"--flashinfer-mxfp4-moe-precision {precision} has an effect with --moe-runner-backend "
            f"{' or '.join(PRECISE)} only, which is {asked}.",
        )
    elif precision != "default" and facts.config and _format(builder, facts) != "MXFP4":
        builder.refuse(
            option,
            f"--flashinfer-mxfp4-moe-precision {precision} has an effect with experts in MXFP4 only, which this model "
            "does not have; leave it out.",
        )
    if asked not in EXPERTS:
        return otherwise
    backend = EXPERTS[asked]
    reason = backend.unmet(machine, gpu)
    if gpu is not None and not reason and backend.formats:
        reason = _unread(builder, backend.formats[gpu.capability[0]], dtype, facts)
    if not reason and gpu is not None:
        return backend.file_on.get(gpu.capability[0], backend.file)
    instead = "auto" if asked == "triton" or EXPERTS["triton"].unmet(machine, gpu) else "triton"
    builder.refuse("moe_runner_backend", f"--moe-runner-backend {asked} cannot be used: it {reason}; use {instead}.")
    return otherwise


def _unread(builder: PlanBuilder, formats: Sequence[str], dtype: str, facts: ModelFacts) -> str:
    """Return why FlashInfer's kernels for these formats cannot compute the model's experts, or ""."""
    stored, activation = _format(builder, facts), expert_activation(facts)
    fitting = ("silu",) if stored in ("float8 blocks", "NVFP4") else ("silu", "clamped_swiglu")
    dtypes = FLASHINFER_DTYPES if stored == "16 bits" else ("bfloat16",)
    if facts.config and stored not in formats:
        here = f"another format ({facts.quantization})" if stored == "other" else stored
        return f"computes experts in {' or '.join(formats)} on this GPU, and this model's are in {here}"
    if dtype not in dtypes:
        return f"computes these experts in {' or '.join(dtypes)}, and this model in {dtype}"
    if builder.args.moe.ep_size > 1:
        return "computes all experts of a layer, and --ep-size divides them"
    if stored != "16 bits" and builder.args.graphs.enable_torch_compile:
        return "reads quantised weights, which --enable-torch-compile dequantises"
    if activation not in fitting:
        return f"computes these experts with {' or '.join(fitting)}, and this model has {activation}"
    return ""


def _format(builder: PlanBuilder, facts: ModelFacts) -> str:
    """Return the format in which experts are multiplied: a value of `ExpertBackend.formats`, or "other"."""
    quant = builder.args.quant
    if quant.torchao_config:
        return "16 bits"  # torchao's methods leave experts unquantised
    if facts.quantization is None:
        return "16 bits" if quant.quantization is None else "other formats, by --quantization"
    if quant.quantization not in (None, facts.quantization, *(ASKED_NVFP4 if in_nvfp4(facts) else ())):
        return "other formats, by --quantization"
    if in_blocks(facts):
        return "float8 blocks"
    if in_nvfp4(facts):
        return "NVFP4"
    return "MXFP4" if facts.quantization == "mxfp4" else "other"


def expert_activation(facts: ModelFacts) -> str:
    """Return the activation of the model's experts, a name of `ops.activation` or of transformers.

    In configurations of multimodal models, `text_config` has it. gpt-oss's experts have their own activation; its
    `hidden_act` is ignored.
    """
    if facts.architecture.startswith("GptOss"):
        return "clamped_swiglu"
    text = facts.config.get("text_config")
    config = text if isinstance(text, Mapping) else facts.config
    named = next((config[key] for key in ACTIVATION_KEYS if config.get(key)), "silu")
    return "silu" if named == "swish" else str(named)


def kept_on_gpu(asked: str | None, facts: ModelFacts) -> bool:
    """Return whether linear layers may keep weights in 4 bits or float8. The Triton kernels can read such weights."""
    stored = facts.quantization
    method = METHODS.get(asked or "")
    named = stored is not None and asked in (stored, *FORMATS[stored].asked)  # the option only names the format
    if asked is None or (named and method is None) or (stored is not None and method and method.only_unquantized):
        return stored in GROUPED
    return asked.startswith("int4wo") or (method is not None and method.on_gpu == "with_triton")


def products_on_gpu(
    builder: PlanBuilder, machine: Machine, gpu: Gpu | None, dtype: str, facts: ModelFacts, *, kept: bool
) -> tuple[str, str]:
    """Return (file that multiplies quantised weights on a GPU, reason). `kept` tells whether weights stay quantised.

    Refuses a requested backend that cannot compute this model.
    """
    if (in_fp4 := _fp4_products(builder, machine, gpu, dtype, facts, kept=kept)) is not None:
        return in_fp4
    option, asked = "fp8_gemm_backend", builder.args.kernels.fp8_gemm_backend
    otherwise = "Triton kernels multiply weights in 4 bits and float8 without dequantising them first"
    if asked not in BLOCK_PRODUCTS:
        suited = [name for name, each in BLOCK_PRODUCTS.items() if name != "triton" and not each.unmet(machine, gpu)]
        if kept and suited and in_blocks(facts):
            otherwise += f"; FlashInfer's products are used if named (--fp8-gemm-backend {suited[0]}): not measured yet"
        suited = [name for name, each in FP4_PRODUCTS.items() if name != "triton" and not each.unmet(machine, gpu)]
        if kept and suited and in_nvfp4(facts):
            otherwise += f"; FlashInfer's products are used if named (--fp4-gemm-backend {suited[0]}): not measured yet"
        return "with_triton", otherwise
    backend = BLOCK_PRODUCTS[asked]
    reason = backend.unmet(machine, gpu)
    if asked != "triton" and not reason:
        rounded = builder.args.quant.quantization not in (None, "fp8") or builder.args.quant.torchao_config
        if facts.config and (rounded or not (kept and in_blocks(facts))):
            reason = (
                "multiplies weights in float8 with one scale per block of 128 x 128 numbers, which this model does not "
                "have or which other options change"
            )
        elif dtype != "bfloat16":
            reason = f"computes in bfloat16 only, and this model in {dtype}"
    if not reason:
        return backend.file, otherwise if asked == "triton" else f"as asked: {backend.kernels}; Triton otherwise"
    builder.refuse(option, f"--fp8-gemm-backend {asked} cannot be used: it {reason}; use auto.")
    return "with_triton", otherwise


def _fp4_products(
    builder: PlanBuilder, machine: Machine, gpu: Gpu | None, dtype: str, facts: ModelFacts, *, kept: bool
) -> tuple[str, str] | None:
    """Return like `products_on_gpu` for --fp4-gemm-backend, or None if it names no kernels other than Triton's."""
    option, asked = "fp4_gemm_backend", builder.args.kernels.fp4_gemm_backend
    if asked not in FP4_PRODUCTS:
        return None
    backend, beside = FP4_PRODUCTS[asked], builder.args.kernels.fp8_gemm_backend
    reason = backend.unmet(machine, gpu)
    if asked != "triton" and not reason:
        rounded = builder.args.quant.quantization not in (None, facts.quantization, *ASKED_NVFP4)
        if beside not in ("auto", "triton"):
            reason = f"cannot be used beside --fp8-gemm-backend {beside}"
        elif facts.config and (rounded or builder.args.quant.torchao_config or not (kept and in_nvfp4(facts))):
            reason = (
                "multiplies weights in NVFP4 with scales of the inputs, which this model does not have or which other "
                "options change"
            )
        elif dtype not in FLASHINFER_DTYPES:
            reason = f"computes in {' or '.join(FLASHINFER_DTYPES)}, and this model in {dtype}"
    if reason:
        builder.refuse(option, f"--fp4-gemm-backend {asked} cannot be used: it {reason}; use auto.")
    elif asked != "triton":
        return backend.file, f"as asked: {backend.kernels}, which round inputs to NVFP4; Triton otherwise"
    return None


def in_nvfp4(facts: ModelFacts) -> bool:
    """Return whether the checkpoint has weights in NVFP4 with scales of their inputs, according to its settings."""
    settings = facts.config.get("quantization_config") or {}
    if facts.quantization == "modelopt":
        return str(settings.get("quant_algo")).upper() == "NVFP4"
    groups = settings.get("config_groups")
    return (
        facts.quantization == "compressed-tensors"
        and isinstance(groups, Mapping)
        and any(map(_is_nvfp4, groups.values()))
    )


def _is_nvfp4(group: Any) -> bool:
    """Return whether a group of compressed-tensors has weights and inputs in e2m1 with a scale per 16 numbers."""
    each = [group.get(part) for part in ("weights", "input_activations")] if isinstance(group, Mapping) else [None]
    return all(
        isinstance(one, Mapping) and (one.get("num_bits"), one.get("type"), one.get("group_size")) == (4, "float", 16)
        for one in each
    )


def in_blocks(facts: ModelFacts) -> bool:
    """Return whether the checkpoint has float8 weights with one scale per block of 128 x 128 numbers."""
    settings = facts.config.get("quantization_config") or {}
    groups = settings.get("config_groups")
    each = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    blocks: list[Any] = [one.get("block_structure") for one in each if isinstance(one, Mapping)]
    return facts.quantization is not None and BLOCK in (settings.get("weight_block_size"), *blocks)
