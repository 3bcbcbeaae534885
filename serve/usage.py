"""Declarations as text for people: `--help`, docs/arguments.md, and docs/sampling.md."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from textwrap import fill
from typing import Any, get_args, get_origin

from runtime.config import Json, Option, Outcome, options, shown
from runtime.sampling_params import APIS, NOT_BUILT, Parameter, parameters
from serve.outcomes import counts, outcome

WIDTH = 100
_METAVARS = {int: "N", float: "X", str: "TEXT", Json: "JSON"}
_HEADER = """\
usage: penstock [options]             serve a model over HTTP (also: python -m serve)
       penstock explain [options]     show what would be done, and why
       penstock bench COMMAND ...     measure
       penstock batch IN OUT [options]  answer a file of requests without a server
       penstock quantize [options]    write a checkpoint with rounded weights
       penstock shard [options]       write a checkpoint with files of its own for each rank
       penstock top [--url URL]       watch a running server
       penstock models [NAME ...]     list the architectures that are served, and how
       penstock --version

Options may be shortened while they stay unique. Without --model-path a small demo model is served.
"""
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


def help_text() -> str:
    """What `--help` prints: every option that works, by group, and the names of those that do not yet."""
    parts = [_HEADER]
    for title, group in _by_group():
        parts.append(f"{title}:")
        parts += [_paragraph(option) for option in group if option.spec.outcome is not Outcome.PLANNED]
        later = [option.flag for option in group if option.spec.outcome is Outcome.PLANNED]
        if later:
            parts.append(_filled("not supported yet: " + ", ".join(later), indent="  ", rest="    "))
        parts.append("")
    return "\n".join(parts)


def markdown() -> str:
    """The whole of docs/arguments.md."""
    words = {name: str(count) for name, count in counts().items()}
    parts = [_DOCUMENT.format_map(words)]
    for title, group in _by_group():
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


def _by_group() -> Iterable[tuple[str, list[Option]]]:
    for title, group in groupby(options(), key=lambda option: option.title):
        yield title, list(group)


def _paragraph(option: Option) -> str:
    flags = ", ".join(_spellings(option))
    values = _values(option, built_only=True)
    first = f"  {flags} {values}".rstrip()
    if len(first) > WIDTH:
        first = _filled(f"{flags} {values.replace(',', ', ')}", indent="  ", rest="    ")
    text = f"{option.spec.help}{_default_note(option)}{_outcome_note(option)}"
    return f"{first}\n{_filled(text, indent=' ' * 6)}"


def _row(option: Option) -> str:
    spellings = " ".join(f"`{flag}`" for flag in _spellings(option))
    values = _values(option).strip("{}").replace(",", ", ") or "flag"
    default = "" if option.default is None else f"`{shown(option, option.default)}`"
    text = f"{option.spec.help}{_outcome_note(option)}"
    cells = (spellings, values, default, outcome(option), text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _spellings(option: Option) -> list[str]:
    return [*option.flags, *filter(None, [option.negated_flag])]


def _values(option: Option, *, built_only: bool = False) -> str:
    """What follows the flag: nothing, N, {a,b}, ..."""
    if option.type is bool and option.spec.const is None:
        return ""
    choices = option.spec.choices
    if built_only and option.spec.built is not None:
        choices = tuple(choice for choice in choices if choice in option.spec.built)
    one = "{" + ",".join(map(str, choices)) + "}" if choices else _METAVARS.get(option.type, "BOOL")
    return f"{one} ..." if option.many else one


def _default_in_words(option: Option) -> str:
    """What holds where the option is not set."""
    if option.spec.outcome is Outcome.ALWAYS and option.type is bool:
        return f"always on: {option.spec.reason}"
    if option.default is True:
        return "on"
    return option.spec.help.partition("Default: ")[2].rstrip(".") or shown(option, option.default)


def _default_note(option: Option) -> str:
    if option.default is None or option.default is False or "Default:" in option.spec.help:
        return ""
    if option.default is True or option.default == {}:
        return ""
    return f" Default: {shown(option, option.default)}."


def _outcome_note(option: Option) -> str:
    spec = option.spec
    if spec.outcome is Outcome.INERT:
        return f" *No effect*: {spec.reason}."
    if spec.outcome is Outcome.ALWAYS:
        return f" *Always so*: {spec.reason}.{_later(option)}"
    if spec.outcome is Outcome.PLANNED:
        return f" *Not supported yet*{f': {spec.instead}' if spec.instead else ''}."
    return _later(option)


def _later(option: Option) -> str:
    """The values that do not work yet."""
    built, choices = option.spec.built, option.spec.choices
    if built is None:
        return ""
    if not choices:
        return f" *So far only* {' or '.join(str(value) for value in built)}."
    later = [str(choice) for choice in choices if choice not in built and choice != option.default]
    return f" *Not supported yet*: {', '.join(later)}." if later else ""


def _filled(text: str, *, indent: str, rest: str | None = None) -> str:
    return fill(
        text.replace("*", ""),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if rest is None else rest,
        break_on_hyphens=False,
    )
