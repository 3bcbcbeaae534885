"""`penstock explain [options]`: show each option that was set or derived, its resolved value, and the reason."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap

import orjson

from ops.machine import KNOWN_GPUS, Machine
from runtime.config import Args, Option, Outcome, in_its_words, options, shown, without_effect
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.config.resolve import ANY_MODEL, decide
from runtime.config.resolve.drafts import check_draft_model
from runtime.errors import CheckpointError, ConfigurationError
from serve.demo import demo_path

COLUMNS = ("option", "asked", "done", "reason")
KINDS = ", ".join(["cpu", *KNOWN_GPUS])  # of machines
MAX_GPUS = 64
_REASON_WIDTH = 60
_CELL_WIDTH = 40  # of values; longer ones shift their row


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One option: the value that was set, the resolved value, and the reason for it."""

    option: str
    asked: str
    done: str
    reason: str


def main(words: Sequence[str]) -> int:
    """Print the options of a command line as a table or JSON. Return 2 if an option is refused, else 0."""
    parser = argparse.ArgumentParser(prog="penstock explain", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--all", action="store_true", help="also show options at their defaults")
    parser.add_argument(
        "--machine", type=_machine, metavar="KIND[:N]", help=f"explain for a machine with N GPUs: {KINDS}"
    )
    flags, rest = parser.parse_known_args(words)
    args = Args.parse(rest)
    machine = flags.machine or Machine.probe()
    rows, refusals = explain(args, machine, demo_path=demo_path(), everything=flags.all)
    sys.stdout.write(as_json(rows, refusals) if flags.json else as_text(rows, refusals))
    return 2 if refusals else 0


def _machine(text: str) -> Machine:
    """Return the machine for a kind and a number of GPUs: "cpu", "h100" or "h100:8"."""
    kind, colon, number = text.partition(":")
    if kind != "cpu" and kind not in KNOWN_GPUS:
        raise argparse.ArgumentTypeError(f"{text} is none of {KINDS}")
    machine = Machine.named(kind)
    if not colon:
        return machine
    if kind == "cpu" or re.fullmatch("[1-9][0-9]?", number) is None or int(number) > MAX_GPUS:
        raise argparse.ArgumentTypeError(f"{text} is not a kind of GPU, a colon and a number from 1 to {MAX_GPUS}")
    return replace(machine, gpus=machine.gpus * int(number))


def explain(
    args: Args, machine: Machine, *, demo_path: str | None = None, everything: bool = False
) -> tuple[list[Row], list[str]]:
    """Return (one row per option, messages of refused options). Reads the model's configuration from disk.

    `everything`: also include options at their defaults.
    """
    path = args.model.model_path or demo_path
    facts, unreadable = _facts(args, path) if path else (None, [])
    plan, builder = decide(args, machine, facts or ANY_MODEL, demo_path=demo_path)
    rows = _rows(args, plan, builder.refusals, everything, has_model=facts is not None)
    if facts is not None and plan.lora.enabled:
        rows.append(_adapter_slots(plan, facts))
    unfit = _unfit_draft(plan, facts) if facts is not None else []
    return rows, [*builder.refusals.values(), *unreadable, *unfit]


def as_text(rows: Sequence[Row], refusals: Sequence[str]) -> str:
    """Return an aligned table with wrapped reasons."""
    cells = [COLUMNS, *((row.option, row.asked, row.done, row.reason) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    widths[1:] = [min(_CELL_WIDTH, width) for width in widths[1:]]
    lines: list[str] = []
    for *short, reason in cells:
        reasons = wrap(reason, _REASON_WIDTH) or [""]
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(short, widths)) + f"  {reasons[0]}")
        indent = " " * (sum(widths) + 6)
        lines += [indent + line for line in reasons[1:]]
    if refusals:
        lines += ["", "Errors:", *(f"  - {sentence}" for sentence in refusals)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def as_json(rows: Sequence[Row], refusals: Sequence[str]) -> str:
    """Return one object: `options`, a list of rows, and `refusals`, a list of messages."""
    return orjson.dumps({"options": rows, "refusals": refusals}, option=orjson.OPT_INDENT_2).decode() + "\n"


def _facts(args: Args, path: str) -> tuple[ModelFacts | None, list[str]]:
    """Return the model's `ModelFacts` and [], or None and the reasons why its configuration cannot be read."""
    from runtime.loading.checkpoint import locate, stored_as  # slow to import
    from runtime.loading.facts import read_facts

    try:
        directory = locate(path, args.model.revision, args.model.download_dir, load_format=stored_as(args))
        return read_facts(directory, args.model.json_model_override_args, model_impl=args.model.model_impl), []
    except ConfigurationError as error:
        return None, list(error.refusals)


def _unfit_draft(plan: Plan, facts: ModelFacts) -> list[str]:
    """Return the reasons why the draft model does not fit the model; [] if its files are not on this machine."""
    from runtime.loading.draft_facts import read_draft_facts  # slow to import

    path = plan.draft.path
    if path is None and plan.draft.algorithm == "NEXTN":
        path = facts.path
    if plan.draft.algorithm is None or path is None or not Path(path).exists():
        return []
    try:
        check_draft_model(plan, facts, read_draft_facts(replace(plan.draft, path=path), facts))
    except CheckpointError:  # for example a folder without weights, which `explain` does not need
        return []
    except ConfigurationError as error:
        return list(error.refusals)
    return []


def _adapter_slots(plan: Plan, facts: ModelFacts) -> Row:
    """Return a row with the memory that the slots of LoRA adapters take."""
    from runtime.loading.adapter_memory import largest_rank, slots_bytes  # slow to import

    rank = largest_rank(plan.lora)
    size = slots_bytes(facts.path, plan.lora, rank, 4 if plan.model.dtype == "float32" else 2)
    done = "unknown before the weights are read" if size is None else f"{size / 2**20:,.1f} MiB"
    loaded = "all loaded adapters" if plan.lora.max_loaded is None else f"{plan.lora.max_loaded} adapters"
    reason = (
        f"{plan.lora.max_slots} slots of rank {rank} beside every linear layer that adapters may change, on all ranks "
        f"together; host memory holds {loaded}"
    )
    return Row(option="(adapter slots)", asked="", done=done, reason=reason)


def _rows(args: Args, plan: Plan, refusals: Mapping[str, str], everything: bool, *, has_model: bool) -> list[Row]:
    idle = without_effect(args)
    rows = []
    for option in options():
        name = option.name
        asked = shown(option, args.get(name), _CELL_WIDTH) if name in args.explicitly_set else ""
        done, reason = _done(option, args, plan, has_model)
        if asked and option.spec.outcome is Outcome.ALWAYS:
            reason = option.spec.reason
        if name in idle:
            done, reason = "nothing", idle[name]
        if name in refusals:
            done, reason = "refused", refusals[name]
        if everything or asked or reason not in ("", "the default"):
            reason = reason or ("as asked" if asked else "the default")
            rows.append(Row(option=option.flag, asked=asked, done=done, reason=reason))
    if has_model:  # a separate row, because no option sets all kernels
        kernels = ", ".join(f"{operation} {backend}" for operation, backend in plan.kernels.choices.items())
        rows.append(Row(option="(kernels)", asked="", done=kernels, reason=plan.kernels.reasons["choices"]))
    return rows


def _done(option: Option, args: Args, plan: Plan, has_model: bool) -> tuple[str, str]:
    """Return the resolved value of an option as text, and its reason.

    If the resolved value cannot be written as a value of the option, the text begins with the name of the plan's field.
    """
    section, _, field = option.spec.plan.partition(".")
    if not field:
        return shown(option, args.get(option.name), _CELL_WIDTH), ""
    if not has_model and section != "kernels":  # only the plan's kernels do not depend on the model
        return "unknown without a model", ""
    value, reason = plan.decision(option.spec.plan)
    try:
        return shown(option, in_its_words(option, value), _CELL_WIDTH), reason
    except LookupError:
        return f"{field} {shown(option, value, _CELL_WIDTH)}", reason
