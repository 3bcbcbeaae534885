"""The model's section of the plan: device, precision, context length."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from ops.machine import GIB, Gpu, Machine
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ModelPlan
from runtime.config.quantization import METHODS, TORCHAO, UNREADABLE, WRITERS, agrees
from runtime.config.resolve.kernels import CPP_DTYPES, no_cpp
from runtime.config.resolve.offload import offload_group, offload_host_bytes
from runtime.config.resolve.plan_builder import Decision, PlanBuilder

DTYPES = {"half": "float16", "float": "float32"} | {name: name for name in ("float16", "bfloat16", "float32")}
MAX_TABLE_SHARE = 0.1  # maximum share of the device's memory for rotary tables
_PROMISES = ("enable_deterministic_inference", "rl_on_policy_target")  # promise results independent of other requests
REFUSED = Decision("cpu", "the requested value cannot be used")
_SEED_OPTIONS = ("seed_instance_ip", "seed_instance_service_port", "send_weights_group_ports")
_OTHER_DEVICES = {
    "xpu": "an Intel GPU",
    "hpu": "an Intel Gaudi accelerator",
    "npu": "an Ascend accelerator",
    "mps": "an Apple GPU",
    "hip": "an AMD GPU",
    "rocm": "an AMD GPU",
}


def model_plan(builder: PlanBuilder, machine: Machine, facts: ModelFacts) -> ModelPlan:
    """Plan the model. This comes before all other sections, because it decides the device."""
    args = builder.args.model
    device = _device(builder, machine)
    dtype = _dtype(builder, chosen_gpu(device.value, machine), facts)
    dependence = _dependence(builder, machine, device.value, dtype.value, facts)
    return builder.build(
        ModelPlan,
        path=Decision(facts.path, "as asked" if args.model_path else "no model is given, so the demo model is used"),
        load_format=_load_format(builder, facts),
        seed_address=builder.follow("remote_instance_weight_loader_seed_instance_ip"),
        seed_port=builder.follow("remote_instance_weight_loader_seed_instance_service_port"),
        seed_group_ports=_seed_group_ports(builder, facts),
        seed_key=Decision(builder.args.get("admin_api_key") or builder.args.get("api_key"), "this server's own key"),
        dtype=dtype,
        deterministic=_deterministic(builder, facts),
        dependence=dependence,
        device=device,
        context_length=_context_length(builder, facts, _device_bytes(device.value, machine)),
        random_seed=builder.follow_or("random_seed", secrets.randbelow(2**30), "a new seed at each start"),
        is_embedding=_is_embedding(builder, facts),
        by_transformers=_by_transformers(builder, facts),
        num_load_threads=_num_load_threads(builder),
        shard_pattern=_shard_pattern(builder),
        custom_loaders=builder.follow("custom_weight_loader", tuple(args.custom_weight_loader or ())),
        any_dtype=Decision(args.dtype != "auto", "--dtype is set" if args.dtype != "auto" else "--dtype is auto"),
        delete_after_loading=_delete_after_loading(builder),
        quantization=_quantization(builder, chosen_gpu(device.value, machine), facts),
        kv_scales=_kv_scales(builder, facts),
        config_overrides=builder.follow("json_model_override_args"),
        offload_group=offload_group(builder, device.value, facts),
        offload_host_bytes=offload_host_bytes(builder, machine),
    )


def _dependence(
    builder: PlanBuilder, machine: Machine, device: str, dtype: str, facts: ModelFacts
) -> Decision[str | None]:
    """Decide the reason why results may depend on other requests, or None if they do not.

    Refuse --enable-deterministic-inference and --rl-on-policy-target if results depend on other requests.
    """
    promises = [option for option in _PROMISES if builder.args.get(option)]
    reason = _batch_dependence(builder, machine, device, dtype, facts)
    if reason is not None:
        for option in promises:
            builder.refuse(option, f"--{option.replace('_', '-')}: {reason}.")
    config = facts.config.get("text_config", facts.config)
    absorbed = promises or builder.args.get("flashinfer_mla_disable_ragged")
    if reason is None and config.get("kv_lora_rank") and not absorbed:
        reason = (
            "latent attention expands the keys of long prompts, which depends on the chunks; start the server with "
            "--enable-deterministic-inference"
        )
    return Decision(reason, "by the device, the kernels and the model")


def _deterministic(builder: PlanBuilder, facts: ModelFacts) -> Decision[bool]:
    """Decide whether results must depend on the request alone.

    Refuse --rl-on-policy-target if weights, keys or products would be rounded more than in a trainer's float32.
    """
    target = builder.args.sampling.rl_on_policy_target
    if target is None:
        return builder.follow("enable_deterministic_inference")
    args, why = builder.args, None
    if DTYPES.get(args.model.dtype, "float32") != "float32":
        why = (
            f"--dtype {args.model.dtype} rounds every product, and a trainer that rounds the same products gets "
            "log-probabilities that differ by up to 0.01; leave --dtype out and let the trainer compute in float32"
        )
    elif facts.quantization is not None or args.quant.quantization or args.quant.torchao_config:
        why = "a trainer computes with weights that are not quantised"
    elif args.cache.kv_cache_dtype != "auto":
        why = "a trainer does not round keys and values; leave --kv-cache-dtype out"
    if why is not None:
        builder.refuse("rl_on_policy_target", f"--rl-on-policy-target {target}: {why}.")
    return Decision(True, f"--rl-on-policy-target {target}")


def _batch_dependence(builder: PlanBuilder, machine: Machine, device: str, dtype: str, facts: ModelFacts) -> str | None:
    """Return why results depend on the batch, on earlier requests or on places in memory, or None."""
    if device != "cpu":
        return "products and attention on a GPU depend on the batch; use --device cpu"
    if facts.by_transformers:
        return "transformers' modules compute this model, and torch's products depend on the batch"
    if builder.args.graphs.enable_torch_compile:
        return "with --enable-torch-compile torch computes products, which depend on the batch"
    if no_cpp(machine):
        return "without C++ kernels (a compiler, and a processor with AVX2) torch's products depend on the batch"
    if dtype not in CPP_DTYPES:
        return f"the C++ kernels do not support {dtype}, and torch's products depend on the batch; use bfloat16"
    if facts.config and facts.head_dim % 16:
        return (
            f"attention over heads of size {facts.head_dim}, which is not a multiple of 16, depends on where keys are "
            "stored in the last bits of its sums"
        )
    if any(name.endswith("attention_backend") for name in builder.args.explicitly_set):
        return "attention in torch depends on the batch; leave the options of attention backends out"
    if builder.args.parallel.tp_size > 2:
        return "more than two ranks add numbers in an order that depends on the batch; use --tp-size 2 or 1"
    moe, drafts = builder.args.moe, builder.args.speculative
    if moe.enable_eplb or moe.ep_num_redundant_experts or moe.moe_a2a_backend == "all_to_all":
        return (
            "which ranks add up the results of experts depends on other requests with --enable-eplb, "
            "--ep-num-redundant-experts and --moe-a2a-backend all_to_all; leave them out"
        )
    if moe.ep_dispatch_algorithm == "fake":
        return "--ep-dispatch-algorithm fake chooses experts at random"
    if min(drafts.speculative_accept_threshold_single, drafts.speculative_accept_threshold_acc) < 1:
        return (
            "the thresholds --speculative-accept-threshold-* accept tokens that depend on the number of drafts, and so "
            "on other requests; leave them out"
        )
    return None


def _load_format(builder: PlanBuilder, facts: ModelFacts) -> Decision[str]:
    asked, model = builder.args.model.load_format, builder.args.model
    if facts.by_transformers and (asked in ("npcache", "sharded_state") or model.custom_weight_loader):
        option = "custom_weight_loader" if model.custom_weight_loader else "load_format"
        builder.refuse(
            option, f"{facts.architecture}: transformers' modules compute this model and load its files themselves."
        )
    if model.custom_weight_loader and asked not in ("auto", "layered"):
        builder.refuse(
            "custom_weight_loader",
            f"--custom-weight-loader and --load-format {asked} exclude each other; give one of them.",
        )
    if asked == "sharded_state" and (facts.quantization is not None):
        builder.refuse(
            "load_format", f"--load-format sharded_state does not support quantised checkpoints ({facts.quantization})."
        )
    if asked == "bitsandbytes" and facts.architecture and facts.quantization != "bitsandbytes":
        builder.refuse(
            "load_format",
            "--load-format bitsandbytes needs a checkpoint that bitsandbytes quantised, which transformers writes "
            f"(BitsAndBytesConfig); this one is {facts.quantization or 'not quantised'}. To round its weights to 4 "
            "bits while they load, use --quantization w4a16.",
        )
    usual = {
        "bitsandbytes": "bitsandbytes weights are dequantised while they load",
        "layered": "layers are always loaded one after the other",
        "remote": "the local copy of the remote folder",
    }
    return Decision("auto", usual[asked]) if asked in usual else builder.follow("load_format")


def _seed_group_ports(builder: PlanBuilder, facts: ModelFacts) -> Decision[tuple[int, ...] | None]:
    """Decide the ports of the running server that sends its weights. Refuse models that do not support this."""
    model, ranks = builder.args.model, builder.args.parallel.tp_size * builder.args.parallel.pp_size
    prefix = "remote_instance_weight_loader_"
    address, port, ports = (f"{prefix}{end}" for end in _SEED_OPTIONS)
    given = builder.args.get(ports)
    if model.load_format != "remote_instance":
        for option in (address, port, ports):
            if builder.args.get(option):
                builder.refuse(option, f"--{option.replace('_', '-')} needs --load-format remote_instance.")
        return Decision(given, "no weights are copied from a running server")
    for option in (address, port):
        if not builder.args.get(option):
            builder.refuse(option, f"--load-format remote_instance needs --{option.replace('_', '-')}.")
    if len(given or ()) != ranks:
        builder.refuse(
            ports, f"--load-format remote_instance needs --{ports.replace('_', '-')} with {ranks} ports, one per rank."
        )
    why = None
    if facts.by_transformers:
        why = "transformers' modules compute this model and load its files themselves"
    elif facts.quantization is not None:
        why = f"the layout of a quantised checkpoint ({facts.quantization}) is known only from its files"
    elif builder.args.cache.kv_cache_dtype not in ("auto", "bf16", "bfloat16"):
        why = "the scales of an 8-bit KV cache are no weights; leave --kv-cache-dtype out"
    elif builder.args.moe.ep_size > 1 or builder.args.moe.enable_ep_moe:
        why = "experts of ranks may have moved; leave --ep-size out"
    elif facts.pooling is not None:
        why = "pooling layers are read from files"
    elif builder.args.parallel.dp_size > 1 or builder.args.parallel.nnodes > 1:
        why = "one replica on one machine can copy them; leave --dp-size and --nnodes out"
    if why is not None:
        builder.refuse("load_format", f"--load-format remote_instance: {why}. Load the checkpoint's files instead.")
    return Decision(given, "as asked")


def _delete_after_loading(builder: PlanBuilder) -> Decision[bool]:
    model, parallel, option = builder.args.model, builder.args.parallel, "delete_ckpt_after_loading"
    if not model.delete_ckpt_after_loading:
        return builder.follow(option)
    name = "--delete-ckpt-after-loading"
    if model.model_path is None or not Path(model.model_path).exists():
        builder.refuse(option, f"{name} needs a --model-path that is a local folder or file.")
    elif (parallel.dp_size > 1 and not parallel.enable_dp_attention) or parallel.nnodes > 1:
        builder.refuse(
            option, f"{name} needs --dp-size 1 and --nnodes 1: a restarted replica reads the checkpoint again."
        )
    elif model.load_format == "dummy":
        builder.refuse(option, f"{name} and --load-format dummy exclude each other: no weights are loaded.")
    return Decision(True, "as asked")


def _is_embedding(builder: PlanBuilder, facts: ModelFacts) -> Decision[bool]:
    if facts.is_encoder:
        return Decision(True, f"an encoder generates no text; pooling: {facts.pooling}")
    if facts.pooling is not None:
        return Decision(True, f"the checkpoint has a modules.json; pooling: {facts.pooling}")
    return builder.follow("is_embedding")


def _by_transformers(builder: PlanBuilder, facts: ModelFacts) -> Decision[bool]:
    """Decide whether transformers' modules compute the model. Refuse options that only native models support."""
    if not facts.by_transformers:
        return Decision(False, "there is a native implementation")
    parallel, why = builder.args.parallel, f"transformers' modules compute {facts.architecture}"
    for option, size in (("tp_size", parallel.tp_size), ("pp_size", parallel.pp_size)):
        if size > 1:
            builder.refuse(option, f"--{option.replace('_', '-')} {size}: {why}, and they use one device only.")
    quant = builder.args.quant
    if quant.quantization is not None or quant.torchao_config or facts.quantization is not None:
        builder.refuse(
            "quantization", f"{why}, and they do not support quantised weights; use an unquantised checkpoint."
        )
    asked = builder.args.model.model_impl == "transformers"
    return Decision(True, "as asked" if asked else "there is no native implementation")


