"""`fast-forward`: compare appending forced tokens with `--disable-jump-forward`, in turns on two engines.

Both engines answer the same seeded requests, and must generate the same tokens, else the study fails. For each
concurrency, the result has the share of tokens without a step of their own, the number of steps, and the time. The
fastest turn of each group of requests counts, so that other work of the machine matters little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from bench import PROGRAM
from runtime.errors import ConfigurationError
from serve.bench import report
from serve.bench.load import parse
from serve.bench.options import add_output_options, new_parser

if TYPE_CHECKING:
    from runtime.config import Args
    from serve import Engine


class Saved(NamedTuple):
    """Results over all groups of requests at one concurrency."""

    at_a_time: int
    num_tokens: int
    num_forced: int  # number of these tokens without a step of their own
    steps: tuple[int, int]  # (without, with) forced tokens appended
    # fastest time of each group: (without, with) forced tokens appended
    seconds: tuple[tuple[float, ...], tuple[float, ...]]

    @property
    def ratio(self) -> float:
        """Return the total time with forced tokens appended, divided by the time without."""
        return sum(self.seconds[1]) / sum(self.seconds[0])


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "fast-forward",
        "Time requests with schemas of fixed names. Every other option is the engines': --model-path DIR ...",
        program=PROGRAM,
    )
    group = options.add_argument_group("requests")
    group.add_argument("--at-a-time", type=int, nargs="+", default=[1, 8], help="requests that run together")
    group.add_argument("--requests", type=int, default=16, help="in all, as many with each schema")
    group.add_argument("--new-len", type=int, default=200, help="most tokens of each")
    group.add_argument("--repetitions", type=int, default=7, help="turns, after one that is not measured")
    group.add_argument("--whitespace", help="pattern between the tokens of JSON; '': none. Default: the engine's")
    add_output_options(options)
    return options


def main(argv: Sequence[str]) -> int:
    options, args = parse(parser(), argv)
    if min(*options.at_a_time, options.requests, options.new_len, options.repetitions) < 1:
        raise ConfigurationError("Every size must be at least 1.")
    if options.whitespace is not None:
        args = replace(args, text=replace(args.text, constrained_json_whitespace_pattern=options.whitespace))
    found = anyio.run(lambda: measure(args, options), backend_options={"use_uvloop": True})
    report.say(_render(found))
    if options.output_file:
        settings = {**vars(options), "engine": args.keywords()}
        results = {"found": [{**report.plain(each), "ratio": each.ratio} for each in found]}
        report.write(
            options.output_file,
            report.document("fast-forward", settings, results, argv=argv, program=PROGRAM),
        )
    return 0


async def measure(args: Args, options: argparse.Namespace) -> list[Saved]:
    from serve import Engine

    without = replace(args, text=replace(args.text, disable_jump_forward=True))
    async with Engine.of(without) as off, Engine.of(args) as on:
        return [await _in_turns(off, on, at_a_time, options) for at_a_time in options.at_a_time]


async def _in_turns(off: Engine, on: Engine, at_a_time: int, options: argparse.Namespace) -> Saved:
    groups = [range(first, first + at_a_time) for first in range(0, options.requests, at_a_time)]
    least = [[float("inf")] * len(groups) for _ in range(2)]
    num_tokens = num_forced = 0
    steps = [0, 0]
    for turn in range(1 + options.repetitions):
        for place, group in enumerate(groups):
            answers: dict[int, list[list[int]]] = {}
            for which in (0, 1) if (turn + place) % 2 else (1, 0):
                engine = (off, on)[which]
                before, began_s = engine.status(), perf_counter()
                answers[which] = await asyncio.gather(*(_ask(engine, number, options) for number in group))
                took_s, after = perf_counter() - began_s, engine.status()
                if turn:
                    least[which][place] = min(least[which][place], took_s)
                    steps[which] += after.num_steps - before.num_steps
                    num_forced += after.num_forced - before.num_forced
            if answers[0] != answers[1]:
                raise ConfigurationError("The tokens differ with forced ones appended.")
            num_tokens += sum(map(len, answers[1])) if turn else 0
    seconds = tuple(least[0]), tuple(least[1])
    return Saved(at_a_time, num_tokens, num_forced, (steps[0], steps[1]), seconds)


async def _ask(engine: Engine, number: int, options: argparse.Namespace) -> list[int]:
    params = {
        "max_new_tokens": options.new_len,
        "temperature": 1.0,
        "sampling_seed": number,
        "json_schema": json.dumps(SCHEMAS[number % len(SCHEMAS)]),
    }
    answer = await engine.generate(f"{number}: an object", params)
    return answer["output_ids"]


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_WORD = {"type": "string", "maxLength": 12}
# Typical schemas of programs: a record, a decision, a tool call, a list, and a form with long fixed names.
SCHEMAS: tuple[dict[str, Any], ...] = (
    _object(name=_WORD, age={"type": "integer", "minimum": 0, "maximum": 120}, email=_WORD),
    _object(sentiment={"enum": ["positive", "negative", "neutral"]}, confidence={"type": "number"}),
    _object(
        tool={"const": "get_current_weather"},
        arguments=_object(location=_WORD, unit={"enum": ["celsius", "fahrenheit"]}),
    ),
    {"type": "array", "minItems": 3, "maxItems": 3, "items": _object(id={"type": "integer"}, title=_WORD)},
    _object(
        first_name=_WORD, last_name=_WORD, street_address=_WORD, postal_code={"pattern": "^[0-9]{5}$"},
        country={"const": "United Kingdom of Great Britain"}, subscribed_to_newsletter={"type": "boolean"},
    ),
    _object(reasoning={"type": "string", "maxLength": 40}, answer={"enum": ["yes", "no"]}),
    _object(start={"type": "string", "format": "date"}, end={"type": "string", "format": "date"}),
    _object(user=_object(profile=_object(settings=_object(dark_mode={"type": "boolean"})))),
)  # fmt: skip


def _render(found: Sequence[Saved]) -> str:
    rows: list[report.Row] = []
    for each in found:
        name = f"{each.at_a_time} at a time"
        rows += [
            (f"{name}: tokens", each.num_tokens),
            (f"{name}: without a step (%)", 100 * each.num_forced / each.num_tokens),
            (f"{name}: steps, with / without", each.steps[1] / each.steps[0]),
            (f"{name}: time, with / without", each.ratio),
        ]
    return report.table("fast-forward", rows, {})
