"""Options about kernels: which implementation of attention runs, and its details."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ops.backends import ATTENTION, BLOCK_PRODUCTS, FLASHINFER_COMPILED, FP4_PRODUCTS, Backend
from runtime.config.option_spec import always, inert, option, refused, renamed

_LATENT = "a model with multi-head latent attention (which other backends also support) and"
_NOT_BUILT = {
    "cutlass_mla": f"{_LATENT} an NVIDIA Blackwell GPU, and copies the whole cache in each layer; use trtllm_mla",
    "flashmla": f"{_LATENT} an NVIDIA Hopper GPU and a package that is not on the package index; use fa3",
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
# The default order, up to the first backend that runs on every machine.
_DEFAULT = " if the machine supports it, else ".join(list(ATTENTION)[: list(ATTENTION).index("torch_native") + 1])


def _products(backends: Mapping[str, Backend]) -> str:
    """Return the backends other than Triton, with what they need."""
    others = {name: backend for name, backend in backends.items() if name != "triton"}
    return "; ".join(f"{name}: {backend.kernels} (needs {backend.needs})" for name, backend in others.items())


_NO_PRODUCTS = {
    "deep_gemm": "the deep_gemm package, which has to be built from source; use flashinfer_deepgemm",
    "flashinfer_trtllm": "an NVIDIA Blackwell GPU; use flashinfer_cutlass",
    "cutlass": "the sgl-kernel package; use flashinfer_deepgemm on Hopper and flashinfer_cutlass on Blackwell",
    "aiter": "an AMD GPU",
}
_NO_FP4_PRODUCTS = {
    "flashinfer_cudnn": "an NVIDIA Blackwell GPU and NVIDIA's cuDNN front end; use flashinfer_cutlass",
    "flashinfer_trtllm": "an NVIDIA Blackwell GPU; use flashinfer_cutlass",
    "cutlass": "the sgl-kernel package; use flashinfer_cutlass",
}
_NO_DOUBLE_SPARSITY = {
    "reason": "double sparsity changes answers and needs channels calibrated for each model, and SGLang removed it "
    "(pull request 23009)",
    "instead": "to read less of long caches, use --kv-cache-dtype fp8_e5m2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelArgs:
    """Kernels."""

    cpu_threads: int | None = option(
        None,
        "Threads that compute a step on a CPU. Default: the number of threads that torch uses, which is one per "
        "core unless OMP_NUM_THREADS is set.",
        low=1,
    )
    wait_for_kernels: bool = option(
        False,
        "If the C++ kernels must be compiled first, accept requests only when they are. Default: PyTorch computes the "
        "steps of small models meanwhile (up to 1 GiB of weights, on one rank); requests that run at the change are "
        "recomputed. Larger models always wait.",
        plan="kernels.in_background",
        invert=True,
    )
    attention_backend: str | None = option(
        None,
        f"Implementation of attention: {_KERNELS}. On a CPU, any named backend replaces the C++ kernels of attention. "
        f"Default: on a CPU, the C++ kernels where a compiler is installed, else torch_native; on a GPU, {_DEFAULT}. "
        f"On Hopper it is fa3 (flashinfer with an 8-bit cache) if the package {FLASHINFER_COMPILED} is installed.",
        **_ATTENTION,
        sglang="fa3 on Hopper, else flashinfer if it is installed, else triton; on a CPU intel_amx or torch_native",
        plan="kernels.attention_backend",
    )
    prefill_attention_backend: str | None = option(
        None,
        "Implementation of attention for prefill, that is, for rows with several tokens. Default: the value of "
        "--attention-backend.",
        **_ATTENTION,
        plan="kernels.prefill_attention_backend",
    )
    decode_attention_backend: str | None = option(
        None,
        "Implementation of attention for decode, that is, for rows with one token. Default: the value of "
        "--attention-backend.",
        **_ATTENTION,
        plan="kernels.decode_attention_backend",
    )
    fp8_gemm_backend: str = option(
        "auto",
        "Kernels that multiply weights in float8 with one scale per block of 128 x 128 numbers (DeepSeek's format), in "
        f"bfloat16 on a GPU. auto: triton if the GPU supports it. {_products(BLOCK_PRODUCTS)}. Triton computes other "
        "weights and experts.",
        choices=("auto", *BLOCK_PRODUCTS, *_NO_PRODUCTS),
        built=("auto", *BLOCK_PRODUCTS),
        needs=_NO_PRODUCTS,
    )
    fp4_gemm_backend: str = option(
        "auto",
        "Kernels that multiply weights in NVFP4 on a GPU, in checkpoints with scales of the inputs. auto: triton if "
        f"the GPU supports it, which does not round inputs. {_products(FP4_PRODUCTS)}, which round inputs to NVFP4 "
        "too. Triton computes other weights.",
        choices=("auto", *FP4_PRODUCTS, *_NO_FP4_PRODUCTS),
        built=("auto", *FP4_PRODUCTS),
        needs=_NO_FP4_PRODUCTS,
    )
    triton_attention_num_kv_splits: int | None = option(
        None,
        "Largest number of parts into which the Triton decode kernel splits one sequence. Default: as many as one long "
        "sequence needs to use the whole GPU.",
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
        "Accumulate attention in float32.",
        reason="sums are always in float32; in SGLang only double sparsity reads this option",
    )
    flashinfer_mla_disable_ragged: bool = option(
        False,
        "Use absorbed attention for prompts of MLA models too, instead of expanded keys and values. This is slower "
        "for long prompts on a CPU, but results do not depend on how a prompt is divided into chunks. A GPU always "
        "uses absorbed attention.",
        plan="model.always_absorbed",
    )
    enable_flashinfer_mla: bool = renamed("attention_backend", "flashinfer")
    disable_chunked_prefix_cache: bool = always(
        False,
        "For MLA models: read a cached prefix as a whole instead of chunk by chunk.",
        reason="one attention call reads the whole prefix, as latent vectors or expanded on the fly",
        sglang="off: a long cached prefix is read chunk by chunk",
    )
    enable_double_sparsity: bool = refused(
        False,
        "Attend in long sequences only to the tokens that a few channels mark as important.",
        **_NO_DOUBLE_SPARSITY,
    )
    ds_channel_config_path: str | None = refused(
        None,
        "JSON file that lists the important channels of each head for double sparsity.",
        **_NO_DOUBLE_SPARSITY,
    )
    ds_heavy_channel_num: int = refused(
        32, "Channels per head that double sparsity compares.", low=1, **_NO_DOUBLE_SPARSITY
    )
    ds_heavy_token_num: int = refused(256, "Tokens that double sparsity attends to.", low=1, **_NO_DOUBLE_SPARSITY)
    ds_heavy_channel_type: str = refused(
        "qk",
        "Whether statistics of queries (q), keys (k) or both select the channels of double sparsity.",
        choices=("q", "k", "qk"),
        **_NO_DOUBLE_SPARSITY,
    )
    ds_sparse_decode_threshold: int = refused(
        4096, "Sequence length in tokens from which double sparsity is used.", low=1, **_NO_DOUBLE_SPARSITY
    )
