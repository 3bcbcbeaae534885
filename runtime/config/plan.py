"""What will be done: frozen sections, each read by one part, made from Args, Machine and ModelFacts.

After it is made, only the plan is read. A section says for every decided value why it is what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from runtime.config import buckets
from runtime.config.buckets import Bounds
from runtime.config.chat_templates import MiddleTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the plan. Its fields are plain values; the reason for each stands beside them under its name."""

    reasons: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan(Section):
    """Which checkpoint is loaded, from where, in which precision and onto which device."""

    path: str
    load_format: str  # "auto", "safetensors", "pt", "npcache", "sharded_state", "gguf", "dummy"
    dtype: str  # "float32", "bfloat16", "float16"
    device: str  # "cpu", "cuda", "cuda:1"
    context_length: int
    random_seed: int
    is_embedding: bool = False  # nothing is generated
    by_transformers: bool = False  # transformers' modules compute the model
    mmap: bool = True
    num_load_threads: int = 1
    shard_pattern: str | None = None  # how files of sharded_state are called, if not as they are written
    # Functions that give the tensors in place of files, as package.module.name.
    custom_loaders: Sequence[str] = ()
    any_dtype: bool = False  # tensors may differ in their dtypes: all are converted
    delete_after_loading: bool = False  # the checkpoint
    state_dtype: str = "float32"  # of the states of recurrent layers
    always_absorbed: bool = False  # latent attention of prompts too
    # How weights are rounded when they are loaded; None: they stay as they are.
    quantization: str | None = None
    kv_scales: str | None = None  # a file with those of an 8-bit cache


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan(Section):
    """The pages of the KV cache: their size, their precision, and how much memory they get."""

    page_size: int
    prefix_cache: bool  # keep finished prefixes in the radix tree
    kv_dtype: str  # as torch calls it: that of the model, "bfloat16", "float8_e5m2", "float8_e4m3fn"
    mem_fraction: float  # of the device's memory, for weights and KV together; or, if `of_free_memory`,
    of_free_memory: bool = False  # of the memory that is free once the weights are in place, for KV alone
    max_total_tokens: int | None  # cap; the pool is sized when the weights are in place
    # Pages of sliding-window layers for each page of the others; None: as many, in one pool.
    window_ratio: float | None = None
    max_states: int | None = None  # of recurrent layers; None: as memory allows


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPlan(Section):
    """How many sequences run and wait, and what a step may compute."""

    max_running: int
    max_queued: int
    max_queued_tokens: int = 2**23  # of the prompts that wait
    chunk_tokens: int | None  # prompt tokens per step and per chunk; None: whole prompts
    max_prefill_tokens: int
    policy: str  # "fcfs", "lpm", ...
    mixed: bool  # prompts and running rows share a step
    overlap: bool  # launch step n+1 before the tokens of step n are known
    new_token_ratio: float  # share of the remaining output that admission reserves, at first
    min_new_token_ratio: float
    new_token_ratio_decay: float  # per step
    open_ended_tokens: int = 256  # output expected, at first, of a request that states no limit
    stream_interval: int
    log_interval_steps: int
    watchdog_timeout_s: float
    crash_folder: str | None = None  # for a record of what went on when a step hangs
    max_queue_time_s: float | None = None  # that a request may wait; None: as long as it takes
    micro_batches: int = 1  # in flight at the same time, without a sequence in common: one for each stage
    priorities: bool = False  # requests have them: they order the queue, displace, and interrupt who runs
    low_priority_first: bool = False  # lower numbers go before higher ones
    # A priority must be further above a running one's than this to interrupt it.
    preemption_threshold: int = 10
    max_new_sequences: int | None = None  # that one step takes on; None: no limit of its own
    max_forced: int = 0  # tokens that a grammar forces are appended up to so many at once; 0: each is sampled
    # Of the running rows: so many steps of one token must be saved by that at a time.
    forced_share: float = 0.0
    receive_interval: int = 1  # steps between two looks at the inbox while something runs
    max_micro_batch: int | None = None  # rows of one of them; None: no limit of its own

    @property
    def step_prompt_tokens(self) -> int:
        """Prompt tokens of one step, but for a single whole prompt that is longer."""
        return self.chunk_tokens or self.max_prefill_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan(Section):
    """Which implementation of each operation runs."""

    # By file role: operation -> "native", "with_cpp", "with_triton". "attention" is for rows of one
    # token where "prefill_attention" differs from it.
    choices: Mapping[str, str] = field(default_factory=dict)
    fallback: Mapping[str, str] | None = None  # instead, where the kernels in C++ turn out not to compile
    # What backends are made with, by file.
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # The same as users call it: "torch_native", "triton", ...
    attention_backend: str = "torch_native"
    prefill_attention_backend: str = "torch_native"  # of rows of several tokens
    decode_attention_backend: str = "torch_native"  # of rows of one token
    sampling_backend: str = "pytorch"
    # Log-probabilities of the output are of the logits before anything changes them.
    raw_logprobs: bool = False
    logits_folder: str | None = None  # where the logits of every step are written; None: nowhere
    nan_detection: bool = False  # say where values stop being finite numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan(Section):
    """Which steps are captured or compiled ahead."""

    sizes: tuple[int, ...] = ()  # rows of one token for which a CUDA graph is captured; (): no graphs
    padding: bool = True  # a batch may be filled up to the next size
    profile: bool = False  # log a profile of each capture
    collect_garbage: bool = False  # while capturing
    compile_max_rows: int = 0  # up to which torch.compile is used; 0: it is not


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan(Section):
    """Over how many processes and devices the model is spread."""

    tp_size: int = 1  # ranks that share every layer
    pp_size: int = 1  # stages, each with a share of the layers
    dp_size: int = 1  # copies of the model
    balance: str = "round_robin"  # how requests are spread over the copies
    gpu_step: int = 1  # distance between the numbers of the GPUs in use
    nnodes: int = 1  # machines
    node_rank: int = 0  # this one among them
    master_address: tuple[str, int] | None = None  # host and port of the first machine, where the others join
    store_port: int | None = None  # of the rendezvous of the ranks; None: any that is free
    join_timeout_s: float = 600.0  # for all processes to be there at the start

    @property
    def ranks(self) -> int:
        """Processes of one copy of the model."""
        return self.tp_size * self.pp_size

    @property
    def ranks_here(self) -> range:
        """Of one copy, those that are on this machine."""
        share = self.ranks // self.nnodes
        return range(self.node_rank * share, (self.node_rank + 1) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerPlan(Section):
    """How text becomes ids and back, and how the model writes thoughts and calls."""

    tokenizer_path: str | None  # None: ids in, ids out
    mode: str  # "auto", "slow"
    trust_remote_code: bool
    revision: str | None
    chat_template: str | None  # a file or a builtin name; None: the tokenizer's own
    tool_call_parser: str | None = None  # a name of `runtime.config.parsers`; None: calls are not recognised
    reasoning_parser: str | None = None  # a name of `runtime.config.parsers`; None: the output is not divided
    grammar_backend: str = "none"
    memory_only_automata: bool = False  # those of outlines are not kept on disk
    middle: MiddleTemplate | None = None  # of prompts with a suffix; None: as the tokenizer's tokens tell
    encoder_threads: int = 2  # that tokenize long texts
    json_whitespace: str | None = None  # regular expression; None: the backend's


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan(Section):
    """Where the server listens, who may call it, and what it answers on its own account."""

    host: str
    port: int
    api_key: str | None = field(repr=False)
    served_model_name: str
    log_level: str
    log_level_http: str
    log_json: bool = False
    skip_warmup: bool
    input_file: str | None = None  # with token ids that are computed once, and then the server ends
    cache_report: bool  # usage.prompt_tokens_details
    preferred_sampling: Mapping[str, Any]
    allow_auto_truncate: bool
    file_storage: str | None = None  # folder of /v1/files; None: there are no files and batches
    weight_version: str
    chat_page: bool = True
    admin_api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    cors_allow_origins: tuple[str, ...] = ()  # other than our own
    shutdown_timeout_s: float = 30.0  # for running requests, from the first signal
    refuse_unknown_fields: bool = False  # of bodies; else they are ignored
    ignore_model_name: bool = False  # in bodies; else only the served one's is taken
    ssl_certfile: str | None = None  # None: connections are not encrypted
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    ssl_ca_certs: str | None = None  # of the authorities of clients' certificates
    max_open_calls: int | None = None  # of one client; None: no limit
    max_body_bytes: int | None = None  # of a request on any route; None: by what the route takes


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsPlan:
    """Where events about cached pages go, by ZeroMQ; the names are those of --kv-events-config."""

    endpoint: str = "tcp://*:5557"  # of the first replica; the others have the ports behind it
    replay_endpoint: str | None = None  # where subscribers ask for what they missed
    buffer_steps: int = 10_000  # batches that are kept for them
    hwm: int = 100_000  # messages that may wait for one subscriber
    max_queue_size: int = 100_000  # batches that may wait to be sent
    topic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservePlan(Section):
    """What is counted and logged of requests and steps."""

    metrics: bool = False
    ttft_bounds: Bounds = buckets.TIME_TO_FIRST_TOKEN
    itl_bounds: Bounds = buckets.INTER_TOKEN_LATENCY
    e2e_bounds: Bounds = buckets.E2E_LATENCY
    prompt_bounds: Bounds = ()  # of the histogram of prompt lengths; (): there is none
    output_bounds: Bounds = ()
    # A JSON object whose entries become labels of the request's metrics.
    labels_header: str = "x-customer-labels"
    request_labels: tuple[str, ...] = ()  # those that it may set
    request_log_level: int | None = None  # how much is logged of each request; None: nothing
    log_request_times: bool = False
    trace_endpoint: str | None = None  # where spans of requests are sent; None: nowhere
    kv_events: KvEventsPlan | None = None  # None: nobody is told what is cached
    collector_warning_s: float = 0.0  # garbage collections that take longer are logged; 0.0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All sections."""

    model: ModelPlan
    cache: CachePlan
    scheduler: SchedulerPlan
    kernels: KernelPlan
    tokenizer: TokenizerPlan
    serve: ServePlan
    parallel: ParallelPlan = field(default_factory=ParallelPlan)
    graphs: GraphPlan = field(default_factory=GraphPlan)
    observe: ObservePlan = field(default_factory=ObservePlan)

    def decision(self, field: Any) -> tuple[Any, str]:
        """(value, reason) of a field that is named as `CachePlan.page_size`; no reason where none was noted."""
        for section in (getattr(self, each.name) for each in fields(self)):
            if type(section) is field.__objclass__:
                return field.__get__(section), section.reasons.get(field.__name__, "")
        raise LookupError(f"the plan has no section {field.__objclass__.__name__}")
