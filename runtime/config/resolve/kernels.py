"""The kernel section of the plan: the implementation of each operation, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from ops.backends import (
    ATTENTION,
    GPU_OPERATIONS,
    PREFERRED,
    SAMPLING,
    SMALL,
    SMALL_OPERATIONS,
    AttentionShape,
    Backend,
)
from ops.machine import Gpu, Machine
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import CachePlan, KernelPlan, Plan
from runtime.config.quantization import METHODS, TORCHAO
from runtime.config.resolve.drafts import drafts_by_prefill
from runtime.config.resolve.gpu_weights import experts_on_gpu, kept_on_gpu, products_on_gpu
from runtime.config.resolve.plan_builder import Decision, PlanBuilder

# dtype -> sets of x86 processor flags. For this dtype, oneDNN needs all flags of at least one set. On other processors,
# oneDNN refuses the dtype or is slow.
ONEDNN_NEEDS: Mapping[str, Sequence[frozenset[str]]] = {
    "float32": (frozenset({"avx2", "fma"}),),
    "bfloat16": (frozenset({"avx512bw", "avx512dq", "avx512vl"}), frozenset({"avx_ne_convert"})),
}
CPP_DTYPES = ("float32", "bfloat16")
# Architecture -> processor flags that the C++ kernels need to be faster than torch.
CPP_NEEDS: Mapping[str, frozenset[str]] = {
    "x86_64": frozenset({"avx2", "fma"}),
    "aarch64": frozenset({"asimd"}),
}
MAX_RELOADED_BYTES = 1 << 30  # above this size, kernels do not compile in the background: the weights would load twice
# SGLang's defaults of options that set a value for one backend. These values are accepted with every backend.
ORIGINAL_DEFAULTS: Mapping[str, int] = {"triton_attention_num_kv_splits": 8}
# Operations that torch.compile fuses better than hand-written kernels do.
FUSED = ("activation", "norm", "rope")


def kernel_plan(
    builder: PlanBuilder, machine: Machine, gpu: Gpu | None, dtype: str, facts: ModelFacts, cache: CachePlan
) -> KernelPlan:
    """Plan the kernels. `gpu` is None on a CPU, and `dtype` is the model's dtype."""
    attention, decode, prefill = _attention(builder, machine, gpu, _shape(dtype, facts, cache))
    sampling = _chosen(builder, "sampling_backend", SAMPLING, _unmet(SAMPLING, machine, gpu))
    choices, reasons = _small_operations(builder, machine, gpu, dtype, facts)
    choices |= {
        "attention": ATTENTION[decode.value].file,
        "prefill_attention": ATTENTION[prefill.value].file,
        "sampling": SAMPLING[sampling.value].file,
    }
    if drafts_by_prefill(builder, gpu, decode.value, prefill.value):
        choices["draft_attention"] = choices["prefill_attention"]
    compiled = builder.args.graphs.enable_torch_compile
    if gpu is None:
        by_products, reason = _attends_by_products(builder, machine, dtype)
        if by_products:  # `with_onednn` calls plain torch for rows of several tokens
            choices |= dict.fromkeys(("attention", "prefill_attention"), "with_onednn")
        reasons.append(reason)
    quant = builder.args.quant
    asked = quant.quantization or TORCHAO.get(quant.torchao_config)
    quantized = METHODS.get(asked or "")
    kept = gpu is not None and choices["kv"] == "with_triton" and not compiled and kept_on_gpu(asked, facts)
    products = products_on_gpu(builder, machine, gpu, dtype, facts, kept=kept)
    if kept:
        choices["matmul"], reason = products
    elif quantized is not None and quantized.matmul is not None:
        choices["matmul"] = quantized.matmul
        reason = f"{asked} needs it; torch dequantises weights for every product"
    else:
        choices["matmul"], reason = _matmul(machine, gpu, dtype, compiled=compiled)
    reasons.append(reason)
    fallback: Mapping[str, str] | None = None
    if gpu is None and not compiled:
        in_cpp, reason = _in_cpp(builder, machine, dtype, by_transformers=facts.by_transformers)
        if in_cpp:
            fallback, choices, reasons = choices, choices | in_cpp, []
        reasons.append(reason)
    return builder.build(
        KernelPlan,
        choices=Decision(choices, "; ".join(reasons)),
        fallback=Decision(fallback, "for the case that the C++ kernels do not compile"),
        settings=_settings(builder, decode.value),
        attention_backend=attention,
        prefill_attention_backend=prefill,
        decode_attention_backend=decode,
        sampling_backend=sampling,
        raw_logprobs=builder.follow("logprobs_mode", builder.args.sampling.logprobs_mode == "raw_logprobs"),
        dump_folder=_dump_folder(builder),
        dump_layers=_dump_layers(builder, facts),
    )


