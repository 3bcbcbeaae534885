"""`grammars`: the cost of constrained outputs: steps with a grammar per row against steps without, and masks alone.

The engine generates the same batch in turns, without grammars and with a different grammar for each row. Other work of
the machine affects both, so the ratio is more reliable than the times. Then, without a model, random outputs are drawn
from the masks, and the masks of all rows are timed for each step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bench import PROGRAM
from runtime.errors import ConfigurationError
from serve.bench import report
from serve.bench.load import parse, run_with_engine
from serve.bench.metrics import Summary, summarize
from serve.bench.options import add_output_options, new_parser

if TYPE_CHECKING:
    from runtime.config import Args
    from runtime.grammar.backends.backend import Backend, Matcher
    from serve import Engine

MIN_ITEMS = 1_000  # large enough that no output ends before its token limit


class Took(NamedTuple):
    clock: float
    processors: float


class Costs(NamedTuple):
    """Microseconds per token of the whole batch, for each turn: wall time, and CPU time of all processors."""

    free_us: tuple[Took, ...]
    constrained_us: tuple[Took, ...]
    alone: Mapping[str, Summary | None]  # times of compilation, and of the masks of all rows of a step

    @property
    def ratio(self) -> Took:
        """Return how many times longer a token takes with grammars, by medians."""
        free, constrained = medians(self.free_us), medians(self.constrained_us)
        return Took(constrained.clock / free.clock, constrained.processors / free.processors)


def medians(turns: Sequence[Took]) -> Took:
    """Return the median of each kind of time; NaN without turns."""
    clock, processors = zip(*turns) if turns else ((float("nan"),),) * 2
    return Took(median(clock), median(processors))


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "grammars",
        "Time steps with a grammar for each row. Every other option is the engine's: --model-path DIR ...",
        program=PROGRAM,
    )
    group = options.add_argument_group("batch")
    group.add_argument("--batch-size", type=int, default=32, help="rows, each with a JSON schema of its own")
    group.add_argument("--new-len", type=int, default=96, help="tokens that each row generates")
    group.add_argument("--repetitions", type=int, default=7, help="turns, after one that is not measured")
    group.add_argument("--mask-steps", type=int, default=300, help="steps whose masks are timed alone")
    group.add_argument("--tokenizer", help="folder with tokenizer.json, for the masks alone; without: the model's")
    group.add_argument("--masks-only", action="store_true", help="load no model; needs --tokenizer")
    add_output_options(options)
    return options


def main(argv: Sequence[str]) -> int:
    options, args = parse(parser(), argv)
    if min(options.batch_size, options.new_len, options.repetitions) < 1 or options.mask_steps < 2:
        raise ConfigurationError("Every size must be at least 1, --mask-steps at least 2.")
    if options.masks_only and options.tokenizer is None:
        raise ConfigurationError("--masks-only needs --tokenizer.")
    free: list[Took] = []
    constrained: list[Took] = []
    if not options.masks_only:
        free, constrained = run_with_engine(args, lambda engine: turns(engine, options))
    alone = time_masks(_tokenizer(options, args), options.batch_size, options.mask_steps)
    costs = Costs(tuple(free), tuple(constrained), alone)
    report.say(_render(options, costs))
    if options.output_file:
        settings = {**vars(options), "engine": args.keywords()}
        results = {**report.plain(costs), "ratio": costs.ratio}
        report.write(options.output_file, report.document("grammars", settings, results, argv=argv, program=PROGRAM))
    return 0


def schemas(count: int, min_items: int = MIN_ITEMS) -> list[dict[str, Any]]:
    """Return schemas of lists of records, each with other names, types and limits."""
    return [{"type": "array", "minItems": min_items, "items": _record(number)} for number in range(count)]


def _record(number: int) -> dict[str, Any]:
    chance = random.Random(number)
    kinds: list[Any] = [
        {"type": "string"},
        {"type": "string", "maxLength": 20 + number},
        {"type": "string", "pattern": "^[A-Z][a-z]{2,12}( [A-Z][a-z]{2,12})?$"},
        {"type": "string", "format": chance.choice(["date", "date-time", "uuid", "email"])},
        {"type": "integer", "minimum": 0, "maximum": 1000 + number},
        {"type": "number"},
        {"type": "boolean"},
        {"enum": [f"{word}-{number}" for word in ("red", "green", "blue", "grey")]},
        {"type": ["string", "null"]},
        {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        {"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"value": {"type": "string"}}}]},
    ]
    chosen = chance.sample(kinds, 6)
    names = [f"{name}_{number}" for name in ("id", "title", "kind", "amount", "tags", "note")]
    return {
        "type": "object",
        "properties": dict(zip(names, chosen)),
        "required": names[:4],
        "additionalProperties": False,
    }


async def turns(engine: Engine, options: argparse.Namespace) -> tuple[list[Took], list[Took]]:
    """Return microseconds per token without and with grammars, for each turn."""
    texts = [json.dumps(schema) for schema in schemas(options.batch_size)]
    times: tuple[list[Took], list[Took]] = [], []
    for turn in range(1 + options.repetitions):
        for constrained in (False, True) if turn % 2 else (True, False):
            grammars = [{"json_schema": text} if constrained else {} for text in texts]
            took_us = await _one_turn(engine, grammars, options.new_len, turn)
            if turn:
                times[constrained].append(took_us)
    return times


async def _one_turn(engine: Engine, grammars: Sequence[Mapping[str, str]], num_tokens: int, turn: int) -> Took:
    async def one(number: int, grammar: Mapping[str, str]) -> int:
        params = {
            "max_new_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "sampling_seed": 1000 * turn + number,
            **grammar,
        }
        answer = await engine.generate(f"{number}: a list of records", params)
        return answer["meta_info"]["completion_tokens"]

    began_s, worked_s = perf_counter(), process_time()
    counts = await asyncio.gather(*(one(number, grammar) for number, grammar in enumerate(grammars)))
    took_s, work_s = perf_counter() - began_s, process_time() - worked_s
    if min(counts) < num_tokens:
        raise ConfigurationError("An output ended early; lower --new-len.")
    return Took(1e6 * took_s / sum(counts), 1e6 * work_s / sum(counts))


def time_masks(path: str, num_rows: int, num_steps: int) -> dict[str, Summary | None]:
    """Return times to compile a schema, and for the masks of all rows of a step: wall time, and CPU time.

    Both are measured twice, because requests with the same schema share the library's state.
    """
    from bench.schemas import read
    from runtime.grammar.backends.with_llguidance import LLGuidanceBackend
    from runtime.grammar_spec import Grammar

    tokenizer = read(path)
    backend = LLGuidanceBackend.load(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids, None)
    compile_ms, compiled = [], []
    for schema in schemas(num_rows):
        began_s = perf_counter()
        compiled.append(backend.compile(Grammar("json_schema", json.dumps(schema))))
        compile_ms.append(1e3 * (perf_counter() - began_s))
    found = {"compile (ms)": summarize(compile_ms)}
    for seed, when in enumerate(("first use", "again")):
        masks_us, processors_us = _steps(backend, [each.copy() for each in compiled], num_steps, seed)
        found[f"{when}: masks of a step (us)"] = summarize(masks_us)
        found[f"{when}: of all processors (us)"] = summarize(processors_us)
    alone = [_steps(backend, [each.copy()], max(2, num_steps // num_rows), 2)[1] for each in compiled]
    found["again: one mask, of a processor (us)"] = summarize(time_us for each in alone for time_us in each)
    return found


def _steps(backend: Backend, matchers: Sequence[Matcher], num_steps: int, seed: int) -> tuple[list[float], list[float]]:
    """Return microseconds of each step's masks (wall and CPU time) for outputs drawn from the masks."""
    masks = np.zeros((len(matchers), backend.num_words), np.int32)
    chance = random.Random(seed)
    masks_us: list[float] = []
    processors_us: list[float] = []
    for _ in range(num_steps):
        began_s, worked_s = perf_counter(), process_time()
        backend.fill_masks(matchers, masks)
        masks_us.append(1e6 * (perf_counter() - began_s))
        processors_us.append(1e6 * (process_time() - worked_s))
        for matcher, mask in zip(matchers, masks):
            matcher.consume([_draw(mask, chance)])
    return masks_us, processors_us


def _draw(mask: np.ndarray, chance: random.Random) -> int:
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(allowed[chance.randrange(len(allowed))])


def _tokenizer(options: argparse.Namespace, args: Args) -> str:
    from serve.demo import demo_path

    path = options.tokenizer or args.model.model_path or demo_path()
    if path is None:
        raise ConfigurationError("There is no demo model here; name a folder with --tokenizer.")
    return str(path)


def _render(options: argparse.Namespace, costs: Costs) -> str:
    rows: list[report.Row] = [("rows", options.batch_size)]
    if costs.free_us:
        for name, took in (
            ("without grammars (us/token)", medians(costs.free_us)),
            ("with grammars (us/token)", medians(costs.constrained_us)),
            ("with / without", costs.ratio),
        ):
            rows += [(name, took.clock), (f"{name}, of all processors", took.processors)]
    return report.table("grammars", rows, costs.alone, heads=("mean", "median", "p90", "p99", "max"))
