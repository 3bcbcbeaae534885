"""Selects the implementation of each operation once, at start, for all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ops.attention import Attend
from ops.attention.hybrid import hybrid
from ops.backends import ATTENTION, SAMPLING
from ops.cpp.library import KernelDescription
from ops.machine import Machine
from ops.moe import Mixture
from ops.rope.composed import compose
from ops.sampling import Scores

if TYPE_CHECKING:
    from ops.cpp.build import Lifeline
    from ops.cpp.kernel_launcher import KernelLauncher

PREFILL = "prefill_attention"  # key in `choices` for the attention backend of rows with several tokens
DRAFTS = "draft_attention"  # key in `choices`; if it exists, the prefill backend also computes rows with draft tokens

# operation -> (fields of `Kernels` that a backend file provides, names of the backend files)
OPERATIONS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "activation": (("gate", "gate_round", "activate", "modulate"), ("native", "with_cpp", "with_triton")),
    "attention": (
        ("attend",),
        ("with_cpp", "with_onednn", *(backend.file for backend in ATTENTION.values())),
    ),
    "embedding": (
        ("embed", "embed_with_positions", "reads", "as_logits"),
        ("native", "with_cpp", "with_triton"),
    ),
    "encoder_attention": (("attend_bidirectional",), ("native", "with_cpp")),
    "kv": (("store", "copy_pages"), ("native", "with_cpp", "with_triton")),
    "latent": (("prepare_heads", "join", "attend_latent"), ("native", "with_cpp")),
    "low_rank": (("add_low_rank",), ("native", "with_cpp", "with_triton")),
    "matmul": (
        ("prepare", "prepare_grouped", "linear", "logits", "row_group"),
        ("native", "int8", "with_cpp", "with_deepgemm", "with_fp4", "with_groupwise", "with_onednn", "with_triton"),
    ),
    "moe": (
        ("route", "mix", "prepare_experts", "prepare_grouped_experts", "one_expert"),
        ("native", "with_cpp", "with_flashinfer", "with_triton", "with_trtllm_gen"),
    ),
    "norm": (
        ("rms_norm", "add_rms_norm", "add_rms_norm_round", "layer_norm", "add_layer_norm", "add"),
        ("native", "with_cpp", "with_triton"),
    ),
    "recurrence": (("convolve", "delta_rule", "scan"), ("native", "with_cpp", "with_triton")),
    "rope": (
        ("rotate", "angles", "norm_rotate", "rotate_store", "rotate_store_latent"),
        ("native", "with_cpp", "with_triton"),
    ),
    "sampling": (
        ("choose", "penalize", "score"),
        ("with_cpp", *(backend.file for backend in SAMPLING.values())),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The selected callables, each documented by the package of its operation (`attend` by `ops.attention`)."""

    attend: Attend
    attend_bidirectional: Callable[..., Tensor]
    store: Callable[..., None]
    copy_pages: Callable[..., None]
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    add_rms_norm_round: Callable[..., tuple[Tensor, Tensor]]
    layer_norm: Callable[..., Tensor]
    add_layer_norm: Callable[..., tuple[Tensor, Tensor]]
    add: Callable[..., Tensor]
    angles: Callable[..., Tensor]
    rotate: Callable[..., tuple[Tensor, Tensor]]
    norm_rotate: Callable[..., tuple[Tensor, Tensor]]
    rotate_store: Callable[..., Tensor]
    rotate_store_latent: Callable[..., Tensor]
    gate: Callable[..., Tensor]
    gate_round: Callable[..., Tensor]
    activate: Callable[..., Tensor]
    modulate: Callable[..., Tensor]
    embed: Callable[..., Tensor]
    embed_with_positions: Callable[..., Tensor]
    reads: Callable[[Tensor], bool]
    as_logits: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    mix: Callable[..., Tensor]
    prepare_experts: Callable[..., Mixture]
    prepare_grouped_experts: Callable[..., Mixture]
    one_expert: Callable[..., Mixture]
    prepare_heads: Callable[[Tensor], Tensor]
    join: Callable[[Tensor, Tensor], Tensor]
    attend_latent: Callable[..., Tensor]
    convolve: Callable[..., Tensor]
    delta_rule: Callable[..., Tensor]
    scan: Callable[..., Tensor]
    prepare: Callable[..., Tensor]
    prepare_grouped: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    logits: Callable[[Tensor, Tensor], Tensor]
    row_group: Callable[[Tensor], int | None]
    add_low_rank: Callable[..., Tensor]
    choose: Callable[..., tuple[Tensor, Tensor]]
    penalize: Callable[..., None]
    score: Callable[..., Scores]
    backends: Mapping[str, str]  # operation or "prefill_attention" -> selected backend file
    launcher: KernelLauncher | None = None  # runs the C++ kernels; None if no operation uses them

    @property
    def description(self) -> KernelDescription:
        """Return the description of the C++ kernels if any operation uses them, otherwise of torch's CPU kernels."""
        if self.launcher is not None:
            return self.launcher.description
        return KernelDescription(
            kernels="torch",
            library=f"torch {torch.__version__}",
            num_threads=torch.get_num_threads(),
            instruction_set=torch.backends.cpu.get_cpu_capability().lower(),
            matrix_unit=None,
        )


