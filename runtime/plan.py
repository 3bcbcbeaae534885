"""What will be done: frozen sections, each read by one part, made from Args, Machine and ModelFacts.

Nobody reads Args after this. `Plan.because` says for every decided value why it is what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    path: str
    load_format: str  # "auto", "safetensors", "pt", "dummy"
    dtype: str  # "float32", "bfloat16", "float16"
    device: str  # "cpu", "cuda", "cuda:1"
    context_length: int
    random_seed: int
    mmap: bool = True
    num_load_threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    page_size: int
    prefix_cache: bool  # keep finished prefixes in the radix tree
    kv_dtype: str
    mem_fraction: float  # of the device's memory, for weights and KV together; or, if `modest`,
    modest: bool = False  # of the memory that is free once the weights are in place, for KV alone
    max_total_tokens: int | None  # cap; the pool is sized when the weights are in place


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlan:
    max_running: int
    max_queued: int
    chunk_tokens: int | None  # prompt tokens per step and per chunk; None: whole prompts
    max_prefill_tokens: int
    policy: str  # "fcfs", "lpm", ...
    mixed: bool  # prompts and running rows share a step
    overlap: bool  # launch step n+1 before the tokens of step n are known
    new_token_ratio: float  # share of the remaining output that admission reserves, at first
    min_new_token_ratio: float
    new_token_ratio_decay: float  # per step
    stream_interval: int
    log_interval_steps: int
    watchdog_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan:
    """Implementation chosen for each operation, by file role: "native", "with_onednn", ..."""

    choices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    tokenizer_path: str | None  # None: ids in, ids out
    mode: str  # "auto", "slow"
    trust_remote_code: bool
    revision: str | None
    chat_template: str | None  # a file or a builtin name; None: the tokenizer's own


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    host: str
    port: int
    api_key: str | None = field(repr=False)
    served_model_name: str
    log_level: str
    log_level_http: str
    skip_warmup: bool
    cache_report: bool  # usage.prompt_tokens_details
    preferred_sampling: Mapping[str, Any]
    allow_auto_truncate: bool
    weight_version: str
    chat_page: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    model: ModelPlan
    cache: CachePlan
    schedule: SchedulePlan
    kernels: KernelPlan
    text: TextPlan
    serve: ServePlan
    because: Mapping[str, str]  # "cache.page_size" -> one sentence
