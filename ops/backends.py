"""Declarations of the backends that users can select by name.

They determine the choices and help texts of the command line, which backends are refused and why, the default backend,
the output of `explain` and the tables in docs/kernels.md. An attention backend is an entry of `ATTENTION` and a file in
`ops/attention` with `make_attend(**settings)`. This module does not import torch, so `explain` runs without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ops.machine import Gpu, Machine

CAPABILITY = (8, 0)  # minimum compute capability of the Triton kernels
GENERATIONS = {9: "Hopper", 10: "Blackwell"}  # major number of the compute capability -> name


@dataclass(frozen=True, slots=True)
class GpuWith:
    """Requires a package, and a GPU with at least `CAPABILITY`.

    `generations`, if given, are the supported major numbers of the GPU's compute capability. `compiled`, if given, is
    a package of precompiled kernels. Without this package, `package` compiles its kernels with nvcc on first use.
    """

    package: str
    generations: tuple[int, ...] = ()
    compiled: str | None = None

    def __str__(self) -> str:
        if self.generations:
            names = " or ".join(GENERATIONS[each] for each in self.generations)
            numbers = " or ".join(f"{each}.x" for each in self.generations)
            return f"an NVIDIA {names} GPU (compute capability {numbers})"
        return f"an NVIDIA GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or newer"

    def unmet(self, machine: Machine, gpu: Gpu | None) -> str:
        """Return the requirement that is not met, as text that begins with a verb ("needs ..."), or "" if all are met.

        `gpu` is None if the model runs on the CPU.
        """
        if gpu is None:
            return f"needs {self}, and this model runs on the CPU"
        if gpu.capability < CAPABILITY or (self.generations and gpu.capability[0] not in self.generations):
            return f"needs {self}, and {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
        if self.package not in machine.packages:
            return f"needs the package {self.package}, which is not installed (pip install 'penstock[cuda]')"
        if self.compiled is not None and machine.cuda_compiler is None and self.compiled not in machine.packages:
            version = machine.packages[self.package]
            return (
                f"compiles its kernels with CUDA's compiler, and there is no nvcc (install the CUDA toolkit and set "
                f"CUDA_HOME, or install compiled kernels: pip install {self.compiled}=={version}, from FlashInfer's "
                f"own package index)"
            )
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One implementation of an operation, under a name for users."""

    file: str  # name of the module in the operation's package
    kernels: str  # origin of the kernels, for help texts
    needs: GpuWith | None = None  # required hardware and package; None: runs on every machine
    # Whether CUDA graphs can capture this backend for all kinds of rows. Such a backend must not read data of the rows
    # on the host, unless it registers a function in `AttentionMetadata.replans`. With False, a sampling backend is
    # captured for greedy rows only.
    captured: bool = False

    def unmet(self, machine: Machine, gpu: Gpu | None) -> str:
        """Return the requirement that is not met, or "" if all are met. `gpu` is None if the model runs on the CPU.

        The text begins with a verb, such as "needs", and continues a sentence that begins with the backend's name.
        """
        return "" if self.needs is None else self.needs.unmet(machine, gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Properties of a model's attention that decide which backends can compute it."""

    dtype: str  # name of the torch dtype, for example "bfloat16"
    head_dim: int | None  # None if the model is unknown
    # (size of a latent vector, size of a rotated key) of multi-head latent attention (MLA); None: not MLA
    latent_dims: tuple[int, int] | None = None
    page_size: int
    kv_dtype: str  # dtype of the cache
    features: frozenset[str] = frozenset()  # "sliding window", "chunks", "soft cap", "sinks", "ALiBi"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend(Backend):
    """An implementation of attention. Empty fields mean no restriction."""

    head_dims: tuple[int, ...] = ()
    max_head_dim: int | None = None
    dtypes: tuple[str, ...] = ()
    page_sizes: tuple[int, ...] = ()
    # Values of `AttentionShape.latent_dims` for which this backend has special kernels. (): it computes MLA as one kv
    # head with its usual kernels.
    latent_dims: tuple[tuple[int, int], ...] = ()
    only_latent: bool = False  # whether this backend computes MLA only
    float8_cache: bool = True  # whether the cache may be in float8; False: only in the model's dtype
    lacks: frozenset[str] = frozenset()  # unsupported `AttentionShape.features`
    # Major compute capability of the GPUs on which this backend is the default, if its compiled kernels are installed.
    default_on: int | None = None
    # Whether `AttentionMetadata.starts_host` must be exact for rows of one token. False: it may have upper bounds.
    exact_starts: bool = False
    decode_settings: Mapping[str, str] = field(default_factory=dict)  # command-line option -> argument of `make_attend`
    # command-line option -> reason why CUDA graphs cannot be used with the option
    uncaptured_with: Mapping[str, str] = field(default_factory=dict)

    def not_default(self, machine: Machine, gpu: Gpu | None) -> str | None:
        """Return why this backend is not the default on a GPU of its `default_on` generation, or "" if it is.

        The text begins with a verb. Returns None for a GPU of another generation, and if a requirement is not met.
        """
        if self.default_on is None or gpu is None or gpu.capability[0] != self.default_on or self.unmet(machine, gpu):
            return None
        needed = "" if self.needs is None else self.needs.compiled or ""
        if needed and needed not in machine.packages:
            return (
                f"is the default if its compiled kernels are installed (the package {needed}): compiling takes minutes"
            )
        return ""

    def lacking(self, shape: AttentionShape) -> list[str]:
        """Return the reasons why this backend cannot compute the shape. Each begins with a verb, such as "takes"."""
        missing = []
        if shape.latent_dims is not None and self.latent_dims:
            if shape.latent_dims not in self.latent_dims:
                sizes = " or ".join(f"{rank} + {rope}" for rank, rope in self.latent_dims)
                missing.append(f"takes latent vectors of {sizes} dimensions, and this model's have {shape.head_dim}")
            if shape.kv_dtype != shape.dtype and self.float8_cache:
                missing.append(f"reads latent vectors in the model's dtype only, and this cache is in {shape.kv_dtype}")
        elif self.only_latent and shape.head_dim is not None:
            missing.append("computes multi-head latent attention only, which this model does not have")
        elif shape.head_dim is not None and self.head_dims and shape.head_dim not in self.head_dims:
            missing.append(f"takes heads of {_listed(self.head_dims)} dimensions, and this model has {shape.head_dim}")
        if self.max_head_dim is not None and (shape.head_dim or 0) > self.max_head_dim:
            missing.append(f"takes heads of up to {self.max_head_dim} dimensions, and this model has {shape.head_dim}")
        if shape.head_dim is not None and self.dtypes and shape.dtype not in self.dtypes:
            missing.append(f"computes in {' or '.join(self.dtypes)}, and this model in {shape.dtype}")
        if self.page_sizes and shape.page_size not in self.page_sizes:
            missing.append(f"reads pages of {_listed(self.page_sizes)} tokens, and --page-size is {shape.page_size}")
        if not self.float8_cache and shape.kv_dtype != shape.dtype:
            missing.append(f"reads a cache of the model's dtype only, and this one is in {shape.kv_dtype}")
        missing += [f"has no {feature}, which this model has" for feature in sorted(self.lacks & shape.features)]
        return missing


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBackend(Backend):
    """An implementation of mixtures of experts."""

    # Major number of the GPU's compute capability -> formats of experts that the kernels read: "16 bits", "MXFP4",
    # "NVFP4" (with scales of the inputs), "float8 blocks" (one scale per block of 128 x 128 numbers). {}: every format.
    formats: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    file_on: Mapping[int, str] = field(default_factory=dict)  # major number -> `file` on GPUs of this generation


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBackend(Backend):
    """An implementation of sampling."""

    # Names of the supported limits in `ops.sampling.SamplingArrays`. `native` computes rows with other limits.
    limits: frozenset[str] = frozenset()


# Head dimensions and dtypes that all kernels of FlashInfer support, and sizes that some of its kernels require.
FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_DTYPES = ("float16", "bfloat16")
LATENT_DIMS = (512, 64)  # `AttentionShape.latent_dims` of its kernels for MLA
FLASHINFER_COMPILED = "flashinfer-jit-cache"  # package with FlashInfer's kernels as machine code
TRTLLM_PAGE_SIZES = (16, 32, 64)
TRTLLM_LATENT_PAGE_SIZES = (32, 64)

# If no option names a backend, the default is the first backend of `PREFERRED` that is a default on this GPU and
# supports the model or, if there is none, the first usable backend of `ATTENTION`.
PREFERRED = ("fa3", "flashinfer")
ATTENTION: Mapping[str, AttentionBackend] = {
    "triton": AttentionBackend(
        file="with_triton",
        kernels="our own in Triton",
        needs=GpuWith("triton"),
        max_head_dim=576,  # latent vectors of MLA: 512 and 64
        captured=True,
        decode_settings={
            "triton_attention_num_kv_splits": "num_kv_splits",
            "triton_attention_split_tile_size": "split_tile_tokens",
        },
        uncaptured_with={"triton_attention_split_tile_size": "the longest row decides what is launched"},
    ),
    "torch_native": AttentionBackend(file="native", kernels="plain torch", exact_starts=True),
    "flashinfer": AttentionBackend(
        file="with_flashinfer",
        kernels="FlashInfer's own choice",
        needs=GpuWith("flashinfer-python", compiled=FLASHINFER_COMPILED),
        head_dims=FLASHINFER_HEAD_DIMS,
        latent_dims=(LATENT_DIMS,),
        dtypes=FLASHINFER_DTYPES,
        lacks=frozenset({"sinks", "chunks", "ALiBi"}),
        captured=True,
        exact_starts=True,
        default_on=9,
    ),
    "fa3": AttentionBackend(
        file="with_fa3",
        kernels="FlashAttention 3",
        needs=GpuWith("flashinfer-python", generations=(9,), compiled=FLASHINFER_COMPILED),
        head_dims=FLASHINFER_HEAD_DIMS,
        latent_dims=(LATENT_DIMS,),
        dtypes=FLASHINFER_DTYPES,
        float8_cache=False,
        lacks=frozenset({"sinks", "chunks", "ALiBi"}),
        captured=True,
        exact_starts=True,
        default_on=9,
    ),
    "trtllm_mha": AttentionBackend(
        file="with_trtllm",
        kernels="TensorRT-LLM's",
        needs=GpuWith("flashinfer-python", generations=(10,), compiled=FLASHINFER_COMPILED),
        head_dims=FLASHINFER_HEAD_DIMS,
        dtypes=FLASHINFER_DTYPES,
        page_sizes=TRTLLM_PAGE_SIZES,
        float8_cache=False,
        lacks=frozenset({"soft cap", "chunks", "ALiBi"}),
        captured=True,
    ),
    "trtllm_mla": AttentionBackend(
        file="with_trtllm_mla",
        kernels="TensorRT-LLM's for MLA, and FlashInfer's for prefill",
        needs=GpuWith("flashinfer-python", generations=(10,), compiled=FLASHINFER_COMPILED),
        latent_dims=(LATENT_DIMS,),
        only_latent=True,
        dtypes=("bfloat16",),
        page_sizes=TRTLLM_LATENT_PAGE_SIZES,
        float8_cache=False,
        lacks=frozenset({"sliding window", "soft cap", "sinks", "chunks", "ALiBi"}),
        captured=True,
        exact_starts=True,  # FlashInfer's wrapper, which computes rows of several tokens, plans with the exact lengths
    ),
}
SAMPLING: Mapping[str, SamplingBackend] = {
    "triton": SamplingBackend(
        file="with_triton",
        kernels="our own in Triton",
        needs=GpuWith("triton"),
        captured=True,
        limits=frozenset({"top_k", "top_p", "min_p"}),
    ),
    "pytorch": SamplingBackend(file="native", kernels="plain torch"),
}
# These operations use the first backend of SMALL that runs on the machine, unless `runtime.config.resolve.kernels`
# selects another one (C++ kernels on a CPU, --lora-backend, --enable-torch-compile).
SMALL_OPERATIONS = ("activation", "kv", "low_rank", "norm", "rope")
# Implementations of experts besides C++ and torch. The first is the default on a GPU that can run it.
EXPERTS: Mapping[str, ExpertBackend] = {
    "triton": ExpertBackend(file="with_triton", kernels="our own in Triton", needs=GpuWith("triton"), captured=True),
    "flashinfer_cutlass": ExpertBackend(
        file="with_flashinfer",
        kernels="FlashInfer's CUTLASS kernels, for experts in 16 bits, on Hopper also in MXFP4, and in float8 with one "
        "scale per block of 128 x 128 numbers, and on Blackwell also in NVFP4",
        needs=GpuWith("flashinfer-python", generations=(9, 10), compiled=FLASHINFER_COMPILED),
        captured=True,
        formats={9: ("16 bits", "MXFP4", "float8 blocks"), 10: ("16 bits", "NVFP4")},
    ),
    "flashinfer_mxfp4": ExpertBackend(
        file="with_trtllm_gen",
        file_on={9: "with_flashinfer"},
        kernels="FlashInfer's kernels for gpt-oss's MXFP4 experts, TensorRT-LLM's on Blackwell and CUTLASS's on Hopper",
        needs=GpuWith("flashinfer-python", generations=(9, 10), compiled=FLASHINFER_COMPILED),
        captured=True,
        formats={9: ("MXFP4",), 10: ("MXFP4",)},
    ),
    "flashinfer_trtllm": ExpertBackend(
        file="with_trtllm_gen",
        kernels="TensorRT-LLM's kernels in FlashInfer, for experts in MXFP4, in NVFP4, and in float8 with one scale "
        "per block of 128 x 128 numbers",
        needs=GpuWith("flashinfer-python", generations=(10,), compiled=FLASHINFER_COMPILED),
        captured=True,
        formats={10: ("MXFP4", "NVFP4", "float8 blocks")},
    ),
}
# Implementations of products with float8 weights that have one scale per block of 128 x 128 numbers. Triton is the
# default, because FlashInfer's products are not measured yet, and its products for Hopper are compiled while requests
# are served.
BLOCK_PRODUCTS: Mapping[str, Backend] = {
    "triton": ATTENTION["triton"],
    "flashinfer_deepgemm": Backend(
        file="with_deepgemm",
        kernels="DeepGEMM's kernels in FlashInfer, which are compiled for each shape of a weight and range of rows",
        needs=GpuWith("flashinfer-python", generations=(9,), compiled=FLASHINFER_COMPILED),
        captured=True,
    ),
    "flashinfer_cutlass": Backend(
        file="with_groupwise",
        kernels="CUTLASS's kernels in FlashInfer",
        needs=GpuWith("flashinfer-python", generations=(10,), compiled=FLASHINFER_COMPILED),
        captured=True,
    ),
}
# Implementations of products with weights in NVFP4. Triton dequantises them; the other kernels also round the inputs.
FP4_PRODUCTS: Mapping[str, Backend] = {
    "triton": ATTENTION["triton"],
    "flashinfer_cutlass": Backend(
        file="with_fp4",
        kernels="CUTLASS's kernels in FlashInfer",
        needs=GpuWith("flashinfer-python", generations=(10,), compiled=FLASHINFER_COMPILED),
        captured=True,
    ),
}
# Operation -> files whose kernels round inputs to NVFP4 with the factors of a checkpoint.
ROUNDING: Mapping[str, frozenset[str]] = {
    "matmul": frozenset({"with_fp4"}),
    "moe": frozenset({"with_flashinfer", "with_trtllm_gen"}),
}
GPU_OPERATIONS = ("embedding", "moe", "recurrence")  # Triton or torch on a GPU, C++ or torch on a CPU
SMALL: Mapping[str, Backend] = {name: ATTENTION[name] for name in ("triton", "torch_native")}


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
