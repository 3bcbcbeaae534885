"""The rows of work for engines in their processes, and the figures that result."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

FIRST_ORDINARY = 3  # smaller ids are special tokens
WARM_UP_LENGTH, WARM_UP_TOKENS = 16, 2

Ids = list[int]


class WorkError(Exception):
    """Raised if an engine did not do its work."""


class Asked(Protocol):
    """A function that generates, and returns the duration in seconds. Raises `WorkError`."""

    def generate(self, prompts: Sequence[Ids], new_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure with its goals."""

    row: int
    name: str
    unit: str
    goal: float | None = None  # goal for the ratio to the best peer
    share_goal: float | None = None  # goal for the share of the machine's limit
    most: float | None = None  # upper limit of the figure itself
    higher_is_better: bool = True


class Draw:
    """Draws prompts of random ids, which share no prefix except by chance. The same seed gives the same prompts."""

    def __init__(self, seed: int | str, vocab: int) -> None:
        self._random = random.Random(seed)
        self._vocab = vocab

    def prompt(self, length: int) -> Ids:
        return self._random.choices(range(FIRST_ORDINARY, self._vocab), k=length)

    def prompts(self, number: int, length: int) -> list[Ids]:
        return [self.prompt(length) for _ in range(number)]


PREFILL_LENGTHS = (512, 2048)
PREFILL_TOKENS = 4096  # total tokens of all prompts of one length
DECODE_PROMPT, DECODE_TOKENS = 32, 128
CONCURRENCIES = (8, 32, 64)
PROMPT, OUTPUT = 128, 64
PREFIX, SHARERS, OWN, SHARED_OUTPUT = 1024, 32, 32, 32
STREAMS = 16
FIRST_PROMPT = 32


@dataclass(frozen=True, slots=True)
class Measure:
    """A job with a name, which is repeated with new prompts."""

    row: int
    figures: tuple[Figure, ...]
    run: Callable[[Asked, Draw], dict[str, float]]  # returns figures by name
    warm_up: Callable[[Asked, Draw], object]


def prefill(length: int) -> Measure:
    """Tokens per second of one prompt up to its first token: the median of several prompts, one by one."""
    figure = Figure(1, f"prefill {length:,}", "tok/s", 1.0, share_goal=0.6)

    def run(engine: Asked, draw: Draw) -> dict[str, float]:
        prompts = draw.prompts(PREFILL_TOKENS // length, length)
        return {figure.name: length / median(engine.generate([prompt], 1) for prompt in prompts)}

    return Measure(1, (figure,), run, lambda engine, draw: engine.generate([draw.prompt(length)], 1))


def decode() -> Measure:
    """Tokens per second of one sequence after its first token: the difference between a long and a short run."""
    figure = Figure(2, "decode, batch 1", "tok/s", 1.0, share_goal=0.75)

    def run(engine: Asked, draw: Draw) -> dict[str, float]:
        short_s = engine.generate([draw.prompt(DECODE_PROMPT)], 1)
        long_s = engine.generate([draw.prompt(DECODE_PROMPT)], DECODE_TOKENS)
        return {figure.name: (DECODE_TOKENS - 1) / (long_s - short_s)}

    return Measure(2, (figure,), run, lambda engine, draw: engine.generate([draw.prompt(DECODE_PROMPT)], 8))


def concurrency(number: int, row: int = 3, goal: float | None = 1.2) -> Measure:
    """Output tokens per second of simultaneous requests."""
    figure = Figure(row, f"concurrency {number}", "tok/s", goal)

    def run(engine: Asked, draw: Draw) -> dict[str, float]:
        seconds = engine.generate(draw.prompts(number, PROMPT), OUTPUT)
        return {figure.name: number * OUTPUT / seconds}

    def warm_up(engine: Asked, draw: Draw) -> object:
        return engine.generate(draw.prompts(number, WARM_UP_LENGTH), WARM_UP_TOKENS)

    return Measure(row, (figure,), run, warm_up)


def shared_prefix() -> Measure:
    """Output tokens per second of requests with a common prefix: first with a new prefix, then with the same prefix
    again.
    """
    cold, warm = (Figure(4, f"shared prefix, {state}", "tok/s", 1.2) for state in ("cold", "warm"))

    def run(engine: Asked, draw: Draw) -> dict[str, float]:
        prefix, found = draw.prompt(PREFIX), {}
        for figure in (cold, warm):
            asked = [prefix + own for own in draw.prompts(SHARERS, OWN)]
            found[figure.name] = SHARERS * SHARED_OUTPUT / engine.generate(asked, SHARED_OUTPUT)
        return found

    def warm_up(engine: Asked, draw: Draw) -> object:
        return engine.generate(draw.prompts(SHARERS, WARM_UP_LENGTH), WARM_UP_TOKENS)

    return Measure(4, (cold, warm), run, warm_up)


IN_PROCESS = concurrency(STREAMS, row=5, goal=None)
STREAMED = Figure(5, f"HTTP, {STREAMS} streams", "tok/s", 1.2)
STREAM_FIGURES = (
    STREAMED,
    Figure(5, "HTTP, first token p50", "ms", higher_is_better=False),
    Figure(5, "HTTP, first token p99", "ms", higher_is_better=False),
    Figure(5, "HTTP, between tokens p50", "ms", higher_is_better=False),
    Figure(5, "HTTP, between tokens p99", "ms", higher_is_better=False),
)
LAG = Figure(5, "loop lag p99", "ms", most=5.0, higher_is_better=False)
START = Figure(6, "start to first token", "s", most=5.0, higher_is_better=False)
MEMORY = Figure(6, "peak memory", "MiB", higher_is_better=False)

MEASURES: tuple[Measure, ...] = (
    *(prefill(length) for length in PREFILL_LENGTHS),
    decode(),
    *(concurrency(number) for number in CONCURRENCIES),
    shared_prefix(),
)
FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        *(figure for measure in MEASURES for figure in measure.figures),
        *IN_PROCESS.figures,
        *STREAM_FIGURES,
        LAG,
        START,
        MEMORY,
    )
}
# Goals with 4-bit weights, if they are higher: the ratio, and the share of the limit.
GOALS_OF_4_BITS: Mapping[str, tuple[float, float | None]] = {
    "prefill 512": (1.2, None),
    "decode, batch 1": (1.5, 0.8),
    "concurrency 8": (1.5, None),
    "concurrency 32": (1.5, None),
}
ROWS = tuple(sorted({figure.row for figure in FIGURES.values()}))


def measures_of(rows: Sequence[int]) -> Iterator[Measure]:
    """Return the jobs in process for these rows."""
    return (measure for measure in MEASURES if measure.row in rows)
