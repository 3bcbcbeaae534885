"""Every supported option changes the plan, and every field of the plan has a reader."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from safetensors.numpy import save_file

from ops.machine import Machine
from option_values import other_value
from runtime.actors import assemble
from runtime.config import Args, Option, Outcome, options
from runtime.config.plan import Plan
from runtime.errors import ConfigurationError

ROOT = Path(__file__).parents[3]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
HYBRID = {"architectures": ["Qwen3_5ForCausalLM"]}  # a model with recurrent layers
MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
PARTS = {"json_model_override_args": MIXTURE, "tp_size": 2, "ep_size": 2}
CHUNKED = {"attention_chunk_size": 512}
SEEING = {"vision_config": {"hidden_size": 16}}  # a model with an image encoder
CPU = replace(Machine.named("cpu"), compiler="/usr/bin/c++")
H200 = Machine.named("h200")
FOUR_GPUS = replace(H200, gpus=H200.gpus * 4)
NODES = {"nnodes": 2, "tp_size": 2, "dist_init_addr": "first:5000"}
REMOTE = {
    "load_format": "remote_instance",
    "remote_instance_weight_loader_seed_instance_ip": "first",
    "remote_instance_weight_loader_seed_instance_service_port": 30000,
    "remote_instance_weight_loader_send_weights_group_ports": (30100,),
}
BLOCKS = {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "torch_dtype": "bfloat16",
}
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "torch_dtype": "bfloat16"}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 8,
    "quantization_config": {"quant_method": "mxfp4"},
}
# Machines, with options that other options require.
SITUATIONS: list[tuple[Machine, dict[str, Any]]] = [
    (CPU, {}),
    (CPU, {"enable_torch_compile": True}),
    (CPU, {"pp_size": 2}),
    (CPU, {"tp_size": 2, "dp_size": 2}),
    (CPU, {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}),
    (CPU, {"tp_size": 2, "enable_two_batch_overlap": True}),
    (CPU, {"kv_cache_dtype": "fp8_e4m3"}),
    (CPU, {"enable_priority_scheduling": True, "enable_trace": True}),
    (CPU, NODES),
    (CPU, {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 8}),
    (CPU, {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "draft"}),
    (CPU, {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "draft"}),
    (CPU, {"enable_lora": True}),
    (CPU, {"enable_hierarchical_cache": True}),
    (CPU, {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}),
    (CPU, {"disaggregation_mode": "prefill"}),
    (CPU, {"disaggregation_mode": "decode", "disaggregation_prefill": ("first:8998",)}),
    (CPU, {"api_key_file": "keys"}),
    (CPU, {"debug_tensor_dump_output_folder": "dump"}),
    (CPU, {"collect_tokens_histogram": True, "log_requests": True}),
    (H200, {}),
    (H200, {"json_model_override_args": BLOCKS}),
    (Machine.named("b200"), {"json_model_override_args": NVFP4}),
    (Machine.named("b200"), {"json_model_override_args": GPT_OSS, "moe_runner_backend": "flashinfer_mxfp4"}),
    (H200, {"json_model_override_args": {"num_hidden_layers": 8}, "offload_group_size": 2}),
    (FOUR_GPUS, {"tp_size": 2}),
    (CPU, {"json_model_override_args": HYBRID}),
    (CPU, {"json_model_override_args": CHUNKED}),
    (CPU, {"json_model_override_args": MIXTURE, "tp_size": 2}),
    (CPU, PARTS),
    (CPU, {**PARTS, "enable_eplb": True}),
    (CPU, {"json_model_override_args": SEEING}),
    (CPU, REMOTE),
    (CPU, {"model_path": str(ROOT)}),  # an existing path
]
# Values of options that do not accept arbitrary values.
VALUES: dict[str, list[Any]] = {
    "public_origin": ["https://models.example"],
    "device": ["cpu"],
    "speculative_config": [{"method": "ngram", "num_speculative_tokens": 3}],
    "speculative_adaptive": [{"min_gain": 1.5}],
    "speculative_ngram_external_corpus_path": [__file__],
    "speculative_ngram_external_sam_budget": [3],
    "chat_template": ["llama-3"],
    "completion_template": ["star_coder"],
    "tokenizer_worker_num": [3],
    "context_length": [100],
    "dist_init_addr": ["other:5000"],
    "json_model_override_args": [{"vocab_size": 17}],
    "model_loader_extra_config": [{"enable_multithread_load": True}],
    "chunked_prefill_size": [64],
    "cuda_graph_bs": [[3]],
    "piecewise_cuda_graph_tokens": [[3]],
    "max_total_tokens": [64],
    "model_impl": ["transformers"],
    "nnodes": [1],
    "random_seed": [7],
    "prompt_tokens_buckets": [["tse", "1000", "2", "8"]],
    "generation_tokens_buckets": [["customer", "10", "20"]],
    "constrained_json_whitespace_pattern": [" ?"],
    "kv_events_config": [{"publisher": "zmq"}],
    "torchao_config": ["int4wo-128"],
    "lora_paths": [["a=adapter"]],
    "disaggregation_prefill": [("other:8998",)],
    "api_key_weights": [{"chat": 4}],
    "hicache_storage_backend_extra_config": [{"path": "pages"}],
    "lora_target_modules": [["q_proj"]],
    "max_loaded_loras": [9],
    "mm_threads": [3],
    "moe_dense_tp_size": [1],
    "enable_multimodal": [False],
    "limit_mm_per_prompt": [{"image": 3}],
}
# Options whose choice the plan also has as text for `explain`; the engine reads `choices`.
SHOWN = {f"{kind}_backend" for kind in ("attention", "prefill_attention", "decode_attention", "sampling")}
NOT_STARTED = (Outcome.REFUSED, Outcome.RENAMED)
BY_ITSELF = {"config"}  # a file with other options; see test_config_file


class Checkpoint:
    """A folder with a model's configuration, which is found under every name."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
        self._folder = str(folder)
        self._asked: list[Any] = []
        (folder / "preprocessor_config.json").write_text("{}")
        save_file({"fc.weight": np.zeros(1, np.float32)}, folder / "model.safetensors")
        patch.setattr(assemble, "locate", self._locate)

    def done(self, machine: Machine, **keywords: Any) -> Any:
        """Return everything from which an engine is built: the plan, the model's facts, and the searched folders.

        Returns None if the arguments are refused.
        """
        self._asked = []
        try:
            args = Args.of(**{"model_path": "some/model", "random_seed": 1} | keywords)
            return assemble.prepare(args, machine), self._asked
        except ConfigurationError:
            return None

    def _locate(self, *where: Any, **more: Any) -> str:
        self._asked.append((where, more))
        return self._folder


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    return Checkpoint(tmp_path, monkeypatch)


