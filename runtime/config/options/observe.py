"""Options about logs, metrics and traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import Json, OptionSpec, planned

_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveArgs:
    """Logs, metrics and traces."""

    log_level: Annotated[
        str, OptionSpec("Least important messages that are logged.", choices=_LEVELS, plan="serve.log_level")
    ] = "info"
    log_level_http: Annotated[
        str | None,
        OptionSpec(
            "The same for the HTTP server's own messages. Default: that of --log-level.",
            choices=(*_LEVELS, "trace"),
            plan="serve.log_level_http",
        ),
    ] = None
    decode_log_interval: Annotated[
        int,
        OptionSpec(
            "Steps between two log lines about the running batch.", low=1, plan="schedule.log_interval_steps"
        ),
    ] = 40
    log_requests: Annotated[bool, planned("Log every request when it arrives and when it ends.")] = False
    log_requests_level: Annotated[
        int,
        planned(
            "How much of a request is logged: 0 only its name, 1 also its parameters, 2 also the first 2048 "
            "characters of its texts, 3 everything.",
            choices=(0, 1, 2, 3),
        ),
    ] = 2
    show_time_cost: Annotated[bool, planned("Print the time spent in marked parts of the code.")] = False
    enable_metrics: Annotated[bool, planned("Serve Prometheus metrics at /metrics.")] = False
    enable_metrics_for_all_schedulers: Annotated[
        bool, planned("Let every tensor-parallel rank report metrics of its own.")
    ] = False
    bucket_time_to_first_token: Annotated[
        tuple[float, ...] | None,
        planned("Histogram bounds in seconds for the time to the first token.", above=0),
    ] = None
    bucket_inter_token_latency: Annotated[
        tuple[float, ...] | None, planned("Histogram bounds in seconds for the time between tokens.", above=0)
    ] = None
    bucket_e2e_request_latency: Annotated[
        tuple[float, ...] | None, planned("Histogram bounds in seconds for whole requests.", above=0)
    ] = None
    collect_tokens_histogram: Annotated[
        bool, planned("Also keep histograms of prompt and output lengths.")
    ] = False
    prompt_tokens_buckets: Annotated[
        tuple[str, ...] | None,
        planned(
            "Histogram bounds of prompt lengths: `default`, `tse MIDDLE BASE COUNT` for bounds that spread "
            "from the middle, or `customer VALUE ...`.",
        ),
    ] = None
    generation_tokens_buckets: Annotated[
        tuple[str, ...] | None,
        planned("Histogram bounds of output lengths, written like --prompt-tokens-buckets."),
    ] = None
    gc_warning_threshold_secs: Annotated[
        float,
        planned(
            "Warn when Python's garbage collector takes longer than so many seconds; 0 never warns.", low=0
        ),
    ] = 0.0
    enable_request_time_stats_logging: Annotated[
        bool, planned("Log for every finished request how long it waited and ran.")
    ] = False
    kv_events_config: Annotated[
        Json | None, planned("JSON object that says where events about cached pages are published.")
    ] = None
    enable_trace: Annotated[bool, planned("Send OpenTelemetry traces of requests.")] = False
    oltp_traces_endpoint: Annotated[
        str, planned("host:port of the trace collector.", aliases=("--otlp-traces-endpoint",))
    ] = "localhost:4317"
    tokenizer_metrics_custom_labels_header: Annotated[
        str, planned("HTTP header whose JSON object adds labels to the metrics of a request.")
    ] = "x-customer-labels"
    tokenizer_metrics_allowed_customer_labels: Annotated[
        tuple[str, ...] | None,
        planned(
            "Labels that this header may set.",
            aliases=("--tokenizer-metrics-allowed-custom-labels",),
        ),
    ] = None