def compiled_in_background(builder: PlanBuilder, machine: Machine, facts: ModelFacts, plan: Plan) -> KernelPlan:
    """Return the plan's kernel section, which says whether requests are accepted while the C++ kernels compile."""
    reason = _must_wait(builder, machine, facts, plan)
    kernels = plan.kernels
    reasons = {**kernels.reasons, "in_background": reason or "torch answers first requests at once"}
    return replace(kernels, in_background=not reason, reasons=reasons)


def _must_wait(builder: PlanBuilder, machine: Machine, facts: ModelFacts, plan: Plan) -> str:
    """Return the reason to compile the C++ kernels before the first request, or "" if they may compile later."""
    args, parallel, cache = builder.args, plan.parallel, plan.cache
    if plan.kernels.fallback is None:
        return "C++ kernels do not compute this model"
    if machine.prebuilt:
        return "the package has compiled kernels"
    if args.kernels.wait_for_kernels:
        return "as asked"
    if not 0 < facts.weight_bytes <= MAX_RELOADED_BYTES:
        return f"the weights are loaded once more, which is done up to {MAX_RELOADED_BYTES >> 20} MiB"
    once = {  # features that keep state in the executor; after compilation, a new executor would lack this state
        "several ranks or replicas": parallel.ranks * parallel.copies > 1,
        "adapters": plan.lora.enabled,
        "a draft model": plan.draft.algorithm is not None,
        "deterministic answers": plan.model.deterministic,
        "media": plan.media.enabled or plan.media.transcription_model is not None,
        "records of experts": plan.experts.records,
        "host memory for pages": cache.host_tier or cache.swap_space_gib > 0 or cache.storage is not None,
        "a role in disaggregation": cache.role != "null",
        "dumps of tensors": plan.kernels.dump_folder is not None,
        "a record of the schedule": plan.scheduler.record_file is not None,
        "transformers' modules": plan.model.by_transformers,
        "weights of a running server or random weights": plan.model.load_format in ("dummy", "remote_instance"),
        "a checkpoint that is deleted": plan.model.delete_after_loading,
    }
    return next(
        (f"{feature}: kernels cannot change while the engine runs" for feature, used in once.items() if used), ""
    )


def _dump_folder(builder: PlanBuilder) -> Decision[str | None]:
    option = "debug_tensor_dump_output_folder"
    parallel = builder.args.parallel
    problems = {
        "--dp-size": parallel.dp_size > 1,
        "--pp-size": parallel.pp_size > 1,
        "--enable-two-batch-overlap": parallel.enable_two_batch_overlap,
        "--enable-torch-compile": builder.args.graphs.enable_torch_compile,
    }
    used = [flag for flag, is_set in problems.items() if is_set]
    if builder.args.debug.debug_tensor_dump_output_folder is not None and used:
        builder.refuse(
            option,
            f"--debug-tensor-dump-output-folder writes the layers of one rank, operation by operation; leave "
            f"{' and '.join(used)} out.",
        )
    return builder.follow(option)


def _dump_layers(builder: PlanBuilder, facts: ModelFacts) -> Decision[tuple[int, ...] | None]:
    option, debug = "debug_tensor_dump_layers", builder.args.debug
    asked = debug.debug_tensor_dump_layers
    if asked is not None and debug.debug_tensor_dump_output_folder is None:
        builder.refuse(option, "--debug-tensor-dump-layers needs --debug-tensor-dump-output-folder.")
    if asked is not None and facts.architecture and max(asked, default=0) >= facts.num_layers:
        builder.refuse(option, f"--debug-tensor-dump-layers {max(asked)}: the model has {facts.num_layers} layers.")
    return builder.follow(option)


def _shape(dtype: str, facts: ModelFacts, cache: CachePlan) -> AttentionShape:
    config = facts.config
    features = {
        "sliding window": config.get("sliding_window") and config.get("use_sliding_window", True),
        "chunks": config.get("text_config", config).get("attention_chunk_size"),
        "soft cap": config.get("attn_logit_softcapping"),
        "sinks": facts.has_sinks,
        "ALiBi": facts.alibi,
    }
    return AttentionShape(
        dtype=dtype,
        head_dim=facts.head_dim if facts.architecture else None,
        latent_dims=facts.latent_dims,
        page_size=cache.page_size,
        kv_dtype=cache.kv_dtype,
        features=frozenset(name for name, present in features.items() if present),
    )