def chosen_gpu(device: str, machine: Machine) -> Gpu | None:
    if not device.startswith("cuda"):
        return None
    return machine.gpus[int(device.partition(":")[2] or 0)]


def _device(builder: PlanBuilder, machine: Machine) -> Decision[str]:
    asked, first = builder.args.model.device, builder.args.parallel.base_gpu_id
    if first and asked is not None and ":" in asked:
        builder.refuse(
            "base_gpu_id", f"--base-gpu-id {first} and --device {asked} exclude each other; give one of them."
        )
    elif first and asked in (None, "cuda") and not _no_cuda(machine):
        if reason := _no_such_gpu(machine, first):
            builder.refuse("base_gpu_id", f"--base-gpu-id {first} cannot be used: {reason}.")
            return REFUSED
        return Decision(f"cuda:{first}", "the GPU of --base-gpu-id")
    if asked is None:
        return _best_device(builder, machine)
    known = re.fullmatch(r"cpu|cuda(?::(\d+))?", asked)
    if known is None:
        kind = asked.partition(":")[0]
        needs = f"Penstock has no code for it, and it needs {_OTHER_DEVICES[kind]}" if kind in _OTHER_DEVICES else ""
        builder.refuse("device", f"--device {asked} is refused: {needs or 'no such device'}; use cpu, cuda or cuda:N.")
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
    """Return the reason why CUDA cannot be used, or ""."""
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
        builder.refuse("device", f"{gpu.name} is too old: compute capability 7.5 is needed; use --device cpu.")
    if asked != "auto":
        dtype = DTYPES[asked]
        if dtype == "bfloat16" and gpu is not None and gpu.capability < (8, 0):
            builder.refuse("dtype", f"--dtype {asked} is not possible on {gpu.name}; use float16.")
        return Decision(dtype, "as asked")
    if facts.dtype not in DTYPES.values():
        builder.refuse("dtype", f"Checkpoints in {facts.dtype} are not supported yet; set --dtype to convert it.")
        return Decision("float32", "the requested value cannot be used")
    if builder.args.sampling.rl_on_policy_target is not None:
        return Decision("float32", "a trainer computes log-probabilities in float32 (--rl-on-policy-target)")
    return _auto_dtype(gpu, facts.dtype, facts.quantization)


