"""Write the documentation's tables from declarations.

docs/arguments.md, docs/sampling.md, docs/monitoring/metrics.md, docs/models.md, and the differences from SGLang in
docs/migration.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from bench.option_outcomes import counts, outcome
from runtime.config import Option, Outcome, options, shown
from runtime.metrics.declarations import METRICS, MODEL, REPLICA, Metric
from runtime.models.registry import HEADS
from runtime.sampling_params import APIS, NOT_BUILT, Parameter, parameters
from serve.cli.models_table import HEAD, cells_of
from serve.cli.models_table import rows as model_rows
from serve.cli.usage import by_group, outcome_note, spellings, values_of

_DOCUMENT = """\
# Options

Every option of `penstock` (`python -m serve`). `just docs` writes this page. An
option is a flag on the command line, a key with dashes or underscores in a `--config` file, and a keyword with
underscores in Python: `--page-size 16`, `page-size: 16`, `page_size=16`.

*Outcome* says whether the option works on a CPU, on eight H100 and on eight B200: each of its values is tried on
descriptions of these machines (`penstock explain --machine h100:8` does this for a whole command line). {works} options
work, except with the listed values; {always so} are *always so*, {no effect} have *no effect*, and {refused} are
*refused*. The server refuses to start with an option that its machine does not support, and names the option.

**No GPU has run Penstock yet.** For H100 and B200, *works* means that the server would start with the option there and
that its kernels are tested without a GPU: against plain torch in an interpreter, and compiled for these GPUs.

Options and values marked *refused* need a package, hardware or rights that Penstock does not use; the text says what
to use instead. Values marked *not supported yet* are refused with a clear message too. Options with *no effect* are
accepted for compatibility only. Options marked *always so* request behaviour that Penstock always has.
"""
_SAMPLING_DOCUMENT = """\
# Sampling parameters

Every sampling parameter. `just docs` writes this page. In `/generate` and in Python, the
parameters are keys of `sampling_params`; in `/v1/chat/completions` and `/v1/completions`, they are keys of the body.
*yes*: accepted under the same name; -: not accepted. The model's generation_config overrides the default (parameters
marked *model*; OpenAI routes only), `--preferred-sampling-params` overrides both, and the request overrides all. null
means not set, unless stated otherwise.

Order of application to the logits: penalties, logit_bias (and forbidden tokens), temperature, then the filters that
limit the candidate tokens, in the order of this table.
"""
_METRICS_DOCUMENT = """\
# Metrics

Every metric of `/metrics` (`--enable-metrics`). `just docs` writes this page. Metrics
whose names begin with `sglang:` are the ones that SGLang's dashboards query; names with `penstock:` are our own. The
page `/metrics` also has the `process_*` metrics of prometheus-client. A counter's name gets `_total`, a histogram's
samples get `_bucket`, `_sum` and `_count`.

Labels: *model* stands for `model_name`; *replica* for `model_name`, `engine_type`, `tp_rank`, `pp_rank` and, with
`--dp-size` above 1, `dp_rank`; *request* for `model_name` and the labels of
`--tokenizer-metrics-allowed-customer-labels`.
"""
_ABSENT_METRICS = """\
Metrics of SGLang 0.5.2 that Penstock does not have, and why:

| name | why |
|---|---|
"""
_MODELS_DOCUMENT = """\
# Models

Every architecture with a native implementation. `just docs` writes this page; `penstock models NAME`
prints the row of one architecture, including those that [transformers computes](models-by-transformers.md): nearly all
its other causal language models, each of which is checked before it serves. The name is the one in `architectures`
in config.json.

- *gives*: text, vectors ([embeddings](embeddings.md)), or scores (classification, ranking).
- *ranks*: whether the model supports `--tp-size` and `--pp-size` ([parallelism](parallelism.md)).
- *CPU graph*: whether a step on a CPU is one native call ([architecture](architecture.md)). *CUDA graph*: whether
  decode steps are captured on a GPU.
- *quantised*: whether [quantised weights](quantization.md) are supported, both stored and quantised during loading;
  *when loaded*: only the latter.
