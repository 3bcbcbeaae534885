"""The tables of the documentation that are written from declarations: docs/arguments.md, docs/sampling.md,
docs/monitoring/metrics.md, and the differences from SGLang in docs/migration.md.
"""

from __future__ import annotations

from typing import Any, get_args, get_origin

from runtime.config import Option, Outcome, options, shown
from runtime.metrics.declarations import ABSENT, METRICS, MODEL, REPLICA, Metric
from runtime.sampling_params import APIS, NOT_BUILT, Parameter, parameters
from serve.option_outcomes import counts, outcome
from serve.usage import by_group, outcome_note, spellings, values_of

_DOCUMENT = """\
# Options

Every option of `penstock` (`python -m serve`), written by `python -m serve explain --table markdown`. On the
command line an option is a flag, in a `--config` file a key with dashes or underscores, in Python a keyword
with underscores: `--page-size 16`, `page-size: 16`, `page_size=16`.

*Outcome* is what becomes of the option on a CPU, on a machine with eight H100 and on one with eight B200, found by
trying each of its values on descriptions of them (`penstock explain --machine h100` does the same for a whole command
line): {works} work there, or with the values that are not listed; {always so} are *always so*, {no effect} have *no
effect*, {not supported} are *not supported* so far. A start refuses what its machine lacks, by name.

What an option marked *not supported yet* asks for is refused with a clear message, and so are such values. *No
effect* marks what is accepted for compatibility only, *always so* what asks for something that is so anyway.
"""
_SAMPLING_DOCUMENT = """\
# Sampling parameters

Every sampling parameter, written by `python -m serve explain --table sampling`. In `/generate` and in Python they
are the keys of `sampling_params`, in `/v1/chat/completions` and `/v1/completions` keys of the body; *yes*: under the
same name; -: not taken there. A default is overruled by the model's generation_config (parameters marked *model*;
OpenAI routes only), that by `--preferred-sampling-params`, and that by the request. null is taken as not set, unless
said otherwise.

Order on the logits: penalties, logit_bias (and forbidden tokens), temperature, then top_k, top_p and min_p on the
probabilities.
"""
_METRICS_DOCUMENT = """\
# Metrics

Every metric of `/metrics` (`--enable-metrics`), written by `python -m serve explain --table metrics`. Names that begin
with `sglang:` are those that SGLang's dashboards ask for, those with `penstock:` are ours; beside them stand
`process_*` of prometheus-client. A counter's name gets `_total`, a histogram's samples get `_bucket`, `_sum` and
`_count`.

*model* stands for the label `model_name`; *replica* for `model_name`, `engine_type`, `tp_rank`, `pp_rank` and, with
`--dp-size` above 1, `dp_rank`; *request* for `model_name` and those of `--tokenizer-metrics-allowed-customer-labels`.
"""
_ABSENT_METRICS = """\
Names of SGLang 0.5.2 that are not served, and why:

| name | why |
|---|---|
"""


def markdown() -> str:
    """The whole of docs/arguments.md."""
    words = {name: str(count) for name, count in counts().items()}
    parts = [_DOCUMENT.format_map(words)]
    for title, group in by_group():
        header = "| option | values | default | outcome | what it does |\n|---|---|---|---|---|"
        parts.append(f"## {title}\n\n{header}")
        parts += [_row(option) for option in group]
        parts.append("")
    return "\n".join(parts)


def sampling_markdown() -> str:
    """The whole of docs/sampling.md."""
    routes = [f"`{route}`" for route in APIS.values()]
    header = ["parameter", "values", "default", *routes, "what it does"]
    rows = [header, ["---"] * len(header), *map(_sampling_row, parameters())]
    later = ", ".join(f"`{name}`" for name in NOT_BUILT)
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([_SAMPLING_DOCUMENT, *lines, "", f"Not supported yet, and refused: {later}.", ""])


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
    """What JSON value an annotation stands for."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is list:
        return f"list of {_type_name(args[0])}s"
    if origin is dict:
        return "object" if args[1] is Any else f"object of {_type_name(args[1])}s"
    if args:
        return " or ".join(_type_name(arg) for arg in args)
    return {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}[annotation]


def _json(value: Any) -> str:
    """A default; empty where there is none."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else ""


def differences() -> str:
    """The table in docs/migration.md: the options whose default is not that of SGLang."""
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
    """What holds where the option is not set."""
    if option.spec.outcome is Outcome.ALWAYS and option.type is bool:
        return f"always on: {option.spec.reason}"
    if option.default is True:
        return "on"
    return option.spec.help.partition("Default: ")[2].rstrip(".") or shown(option, option.default)


def metrics_markdown() -> str:
    """The whole of docs/monitoring/metrics.md."""
    lines = ["| name | kind | labels | what it is | observed in |", "|---|---|---|---|---|"]
    lines += [
        f"| `{metric.name}` | {metric.kind} | {_labels(metric)} | {metric.help} | `{metric.observed}` |"
        for metric in METRICS
    ]
    absent = [f"| `{name}` | {reason} |" for name, reason in ABSENT.items()]
    return "\n".join([_METRICS_DOCUMENT, *lines, "", _ABSENT_METRICS + "\n".join(absent), ""])


def _labels(metric: Metric) -> str:
    if metric.per_request:
        return "request"
    of_replica = metric.labels[: len(REPLICA)] == REPLICA
    more = metric.labels[len(REPLICA if of_replica else MODEL) :]
    return ", ".join(["replica" if of_replica else "model", *(f"`{label}`" for label in more)])
