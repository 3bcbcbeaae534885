"""Whether each option works on a CPU, on eight H100 and on eight B200, tried on descriptions of these
machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from ops.machine import Machine
from runtime.config import Args, Json, Option, Outcome, options
from runtime.config.resolve import ANY_MODEL, decide
from runtime.errors import ConfigurationError

WITHOUT_TRIAL = {
    Outcome.REFUSED: "refused",
    Outcome.ALWAYS: "always so",
    Outcome.INERT: "no effect",
}
SELF_CONTAINED = {"config"}  # a file with other options
_NGRAM = {"speculative_algorithm": "NGRAM"}
_STANDALONE = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "draft"}
_NODES = {"nnodes": 2, "tp_size": 2, "dist_init_addr": "first:5000"}
_PARTS = {"tp_size": 2, "ep_size": 2}
_BALANCED = {**_PARTS, "enable_eplb": True}
_REMOTE = {
    "load_format": "remote_instance",
    "remote_instance_weight_loader_seed_instance_ip": "first",
    "remote_instance_weight_loader_seed_instance_service_port": 30000,
    "remote_instance_weight_loader_send_weights_group_ports": (30100,),
}
# Further options that an option requires.
_COMPANIONS: Mapping[str, Mapping[str, Any]] = {
    "torch_compile_max_bs": {"enable_torch_compile": True},
    "max_micro_batch_size": {"pp_size": 2},
    "node_rank": _NODES,
    "dist_init_addr": _NODES,
    "nccl_port": _NODES,
    "schedule_low_priority_values_first": {"enable_priority_scheduling": True},
    "priority_scheduling_preemption_threshold": {"enable_priority_scheduling": True},
    "service_tier_priorities": {"enable_priority_scheduling": True},
    "api_key_weights": {"api_key_file": "keys"},
    **{
        f"hicache_{name}": {"enable_hierarchical_cache": True}
        for name in (
            "ratio",
            "size",
            "write_policy",
            "io_backend",
            "mem_layout",
            "storage_prefetch_policy",
        )
    },
    "disaggregation_prefill": {"disaggregation_mode": "decode"},
    "disaggregation_prefill_replicas": {"dp_size": 2},
    "disaggregation_bootstrap_port": {"disaggregation_mode": "prefill"},
    "num_reserved_decode_tokens": {"disaggregation_mode": "decode", "disaggregation_prefill": ("first:8998",)},
    "debug_tensor_dump_layers": {"debug_tensor_dump_output_folder": "dump"},
    "hicache_storage_backend": {"enable_hierarchical_cache": True},
    "hicache_storage_backend_extra_config": {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"},
    "offload_num_in_group": {"offload_group_size": 4},
    "offload_prefetch_step": {"offload_group_size": 4},
    "nnodes": _NODES,
    "ep_size": {"tp_size": 2},
    "moe_a2a_backend": _PARTS,
    "flashinfer_mxfp4_moe_precision": {"moe_runner_backend": "flashinfer_mxfp4"},
    "ep_num_redundant_experts": _PARTS,
    "ep_dispatch_algorithm": _PARTS,
    "init_expert_location": _PARTS,
    "enable_eplb": _PARTS,
    "enable_dp_attention": {"tp_size": 2, "dp_size": 2},
    "enable_dp_lm_head": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "moe_dense_tp_size": {"tp_size": 2},
    "enable_symm_mem": {"tp_size": 2},
    "enable_two_batch_overlap": {"tp_size": 2},
    "tbo_token_distribution_threshold": {"tp_size": 2, "enable_two_batch_overlap": True},
    "eplb_algorithm": _BALANCED,
    "eplb_rebalance_layers_per_chunk": _BALANCED,
    "eplb_min_rebalancing_utilization_threshold": _BALANCED,
    "speculative_algorithm": {"speculative_draft_model_path": "draft"},
    "speculative_draft_model_path": {"speculative_algorithm": "STANDALONE"},
    "speculative_draft_model_revision": _STANDALONE,
    "speculative_token_map": {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "draft"},
    "speculative_num_steps": _STANDALONE,
    "speculative_eagle_topk": _STANDALONE,
    "speculative_num_draft_tokens": _NGRAM,
    "speculative_adaptive": _NGRAM,
    "speculative_accept_threshold_single": _NGRAM,
    "speculative_accept_threshold_acc": _NGRAM,
    "speculative_ngram_branch_length": _NGRAM,
    "speculative_ngram_match_type": {**_NGRAM, "speculative_ngram_max_bfs_breadth": 2},
    "speculative_ngram_min_bfs_breadth": {**_NGRAM, "speculative_ngram_max_bfs_breadth": 4},
    "speculative_ngram_max_bfs_breadth": _NGRAM,
    "speculative_ngram_max_trie_depth": _NGRAM,
    "speculative_ngram_capacity": _NGRAM,
    "speculative_ngram_external_corpus_path": _NGRAM,
    "speculative_ngram_external_sam_budget": _NGRAM,
    "speculative_ngram_external_corpus_max_tokens": _NGRAM,
    "speculative_ngram_min_match_window_size": _NGRAM,
    "speculative_ngram_max_match_window_size": _NGRAM,
    **{name: _REMOTE for name in _REMOTE if name != "load_format"},
    "quantization_param_path": {"kv_cache_dtype": "fp8_e4m3"},
    "delete_ckpt_after_loading": {"model_path": "."},  # an existing path; nothing is deleted for the table
}
# Values of options that do not accept arbitrary text.
_EXAMPLES: Mapping[str, Any] = {
    "public_origin": "https://models.example",
    "speculative_config": {"method": "ngram"},
    "speculative_ngram_external_corpus_path": __file__,  # an existing file; the table does not read it
    "speculative_adaptive": {"min_gain": 1.5},
    "lora_paths": ["adapter"],
    "max_loaded_loras": 8,
    "chat_template": "chat.jinja",
    "completion_template": "star_coder",
    "max_total_tokens": 64,
    "expert_distribution_recorder_buffer_size": 500,
    "cuda_graph_bs": (3,),
    "piecewise_cuda_graph_tokens": (3,),
    "device": "cpu",
    "torchao_config": "int8wo",
    "dist_init_addr": "other:5000",
    "prompt_tokens_buckets": ("tse", "1000", "2", "8"),
    "generation_tokens_buckets": ("customer", "10", "20"),
    "model_loader_extra_config": {"enable_multithread_load": True},
    "constrained_json_whitespace_pattern": " ?",
    "kv_events_config": {"publisher": "zmq"},
    "hicache_storage_backend": "file",
    "disaggregation_prefill": ("first:8998",),
    "hicache_storage_backend_extra_config": {"path": "pages"},
    "limit_mm_per_prompt": {"image": 4},
    "service_tier_priorities": {"flex": -1},
    "api_key_weights": {"chat": 4},
    "default_chat_template_kwargs": {"enable_thinking": False},
}


@cache
def machines() -> Mapping[str, Machine]:
    """Return the machines by their names in the table."""
    cpu = replace(Machine.named("cpu"), compiler="/usr/bin/c++")
    by_title = {"CPU": cpu}
    for title in ("H100", "B200"):
        one = Machine.named(title.lower())
        by_title[title] = replace(one, gpus=one.gpus * 8)
    return by_title


def outcome(option: Option) -> str:
    """Return "works", "no effect", "always so" or "refused", or the values that are refused on each machine."""
    if option.spec.means is not None and not any(_accepted(option)):
        return "refused"
    if option.spec.outcome in WITHOUT_TRIAL:
        return WITHOUT_TRIAL[option.spec.outcome]
    if option.name in SELF_CONTAINED:
        return "works"
    tried = list(_values(option))
    refused = {
        title: [each for each in tried if refusals(option, each, machine)] for title, machine in machines().items()
    }
    if not any(refused.values()):
        return "works"
    without = [title for title, values in refused.items() if len(values) == len(tried)]
    parts = ["works" if not without else f"works on {' and '.join(t for t in refused if t not in without)}"]
    parts += [f"not {title}" for title in without]
    parts += [
        f"not {title}: {', '.join(map(str, values))}"
        for title, values in refused.items()
        if values and title not in without
    ]
    return "; ".join(parts)


def refusals(option: Option, value: Any, machine: Machine) -> str:
    """Return why the option with this value, and its required options, is refused; empty if it is accepted."""
    keywords = {"model_path": "some/model", **_COMPANIONS.get(option.name, {}), option.name: value}
    try:
        _, builder = decide(Args.of(**keywords), machine, ANY_MODEL)
    except ConfigurationError as refused:
        return str(refused)
    return builder.refusals.get(option.spec.means[0] if option.spec.means else option.name, "")


def _accepted(option: Option) -> Iterator[str]:
    """Yield the machines that accept at least one value of the option other than the default."""
    for title, machine in machines().items():
        if not all(refusals(option, value, machine) for value in _values(option)):
            yield title


def _values(option: Option) -> Iterator[Any]:
    """Values of the option other than the default: all that can be listed, otherwise one."""
    spec = option.spec
    known = spec.choices if spec.built is None else [each for each in spec.built if each is not None]
    listed = [each for each in known if each != option.default and (not spec.choices or each in spec.choices)]
    if option.name in _EXAMPLES:
        yield _EXAMPLES[option.name]
    elif listed:
        yield from [(each,) if option.many else each for each in listed]
    else:
        one = _one(option)
        yield (one,) if option.many else one


def _one(option: Option) -> Any:
    spec = option.spec
    if option.type is bool:
        return not option.default
    if option.type is Json:
        return {"temperature": 0.5}
    if option.type is str:
        return "something"
    low = spec.low if spec.low is not None else spec.above if spec.above is not None else 0
    step = 1 if option.type is int else 0.125
    return option.type(next(each for each in (low + step, low + 2 * step) if each != option.default))


def counts() -> Mapping[str, int]:
    """Return the number of options that work on at least one machine, and of each other kind."""
    totals = dict.fromkeys(("works", *WITHOUT_TRIAL.values()), 0)
    for option in options():
        renamed = "works" if option.spec.means is None or any(_accepted(option)) else "refused"
        totals[WITHOUT_TRIAL.get(option.spec.outcome, renamed)] += 1
    return totals
