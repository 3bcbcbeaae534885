"""Options about logs, metrics, traces and debugging."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import Json, always, inert, option

_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveArgs:
    """Logs, metrics and traces."""

    log_level: str = option(
        "info",
        "Minimum level of messages that are logged.",
        choices=_LEVELS,
        any_case=True,
        plan="serve.log_level",
    )
    log_level_http: str | None = option(
        None,
        "Minimum level of the HTTP server's messages. Default: the value of --log-level.",
        choices=(*_LEVELS, "trace"),
        any_case=True,
        plan="serve.log_level_http",
    )
    log_json: bool = option(False, "Write each log message as a JSON object on one line.", plan="serve.log_json")
    decode_log_interval: int = option(
        40,
        "Steps between two log lines about the running batch.",
        low=1,
        plan="scheduler.log_interval_steps",
    )
    log_requests: bool = option(
        False, "Log every request when it arrives and when it ends.", plan="observe.request_log_level"
    )
    log_requests_level: int = option(
        2,
        "Detail of the request log. 0: the request id; 1: also the parameters; 2: also the first 2048 characters of "
        "each text; 3: everything.",
        choices=(0, 1, 2, 3),
        plan="observe.request_log_level",
    )
    show_time_cost: bool = inert(
        False,
        "Print the time spent in annotated parts of the code.",
        reason="SGLang annotates no part either; --enable-metrics reports the duration of steps",
    )
    enable_metrics: bool = option(False, "Serve Prometheus metrics at /metrics.", plan="observe.metrics")
    enable_metrics_for_all_schedulers: bool = always(
        False,
        "Let every scheduler report its own metrics.",
        reason="each replica has one scheduler, and every scheduler reports metrics",
    )
    bucket_time_to_first_token: tuple[float, ...] | None = option(
        None,
        "Histogram bounds in seconds for the time to the first token.",
        above=0,
        plan="observe.ttft_bounds",
    )
    bucket_inter_token_latency: tuple[float, ...] | None = option(
        None, "Histogram bounds in seconds for the time between tokens.", above=0, plan="observe.itl_bounds"
    )
    bucket_e2e_request_latency: tuple[float, ...] | None = option(
        None, "Histogram bounds in seconds for whole requests.", above=0, plan="observe.e2e_bounds"
    )
    collect_tokens_histogram: bool = option(False, "Add histograms of prompt and output lengths to the metrics.")
    prompt_tokens_buckets: tuple[str, ...] | None = option(
        None,
        "Histogram bounds of prompt lengths: `default`; `tse MIDDLE BASE COUNT` for COUNT bounds at distances BASE, "
        "BASE ** 2, ... on both sides of MIDDLE; or `customer VALUE ...`. Needs --collect-tokens-histogram.",
        plan="observe.prompt_bounds",
    )
    generation_tokens_buckets: tuple[str, ...] | None = option(
        None,
        "Histogram bounds of output lengths, written like --prompt-tokens-buckets.",
        plan="observe.output_bounds",
    )
    gc_warning_threshold_secs: float = option(
        0.0,
        "Log a warning when Python's garbage collector takes longer than this many seconds; 0: never.",
        low=0,
        plan="observe.collector_warning_s",
    )
    enable_request_time_stats_logging: bool = option(
        False,
        "Log the waiting time and the running time of every finished request.",
        plan="observe.log_request_times",
    )
    kv_events_config: Json | None = option(
        None,
        'Publish events about cached pages. JSON object: {"publisher": "zmq"}, with the optional fields endpoint '
        "(default tcp://*:5557; replica i adds i to the port), replay_endpoint, buffer_steps, hwm, max_queue_size and "
        "topic. The messages have the format of SGLang and vLLM. Needs penstock[kv-events]. Default: no events.",
        plan="observe.kv_events",
    )
    enable_trace: bool = option(
        False,
        "Send OpenTelemetry traces of requests, with spans for tokenization, waiting, prefill and decode. Their parent "
        "is the span in the request's traceparent header. Needs penstock[trace].",
        plan="observe.trace_endpoint",
    )
    oltp_traces_endpoint: str = option(
        "localhost:4317",
        "host:port of the trace collector, which receives spans by gRPC. If $OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is "
        "http/protobuf, the URL of the collector.",
        aliases=("--otlp-traces-endpoint",),
        plan="observe.trace_endpoint",
    )
    tokenizer_metrics_custom_labels_header: str = option(
        "x-customer-labels",
        "HTTP header whose JSON object adds labels to the metrics of a request.",
        plan="observe.labels_header",
    )
    tokenizer_metrics_allowed_customer_labels: tuple[str, ...] | None = option(
        None,
        "Metric labels that the header of --tokenizer-metrics-custom-labels-header may set. Other labels are ignored.",
        aliases=("--tokenizer-metrics-allowed-custom-labels",),
        plan="observe.request_labels",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugArgs:
    """Debugging."""

    crash_dump_folder: str | None = option(
        None,
        "Folder for a JSON file that is written when a step hangs (--watchdog-timeout): stacks, steps in flight, and "
        "requests without their texts.",
        plan="scheduler.crash_folder",
    )
    record: str | None = option(
        None,
        "File for a record of the schedule: the token ids of requests, and each step's decision in about 100 bytes. "
        "penstock replay repeats it, and penstock simulate takes its requests and step times. If the file exists, a "
        "number is added to its name. It holds prompts and outputs as token ids, so protect it like them.",
        plan="scheduler.record_file",
    )
    debug_tensor_dump_output_folder: str | None = option(
        None,
        "Folder for the hidden states and logits of every step. Each step writes a file step-N.safetensors with "
        "input_ids, positions, rows, the output of each layer, the final hidden states, and logits. Steps are slow and "
        "use no graphs. Requires a single replica without pipeline stages.",
        plan="kernels.dump_folder",
    )
    debug_tensor_dump_layers: tuple[int, ...] | None = option(
        None,
        "Layers, counted from 0, whose outputs are written to --debug-tensor-dump-output-folder. Default: all.",
        low=0,
        plan="kernels.dump_layers",
    )
    debug_tensor_dump_input_file: str | None = option(
        None,
        "NumPy file (.npy) with the token ids of a prompt. The server generates one token for it at the start and then "
        "exits.",
        plan="serve.input_file",
    )
    debug_tensor_dump_inject: str | None = inert(
        None,
        "Folder with dumped tensors that replace computed tensors.",
        reason="SGLang reads it for Grok-1 only, a model that Penstock does not serve",
    )
    debug_tensor_dump_prefill_only: bool = inert(
        False, "Dump tensors of prompts only.", reason="SGLang does not read it either"
    )
