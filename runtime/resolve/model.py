"""The model's section of the plan: device, precision, context length."""

from __future__ import annotations

import re
import secrets

from ops.machine import Gpu, Machine
from runtime.facts import ModelFacts
from runtime.plan import ModelPlan
from runtime.resolve.ledger import Ledger

DTYPES = {"half": "float16", "float": "float32"} | {name: name for name in ("float16", "bfloat16", "float32")}
_OTHER_DEVICES = {
    "xpu": "an Intel GPU",
    "hpu": "an Intel Gaudi accelerator",
    "npu": "an Ascend accelerator",
    "mps": "an Apple GPU",
    "hip": "an AMD GPU",
    "rocm": "an AMD GPU",
}


def model_plan(ledger: Ledger, machine: Machine, facts: ModelFacts) -> ModelPlan:
    args = ledger.args.model
    device = _device(ledger, machine)
    why_path = "as asked" if args.model_path else "no model was asked for: the demo model"
    return ModelPlan(
        path=ledger.decide("model.path", facts.path, why_path),
        load_format=ledger.take("model.load_format", "load_format"),
        dtype=_dtype(ledger, chosen_gpu(device, machine), facts),
        device=device,
        context_length=_context_length(ledger, facts),
        random_seed=_random_seed(ledger),
        mmap=ledger.take("model.mmap", "weight_loader_disable_mmap", not args.weight_loader_disable_mmap),
        num_load_threads=_num_load_threads(ledger),
    )


def chosen_gpu(device: str, machine: Machine) -> Gpu | None:
    if not device.startswith("cuda"):
        return None
    return machine.gpus[int(device.partition(":")[2] or 0)]


def _device(ledger: Ledger, machine: Machine) -> str:
    asked, first = ledger.args.model.device, ledger.args.parallel.base_gpu_id
    if first and asked is not None and ":" in asked:
        ledger.refuse("base_gpu_id", f"--base-gpu-id {first} and --device {asked}: give one of them.")
    elif first and asked in (None, "cuda") and not _no_cuda(machine):
        if reason := _no_such_gpu(machine, first):
            ledger.refuse("base_gpu_id", f"--base-gpu-id {first} cannot be used: {reason}.")
            return "cpu"
        return ledger.decide("model.device", f"cuda:{first}", "the first GPU that --base-gpu-id allows")
    if asked is None:
        return _best_device(ledger, machine)
    known = re.fullmatch(r"cpu|cuda(?::(\d+))?", asked)
    if known is None:
        kind = asked.partition(":")[0]
        needs = f" (and needs {_OTHER_DEVICES[kind]})" if kind in _OTHER_DEVICES else ""
        ledger.refuse("device", f"--device {asked} is not built yet{needs}; use cpu, cuda or cuda:N.")
        return "cpu"
    if asked != "cpu":
        reason = _no_cuda(machine) or _no_such_gpu(machine, int(known[1] or 0))
        if reason:
            ledger.refuse("device", f"--device {asked} cannot be used: {reason}.")
            return "cpu"
    return ledger.decide("model.device", asked, "as asked")


def _best_device(ledger: Ledger, machine: Machine) -> str:
    if reason := _no_cuda(machine):
        return ledger.decide("model.device", "cpu", reason)
    return ledger.decide("model.device", "cuda", f"there is a GPU: {machine.gpus[0].name}")


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


def _dtype(ledger: Ledger, gpu: Gpu | None, facts: ModelFacts) -> str:
    asked = ledger.args.model.dtype
    if gpu is not None and gpu.capability < (7, 5):
        ledger.refuse("device", f"{gpu.name} is too old: compute capability 7.5 is needed; use --device cpu.")
    if asked != "auto":
        dtype = DTYPES[asked]
        if dtype == "bfloat16" and gpu is not None and gpu.capability < (8, 0):
            ledger.refuse("dtype", f"--dtype {asked} is not possible on {gpu.name}; use float16.")
        return ledger.decide("model.dtype", dtype, "as asked")
    if facts.dtype not in DTYPES.values():
        ledger.refuse(
            "dtype", f"Checkpoints in {facts.dtype} are not supported yet; say --dtype to convert it."
        )
        return "float32"
    return ledger.decide("model.dtype", *_auto_dtype(gpu, facts.dtype))


def _auto_dtype(gpu: Gpu | None, checkpoint: str) -> tuple[str, str]:
    if gpu is None:
        why = (
            "the checkpoint's; a CPU computes it as exactly"
            if checkpoint == "float32"
            else "the checkpoint's"
        )
        return checkpoint, why
    if gpu.capability < (8, 0) and checkpoint != "float16":
        return "float16", f"{gpu.name} has no bfloat16"
    if checkpoint == "float32":
        return "bfloat16", "the checkpoint is float32, and a GPU is many times faster in bfloat16"
    return checkpoint, "the checkpoint's"


def _context_length(ledger: Ledger, facts: ModelFacts) -> int:
    asked = ledger.args.model.context_length
    if asked is None:
        return ledger.decide(
            "model.context_length", facts.context_length, "as the model's configuration says"
        )
    if asked > facts.context_length:
        ledger.refuse(
            "context_length",
            f"--context-length {asked} is longer than the {facts.context_length} tokens that the model was "
            f"made for; use at most {facts.context_length}.",
        )
    return ledger.decide("model.context_length", min(asked, facts.context_length), "as asked")


def _random_seed(ledger: Ledger) -> int:
    asked = ledger.args.model.random_seed
    if asked is not None:
        return ledger.decide("model.random_seed", asked, "as asked")
    return ledger.decide("model.random_seed", secrets.randbelow(2**30), "a new one at each start")


def _num_load_threads(ledger: Ledger) -> int:
    config = ledger.args.model.model_loader_extra_config
    option, name = "model_loader_extra_config", "--model-loader-extra-config"
    unknown = config.keys() - {"enable_multithread_load", "num_threads"}
    several, threads = config.get("enable_multithread_load", False), config.get("num_threads", 8)
    if unknown:
        known = "enable_multithread_load and num_threads"
        ledger.refuse(option, f"{name} knows {known}, not {', '.join(sorted(unknown))}.")
    elif not isinstance(several, bool):
        ledger.refuse(option, f"{name}: enable_multithread_load must be true or false.")
    elif isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 256:
        ledger.refuse(option, f"{name}: num_threads must be a whole number from 1 to 256.")
    elif several:
        return ledger.decide("model.num_load_threads", threads, "as asked")
    return ledger.decide("model.num_load_threads", 1, "one file after the other, unless asked otherwise")