def _attention(
    builder: PlanBuilder, machine: Machine, gpu: Gpu | None, shape: AttentionShape
) -> tuple[Decision[str], Decision[str], Decision[str]]:
    """Return the attention backends (general, for decode, for prefill)."""
    unusable = {name: ", and it ".join(backend.lacking(shape)) for name, backend in ATTENTION.items()}
    unusable |= _unmet(ATTENTION, machine, gpu)
    attention = _chosen(builder, "attention_backend", ATTENTION, unusable)
    if builder.args.kernels.attention_backend is None and gpu is not None:
        attention = _preferred(builder, machine, gpu, unusable, attention)
    decode, prefill = (
        _chosen(builder, f"{rows}_attention_backend", ATTENTION, unusable, otherwise=attention.value)
        for rows in ("decode", "prefill")
    )
    for name, backend in ATTENTION.items():
        for option in backend.decode_settings:
            is_original = builder.args.get(option) == ORIGINAL_DEFAULTS.get(option)
            if builder.args.changed(option) and not is_original and decode.value != name:
                flag = "--" + option.replace("_", "-")
                builder.refuse(option, f"{flag} has an effect with {name} only, and decode uses {decode.value}.")
    return attention, decode, prefill


def _preferred(
    builder: PlanBuilder, machine: Machine, gpu: Gpu, unusable: Mapping[str, str], otherwise: Decision[str]
) -> Decision[str]:
    """Return the first `PREFERRED` backend that is a default on this GPU and usable.

    If there is none, return `otherwise` with a reason that also says why no preferred backend is used.
    """
    against = []
    for name in PREFERRED:
        reason = ATTENTION[name].not_default(machine, gpu)
        if reason is None:
            continue
        reason = reason or unusable.get(name) or _against(builder, name, otherwise.value)
        if not reason:
            return Decision(name, f"FlashInfer's compiled kernels are installed, which suit {gpu.name}")
        against.append(f"{name} {reason}")
    return Decision(otherwise.value, "; ".join((otherwise.reason, *against)))


def _against(builder: PlanBuilder, name: str, otherwise: str) -> str:
    """Return why the given options exclude this backend as the default, or "" if they do not."""
    if builder.args.speculative.speculative_algorithm is not None and ATTENTION[name].exact_starts:
        return "needs the exact lengths of rows on the host, so steps with drafts would not overlap"
    settings = ATTENTION[otherwise].decode_settings
    asked = next((option for option in settings if builder.args.changed(option)), None)
    return "" if asked is None else f"does not have --{asked.replace('_', '-')}"


