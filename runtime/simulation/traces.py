"""Traces: arrival times of requests, lengths of prompts and outputs, and shared prefixes.

record              a record of `--record`: its requests, with the recorded outputs
*.jsonl             objects with timestamp (ms), input_length, output_length and optionally hash_ids: one number per
                    512 prompt tokens, equal where prompts share a prefix (the format of Mooncake's traces)
*.csv               columns TIMESTAMP, ContextTokens, GeneratedTokens (the format of Azure's traces)
requests=N,rate=R   random: N requests, R per second; also input and output (mean lengths), prefixes (number of shared
                    ones), prefix (their length) and seed
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import NamedTuple

import orjson

from runtime.errors import ConfigurationError
from runtime.replay.player import Added, Applied, Dropped, Launched, Player, Timed
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from runtime.sequence import Sequence
from runtime.simulation.costs import features

BLOCK = 512  # number of tokens per element of `hash_ids`
IDS = 2**31 - 2
SAMPLING = SamplingParams(max_new_tokens=None, temperature=0.0)
OUTPUT_ID, LAST_ID = IDS, IDS + 1  # id of all generated tokens, and id of the token that ends an output


class Arrival(NamedTuple):
    """A request of a trace."""

    time_s: float
    sequences: list[Sequence]
    outputs: list[list[int] | int]  # for each sequence: its tokens, or the number of tokens if they are unknown


class Measured(NamedTuple):
    """The measured times in a record, of steps (to fit costs) and of requests."""

    steps: list[tuple[tuple[int, int, int, int], float]]  # (features of the step, seconds)
    first_s: dict[int, float]  # request id -> time of its first token
    last_s: dict[int, float]
    num_output: dict[int, int]
    order: list[int]  # request ids in the order of their admission


def read_record(path: str | Path) -> tuple[Player, list[Arrival], Measured]:
    """Replay a record. Return the player, the recorded requests and the measured times."""
    player = Player(path, check=False)
    added: list[tuple[float, list[Sequence]]] = []
    outputs: dict[tuple[int, int], list[int]] = {}
    found = Measured([], {}, {}, {}, [])
    admitted: set[int] = set()
    for event in player.events():
        if isinstance(event, Added):
            added.append(event)
        elif isinstance(event, Launched):
            for sequence in event.batch.sequences if event.batch.stats.num_new else ():
                if sequence.request.id not in admitted:
                    admitted.add(sequence.request.id)
                    found.order.append(sequence.request.id)
        elif isinstance(event, Applied):
            for delta in event.deltas:
                if delta.ids:
                    found.first_s.setdefault(delta.request_id, event.time_s)
                    found.last_s[delta.request_id] = event.time_s
                    outputs.setdefault((delta.request_id, delta.index), []).extend(delta.ids)
                    number = found.num_output.get(delta.request_id, 0)
                    found.num_output[delta.request_id] = number + len(delta.ids)
        elif isinstance(event, Timed):
            found.steps.append((features(event.batch), event.seconds))
        elif isinstance(event, Dropped):
            raise ConfigurationError(f"{path}: steps failed while it was recorded, so its times cannot be used.")
    arrivals = []
    for time_s, sequences in added:
        known = [outputs.get((each.request.id, each.index), []) for each in sequences]
        fresh = [each.restarted() for each in sequences]
        for each in fresh:
            each.constraint = None  # not needed, because the outputs are known
        arrivals.append(Arrival(time_s, fresh, list(known)))
    return player, arrivals, found


def read_trace(text: str, limit: int | None = None) -> Iterator[Arrival]:
    """Yield up to `limit` requests of a trace file or a random trace. Raises `ConfigurationError` if it is invalid."""
    path = Path(text)
    rows: Iterable[Row]
    if "=" in text and not path.exists():
        rows = _drawn(text, limit)
    elif path.suffix == ".csv":
        rows = _azure(path)
    else:
        rows = _mooncake(path)
    try:
        for number, row in enumerate(rows):
            if number == limit:
                return
            yield Arrival(row.time_s, [_sequence(row)], [row.num_output])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"--trace {text}: {type(error).__name__}: {error}.") from error


class Row(NamedTuple):
    time_s: float
    ids: list[int]
    num_output: int


def _sequence(row: Row) -> Sequence:
    request = Request(label="", ids=(), sampling=SAMPLING)
    return Sequence(request, 0, row.ids, max_tokens=2**31, stop_ids=frozenset((LAST_ID,)), seed=0)


def _mooncake(path: Path) -> Iterator[Row]:
    fresh = _fresh_ids()
    blocks: dict[int, list[int]] = {}
    with path.open("rb") as lines:
        for line in lines:
            values = orjson.loads(line)
            length = max(1, int(values["input_length"]))
            ids: list[int] = []
            for block in values.get("hash_ids", ()):
                if block not in blocks:
                    blocks[block] = fresh(BLOCK)
                ids += blocks[block]
            ids = ids[:length]
            yield Row(float(values["timestamp"]) / 1000, ids + fresh(length - len(ids)), int(values["output_length"]))


def _azure(path: Path) -> Iterator[Row]:
    fresh, began = _fresh_ids(), None
    with path.open(newline="") as lines:
        for values in csv.DictReader(lines):
            time = datetime.fromisoformat(values["TIMESTAMP"][:26])
            began = began or time
            ids = fresh(max(1, int(values["ContextTokens"])))
            yield Row((time - began).total_seconds(), ids, max(1, int(values["GeneratedTokens"])))


def _drawn(text: str, limit: int | None) -> Iterator[Row]:
    settings = {"requests": 1000.0, "rate": 10.0, "input": 512, "output": 128, "prefixes": 0, "prefix": 256, "seed": 0}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in settings:
            raise ValueError(f"{name!r} is unknown; use {', '.join(settings)}")
        settings[name] = float(value)
        if not 0 <= settings[name] < 1e9:
            raise ValueError(f"{name} must be at least 0 and below 10^9")
    draw, fresh, time_s = random.Random(int(settings["seed"])), _fresh_ids(), 0.0
    prefixes = [fresh(int(settings["prefix"])) for _ in range(int(settings["prefixes"]))]
    for _ in range(int(settings["requests"])):
        time_s += draw.expovariate(settings["rate"]) if settings["rate"] else 0.0
        ids = fresh(_length(draw, settings["input"]))
        if prefixes:
            ids = draw.choice(prefixes) + ids
        yield Row(time_s, ids, _length(draw, settings["output"]))


def _length(draw: random.Random, mean: float) -> int:
    """Return a random length from a log-normal distribution with this mean, which resembles the lengths of chats."""
    return max(1, round(draw.lognormvariate(math.log(max(mean, 1)) - 0.5, 1.0)))


def _fresh_ids() -> Callable[[int], list[int]]:
    """Return a function that returns the given number of token ids, with a prefix that no earlier result has."""
    numbers = count()

    def fresh(length: int) -> list[int]:
        number = next(numbers)
        return [number % IDS, number // IDS, *[number % 997] * length][:length]

    return fresh