"""
_MODEL_HEADS = """
Each decoder is also supported with another head instead of `ForCausalLM`, if a checkpoint names it:
"""
# SGLang's metrics that Penstock does not have, with the reason.
ABSENT_METRICS: dict[str, str] = {
    "sglang:num_prefill_prealloc_queue_reqs": "pages are fetched on demand; see penstock:storage_loaded_pages",
    "sglang:num_prefill_inflight_queue_reqs": "pages are fetched on demand; see penstock:storage_loaded_pages",
    "sglang:num_decode_prealloc_queue_reqs": "pages are fetched on demand; see penstock:storage_loaded_pages",
    "sglang:num_decode_transfer_queue_reqs": "pages are fetched on demand; see penstock:storage_loaded_pages",
    "sglang:num_bootstrap_failed_reqs": "pages are fetched on demand; see penstock:storage_loaded_pages",
    "sglang:num_transfer_failed_reqs": "pages are fetched on demand; see penstock:storage_loaded_pages",
    "sglang:kv_transfer_speed_gb_s": "pages are fetched on demand; see penstock:storage_loaded_pages",
    "sglang:kv_transfer_latency_ms": "pages are fetched on demand; see penstock:storage_loaded_pages",
    "sglang:num_running_reqs_offline_batch": "there are no offline batches",
    "sglang:time_to_first_token_seconds_offline_batch": "there are no offline batches",
    "sglang:num_retracted_reqs": "never set there; see sglang:total_retracted_reqs",
    "sglang:num_paused_reqs": "never set there",
    "sglang:utilization": "never set there; see penstock:step_seconds",
    "sglang:max_running_requests_under_SLO": "never set there",
    "sglang:engine_load_weights_time": "never set there; see sglang:engine_startup_time",
    "sglang:avg_request_queue_latency": "never set there; see sglang:queue_time_s",
    "sglang:num_grammar_cache_hit": "never set there",
    "sglang:num_grammar_aborted": "never set there",
    "sglang:num_grammar": "never set there; see sglang:num_so_requests",
    "sglang:grammar_compilation_time_seconds": "never set there",
    "sglang:grammar_schema_count": "never set there",
    "sglang:grammar_ebnf_size": "never set there",
    "sglang:grammar_tree_traversal_time_avg": "never set there",
    "sglang:grammar_tree_traversal_time_max": "never set there",
    "sglang:prefetched_tokens": "see penstock:storage_loaded_pages",
    "sglang:backuped_tokens": "see penstock:storage_saved_pages",
    "sglang:prefetch_pgs": "see penstock:storage_loaded_pages",
    "sglang:backup_pgs": "see penstock:storage_saved_pages",
    "sglang:prefetch_bandwidth": "not measured",
    "sglang:backup_bandwidth": "not measured",
    "sglang:func_latency_seconds": "it times functions of SGLang's processes; see penstock:step_seconds",
    "sglang:startup_latency_breakdown_seconds_max": "see sglang:engine_startup_time",
}


def markdown() -> str:
    """Return the content of docs/arguments.md."""
    words = {name: str(count) for name, count in counts().items()}
    parts = [_DOCUMENT.format_map(words)]
    for title, group in by_group():
        header = "| option | values | default | outcome | what it does |\n|---|---|---|---|---|"
        parts.append(f"## {title}\n\n{header}")
        parts += [_row(option) for option in group]
        parts.append("")
    return "\n".join(parts)


def sampling_markdown() -> str:
    """Return the content of docs/sampling.md."""
    routes = [f"`{route}`" for route in APIS.values()]
    header = ["parameter", "values", "default", *routes, "what it does"]
    rows = [header, ["---"] * len(header), *map(_sampling_row, parameters())]
    later = ", ".join(f"`{name}`" for name in NOT_BUILT)
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([_SAMPLING_DOCUMENT, *lines, "", f"Not supported yet (requests are refused): {later}.", ""])


def _sampling_row(parameter: Parameter) -> list[str]:
    spec = parameter.spec
    names = []
    for api in APIS:
        spellings = parameter.names_in(api)
        cell = ", ".join(f"`{name}`" for name in spellings) if spellings != (parameter.name,) else "yes"
        cell = cell or "-"
        default = parameter.default_in(api)
        if cell != "-" and default != parameter.default:
            cell += f" (default {_json(default)})"
        names.append(cell)
    values = ", ".join(filter(None, [_type_name(parameter.json), spec.limits]))
    help_text = f"{spec.help}{' *model*' if spec.from_model else ''}"
    return [f"`{parameter.name}`", values, _json(parameter.default), *names, help_text]


def _type_name(annotation: Any) -> str:
    """Return the name of the JSON type of an annotation."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is list:
        return f"list of {_type_name(args[0])}s"
    if origin is dict:
        return "object" if args[1] is Any else f"object of {_type_name(args[1])}s"
    if args:
        return " or ".join(_type_name(arg) for arg in args)
    return {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}[annotation]