def _unmet(backends: Mapping[str, Backend], machine: Machine, gpu: Gpu | None) -> dict[str, str]:
    """Map each backend that this machine cannot run to its missing requirement."""
    reasons = {name: backend.unmet(machine, gpu) for name, backend in backends.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _chosen(
    builder: PlanBuilder,
    option: str,
    backends: Mapping[str, Backend],
    unusable: Mapping[str, str],
    *,
    otherwise: str | None = None,
) -> Decision[str]:
    """Return the backend's name: the requested one, else `otherwise`, else the first usable one."""
    asked = builder.args.get(option)
    first = next(name for name in backends if not unusable.get(name))
    if asked in backends:
        if not (reason := unusable.get(asked)):
            return Decision(asked, "as asked")
        flag = "--" + option.replace("_", "-")
        builder.refuse(option, f"{flag} {asked} cannot be used: it {reason}; use {first}.")
        return Decision(first, "the requested value cannot be used")
    if otherwise is not None:
        return Decision(otherwise, "the value of --attention-backend")
    before = takewhile(lambda name: name != first, backends)
    reason = "; ".join(f"{name} {unusable[name]}" for name in before)
    return Decision(first, reason or "the first choice, and this machine runs it")


def _small_operations(
    builder: PlanBuilder, machine: Machine, gpu: Gpu | None, dtype: str, facts: ModelFacts
) -> tuple[dict[str, str], list[str]]:
    """Return (operation -> file, reasons) for the operations that have no option of their own."""
    unmet = _unmet(SMALL, machine, gpu)
    file = next(backend.file for name, backend in SMALL.items() if name not in unmet)
    choices: dict[str, str] = dict.fromkeys((*SMALL_OPERATIONS, *GPU_OPERATIONS), file)
    reasons = ["attention and sampling: see their options; small operations: the first backend that runs here"]
    reasons += [f"{name} {reason}" for name, reason in unmet.items()]
    choices["moe"] = experts_on_gpu(builder, machine, gpu, dtype, facts, choices["moe"])
    if builder.args.lora.lora_backend == "torch_native":
        choices["low_rank"] = "native"
    if builder.args.graphs.enable_torch_compile:
        choices |= dict.fromkeys(FUSED, "native")
        reasons.append(f"{', '.join(FUSED)}: plain torch, which torch.compile fuses")
    return choices, reasons


def _settings(builder: PlanBuilder, decode: str) -> Decision[Mapping[str, Mapping[str, Any]]]:
    backend = ATTENTION[decode]
    own = {keyword: builder.args.get(option) for option, keyword in backend.decode_settings.items()}
    cpp = {"num_threads": builder.args.kernels.cpu_threads}
    rounds = {"rounds": builder.args.moe.flashinfer_mxfp4_moe_precision == "default"}
    settings = {"with_cpp": cpp, "with_trtllm_gen": rounds} | ({backend.file: own} if own else {})
    return Decision(settings, "by the options of each backend")


def no_cpp(machine: Machine) -> str:
    """Return the reason why this machine cannot use the C++ kernels, or "" if it can."""
    if not machine.has_cpp:
        return "there are no compiled C++ kernels, and no C++ compiler; a step would be faster with one"
    needs = CPP_NEEDS.get(machine.processor)
    if needs is None:
        return f"the C++ kernels are not tested on {machine.processor}"
    if not machine.cpu_flags >= needs:
        return f"the C++ kernels are slow on a processor without {'+'.join(sorted(needs))}"
    return ""


def _in_cpp(builder: PlanBuilder, machine: Machine, dtype: str, *, by_transformers: bool) -> tuple[dict[str, str], str]:
    """Return (operation -> file for operations that a CPU computes in C++, reason). The mapping may be empty."""
    if reason := no_cpp(machine):
        return {}, reason
    if dtype not in CPP_DTYPES:
        return {}, f"the C++ kernels do not support {dtype}"
    names = (*SMALL_OPERATIONS, "embedding", "latent", "matmul", "moe", "recurrence")
    operations: dict[str, str] = dict.fromkeys(names, "with_cpp")
    if builder.args.lora.lora_backend == "torch_native":
        del operations["low_rank"]
    if builder.args.sampling.sampling_backend is None:
        operations["sampling"] = "with_cpp"
    if any(name.endswith("attention_backend") for name in builder.args.explicitly_set):
        return operations, "C++ kernels compiled for this processor, except for attention, whose backend is set"
    for rows in ("attention", "prefill_attention", "encoder_attention"):
        operations[rows] = "with_cpp"
    if by_transformers:
        return operations, (
            "C++ kernels compiled for this processor, for attention and sampling; transformers' modules call torch for "
            "all other operations"
        )
    return operations, "C++ kernels compiled for this processor, which compute a whole step in one call"


def _attends_by_products(builder: PlanBuilder, machine: Machine, dtype: str) -> tuple[bool, str]:
    """Return (whether attention on a CPU uses batched products, reason)."""
    if any(name.endswith("attention_backend") for name in builder.args.explicitly_set):
        return False, "attention: plain torch, as asked"
    if dtype != "bfloat16" or "amx_bf16" in machine.cpu_flags:
        return False, "attention: plain torch, the fastest implementation here"
    if not _packs(machine, dtype):
        return False, "attention: plain torch, because this processor has no bfloat16 products"
    return True, "decode attention: batched products, which are faster than plain torch on a processor without AMX"


def _matmul(machine: Machine, gpu: Gpu | None, dtype: str, *, compiled: bool) -> tuple[str, str]:
    """Return (file that multiplies activations with weights, reason)."""
    if gpu is not None:
        return "native", "matrix products: plain torch on a GPU"
    if compiled:
        return "native", "matrix products: plain torch, which torch.compile can optimise"
    needed = ONEDNN_NEEDS.get(dtype)
    if needed is None:
        return "native", f"matrix products: plain torch, because oneDNN does not pack weights in {dtype}"
    if not _packs(machine, dtype):
        return "native", f"matrix products: plain torch, because this processor lacks {_any_of(needed)}"
    return "with_onednn", "matrix products: oneDNN, with weights packed once at load time"


def _packs(machine: Machine, dtype: str) -> bool:
    return any(flags <= machine.cpu_flags for flags in ONEDNN_NEEDS[dtype])


def _any_of(needed: Sequence[frozenset[str]]) -> str:
    return " or ".join("+".join(sorted(flags)) for flags in needed)