def values(option: Option) -> Iterator[Any]:
    yield from VALUES.get(option.name, [])
    yield from option.spec.built or option.spec.choices or [other_value(option)]


def changes(checkpoint: Checkpoint, option: Option) -> Iterator[str]:
    """Return the values of the option that change the result in at least one situation."""
    for machine, keywords in SITUATIONS:
        before = checkpoint.done(machine, **keywords)
        for value in values(option):
            after = checkpoint.done(machine, **keywords | {option.name: value})
            if after is not None and after != before:
                yield repr(value)


@pytest.mark.parametrize(
    "option",
    # A start refuses some options, and renamed ones set another option; see test_declarations.
    [o for o in options() if o.name not in BY_ITSELF and o.spec.outcome not in NOT_STARTED],
    ids=lambda o: o.name,
)
def test_an_option_changes_what_is_done_if_and_only_if_it_works(option: Option, checkpoint: Checkpoint) -> None:
    """The results with and without the option are compared, so an option that is read but ignored fails too."""
    changed = next(changes(checkpoint, option), None)
    assert (changed is not None) == (option.spec.outcome is Outcome.WORKS)


@cache
def names_read() -> frozenset[str]:
    """Return the attributes that product code reads, outside the resolution of options."""
    files = [path for folder in ("serve", "runtime", "ops") for path in (ROOT / folder).rglob("*.py")]
    configuration = ROOT / "runtime" / "config"
    read: set[str] = set()
    for path in files:
        if configuration not in path.parents or path.name == "plan.py":
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            read |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    return frozenset(read)


def test_every_field_of_the_plan_is_read() -> None:
    """Fields are matched by name, so the test misses a field whose name is also read from another object, for example
    `path`.
    """
    sections = get_type_hints(Plan).values()
    names = {field.name for section in sections for field in fields(section)} - SHOWN
    assert names - names_read() == set()
