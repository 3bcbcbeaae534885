"""Generate the text of `--help` from the declarations of the options."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from textwrap import fill

from runtime.config import Json, Option, Outcome, options, shown

WIDTH = 100
_EMPHASIS = re.compile(r"\*([A-Z][a-z ]+)\*")  # *No effect*
_METAVARS = {int: "N", float: "X", str: "TEXT", Json: "JSON"}
_COMMANDS = """\
usage: penstock [serve MODEL] [options]  serve a model over HTTP (also: python -m serve)
       penstock explain [options]        show the resolved options, with reasons
       penstock bench COMMAND ...        measure
       penstock batch IN OUT [options]   answer a file of requests without a server
       penstock router [options]         one address for prefill and decode servers
       penstock ray [options]            serve with several replicas on a Ray cluster
       penstock quantize [options]       write a checkpoint with quantised weights
       penstock shard [options]          write a checkpoint with separate files per rank
       penstock top [--url URL]          watch a running server
       penstock replay FILE [options]    repeat a recorded schedule, with or without the model
       penstock simulate [options]       compare schedules on a trace, over a virtual clock
       penstock models [NAME ...]        list the supported architectures and their features
       penstock --version

Options may be abbreviated if they stay unique. Without a model, a small demo model is served.
"""
# The options of the short help: those that are set most often.
_MAIN = (
    "model_path", "host", "port", "api_key", "served_model_name", "context_length", "dtype", "quantization", "device",
    "tp_size", "mem_fraction_static", "max_running_requests", "chat_template", "tool_call_parser", "reasoning_parser",
    "lora_paths", "speculative_algorithm", "enable_metrics", "log_level", "config",
)  # fmt: skip
_MORE = """\
penstock --help all       all options
penstock --help WORD      the options with this word, for example: penstock --help lora
docs/arguments.md has the same list as a table.
"""


def help_text(topic: str = "") -> str:
    """Return the text of `--help TOPIC`: the main options (""), all options ("all"), or the options with a word."""
    if topic == "all":
        return f"{_COMMANDS}\n{_full(options())}"
    if topic:
        return _about(topic)
    by_name = {option.name: option for option in options()}
    lines = [_line(by_name[name]) for name in _MAIN]
    return "\n".join([_COMMANDS, *lines, "", _MORE])


def _about(topic: str) -> str:
    """Return the help of all options with this word in a flag.

    If there is none, use the options with this word in the help text or the group's title.
    """
    word = topic.strip("-").replace("_", "-").lower()
    found = [option for option in options() if any(word in flag for flag in spellings(option))]
    if not found:
        found = [each for each in options() if word in f"{each.title} {each.spec.help}".replace("_", "-").lower()]
    return _full(found) if found else f"No option has the word {topic[:80]!r}; penstock --help all lists the options.\n"


def _line(option: Option) -> str:
    """Return one line with an option's flag and the beginning of its help."""
    flag = f"  {option.flag} {_METAVARS.get(option.type, '')}".rstrip()
    sentence = option.spec.help.partition(". ")[0].partition(";")[0].partition(": ")[0]
    text = f"{flag:<32}{sentence.rstrip('.')}"
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 5].rpartition(' ')[0].rstrip(',')} ..."


def _full(chosen: Iterable[Option]) -> str:
    """Return the complete help of these options by group."""
    wanted = {option.name for option in chosen}
    parts: list[str] = []
    for title, members in by_group():
        group = [option for option in members if option.name in wanted]
        if not group:
            continue
        parts.append(f"{title}:")
        parts += [*map(_paragraph, group), ""]
    return "\n".join(parts)


def by_group() -> Iterable[tuple[str, list[Option]]]:
    for title, group in groupby(options(), key=lambda option: option.title):
        yield title, list(group)


def _paragraph(option: Option) -> str:
    flags = ", ".join(spellings(option))
    values = values_of(option, built_only=True)
    first = f"  {flags} {values}".rstrip()
    if len(first) > WIDTH:
        first = _filled(f"{flags} {values.replace(',', ', ')}", indent="  ", rest="    ")
    text = f"{option.spec.help}{default_note(option)}{outcome_note(option)}"
    return f"{first}\n{_filled(text, indent=' ' * 6)}"


def spellings(option: Option) -> list[str]:
    return [*option.flags, *filter(None, [option.negated_flag])]


def values_of(option: Option, *, built_only: bool = False) -> str:
    """Return the placeholder for an option's value in the help, for example "", "N" or "{a,b}"."""
    if option.type is bool and option.spec.const is None:
        return ""
    choices = option.spec.choices
    if built_only and option.spec.built is not None:
        choices = tuple(choice for choice in choices if choice in option.spec.built)
    one = "{" + ",".join(map(str, choices)) + "}" if choices else _METAVARS.get(option.type, "BOOL")
    return f"{one} ..." if option.many else one


def default_note(option: Option) -> str:
    if option.default is None or option.default is False or "Default:" in option.spec.help:
        return ""
    if option.default is True or option.default == {}:
        return ""
    return f" Default: {shown(option, option.default)}."


def outcome_note(option: Option) -> str:
    spec = option.spec
    if spec.outcome is Outcome.INERT:
        return f" *No effect*: {spec.reason}."
    if spec.outcome is Outcome.ALWAYS:
        return f" *Always so*: {spec.reason}.{_later(option)}"
    if spec.outcome is Outcome.REFUSED:
        return f" *Refused*: {spec.reason}; {spec.instead or 'leave it out'}."
    return _later(option)


def _later(option: Option) -> str:
    """Return a note about the values of an option that are refused or not supported yet, or ""."""
    built, choices, needs = option.spec.built, option.spec.choices, option.spec.needs
    if built is None:
        return ""
    if not choices:
        return f" *So far only* {' or '.join(str(value) for value in built)}."
    without = [choice for choice in choices if choice not in built and choice != option.default]
    later = [str(choice) for choice in without if choice not in needs]
    refused = [f"{choice} (needs {needs[choice].partition(';')[0]})" for choice in without if choice in needs]
    return (f" *Refused*: {', '.join(refused)}." if refused else "") + (
        f" *Not supported yet*: {', '.join(later)}." if later else ""
    )


def _filled(text: str, *, indent: str, rest: str | None = None) -> str:
    return fill(
        _EMPHASIS.sub(r"\1", text),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if rest is None else rest,
        break_on_hyphens=False,
    )