def select(
    choices: Mapping[str, str] | None = None, settings: Mapping[str, Mapping[str, Any]] | None = None
) -> Kernels:
    """Return the kernels for `choices`, which maps operations to backend files: {"attention": "with_triton"}.

    The default of each operation is "native". If `choices` has "prefill_attention", this attention backend computes the
    rows with several tokens. It also computes rows with draft tokens if `choices` has "draft_attention".
    `settings` maps backend files to keyword arguments of the backend. Raises ValueError for an unknown operation or
    backend, and `ops.cpp.build.BuildError` if the C++ kernels cannot be compiled.
    """
    choices, settings = dict(choices or {}), dict(settings or {})
    cpp, launcher = settings.pop("with_cpp", {}), None
    if "with_cpp" in choices.values():
        launcher = _launcher(**cpp)
        settings["with_cpp"] = {"launcher": launcher}
    prefill, drafts = choices.pop(PREFILL, None), choices.pop(DRAFTS, None)
    for operation in choices:
        if operation not in OPERATIONS:
            raise ValueError(f"Unknown operation '{operation}'. Operations: {', '.join(sorted(OPERATIONS))}.")
    callables: dict[str, Any] = {}
    backends = {operation: choices.get(operation, "native") for operation in OPERATIONS}
    for operation, (fields, _) in OPERATIONS.items():
        file = backends[operation]
        module = _backend(operation, file)
        if operation == "attention":
            continue
        if file == "with_cpp":
            callables.update(module.make(launcher))
        elif file == "with_trtllm_gen":
            callables.update(module.make(**settings.get(file, {})))
        else:
            callables.update({field: getattr(module, field) for field in fields})
    if len({backends[operation] for operation in ("kv", "norm", "rope")}) > 1:
        callables |= compose(*(callables[field] for field in ("rms_norm", "rotate", "store", "join")))
    callables["attend"] = _attention(backends["attention"], prefill, settings, drafts_by_prefill=drafts is not None)
    backends[PREFILL] = prefill or backends["attention"]
    return Kernels(**callables, backends=backends, launcher=launcher)


def _launcher(
    num_threads: int | None = None, compiler: str | None = None, lifeline: Lifeline | None = None
) -> KernelLauncher:
    """Return a launcher of the C++ kernels. By default it has as many threads as torch.

    The kernels are the package's precompiled ones for this processor. If there are none, or if `compiler` is set, the
    kernels are compiled. Raises `BuildError` if this fails.
    """
    from ops.cpp.build import BuildError
    from ops.cpp.kernel_launcher import KernelLauncher
    from ops.cpp.library import load, load_prebuilt

    machine = Machine.probe()
    library = load_prebuilt(machine.processor, machine.cpu_flags) if compiler is None else None
    if library is None:
        compiler = compiler or machine.compiler
        if compiler is None:
            raise BuildError("No C++ compiler is installed.")
        library = load(compiler, machine.cpu_flags, lifeline=lifeline)
    return KernelLauncher(library, num_threads or torch.get_num_threads())


def must_compile(compiler: str | None = None) -> bool:
    """Return whether `select` would have to compile C++ kernels, which takes seconds.

    `compiler` is the value of `select`'s setting `compiler` of "with_cpp".
    """
    from ops.cpp import prebuilt
    from ops.cpp.build import BuildError, is_whole, library_path

    machine = Machine.probe()
    if compiler is None and prebuilt.find(machine.processor, machine.cpu_flags) is not None:
        return False
    compiler = compiler or machine.compiler
    try:
        return compiler is not None and not is_whole(library_path(compiler, machine.cpu_flags))
    except (BuildError, RuntimeError, OSError):  # `select` reports these errors
        return False


def _attention(
    decode: str, prefill: str | None, settings: Mapping[str, Mapping[str, Any]], *, drafts_by_prefill: bool
) -> Attend:
    def make(file: str) -> Attend:
        return _backend("attention", file).make_attend(**settings.get(file, {}))

    if prefill is None or prefill == decode:
        return make(decode)
    return hybrid(make(decode), make(prefill), drafts_by_prefill=drafts_by_prefill)


def _backend(operation: str, file: str) -> ModuleType:
    backends = OPERATIONS[operation][1]
    if file not in backends:
        raise ValueError(f"'{operation}' has no backend '{file}'. Backends: {', '.join(backends)}.")
    return import_module(f"ops.{operation}.{file}")