def _auto_dtype(gpu: Gpu | None, checkpoint: str, quantization: str | None) -> Decision[str]:
    if gpu is None and quantization is not None and checkpoint == "float16":
        return Decision("bfloat16", "the weights are quantised anyway, and a CPU is many times faster in bfloat16")
    if gpu is None:
        exact = ", without loss of precision" if checkpoint == "float32" else ""
        return Decision(checkpoint, f"the checkpoint's dtype{exact}")
    if gpu.capability < (8, 0) and checkpoint != "float16":
        return Decision("float16", f"{gpu.name} has no bfloat16")
    if checkpoint == "float32":
        return Decision("bfloat16", "the checkpoint is float32, and a GPU is many times faster in bfloat16")
    return Decision(checkpoint, "the checkpoint's dtype")


def _device_bytes(device: str, machine: Machine) -> int:
    """Return the size of the device's memory."""
    gpu = chosen_gpu(device, machine)
    return machine.total_bytes if gpu is None else gpu.memory_bytes


def _context_length(builder: PlanBuilder, facts: ModelFacts, memory_bytes: int) -> Decision[int]:
    asked = builder.args.model.context_length
    context = facts.context_length if asked is None else min(asked, facts.context_length)
    table_bytes = context * facts.head_dim * 4  # bytes of the rotary tables in float32
    if facts.path and memory_bytes and table_bytes > MAX_TABLE_SHARE * memory_bytes:
        builder.refuse(
            "context_length",
            f"A context of {context} tokens needs {table_bytes / GIB:.1f} GiB for the table of rotary positions alone, "
            f"and the device has {memory_bytes / GIB:.1f} GiB of memory; set a smaller --context-length.",
        )
    if asked is None:
        return Decision(facts.context_length, "the value in the model's configuration")
    if asked > facts.context_length:
        builder.refuse(
            "context_length",
            f"--context-length {asked} exceeds the model's context length of {facts.context_length} tokens; use at "
            f"most {facts.context_length}, or override the model's configuration: "
            f"--json-model-override-args '{{\"max_position_embeddings\": {asked}}}'.",
        )
    return Decision(min(asked, facts.context_length), "as asked")