def _json(value: Any) -> str:
    """Return a default as JSON, or an empty text if it is not a simple value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else ""


def differences() -> str:
    """Return the table in docs/migration.md: options whose default differs from SGLang's."""
    rows = ["| option | in SGLang | here |", "|---|---|---|"]
    rows += [
        f"| `{option.flag}` | {option.spec.sglang} | {_default_in_words(option)} |"
        for option in options()
        if option.spec.sglang
    ]
    return "\n".join(rows) + "\n"


def _row(option: Option) -> str:
    names = " ".join(f"`{flag}`" for flag in spellings(option))
    values = values_of(option).strip("{}").replace(",", ", ") or "flag"
    default = "" if option.default is None else f"`{shown(option, option.default)}`"
    text = f"{option.spec.help}{outcome_note(option)}"
    cells = (names, values, default, outcome(option), text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default_in_words(option: Option) -> str:
    """Return the behaviour if the option is not set."""
    if option.spec.outcome is Outcome.ALWAYS and option.type is bool:
        return f"always on: {option.spec.reason}"
    if option.default is True:
        return "on"
    return option.spec.help.partition("Default: ")[2].rstrip(".") or shown(option, option.default)


def metrics_markdown() -> str:
    """Return the content of docs/monitoring/metrics.md."""
    lines = ["| name | kind | labels | what it is | observed in |", "|---|---|---|---|---|"]
    lines += [
        f"| `{metric.name}` | {metric.kind} | {_labels(metric)} | {metric.help} | `{metric.observed}` |"
        for metric in METRICS
    ]
    absent = [f"| `{name}` | {reason} |" for name, reason in ABSENT_METRICS.items()]
    return "\n".join([_METRICS_DOCUMENT, *lines, "", _ABSENT_METRICS + "\n".join(absent), ""])


def _labels(metric: Metric) -> str:
    if metric.per_request:
        return "request"
    of_replica = metric.labels[: len(REPLICA)] == REPLICA
    more = metric.labels[len(REPLICA if of_replica else MODEL) :]
    return ", ".join(["replica" if of_replica else "model", *(f"`{label}`" for label in more)])


def models_markdown() -> str:
    """Return the content of docs/models.md."""
    lines = [_line(HEAD), "|" + "---|" * len(HEAD), *(_line(cells_of(each)) for each in model_rows())]
    heads = [f"`{name}` ({'scores' if scores else 'vectors'})" for name, scores in HEADS.items()]
    return "\n".join([_MODELS_DOCUMENT, *lines, _MODEL_HEADS.rstrip(), ", ".join(heads) + ".", ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


PAGES = {
    "arguments": markdown,
    "sampling": sampling_markdown,
    "metrics": metrics_markdown,
    "models": models_markdown,
    "differences": differences,
}


def main(argv: Sequence[str]) -> int:
    """Print the page or table with this name."""
    parser = argparse.ArgumentParser(prog="just study documents")
    parser.add_argument("page", choices=PAGES)
    sys.stdout.write(PAGES[parser.parse_args(argv).page]())
    return 0
