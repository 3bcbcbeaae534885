"""The backends that users can name: one declaration each.

The command line's choices and help, what is refused and why, the choice at start, `explain` and the tables in
docs/kernels.md follow from it. A backend of attention is an entry of `ATTENTION` here and its file in `ops/attention`,
whose `make_attend(**settings)` makes it. Torch is not imported here, so that a choice can be explained without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ops.machine import Gpu, Machine

CAPABILITY = (8, 0)  # of the GPUs that our kernels are compiled for
GENERATIONS = {9: "Hopper", 10: "Blackwell"}  # major number of the capability -> what it is called


@dataclass(frozen=True, slots=True)
class GpuWith:
    """A GPU that is new enough, or of one generation (the major number of its capability), and a package."""

    package: str
    generation: int | None = None

    def __str__(self) -> str:
        if self.generation is not None:
            return f"an NVIDIA {GENERATIONS[self.generation]} GPU (compute capability {self.generation}.x)"
        return f"an NVIDIA GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or newer"

    def unmet(self, machine: Machine, gpu: Gpu | None) -> str:
        """See `Backend.unmet`."""
        if gpu is None:
            return f"needs {self}, and this model runs on the CPU"
        if gpu.capability < CAPABILITY or self.generation not in (None, gpu.capability[0]):
            return f"needs {self}, and {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
        if self.package not in machine.packages:
            return f"needs the package {self.package}, which is not installed (pip install 'penstock[cuda]')"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One implementation of an operation as users call it."""

    file: str  # in the operation's folder
    kernels: str  # whose they are
    needs: GpuWith | None = None  # None: it runs everywhere
    # Whether a CUDA graph can hold it for any rows: it reads nothing of them on the host, or leaves what does.
    captured: bool = False

    def unmet(self, machine: Machine, gpu: Gpu | None) -> str:
        """What is missing to run for a model on this GPU (None: the CPU) of the machine.

        The end of a sentence that begins with the backend's name; empty if nothing is missing.
        """
        return "" if self.needs is None else self.needs.unmet(machine, gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a model wants of attention, as far as it decides who can compute it."""

    dtype: str  # as torch calls it
    head_dim: int | None  # None: no model is known
    page_size: int
    kv_dtype: str  # of the cache
    features: frozenset[str] = frozenset()  # of "sliding window", "chunks", "soft cap", "sinks", "ALiBi"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend(Backend):
    """An implementation of attention. What is empty has no limit."""

    head_dims: tuple[int, ...] = ()
    max_head_dim: int | None = None
    dtypes: tuple[str, ...] = ()
    page_sizes: tuple[int, ...] = ()
    float8_cache: bool = True  # it reads a cache of another dtype than the model's
    lacks: frozenset[str] = frozenset()  # features
    decode_settings: Mapping[str, str] = field(default_factory=dict)  # option -> keyword of make_attend
    uncaptured_with: Mapping[str, str] = field(default_factory=dict)  # option -> why no graph holds it then

    def lacking(self, shape: AttentionShape) -> list[str]:
        """What it does not compute of this shape, each as the end of a sentence that begins with "it"."""
        missing = []
        if shape.head_dim is not None and self.head_dims and shape.head_dim not in self.head_dims:
            missing.append(
                f"takes heads of {_listed(self.head_dims)} dimensions, and this model has {shape.head_dim}"
            )
        if self.max_head_dim is not None and (shape.head_dim or 0) > self.max_head_dim:
            missing.append(
                f"takes heads of up to {self.max_head_dim} dimensions, and this model has {shape.head_dim}"
            )
        if shape.head_dim is not None and self.dtypes and shape.dtype not in self.dtypes:
            missing.append(f"computes in {' or '.join(self.dtypes)}, and this model in {shape.dtype}")
        if self.page_sizes and shape.page_size not in self.page_sizes:
            missing.append(
                f"reads pages of {_listed(self.page_sizes)} tokens, and --page-size is {shape.page_size}"
            )
        if not self.float8_cache and shape.kv_dtype != shape.dtype:
            missing.append(f"reads a cache of the model's dtype only, and this one is in {shape.kv_dtype}")
        missing += [
            f"has no {feature}, which this model has" for feature in sorted(self.lacks & shape.features)
        ]
        return missing


# What FlashInfer's kernels compute, whichever they are.
FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_DTYPES = ("float16", "bfloat16")
TRTLLM_PAGE_SIZES = (16, 32, 64)

# In the order in which they are tried where nobody names one.
ATTENTION: Mapping[str, AttentionBackend] = {
    "triton": AttentionBackend(
        file="with_triton",
        kernels="our own in Triton",
        needs=GpuWith("triton"),
        max_head_dim=256,
        captured=True,
        decode_settings={
            "triton_attention_num_kv_splits": "num_kv_splits",
            "triton_attention_split_tile_size": "split_tile_tokens",
        },
        uncaptured_with={"triton_attention_split_tile_size": "the longest row decides what is launched"},
    ),
    "torch_native": AttentionBackend(file="native", kernels="plain torch"),
    "flashinfer": AttentionBackend(
        file="with_flashinfer",
        kernels="FlashInfer's own choice",
        needs=GpuWith("flashinfer-python"),
        head_dims=FLASHINFER_HEAD_DIMS,
        dtypes=FLASHINFER_DTYPES,
        lacks=frozenset({"sinks", "chunks", "ALiBi"}),
        captured=True,
    ),
    "fa3": AttentionBackend(
        file="with_fa3",
        kernels="FlashAttention 3",
        needs=GpuWith("flashinfer-python", generation=9),
        head_dims=FLASHINFER_HEAD_DIMS,
        dtypes=FLASHINFER_DTYPES,
        float8_cache=False,
        lacks=frozenset({"sinks", "chunks", "ALiBi"}),
        captured=True,
    ),
    "trtllm_mha": AttentionBackend(
        file="with_trtllm",
        kernels="TensorRT-LLM's",
        needs=GpuWith("flashinfer-python", generation=10),
        head_dims=FLASHINFER_HEAD_DIMS,
        dtypes=FLASHINFER_DTYPES,
        page_sizes=TRTLLM_PAGE_SIZES,
        float8_cache=False,
        lacks=frozenset({"soft cap", "chunks", "ALiBi"}),
        captured=True,
    ),
}
SAMPLING: Mapping[str, Backend] = {
    "triton": Backend(
        file="with_triton", kernels="our own in Triton", needs=GpuWith("triton"), captured=True
    ),
    "pytorch": Backend(file="native", kernels="plain torch"),
}
# Operations that users do not choose for: the first backend that runs.
SMALL_OPERATIONS = ("activation", "kv", "norm", "rope")
GPU_OPERATIONS = ("embedding", "moe")  # likewise on a GPU; on a CPU plain torch or C++
SMALL: Mapping[str, Backend] = {name: ATTENTION[name] for name in ("triton", "torch_native")}


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