def _quantization(builder: PlanBuilder, gpu: Gpu | None, facts: ModelFacts) -> Decision[str | None]:
    """Decide the method that quantises weights while they load. Refuse an option that contradicts the checkpoint."""
    asked, stored = builder.args.quant.quantization, facts.quantization
    if builder.args.quant.torchao_config:
        return _torchao(builder, gpu, stored)
    if asked is not None and asked in UNREADABLE:
        builder.refuse("quantization", f"--quantization {asked} is not possible: {UNREADABLE[asked]}.")
        return Decision(None, "the requested value cannot be used")
    method = METHODS.get(asked or "")
    if method is not None and stored is not None and method.only_unquantized:
        method = None
    if method is not None and gpu is not None and method.on_gpu is None:
        builder.refuse("quantization", f"--quantization {asked} is supported on a CPU only so far; set --device cpu.")
    if asked is not None and method is None and facts.architecture:
        _check_format(builder, asked, facts)
    if stored is not None and method is None:
        return Decision(None, f"the checkpoint's {stored} weights are kept if a kernel supports them, else dequantised")
    return Decision(asked if method is not None else None, builder.follow("quantization").reason)


def _check_format(builder: PlanBuilder, asked: str, facts: ModelFacts) -> None:
    """Refuse a value of `--quantization` that names another format than the checkpoint's."""
    stored, settings = facts.quantization, facts.config.get("quantization_config")
    if stored is None:
        builder.refuse(
            "quantization",
            f"--quantization {asked}: the checkpoint is not quantised; use {' or '.join(METHODS)}, which quantise "
            f"weights while they load, or a checkpoint in this format{WRITERS.get(asked, '')}.",
        )
    elif not agrees(asked, stored, settings if isinstance(settings, Mapping) else {}):
        builder.refuse(
            "quantization",
            f"--quantization {asked}: the checkpoint's format is {stored}; leave the option out.",
        )


