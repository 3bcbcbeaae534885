"""The layers whose weights a GPU keeps in host memory."""

from __future__ import annotations

from ops.machine import Machine
from runtime.config.model_facts import ModelFacts
from runtime.config.resolve.parallel import ranks_here
from runtime.config.resolve.plan_builder import Decision, PlanBuilder

_DETAILS = ("offload_num_in_group", "offload_prefetch_step")
# Options that cannot be combined with layers in host memory, and the reasons.
_EXCLUDED = {
    "enable_memory_saver": "their weights would be lost while memory is released",
    "enable_torch_compile": "copies are not compiled",
    "enable_two_batch_overlap": "both halves of a step would use one layer's slot",
    "enable_dp_attention": "common steps have not been tested with such layers",
    "enable_eplb": "experts in host memory cannot move",
    "ep_num_redundant_experts": "experts in host memory cannot move",
    "enable_lora": "adapters read weights between steps",
    "lora_paths": "adapters read weights between steps",
    "lora_dir": "adapters read weights between steps",
}


def offload_group(builder: PlanBuilder, device: str, facts: ModelFacts) -> Decision[int]:
    """Decide the size of the groups of layers of which some stay in host memory; 0: no groups.

    Refuse options of offloading that cannot be used.
    """
    args = builder.args.offload
    size, by_size = args.offload_group_size, args.cpu_offload_gb > 0
    asked = "cpu_offload_gb" if by_size else "offload_group_size"
    flag = _flag(asked)
    if not by_size and size < 1:
        for option in _DETAILS:
            if builder.args.changed(option):
                builder.refuse(option, f"{_flag(option)} needs --offload-group-size or --cpu-offload-gb.")
        return Decision(0, "all layers stay on the device")
    reason = ""
    if device == "cpu":
        reason = "on a CPU all weights are in host memory already"
    elif facts.by_transformers:
        reason = "transformers' modules compute this model and hold its weights"
    elif facts.is_encoder:
        reason = "encoders keep all layers on the device"
    elif builder.args.model.load_format == "remote_instance":
        reason = "--load-format remote_instance copies weights from GPU to GPU"
    if reason:
        builder.refuse(asked, f"{flag} has no effect here: {reason}; leave it out.")
    for option, why in _EXCLUDED.items():
        if builder.args.changed(option):
            builder.refuse(option, f"{_flag(option)} cannot be combined with {flag}: {why}.")
    if by_size:
        if size > 0:
            builder.refuse("offload_group_size", f"--offload-group-size cannot be combined with {flag}; give one.")
        if builder.args.changed("offload_num_in_group"):
            builder.refuse("offload_num_in_group", "--offload-num-in-group needs --offload-group-size.")
        return Decision(0, f"{flag} chooses the layers")
    count, ahead = args.offload_num_in_group, args.offload_prefetch_step
    if count > size:
        builder.refuse("offload_num_in_group", f"--offload-num-in-group {count} exceeds {flag} {size}.")
    moved = len(in_groups(facts.num_layers, size, count))
    if facts.architecture and moved <= ahead + 1:
        builder.refuse(
            asked,
            f"{flag} {size} would keep {moved} of {facts.num_layers} layers in host memory, but the GPU has memory for "
            f"{ahead + 1} of them (--offload-prefetch-step + 1), so no memory would be saved; use smaller groups.",
        )
    return Decision(size, "as asked")


def offload_host_bytes(builder: PlanBuilder, machine: Machine) -> Decision[int]:
    """Decide how much host memory the offloaded layers of each rank may take.

    This is decided once, before the ranks start. If each rank measured the free memory itself, a rank might measure
    after another has allocated its layers.
    """
    args, parallel = builder.args.offload, builder.args.parallel
    if args.cpu_offload_gb <= 0 and args.offload_group_size < 1:
        return Decision(0, "all layers stay on the device")
    ranks = ranks_here(parallel)
    return Decision(machine.available_bytes // ranks, f"the free host memory divided by the {ranks} ranks of this host")


def in_groups(num_layers: int, group_size: int, num_in_group: int) -> list[int]:
    """Return the indices of the last `num_in_group` layers of every `group_size` consecutive layers."""
    return [index for index in range(num_layers) if index % group_size >= group_size - num_in_group]


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
