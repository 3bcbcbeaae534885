"""Upper bounds of histogram buckets: the defaults, and the parsing of options that set other bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from runtime.errors import ConfigurationError

Bounds = tuple[float, ...]  # ascending; values above the last bound have their own bucket

MAX_BOUNDS = 200  # per histogram: each bound adds a line to every scrape

TIME_TO_FIRST_TOKEN: Bounds = (
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0),
)
E2E_LATENCY: Bounds = (*TIME_TO_FIRST_TOKEN, 600.0, 1200.0, 1800.0, 2400.0)
INTER_TOKEN_LATENCY: Bounds = (
    *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
)
QUEUE_TIME: Bounds = (
    *(0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0),
    *(float(seconds) for seconds in range(30, 101, 10)),
    *(float(seconds) for seconds in range(200, 1001, 100)),
    *(float(seconds) for seconds in range(1200, 2001, 200)),
    *(2500.0, 3000.0),
)
TOKENS: Bounds = (
    *(100.0, 300.0, 500.0, 700.0, 1000.0, 1500.0),
    *(float(tokens) for tokens in range(2000, 10001, 1000)),
    *(12000.0, 15000.0, 20000.0, 22000.0, 25000.0, 30000.0, 35000.0, 40000.0, 66000.0, 99000.0, 132000.0),
    *(300000.0, 600000.0, 900000.0, 1100000.0),
)
SHORT: Bounds = (  # for durations of about a millisecond
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


def ascending(values: Iterable[float]) -> Bounds:
    """Return the values in ascending order without duplicates. Raises `ConfigurationError` if there are too many."""
    bounds = tuple(sorted({float(value) for value in values}))
    if len(bounds) > MAX_BOUNDS:
        raise ConfigurationError(f"a histogram has at most {MAX_BOUNDS} bounds, not {len(bounds)}.")
    return bounds


def token_bounds(rule: Sequence[str]) -> Bounds:
    """Return the bounds that a rule describes.

    A rule is `default`, `tse MIDDLE BASE COUNT` (see `two_sided_exponential`) or `customer VALUE ...`. Raises
    `ConfigurationError` for an invalid rule. The caller puts the option's name before the error's message.
    """
    kind, *words = rule
    if kind == "default":
        if words:
            raise ConfigurationError("`default` takes no numbers.")
        return TOKENS
    if kind not in ("tse", "customer"):
        raise ConfigurationError(f"the rule is `default`, `tse` or `customer`, not {kind!r}.")
    numbers = [_number(word) for word in words]
    if kind == "customer":
        if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
            raise ConfigurationError("`customer` takes one or more different numbers of at least 0.")
        return ascending(numbers)
    if len(numbers) != 3:
        raise ConfigurationError("`tse` takes three numbers: MIDDLE, BASE and COUNT.")
    middle, base, count = numbers
    if middle <= 0 or base <= 1 or count < 1 or not count.is_integer() or count > MAX_BOUNDS:
        raise ConfigurationError(
            f"`tse` takes a MIDDLE above 0, a BASE above 1 and a whole COUNT from 1 to {MAX_BOUNDS}."
        )
    return two_sided_exponential(middle, base, int(count))


def two_sided_exponential(middle: float, base: float, count: int) -> Bounds:
    """Return `middle`, and `count` / 2 bounds on each side at distances base, base ** 2, ... from it.

    An odd `count` is rounded up. Negative bounds become 0. `1000 2 8` gives 984, 992, 996,
    998, 1000, 1002, 1004, 1008, 1016.
    """
    try:
        distances = [base**power for power in range(1, math.ceil(count / 2) + 1)]
    except OverflowError:
        raise ConfigurationError("the bounds of `tse` are too large for a number.") from None
    below = [max(0.0, middle - distance) for distance in distances]
    return ascending([*below, middle, *(middle + distance for distance in distances)])


def _number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise ConfigurationError(f"{word!r} is no number.") from None
    if not math.isfinite(value):
        raise ConfigurationError(f"{word!r} is no finite number.")
    return value
