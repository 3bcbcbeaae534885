"""Options about logs, metrics and traces, and for finding mistakes."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import Json, always, inert, option
from runtime.config.plan import KernelPlan, ObservePlan, SchedulerPlan, ServePlan

_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveArgs:
    """Logs, metrics and traces."""

    log_level: str = option(
        "info",
        "Least important messages that are logged.",
        choices=_LEVELS,
        any_case=True,
        plan=ServePlan.log_level,
    )
    log_level_http: str | None = option(
        None,
        "The same for the HTTP server's own messages. Default: that of --log-level.",
        choices=(*_LEVELS, "trace"),
        any_case=True,
        plan=ServePlan.log_level_http,
    )
    log_json: bool = option(
        False, "Write each message as a JSON object on a line of its own.", plan=ServePlan.log_json
    )
    decode_log_interval: int = option(
        40,
        "Steps between two log lines about the running batch.",
        low=1,
        plan=SchedulerPlan.log_interval_steps,
    )
    log_requests: bool = option(
        False, "Log every request when it arrives and when it ends.", plan=ObservePlan.request_log_level
    )
    log_requests_level: int = option(
        2,
        "How much of a request is logged: 0 only its name, 1 also its parameters, 2 also the first 2048 "
        "characters of its texts, 3 everything.",
        choices=(0, 1, 2, 3),
        plan=ObservePlan.request_log_level,
    )
    show_time_cost: bool = inert(
        False,
        "Print the time spent in marked parts of the code.",
        reason="no part is marked where it comes from either; --enable-metrics tells the time of steps",
    )
    enable_metrics: bool = option(False, "Serve Prometheus metrics at /metrics.", plan=ObservePlan.metrics)
    enable_metrics_for_all_schedulers: bool = always(
        False,
        "Let every scheduler report metrics of its own.",
        reason="each replica has one scheduler, and each reports",
    )
    bucket_time_to_first_token: tuple[float, ...] | None = option(
        None,
        "Histogram bounds in seconds for the time to the first token.",
        above=0,
        plan=ObservePlan.ttft_bounds,
    )
    bucket_inter_token_latency: tuple[float, ...] | None = option(
        None, "Histogram bounds in seconds for the time between tokens.", above=0, plan=ObservePlan.itl_bounds
    )
    bucket_e2e_request_latency: tuple[float, ...] | None = option(
        None, "Histogram bounds in seconds for whole requests.", above=0, plan=ObservePlan.e2e_bounds
    )
    collect_tokens_histogram: bool = option(False, "Also keep histograms of prompt and output lengths.")
    prompt_tokens_buckets: tuple[str, ...] | None = option(
        None,
        "Histogram bounds of prompt lengths: `default`, `tse MIDDLE BASE COUNT` for bounds that spread from "
        "the middle, or `customer VALUE ...`. Needs --collect-tokens-histogram.",
        plan=ObservePlan.prompt_bounds,
    )
    generation_tokens_buckets: tuple[str, ...] | None = option(
        None,
        "Histogram bounds of output lengths, written like --prompt-tokens-buckets.",
        plan=ObservePlan.output_bounds,
    )
    gc_warning_threshold_secs: float = option(
        0.0,
        "Warn when Python's garbage collector takes longer than so many seconds; 0 never warns.",
        low=0,
        plan=ObservePlan.collector_warning_s,
    )
    enable_request_time_stats_logging: bool = option(
        False,
        "Log for every finished request how long it waited and ran.",
        plan=ObservePlan.log_request_times,
    )
    kv_events_config: Json | None = option(
        None,
        'JSON object that says where events about cached pages are published: {"publisher": "zmq"}, with endpoint '
        "(default tcp://*:5557, of further replicas the ports behind it), replay_endpoint, buffer_steps, hwm, "
        "max_queue_size and topic. The messages are SGLang's and vLLM's. Needs penstock[kv-events]. Default: none are.",
        plan=ObservePlan.kv_events,
    )
    enable_trace: bool = option(
        False,
        "Send OpenTelemetry traces of requests: spans of tokenizing, waiting, prefill and decode, below the span that "
        "a request's traceparent header names. Needs penstock[trace].",
        plan=ObservePlan.trace_endpoint,
    )
    oltp_traces_endpoint: str = option(
        "localhost:4317",
        "host:port of the trace collector, which is asked by gRPC; with $OTEL_EXPORTER_OTLP_TRACES_PROTOCOL "
        "http/protobuf its URL.",
        aliases=("--otlp-traces-endpoint",),
        plan=ObservePlan.trace_endpoint,
    )
    tokenizer_metrics_custom_labels_header: str = option(
        "x-customer-labels",
        "HTTP header whose JSON object adds labels to the metrics of a request.",
        plan=ObservePlan.labels_header,
    )
    tokenizer_metrics_allowed_customer_labels: tuple[str, ...] | None = option(
        None,
        "Labels that this header may set; others are ignored.",
        aliases=("--tokenizer-metrics-allowed-custom-labels",),
        plan=ObservePlan.request_labels,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugArgs:
    """Finding mistakes."""

    crash_dump_folder: str | None = option(
        None,
        "Folder for a record when a step hangs (--watchdog-timeout): stacks, steps in flight, and the requests "
        "without their texts, as JSON.",
        plan=SchedulerPlan.crash_folder,
    )
    debug_tensor_dump_output_folder: str | None = option(
        None,
        "Folder into which the logits of every step that samples are written, as step-N.npz with logits, positions and "
        "rids. Steps become slow. For one replica.",
        plan=KernelPlan.logits_folder,
    )
    debug_tensor_dump_input_file: str | None = option(
        None,
        "NumPy file (.npy) with token ids that are computed once at the start, as the prompt of one output token; then "
        "the server ends.",
        plan=ServePlan.input_file,
    )
    debug_tensor_dump_inject: str | None = inert(
        None,
        "Folder with written tensors that replace the computed ones.",
        reason="only Grok-1 reads it where it comes from, which is not served here",
    )
    debug_tensor_dump_prefill_only: bool = inert(
        False, "Write tensors of prompts only.", reason="nothing reads it where it comes from either"
    )
