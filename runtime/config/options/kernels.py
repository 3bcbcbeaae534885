"""Options about kernels: which implementation of attention runs, and its details."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ops.backends import ATTENTION
from runtime.config.option_spec import always, inert, option, planned
from runtime.config.plan import KernelPlan, ModelPlan

_LATENT = "a model with multi-head latent attention, which other backends compute here, and"
_NOT_BUILT = {
    "cutlass_mla": f"{_LATENT} an NVIDIA Blackwell GPU",
    "flashmla": f"{_LATENT} an NVIDIA Hopper GPU",
    "trtllm_mla": f"{_LATENT} an NVIDIA Blackwell GPU",
    "dual_chunk_flash_attn": "an NVIDIA GPU",
    "hybrid_linear_attn": "an NVIDIA GPU",
    "aiter": "an AMD GPU",
    "wave": "an AMD GPU",
    "intel_amx": "an Intel CPU with AMX",
    "ascend": "an Ascend accelerator",
}
_ATTENTION: dict[str, Any] = {
    "choices": (*ATTENTION, *_NOT_BUILT),
    "built": tuple(ATTENTION),
    "needs": _NOT_BUILT,
}
_KERNELS = ", ".join(
    f"{name} ({backend.kernels}{f'; needs {backend.needs}' if backend.needs else ''})"
    for name, backend in ATTENTION.items()
)
# Those that need something, and the first that runs everywhere.
_DEFAULT = " where it runs, else ".join(list(ATTENTION)[: list(ATTENTION).index("torch_native") + 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelArgs:
    """Kernels."""

    cpu_threads: int | None = option(
        None,
        "Threads that compute a step on a CPU. Default: as many as torch uses, which is one for each "
        "processor unless OMP_NUM_THREADS says otherwise.",
        low=1,
    )
    attention_backend: str | None = option(
        None,
        f"Implementation of attention: {_KERNELS}. Default: {_DEFAULT}.",
        **_ATTENTION,
        sglang="fa3 on Hopper, else flashinfer where it is installed, else triton; on a CPU intel_amx or torch_native",
        plan=KernelPlan.attention_backend,
    )
    prefill_attention_backend: str | None = option(
        None,
        "Implementation of attention for prompts only, that is where a step computes several tokens of a "
        "sequence. Default: that of --attention-backend.",
        **_ATTENTION,
        plan=KernelPlan.prefill_attention_backend,
    )
    decode_attention_backend: str | None = option(
        None,
        "Implementation of attention for output tokens only. Default: that of --attention-backend.",
        **_ATTENTION,
        plan=KernelPlan.decode_attention_backend,
    )
    mm_attention_backend: str | None = planned(
        None, "Implementation of attention in image encoders.", choices=("sdpa", "fa3", "triton_attn")
    )
    triton_attention_num_kv_splits: int = option(
        8,
        "Largest number of parts into which the Triton decode kernel splits one sequence.",
        low=1,
    )
    triton_attention_split_tile_size: int | None = option(
        None,
        "Tokens in each part of a sequence in the Triton decode kernel. Default: "
        "--triton-attention-num-kv-splits decides.",
        low=1,
    )
    triton_attention_reduce_in_fp32: bool = inert(
        False,
        "Add up attention in float32.",
        reason="sums are always in float32, and only double sparsity read it where it comes from",
    )
    flashinfer_mla_disable_ragged: bool = option(
        False,
        "Compute prompts of MLA models absorbed, as single tokens are, not with expanded keys and values. Slower for "
        "long prompts on a CPU, but then the same bits however a prompt is cut; a GPU always does so.",
        plan=ModelPlan.always_absorbed,
    )
    enable_flashinfer_mla: bool = planned(
        False, "Old spelling of --attention-backend flashinfer for MLA models.", instead="drop it"
    )
    disable_chunked_prefix_cache: bool = always(
        False,
        "For MLA models: read a cached prefix in one piece instead of chunk by chunk.",
        reason="it is read as latent vectors, or expanded on the way for a long prompt, in the same attention",
        sglang="off: prompts after a long cached prefix read it chunk by chunk",
    )
    enable_double_sparsity: bool = planned(
        False, "Attend in long sequences only to the tokens that a few channels mark as important."
    )
    ds_channel_config_path: str | None = planned(
        None, "JSON file that lists the important channels of each head for double sparsity."
    )
    ds_heavy_channel_num: int = planned(32, "Channels per head that double sparsity compares.", low=1)
    ds_heavy_token_num: int = planned(256, "Tokens that double sparsity attends to.", low=1)
    ds_heavy_channel_type: str = planned(
        "qk", "Whose statistics mark the channels of double sparsity.", choices=("q", "k", "qk")
    )
    ds_sparse_decode_threshold: int = planned(
        4096, "Sequence length in tokens from which double sparsity is used.", low=1
    )
