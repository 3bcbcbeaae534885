"""The plan: all decided settings of an engine, as frozen sections. Each part of the engine reads its own section.

`runtime.config.resolve` makes the plan from Args, Machine and ModelFacts. Later code reads only the plan. Each section
keeps the reasons for its decided values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.config import buckets
from runtime.config.buckets import Bounds
from runtime.config.chat_templates import MiddleTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the plan, with plain values. `reasons` maps the name of a field to the reason for its value."""

    reasons: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan(Section):
    """The checkpoint: its path, format, precision and device."""

    path: str
    load_format: str  # format of the weight files: "auto", "safetensors", "pt", "npcache", "sharded_state", "gguf", ...
    dtype: str  # dtype in which the model computes: "float32", "bfloat16", "float16"
    device: str  # torch's name: "cpu", "cuda", "cuda:1"
    context_length: int
    random_seed: int
    is_embedding: bool = False  # compute vectors only; generate no text
    by_transformers: bool = False  # the model is computed by transformers' modules
    mmap: bool = True  # map the weight files into memory instead of reading them
    num_load_threads: int = 1
    shard_pattern: str | None = None  # file names of sharded_state; None: the names that `penstock shard` writes
    # Functions that yield the tensors, so that no files are read; named package.module.function.
    custom_loaders: Sequence[str] = ()
    # The running server from which load format remote_instance copies the weights, and its port for each rank.
    seed_address: str | None = None
    seed_port: int | None = None
    seed_group_ports: Sequence[int] | None = None
    seed_key: str | None = field(default=None, repr=False)  # admin key of the running server
    any_dtype: bool = False  # convert tensors of mixed dtypes instead of refusing them
    delete_after_loading: bool = False  # delete the checkpoint's files
    memory_saver: bool = False  # GPU memory can be released while the engine runs, so no graph may hold addresses in it
    state_dtype: str = "float32"  # dtype of recurrent states
    always_absorbed: bool = False  # use the absorbed form of latent attention (MLA) for prompts too
    deterministic: bool = False  # results depend on the request alone; on a CPU, this implies `always_absorbed`
    dependence: str | None = None  # reason why results may depend on other requests; None: they do not
    # Quantisation method that rounds the weights while they load; None: keep them.
    quantization: str | None = None
    kv_scales: str | None = None  # file with the scales of an 8-bit KV cache
    config_overrides: Mapping[str, Any] = field(default_factory=dict)  # values that replace those of config.json
    # Layers whose weights a GPU keeps in host memory: as many as fit into `offload_gib` (in 2^30 bytes), or the last
    # `offload_in_group` of every `offload_group` layers. 0: none.
    offload_gib: int = 0
    offload_group: int = 0
    offload_in_group: int = 1
    offload_ahead: int = 1  # number of these layers that are copied to the GPU ahead of the layer in use
    offload_host_bytes: int = 0  # host memory that each rank may use for these layers; 0: unknown, or there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan(Section):
    """The KV cache: page size, precision and memory."""

    page_size: int
    prefix_cache: bool  # share computed prefixes through the radix tree
    kv_dtype: str  # torch's name: the model's dtype, "float8_e5m2" or "float8_e4m3fn"
    # Share of the device's memory that weights and KV cache may use together. If `of_free_memory` is set, only the KV
    # cache counts, and this is its share of the memory that is free after the weights are loaded.
    mem_fraction: float
    of_free_memory: bool = False
    max_total_tokens: int | None  # maximum number of tokens in the KV cache; None: as many as memory allows
    # Pages of sliding-window layers per page of the other layers; None: one pool for all layers.
    window_ratio: float | None = None
    # Whether all ranks have equal pages, as with latent attention. A rank can then use the pages of any other rank.
    same_pages: bool = False
    max_states: int | None = None  # maximum number of state slots of recurrent layers; None: as many as memory allows
    pin_share: float = 0.0  # maximum share of the pages that pinned prefixes may take
    swap_space_gib: float = 0.0  # host memory per rank, in GiB, for the KV of retracted sequences
    host_tier: bool = False  # keep pages of the prefix tree in host memory too
    host_ratio: float = 2.0  # number of pages of the host tier per page of the device
    host_gb: int = 0  # size of the host tier per rank, in 10^9 bytes; 0: `host_ratio` decides
    write_policy: str = "write_through"  # when a page is copied to the host tier; see `kv_cache.host_tier`
    copy_backend: str = "kernel"  # how a GPU copies pages to and from the host: "kernel" or "direct"
    # "prefill" or "decode" if separate servers compute prompts and outputs; "replicas" if separate replicas of this
    # server do; "null": each replica computes both.
    role: str = "null"
    storage: str | None = None  # backend of the storage tier: "file" or "dynamic"; None: no storage at start
    prefetch_policy: str = "timeout"  # how long a request waits for pages from storage
    storage_config: Mapping[str, Any] = field(default_factory=dict)  # settings of the storage backend
    host_layout: str = "layer_first"  # order of the data in host memory: by layer ("layer_first"), or by page


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPlan(Section):
    """Limits on running and waiting sequences, and on the work of a step."""

    max_running: int
    max_queued: int
    max_queued_tokens: int = 2**23  # maximum number of tokens of all waiting prompts
    # Name of an API key -> weight of its share of the rows; other keys have weight 1.
    owner_weights: Mapping[str, float] = field(default_factory=dict)
    chunk_tokens: int | None  # maximum number of prompt tokens per step and per chunk; None: no chunked prefill
    max_prefill_tokens: int  # maximum number of prompt tokens per step; a single longer prompt may exceed it
    last_chunk_tokens: int | None = None  # maximum number of tokens in a prompt's last chunk; None: no such limit
    policy: str  # order of the waiting requests: "fcfs", "lpm", ...
    mixed: bool  # whether a step may hold both prompts and decode rows
    overlap: bool  # launch step n+1 before the tokens of step n are known
    new_token_ratio: float  # initial share of a request's remaining output tokens for which admission reserves pages
    min_new_token_ratio: float
    new_token_ratio_decay: float  # decrease of `new_token_ratio` per step
    reserved_tokens: int = 0  # minimum output tokens of each running sequence for which admission reserves pages
    open_ended_tokens: int = 256  # initial estimate of the output of a request without `max_tokens`
    stream_interval: int
    log_interval_steps: int
    watchdog_timeout_s: float
    crash_folder: str | None = None  # folder for the record that is written if a step hangs; None: no record
    record_file: str | None = None  # file to which the schedule of all steps is recorded; None: no record
    max_queue_time_s: float | None = None  # longest time that a request may wait in the queue; None: no limit
    micro_batches: int = 1  # number of batches in flight, with disjoint sequences: one per pipeline stage
    priorities: bool = False  # priorities order the queue, displace waiting requests and interrupt running ones
    tiers: Mapping[str, int] = field(default_factory=dict)  # priorities of service tiers; {}: tiers have no effect
    max_first_token_s: float | None = None  # requests with a longer predicted time to the first token are refused
    low_priority_first: bool = False  # lower priority numbers go first
    # A waiting request interrupts a running one if the waiting request's priority is higher by more than this.
    preemption_threshold: int = 10
    max_new_sequences: int | None = None  # maximum number of new sequences per step; None: no limit
    # Maximum number of forced tokens (the only tokens that a grammar allows) appended at once; 0: sample every token.
    max_forced: int = 0
    # Forced tokens are appended if they save at least `forced_share` * (number of running rows) decode rows.
    forced_share: float = 0.0
    max_drafts: int = 0  # maximum number of draft tokens per row; 0: no speculation
    max_step_drafts: int = 256  # maximum number of draft tokens per step
    max_lookup_drafts: int = 0  # maximum number of draft tokens from prompt lookup per row; 0: no prompt lookup
    max_model_drafts: int = 0  # maximum number of draft tokens from a draft model or head per row; 0: no such model
    draft_topk: int = 1  # number of alternative ids that a draft model or head proposes for each draft token
    max_tree_drafts: int = 0  # maximum number of draft tokens from a draft model per row, including alternatives
    max_lookup_ids: int = 0  # maximum number of draft tokens from prompt lookup per row, including alternatives
    # Minimum factor by which draft tokens must speed up decoding (in tokens per second). While the factor is lower,
    # steps have no draft tokens. None: steps always have draft tokens.
    min_draft_gain: float | None = None
    overlap_drafts: bool = False  # whether a sequence may enter the next step while the result of its drafts is unknown
    # Whether `overlap_drafts` also applies to sampled sequences, whose random numbers depend on the output position.
    overlap_draws: bool = False
    draft_constraints: bool = True  # whether a draft model may propose tokens for sequences with a constraint
    draft_windows: tuple[int, int] = (2, 8)  # smallest and largest n-gram that prompt lookup compares
    # Maximum numbers of continuations that prompt lookup proposes: after the longest and after the shortest n-grams.
    draft_breadths: tuple[int, int] = (1, 1)
    drafts_by_frequency: bool = False  # whether prompt lookup prefers frequent continuations to recent ones
    draft_capacity: int = 10_000_000  # maximum number of states of a sequence's index for prompt lookup
    max_corpus_drafts: int = 0  # maximum number of draft tokens from corpora per row; 0: corpora are not used
    adapter_slots: int = 0  # maximum number of LoRA adapters in one batch
    adapters_fifo: bool = False  # evict adapters in FIFO order instead of the least recently used first
    target_token_ms: float | None = None  # target for the time between two tokens of a stream; None: no target
    receive_interval: int = 1  # number of steps between two reads of the inbox while sequences run
    max_micro_batch: int | None = None  # maximum number of rows per micro-batch; None: no limit

    @property
    def step_prompt_tokens(self) -> int:
        """Maximum number of prompt tokens in one step. A single longer prompt that is not chunked may exceed it."""
        return self.chunk_tokens or self.max_prefill_tokens

    @property
    def takes_branches(self) -> bool:
        """Whether draft tokens may have alternatives."""
        by_model, looked_up = self.max_model_drafts > 0, self.max_lookup_drafts > 0
        return (by_model and self.draft_topk > 1) or (looked_up and self.draft_breadths[1] > 1)

    @property
    def max_row_drafts(self) -> int:
        """Maximum number of draft tokens of a sequence in one step, including alternatives."""
        by_model = self.max_tree_drafts if self.max_model_drafts and self.draft_topk > 1 else 0
        looked_up = self.max_lookup_ids if self.max_lookup_drafts and self.draft_breadths[1] > 1 else 0
        return max(self.max_drafts, by_model, looked_up)

    @property
    def max_sampled(self) -> int:
        """Maximum number of positions that one step samples."""
        return self.max_running + min(self.max_row_drafts * self.max_running, self.max_step_drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan(Section):
    """The kernels: which file implements each operation, and settings for logits and debugging."""

    # Maps each operation to the file that implements it: "native", "with_cpp", "with_triton". If the key
    # "prefill_attention" exists, its file computes rows of several tokens. If "draft_attention" exists too, the same
    # file computes rows with draft tokens; otherwise the file of "attention" does.
    choices: Mapping[str, str] = field(default_factory=dict)
    # Replaces `choices` if the C++ kernels do not compile; None: a compile error is raised.
    fallback: Mapping[str, str] | None = None
    # Whether requests are accepted while the C++ kernels compile. Until then, the kernels of `fallback` compute steps.
    in_background: bool = False
    # File of a backend -> its settings.
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Backends by the names that the command-line options use: "torch_native", "triton", ...
    attention_backend: str = "torch_native"
    prefill_attention_backend: str = "torch_native"  # for rows of several tokens
    decode_attention_backend: str = "torch_native"  # for rows of one token
    sampling_backend: str = "pytorch"
    # Whether log-probabilities are computed from the model's logits before penalties, bias, masks and temperature.
    raw_logprobs: bool = False
    dump_folder: str | None = None  # folder for the hidden states and logits of every step; None: do not write them
    dump_layers: Sequence[int] | None = None  # layers whose outputs are written to `dump_folder`; None: all layers
    nan_detection: bool = False  # log the layer that first computes non-finite values


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """An adapter to load at the start."""

    name: str
    path: str
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPlan(Section):
    """LoRA adapters: which layers they may change, and how many are kept."""

    enabled: bool = False
    sources: tuple[AdapterSource, ...] = ()
    max_rank: int = 0
    targets: tuple[str, ...] | None = None  # layers that adapters may change, by the last part of their name; None: all
    max_slots: int = 0  # maximum number of adapters in one batch
    max_loaded: int | None = None  # maximum number of adapters in host memory; None: no limit
    folder: str | None = None  # folder or URL with adapters that are loaded when a request names them
    download_dir: str | None = None  # folder for copies of adapters from a store; None: the user's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan(Section):
    """The model, draft head or corpus that proposes tokens, and how they are accepted."""

    algorithm: str | None = None  # "STANDALONE", "EAGLE", "EAGLE3", "NEXTN"; None: no draft model
    # Folder or GGUF file of the draft model; None: no draft model, or draft layers in the served model's checkpoint.
    path: str | None = None
    revision: str | None = None  # branch, tag or commit on the Hub
    token_map: str | None = None  # file with the ids of the tokens that a draft head proposes; None: all tokens
    corpus_path: str | None = None  # file with texts in which prompt lookup also finds draft tokens; None: no file
    max_corpus_tokens: int = 10_000_000  # maximum number of tokens of all corpora
    # Relaxed acceptance in sampled rows (`worker.relaxed_acceptance`). A draft token to which the served model gives
    # the probability p is accepted if p >= `accept_single`, otherwise with probability p / `accept_divisor`.
    accept_single: float = 1.0
    accept_divisor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPlan(Section):
    """Images, videos and audio in requests: whether they are accepted, where they are read, and their limits."""

    enabled: bool = False
    refusal: str = ""  # why images are refused; "": they are accepted
    # maximum number of items per request, by kind
    limits: Mapping[str, int] = field(default_factory=lambda: {"image": 64, "video": 4, "audio": 16})
    folder: str | None = None  # folder with the files that requests may name; None: no files
    domains: tuple[str, ...] = ()  # hosts from which images are fetched; (): none
    timeout_s: float = 10.0
    max_pixels: int = 2**25
    max_bytes: int = 2**25
    max_frames: int = 64  # maximum number of frames of a video
    max_video_pixels: int = 2**26  # maximum number of pixels of all frames of a video together
    max_audio_s: float = 600.0
    transcription_model: str | None = None  # path or name of a Whisper model; None: audio is not transcribed
    cache_bytes: int = 2**30  # host memory for cached vectors of images
    num_threads: int = 2
    fast: bool = True  # use torchvision's image processors if they are available
    # Whether the user asked for media. The start then fails if the model cannot take them.
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan(Section):
    """Steps that are captured as CUDA graphs, or compiled with torch.compile at start."""

    sizes: tuple[int, ...] = ()  # batch sizes for which decode steps are captured; (): no CUDA graphs
    padding: bool = True  # whether a batch is padded to the next captured size
    # Numbers of tokens for which steps with prompts are captured, without their attention calls; (): none.
    prompt_sizes: tuple[int, ...] = ()
    profile: bool = False  # log a profile of each capture
    collect_garbage: bool = False  # whether Python's garbage collector may run during a capture
    compile_max_rows: int = 0  # maximum number of rows of batches for torch.compile; 0: do not compile


def stage_nodes(nnodes: int, pp_size: int) -> int:
    """Return the number of machines per pipeline stage, or 1 if the machines cannot be divided evenly among stages."""
    return 1 if nnodes % pp_size else nnodes // pp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan(Section):
    """How processes, devices and machines share the model and its requests."""

    tp_size: int = 1  # number of ranks that share every layer (tensor parallelism)
    pp_size: int = 1  # number of pipeline stages, each with a share of the layers
    dp_size: int = 1  # number of replicas, each with its own requests and KV cache
    dp_attention: bool = False  # whether the replicas are attention groups of one copy of the model
    head_by_group: bool = False  # whether each attention group computes the logits of its own rows
    # Two-batch overlap: a row is divided between the halves of a step if the smaller half would otherwise have less
    # than this share of the tokens. None: steps are not split into halves.
    two_batches: float | None = None
    whole_dense: bool = False  # whether each rank has the whole dense MLPs of a mixture-of-experts model
    prefill_replicas: int = 0  # number of replicas that compute prompts for the others; 0: each computes its own
    symmetric_memory: bool = False  # whether ranks add small tensors through symmetric memory
    balance: str = "round_robin"  # load-balancing method among the replicas
    gpu_step: int = 1  # distance between the indices of used GPUs
    numa_nodes: tuple[int, ...] | None = None  # NUMA node of each rank on this machine; None: ranks are not bound
    nnodes: int = 1  # number of machines
    node_rank: int = 0  # index of this machine
    master_address: tuple[str, int] | None = None  # host and port of the first machine
    store_port: int | None = None  # port of the ranks' rendezvous; None: any free port
    join_timeout_s: float = 600.0  # longest time to wait at start until all processes have connected

    @property
    def ranks(self) -> int:
        """Number of processes that compute one copy of the model."""
        return self.tp_size * self.pp_size

    @property
    def copies(self) -> int:
        """Number of copies of the model."""
        return 1 if self.dp_attention else self.dp_size

    @property
    def num_groups(self) -> int:
        """Number of attention groups of a copy of the model."""
        return self.dp_size if self.dp_attention else 1

    @property
    def attention_ranks(self) -> int:
        """Number of ranks that share the attention layers of a sequence."""
        return self.tp_size // self.num_groups

    @property
    def stage_nodes(self) -> int:
        """Number of machines per pipeline stage, or 1 if the machines cannot be divided evenly among the stages."""
        return stage_nodes(self.nnodes, self.pp_size)

    @property
    def ranks_here(self) -> range:
        """The ranks of one copy of the model that run on this machine."""
        share = self.ranks // self.nnodes
        return range(self.node_rank * share, (self.node_rank + 1) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan(Section):
    """The experts of mixtures: their placement on ranks, load balancing, and records of their use."""

    ep_size: int = 1  # number of parts among which the experts are divided; divides `parallel.tp_size`
    # How the partial results of the ranks are added. "none": by all-reduce. "all_to_all": in large steps, each token's
    # results are sent to one rank, which adds them; all ranks then gather the sums.
    exchange: str = "none"
    num_redundant: int = 0  # number of further copies of busy experts, on all ranks together
    dispatch: str = "static"  # how one of an expert's copies is chosen for a token: "static", "dynamic", "fake"
    location: str = "trivial"  # initial placement of experts: "trivial", JSON text, or a file
    balance: bool = False  # move experts to balance the load of the ranks
    balance_algorithm: str = "auto"
    balance_steps: int = 1000  # number of steps between two rebalances
    balance_layers: int | None = None  # maximum number of layers whose experts move between two steps; None: all
    balance_threshold: float = 1.0  # mean utilization of the ranks above which no expert moves
    record: str | None = None  # what is recorded: "stat", "stat_approx", "per_pass", "per_token"; None: nothing
    record_steps: int = 1000  # number of steps that a record holds; -1: all steps
    log_balance: bool = False
    returned: bool = False  # whether requests may ask for the routed experts of their tokens

    @property
    def records(self) -> bool:
        """Whether each step must report which experts the router chose."""
        return self.record is not None or self.returned


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerPlan(Section):
    """The tokenizer, the chat template, and the parsers of tool calls and reasoning."""

    tokenizer_path: str | None  # path of the tokenizer; None: no tokenizer, requests contain token ids
    mode: str  # kind of tokenizer library: "auto" or "slow"
    trust_remote_code: bool
    revision: str | None
    chat_template: str | None  # a file or a built-in name; None: the tokenizer's own template
    tool_call_parser: str | None = None  # a name of `runtime.config.parsers`; None: do not parse tool calls
    reasoning_parser: str | None = None  # a name of `runtime.config.parsers`; None: do not parse reasoning
    grammar_backend: str = "none"
    memory_only_automata: bool = False  # do not store outlines' automata on disk
    middle: MiddleTemplate | None = None  # fill-in-the-middle prompts; None: guess from the tokenizer's tokens
    encoder_threads: int = 2  # number of threads that tokenize long texts
    # Regular expression for whitespace in JSON outputs; None: the grammar backend's default.
    json_whitespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan(Section):
    """The HTTP server: address, keys, certificates and limits."""

    host: str
    port: int
    api_key: str | None = field(repr=False)
    returns_hidden: bool = False  # requests may ask for the hidden states of their tokens
    served_model_name: str
    log_level: str
    log_level_http: str
    log_json: bool = False
    skip_warmup: bool
    input_file: str | None = None  # file with token ids: the server computes them once and exits
    cache_report: bool  # report cached prompt tokens in usage.prompt_tokens_details
    preferred_sampling: Mapping[str, Any]
    model_sampling: bool = True  # whether the APIs take sampling defaults from generation_config.json
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    logits_processors: Sequence[str] | None = None  # import paths of functions that requests may name
    allow_auto_truncate: bool
    file_storage: str | None = None  # folder of /v1/files; None: no files and batches
    weight_version: str
    chat_page: bool = True
    admin_api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    cors_allow_origins: tuple[str, ...] = ()  # origins from which browsers may call the server, besides its own
    public_origin: str | None = None  # origin of the chat page behind a proxy
    shutdown_timeout_s: float = 30.0  # time that running requests have to finish after the first stop signal
    refuse_unknown_fields: bool = False  # False: ignore and log them
    ignore_model_name: bool = False  # accept any `model` in requests
    ssl_certfile: str | None = None  # file with the server's certificate; None: no TLS
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    ssl_ca_certs: str | None = None  # file with the authorities that sign clients' certificates
    max_open_calls: int | None = None  # maximum number of open calls per client; None: no limit
    max_choice_tokens: int = 65_536  # limit on n * max_new_tokens of a prompt with n > 1
    max_body_bytes: int | None = None  # maximum size of a request body on all routes; None: each route's own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsPlan:
    """Settings for publishing KV-cache events over ZeroMQ. The field names are those of --kv-events-config."""

    endpoint: str = "tcp://*:5557"  # address of the first replica; replica i adds i to the port
    replay_endpoint: str | None = None  # address at which subscribers request missed batches; None: no replay
    buffer_steps: int = 10_000  # number of batches kept for replay
    hwm: int = 100_000  # maximum number of messages queued for one subscriber
    max_queue_size: int = 100_000  # maximum number of batches queued for sending
    topic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservePlan(Section):
    """Metrics, logs and traces of requests and steps."""

    metrics: bool = False
    ttft_bounds: Bounds = buckets.TIME_TO_FIRST_TOKEN
    itl_bounds: Bounds = buckets.INTER_TOKEN_LATENCY
    e2e_bounds: Bounds = buckets.E2E_LATENCY
    prompt_bounds: Bounds = ()  # bucket bounds of the histogram of prompt lengths; (): no histogram
    output_bounds: Bounds = ()
    # Header with a JSON object whose entries become labels of the request's metrics.
    labels_header: str = "x-customer-labels"
    request_labels: tuple[str, ...] = ()  # labels that the header may set
    request_log_level: int | None = None  # detail of the request log; None: off
    log_request_times: bool = False
    trace_endpoint: str | None = None  # OTLP endpoint for spans; None: off
    kv_events: KvEventsPlan | None = None  # None: do not publish events
    collector_warning_s: float = 0.0  # log garbage collections that take longer than this; 0.0: off


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All sections of the plan."""

    model: ModelPlan
    cache: CachePlan
    scheduler: SchedulerPlan
    kernels: KernelPlan
    tokenizer: TokenizerPlan
    serve: ServePlan
    parallel: ParallelPlan = field(default_factory=ParallelPlan)
    graphs: GraphPlan = field(default_factory=GraphPlan)
    observe: ObservePlan = field(default_factory=ObservePlan)
    lora: LoraPlan = field(default_factory=LoraPlan)
    draft: DraftPlan = field(default_factory=DraftPlan)
    media: MediaPlan = field(default_factory=MediaPlan)
    experts: ExpertPlan = field(default_factory=ExpertPlan)

    def decision(self, path: str) -> tuple[Any, str]:
        """Return (value, reason) of a field given as "SECTION.FIELD", for example "cache.page_size".

        The reason is "" if the section has none for this field.
        """
        name, _, field_name = path.partition(".")
        section = getattr(self, name)
        return getattr(section, field_name), section.reasons.get(field_name, "")