def _torchao(builder: PlanBuilder, gpu: Gpu | None, stored: str | None) -> Decision[str | None]:
    """Decide the quantisation method that `--torchao-config` selects."""
    asked, option = builder.args.quant.torchao_config, "torchao_config"
    if asked.startswith("fp8dq"):
        builder.refuse(
            option,
            f"--torchao-config {asked} is not supported; use --quantization fp8, which rounds weights and, on GPUs "
            "with float8 products, activations to e4m3, or int8dq on a CPU.",
        )
    elif asked not in TORCHAO:
        builder.refuse(option, f"--torchao-config {asked} is unknown; use {', '.join(TORCHAO)}.")
    elif builder.args.quant.quantization is not None or stored is not None:
        what = builder.args.quant.quantization or f"the checkpoint's {stored}"
        builder.refuse(option, f"--torchao-config {asked} and {what} cannot be combined; leave one of them out.")
    elif gpu is not None and TORCHAO[asked] in METHODS:
        builder.refuse(option, f"--torchao-config {asked} is supported on a CPU only so far; set --device cpu.")
    else:
        return Decision(TORCHAO[asked], f"--torchao-config {asked}")
    return Decision(None, "the requested value cannot be used")


def _kv_scales(builder: PlanBuilder, facts: ModelFacts) -> Decision[str | None]:
    option, dtype = "quantization_param_path", builder.args.cache.kv_cache_dtype
    if builder.args.quant.quantization_param_path is not None:
        if dtype != "fp8_e4m3":
            builder.refuse(option, f"--quantization-param-path needs --kv-cache-dtype fp8_e4m3, which is {dtype} now.")
        elif facts.by_transformers or builder.args.model.model_impl == "transformers":
            builder.refuse(
                option, "--quantization-param-path: models of transformers do not support scales of the KV cache."
            )
    return builder.follow(option)


def _num_load_threads(builder: PlanBuilder) -> Decision[int]:
    config = builder.args.model.model_loader_extra_config
    option, name = "model_loader_extra_config", "--model-loader-extra-config"
    shares = builder.args.model.load_format == "sharded_state"
    unknown = config.keys() - {"enable_multithread_load", "num_threads"} - ({"pattern"} if shares else set())
    several, threads = config.get("enable_multithread_load", False), config.get("num_threads", 8)
    if unknown:
        known = "enable_multithread_load, num_threads and, with sharded_state, pattern"
        builder.refuse(option, f"{name}: unknown fields {', '.join(sorted(unknown))}; supported: {known}.")
    elif not isinstance(several, bool):
        builder.refuse(option, f"{name}: enable_multithread_load must be true or false.")
    elif isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 256:
        builder.refuse(option, f"{name}: num_threads must be a whole number from 1 to 256.")
    elif several:
        return Decision(threads, "as asked")
    return Decision(1, "enable_multithread_load is not set")


def _shard_pattern(builder: PlanBuilder) -> Decision[str | None]:
    pattern, option = builder.args.model.model_loader_extra_config.get("pattern"), "model_loader_extra_config"
    if pattern is None:
        return Decision(None, "the names that penstock shard writes")
    names = ("{rank}", "{part}")
    if not isinstance(pattern, str) or "/" in pattern or any(pattern.count(name) != 1 for name in names):
        builder.refuse(option, "--model-loader-extra-config: pattern must be a file name with {rank} and {part}.")
        return Decision(None, "the requested value cannot be used")
    return Decision(pattern, "as asked")
