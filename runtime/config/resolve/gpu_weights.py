"""Kernels for experts and quantised weights on a GPU, and the refusal of options that select other kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ops.backends import BLOCK_PRODUCTS, EXPERTS, FLASHINFER_DTYPES
from ops.machine import Gpu, Machine
from runtime.config.model_facts import ModelFacts
from runtime.config.quantization import GROUPED, METHODS
from runtime.config.resolve.plan_builder import PlanBuilder

BLOCK = [128, 128]  # outputs and inputs of the float8 blocks, with one scale each, of FlashInfer's kernels


def experts_on_gpu(
    builder: PlanBuilder, machine: Machine, gpu: Gpu | None, dtype: str, facts: ModelFacts, otherwise: str
) -> str:
    """Return the file that computes experts: the requested backend's file, or `otherwise` if none is requested."""
    asked = builder.args.moe.moe_runner_backend
    if asked not in EXPERTS:
        return otherwise
    reason = EXPERTS[asked].unmet(machine, gpu)
    if asked == "flashinfer_cutlass" and gpu is not None and not reason:
        quant = builder.args.quant
        rounded = quant.quantization not in (None, facts.quantization) or quant.torchao_config
        if (rounded or facts.quantization is not None) and (
            rounded or gpu.capability[0] != 9 or not in_blocks(facts) or dtype != "bfloat16"
        ):
            reason = (
                "computes quantised experts only on Hopper, in bfloat16, with float8 weights that have one scale per "
                "block of 128 x 128 numbers"
            )
        elif dtype not in FLASHINFER_DTYPES:
            reason = f"computes in {' or '.join(FLASHINFER_DTYPES)}, and this model in {dtype}"
        elif builder.args.moe.ep_size > 1:
            reason = "computes all experts of a layer, and --ep-size divides them"
        elif facts.config.get("hidden_act", "silu") != "silu":
            reason = f"computes experts with silu only, and this model has {facts.config['hidden_act']}"
    if not reason:
        return EXPERTS[asked].file
    instead = "auto" if asked == "triton" or EXPERTS["triton"].unmet(machine, gpu) else "triton"
    builder.refuse("moe_runner_backend", f"--moe-runner-backend {asked} cannot be used: it {reason}; use {instead}.")
    return otherwise


def kept_on_gpu(asked: str | None, facts: ModelFacts) -> bool:
    """Return whether linear layers may keep weights in 4 bits or float8. The Triton kernels can read such weights."""
    stored = facts.quantization
    if asked is None or (stored is not None and asked in METHODS and METHODS[asked].only_unquantized):
        return stored in GROUPED
    return asked.startswith("int4wo") or (asked in METHODS and METHODS[asked].on_gpu == "with_triton")


def products_on_gpu(
    builder: PlanBuilder, machine: Machine, gpu: Gpu | None, dtype: str, facts: ModelFacts, *, kept: bool
) -> tuple[str, str]:
    """Return (file that multiplies quantised weights on a GPU, reason). `kept` tells whether weights stay quantised.

    Refuses a requested backend that cannot compute this model.
    """
    option, asked = "fp8_gemm_backend", builder.args.kernels.fp8_gemm_backend
    otherwise = "Triton kernels multiply weights in 4 bits and float8 without dequantising them first"
    if asked not in BLOCK_PRODUCTS:
        suited = [name for name, each in BLOCK_PRODUCTS.items() if name != "triton" and not each.unmet(machine, gpu)]
        if kept and suited and in_blocks(facts):
            otherwise += f"; FlashInfer's products are used if named (--fp8-gemm-backend {suited[0]}): not measured yet"
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


def in_blocks(facts: ModelFacts) -> bool:
    """Return whether the checkpoint has float8 weights with one scale per block of 128 x 128 numbers."""
    settings = facts.config.get("quantization_config") or {}
    groups = settings.get("config_groups")
    each = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    blocks: list[Any] = [one.get("block_structure") for one in each if isinstance(one, Mapping)]
    return facts.quantization is not None and BLOCK in (settings.get("weight_block_size"), *blocks)
