"""The model's section of the plan: device, precision, context length."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from ops.machine import GIB, Gpu, Machine
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.config.quantization import METHODS, TORCHAO, UNREADABLE, WRITERS, agrees
from runtime.config.resolve.plan_builder import Decision, PlanBuilder, build

DTYPES = {"half": "float16", "float": "float32"} | {name: name for name in ("float16", "bfloat16", "float32")}
MAX_TABLE_SHARE = 0.1  # of the memory, for the angles of all positions
REFUSED = Decision("cpu", "what was asked for cannot be used")
_OTHER_DEVICES = {
    "xpu": "an Intel GPU",
    "hpu": "an Intel Gaudi accelerator",
    "npu": "an Ascend accelerator",
    "mps": "an Apple GPU",
    "hip": "an AMD GPU",
    "rocm": "an AMD GPU",
}


def model_plan(builder: PlanBuilder, machine: Machine, facts: ModelFacts) -> ModelPlan:
    """The device is decided here, before all other sections."""
    args = builder.args.model
    device = _device(builder, machine)
    return build(
        ModelPlan,
        path=Decision(
            facts.path, "as asked" if args.model_path else "no model was asked for: the demo model"
        ),
        load_format=_load_format(builder, facts),
        dtype=_dtype(builder, chosen_gpu(device.value, machine), facts),
        device=device,
        context_length=_context_length(builder, facts, _device_bytes(device.value, machine)),
        random_seed=_random_seed(builder),
        is_embedding=_is_embedding(builder, facts),
        by_transformers=_by_transformers(builder, facts),
        mmap=builder.follow("weight_loader_disable_mmap", not args.weight_loader_disable_mmap),
        num_load_threads=_num_load_threads(builder),
        shard_pattern=_shard_pattern(builder),
        custom_loaders=builder.follow("custom_weight_loader", tuple(args.custom_weight_loader or ())),
        any_dtype=Decision(
            args.dtype != "auto", "dtype was given" if args.dtype != "auto" else "dtype is auto"
        ),
        delete_after_loading=_delete_after_loading(builder),
        state_dtype=builder.follow("mamba_ssm_dtype"),
        always_absorbed=builder.follow("flashinfer_mla_disable_ragged"),
        quantization=_quantization(builder, chosen_gpu(device.value, machine), facts),
        kv_scales=_kv_scales(builder, facts),
    )


def _load_format(builder: PlanBuilder, facts: ModelFacts) -> Decision[str]:
    asked, model = builder.args.model.load_format, builder.args.model
    if facts.by_transformers and (asked in ("npcache", "sharded_state") or model.custom_weight_loader):
        option = "custom_weight_loader" if model.custom_weight_loader else "load_format"
        builder.refuse(
            option, f"{facts.architecture} is computed by transformers' modules, which read its files alone."
        )
    if model.custom_weight_loader and asked not in ("auto", "layered"):
        builder.refuse(
            "custom_weight_loader", f"--custom-weight-loader and --load-format {asked}: give one of them."
        )
    if asked == "sharded_state" and (facts.quantization is not None):
        builder.refuse("load_format", f"--load-format sharded_state: the checkpoint is {facts.quantization}.")
    usual = {
        "layered": "layers are read and prepared one after the other",
        "remote": "the copy of what the URL names",
    }
    return Decision("auto", usual[asked]) if asked in usual else builder.follow("load_format")


def _delete_after_loading(builder: PlanBuilder) -> Decision[bool]:
    model, parallel, option = builder.args.model, builder.args.parallel, "delete_ckpt_after_loading"
    if not model.delete_ckpt_after_loading:
        return builder.follow(option)
    name = "--delete-ckpt-after-loading"
    if model.model_path is None or not Path(model.model_path).exists():
        builder.refuse(
            option, f"{name} deletes what --model-path names, which must be a folder or file here."
        )
    elif parallel.dp_size > 1 or parallel.nnodes > 1:
        builder.refuse(
            option, f"{name} needs --dp-size 1 and --nnodes 1: a copy that is started again reads it again."
        )
    elif model.load_format == "dummy":
        builder.refuse(option, f"{name} and --load-format dummy: no weights are loaded.")
    return Decision(True, "as asked")


def _is_embedding(builder: PlanBuilder, facts: ModelFacts) -> Decision[bool]:
    if facts.is_encoder:
        return Decision(True, f"an encoder writes no text; its vectors are {facts.pooling}")
    if facts.pooling is not None:
        return Decision(True, f"the checkpoint's modules.json says so; its vectors are {facts.pooling}")
    return builder.follow("is_embedding")


def _by_transformers(builder: PlanBuilder, facts: ModelFacts) -> Decision[bool]:
    """Which code computes the model; refused is what only families of ours can do."""
    if not facts.by_transformers:
        return Decision(False, "there is a family of ours")
    parallel, why = builder.args.parallel, f"{facts.architecture} is computed by transformers' modules"
    for option, size in (("tp_size", parallel.tp_size), ("pp_size", parallel.pp_size)):
        if size > 1:
            builder.refuse(option, f"--{option.replace('_', '-')} {size}: {why}, on one device only.")
    quant = builder.args.quant
    if quant.quantization is not None or quant.torchao_config or facts.quantization is not None:
        builder.refuse("quantization", f"{why}, which take no quantized weights here; use a full checkpoint.")
    asked = builder.args.model.model_impl == "transformers"
    return Decision(True, "as asked" if asked else "there is no family of ours")


def chosen_gpu(device: str, machine: Machine) -> Gpu | None:
    if not device.startswith("cuda"):
        return None
    return machine.gpus[int(device.partition(":")[2] or 0)]


def _device(builder: PlanBuilder, machine: Machine) -> Decision[str]:
    asked, first = builder.args.model.device, builder.args.parallel.base_gpu_id
    if first and asked is not None and ":" in asked:
        builder.refuse("base_gpu_id", f"--base-gpu-id {first} and --device {asked}: give one of them.")
    elif first and asked in (None, "cuda") and not _no_cuda(machine):
        if reason := _no_such_gpu(machine, first):
            builder.refuse("base_gpu_id", f"--base-gpu-id {first} cannot be used: {reason}.")
            return REFUSED
        return Decision(f"cuda:{first}", "the first GPU that --base-gpu-id allows")
    if asked is None:
        return _best_device(builder, machine)
    known = re.fullmatch(r"cpu|cuda(?::(\d+))?", asked)
    if known is None:
        kind = asked.partition(":")[0]
        needs = f" (and needs {_OTHER_DEVICES[kind]})" if kind in _OTHER_DEVICES else ""
        builder.refuse("device", f"--device {asked} is not supported yet{needs}; use cpu, cuda or cuda:N.")
        return REFUSED
    if asked != "cpu":
        reason = _no_cuda(machine) or _no_such_gpu(machine, int(known[1] or 0))
        if reason:
            builder.refuse("device", f"--device {asked} cannot be used: {reason}.")
            return REFUSED
    return Decision(asked, "as asked")


def _best_device(builder: PlanBuilder, machine: Machine) -> Decision[str]:
    if reason := _no_cuda(machine):
        return Decision("cpu", reason)
    return Decision("cuda", f"there is a GPU: {machine.gpus[0].name}")


def _no_cuda(machine: Machine) -> str:
    """Why CUDA cannot be used here; empty if it can."""
    if not machine.gpus:
        return "this machine has no NVIDIA GPU"
    if machine.torch_cuda is None:
        return f"the installed torch ({machine.packages.get('torch', 'unknown')}) is built without CUDA"
    return ""


def _no_such_gpu(machine: Machine, index: int) -> str:
    if index < len(machine.gpus):
        return ""
    return f"the GPUs here are numbered 0 to {len(machine.gpus) - 1}"


def _dtype(builder: PlanBuilder, gpu: Gpu | None, facts: ModelFacts) -> Decision[str]:
    asked = builder.args.model.dtype
    if gpu is not None and gpu.capability < (7, 5):
        builder.refuse(
            "device", f"{gpu.name} is too old: compute capability 7.5 is needed; use --device cpu."
        )
    if asked != "auto":
        dtype = DTYPES[asked]
        if dtype == "bfloat16" and gpu is not None and gpu.capability < (8, 0):
            builder.refuse("dtype", f"--dtype {asked} is not possible on {gpu.name}; use float16.")
        return Decision(dtype, "as asked")
    if facts.dtype not in DTYPES.values():
        builder.refuse(
            "dtype", f"Checkpoints in {facts.dtype} are not supported yet; set --dtype to convert it."
        )
        return Decision("float32", "what was asked for cannot be used")
    return _auto_dtype(gpu, facts.dtype, facts.quantization)


def _auto_dtype(gpu: Gpu | None, checkpoint: str, quantization: str | None) -> Decision[str]:
    if gpu is None and quantization is not None and checkpoint == "float16":
        return Decision(
            "bfloat16", "its weights are rounded anyway, and a CPU is many times faster in bfloat16"
        )
    if gpu is None:
        exact = "; a CPU computes it as exactly" if checkpoint == "float32" else ""
        return Decision(checkpoint, f"the checkpoint's{exact}")
    if gpu.capability < (8, 0) and checkpoint != "float16":
        return Decision("float16", f"{gpu.name} has no bfloat16")
    if checkpoint == "float32":
        return Decision("bfloat16", "the checkpoint is float32, and a GPU is many times faster in bfloat16")
    return Decision(checkpoint, "the checkpoint's")


def _device_bytes(device: str, machine: Machine) -> int:
    """Of the memory that the model is to lie in."""
    gpu = chosen_gpu(device, machine)
    return machine.total_bytes if gpu is None else gpu.memory_bytes


def _context_length(builder: PlanBuilder, facts: ModelFacts, memory_bytes: int) -> Decision[int]:
    asked = builder.args.model.context_length
    context = facts.context_length if asked is None else min(asked, facts.context_length)
    table_bytes = context * facts.head_dim * 4  # of rotary angles, in float32
    if facts.path and memory_bytes and table_bytes > MAX_TABLE_SHARE * memory_bytes:
        builder.refuse(
            "context_length",
            f"The model's context of {context} tokens needs a table of {table_bytes / GIB:.1f} GiB for positions "
            f"alone, and there are {memory_bytes / GIB:.1f} GiB of memory; set a smaller --context-length.",
        )
    if asked is None:
        return Decision(facts.context_length, "as the model's configuration says")
    if asked > facts.context_length:
        builder.refuse(
            "context_length",
            f"--context-length {asked} is longer than the {facts.context_length} tokens that the model was "
            f"made for; use at most {facts.context_length}, or say that it was made for more: "
            f"--json-model-override-args '{{\"max_position_embeddings\": {asked}}}'.",
        )
    return Decision(min(asked, facts.context_length), "as asked")


def _quantization(builder: PlanBuilder, gpu: Gpu | None, facts: ModelFacts) -> Decision[str | None]:
    """How weights are rounded when they are loaded; refused where the checkpoint holds something else."""
    asked, stored = builder.args.quant.quantization, facts.quantization
    if builder.args.quant.torchao_config:
        return _torchao(builder, gpu, stored)
    if asked is not None and asked in UNREADABLE:
        builder.refuse("quantization", f"--quantization {asked} is not possible: {UNREADABLE[asked]}.")
        return Decision(None, "what was asked for cannot be used")
    method = METHODS.get(asked or "")
    if method is not None and gpu is not None and method.on_gpu is None:
        builder.refuse(
            "quantization", f"--quantization {asked} is computed on a CPU only so far; set --device cpu."
        )
    if asked is not None and method is None and facts.architecture:
        if stored is None:
            builder.refuse(
                "quantization",
                f"--quantization {asked}: the checkpoint is not quantized; use {' or '.join(METHODS)}, which round "
                f"its weights when they are loaded, or a checkpoint in that form{WRITERS.get(asked, '')}.",
            )
        elif not agrees(asked, stored):
            builder.refuse(
                "quantization",
                f"--quantization {asked}: the checkpoint's form is {stored}; leave the option out.",
            )
    if stored is not None and method is None:
        return Decision(
            None, f"the checkpoint's {stored} weights: kept where kernels take them, or else dequantised"
        )
    return Decision(asked if method is not None else None, builder.follow("quantization").reason)


def _torchao(builder: PlanBuilder, gpu: Gpu | None, stored: str | None) -> Decision[str | None]:
    """The method that `--torchao-config` asks for."""
    asked, option = builder.args.quant.torchao_config, "torchao_config"
    if asked.startswith("fp8dq"):
        builder.refuse(
            option,
            f"--torchao-config {asked} needs a GPU that multiplies float8, for which there are no kernels here yet; "
            "use fp8wo, or int8dq on a CPU.",
        )
    elif asked not in TORCHAO:
        builder.refuse(option, f"--torchao-config {asked} is unknown; use {', '.join(TORCHAO)}.")
    elif builder.args.quant.quantization is not None or stored is not None:
        what = builder.args.quant.quantization or f"the checkpoint's {stored}"
        builder.refuse(
            option, f"--torchao-config {asked} and {what} cannot be combined; leave one of them out."
        )
    elif gpu is not None and TORCHAO[asked] in METHODS:
        builder.refuse(
            option, f"--torchao-config {asked} is computed on a CPU only so far; set --device cpu."
        )
    else:
        return Decision(TORCHAO[asked], f"--torchao-config {asked}")
    return Decision(None, "what was asked for cannot be used")


def _kv_scales(builder: PlanBuilder, facts: ModelFacts) -> Decision[str | None]:
    option, dtype = "quantization_param_path", builder.args.cache.kv_cache_dtype
    if builder.args.quant.quantization_param_path is not None:
        if dtype != "fp8_e4m3":
            builder.refuse(
                option, f"--quantization-param-path needs --kv-cache-dtype fp8_e4m3, and that is {dtype}."
            )
        elif facts.by_transformers or builder.args.model.model_impl == "transformers":
            builder.refuse(
                option, "--quantization-param-path: transformers' modules have no scales of a KV cache."
            )
    return builder.follow(option)


def _random_seed(builder: PlanBuilder) -> Decision[int]:
    asked = builder.args.model.random_seed
    if asked is not None:
        return Decision(asked, "as asked")
    return Decision(secrets.randbelow(2**30), "a new one at each start")


def _num_load_threads(builder: PlanBuilder) -> Decision[int]:
    config = builder.args.model.model_loader_extra_config
    option, name = "model_loader_extra_config", "--model-loader-extra-config"
    shares = builder.args.model.load_format == "sharded_state"
    unknown = config.keys() - {"enable_multithread_load", "num_threads"} - ({"pattern"} if shares else set())
    several, threads = config.get("enable_multithread_load", False), config.get("num_threads", 8)
    if unknown:
        known = "enable_multithread_load, num_threads and, with sharded_state, pattern"
        builder.refuse(option, f"{name} knows {known}, not {', '.join(sorted(unknown))}.")
    elif not isinstance(several, bool):
        builder.refuse(option, f"{name}: enable_multithread_load must be true or false.")
    elif isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 256:
        builder.refuse(option, f"{name}: num_threads must be a whole number from 1 to 256.")
    elif several:
        return Decision(threads, "as asked")
    return Decision(1, "with one thread, unless asked otherwise")


def _shard_pattern(builder: PlanBuilder) -> Decision[str | None]:
    pattern, option = builder.args.model.model_loader_extra_config.get("pattern"), "model_loader_extra_config"
    if pattern is None:
        return Decision(None, "as penstock shard writes them")
    names = ("{rank}", "{part}")
    if not isinstance(pattern, str) or "/" in pattern or any(pattern.count(name) != 1 for name in names):
        builder.refuse(
            option, "--model-loader-extra-config: pattern must be a file's name with {rank} and {part}."
        )
        return Decision(None, "what was asked for cannot be used")
    return Decision(pattern, "as asked")
