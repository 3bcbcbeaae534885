"""Options about quantised weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import OptionSpec, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantArgs:
    """Quantisation."""

    quantization: Annotated[
        str | None,
        OptionSpec(
            "How the weights are quantised. w8a8_int8 rounds the weights of a checkpoint in bfloat16, float16 or "
            "float32 to 8 bits when it is loaded, and computes with activations of 8 bits; on a CPU so far. "
            "Default: as they are in the checkpoint.",
            choices=(
                "awq", "fp8", "gptq", "marlin", "gptq_marlin", "awq_marlin", "bitsandbytes", "gguf",
                "modelopt", "modelopt_fp4", "petit_nvfp4", "w8a8_int8", "w8a8_fp8", "moe_wna16",
                "qoq", "w4afp8", "mxfp4",
            ),
            built=("w8a8_int8",),
            plan="model.quantization",
        ),
    ] = None  # fmt: skip
    quantization_param_path: Annotated[
        str | None,
        planned("JSON file with the scales of an FP8 KV cache.", none_text=True),
    ] = None
    torchao_config: Annotated[
        str,
        planned(
            "Quantise the loaded weights with torchao: int8dq, int8wo, int4wo-128, fp8wo, fp8dq-per_row, ..."
        ),
    ] = ""
