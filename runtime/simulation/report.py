"""The result of a simulation: request times and their percentiles, and comparisons as text, JSON and SVG."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Batch
from runtime.request import Delta
from runtime.sequence import Sequence

PERCENTILES = (50, 90, 99)
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
WIDTH, HEIGHT, MARGIN = 640, 360, 50


class Outcome:
    """The times and counts of all simulated requests."""

    def __init__(self) -> None:
        self.end_s = 0.0
        self.num_refused = self.num_retracted = self.num_steps = 0
        self.num_tokens = self.num_prompt = self.num_cached = 0
        self.order: list[int] = []  # request ids in the order of their admission
        self.numbers: dict[int, int] = {}  # request id -> index in the arrays
        self.arrived_s, self.first_s, self.last_s = array("d"), array("d"), array("d")
        self.num_output = array("l")
        self._seen = bytearray()  # [index in the arrays]: whether the request was admitted

    def arrived(self, request_id: int, time_s: float, num_prompt: int) -> None:
        """Record a request that the queue accepted."""
        self.numbers[request_id] = len(self.arrived_s)
        self.arrived_s.append(time_s)
        self.first_s.append(0.0)
        self.last_s.append(0.0)
        self.num_output.append(0)
        self._seen.append(0)
        self.num_prompt += num_prompt

    def admitted(self, batch: Batch, num_cached: int) -> None:
        """Record the sequences of a batch that run for the first time."""
        self.num_cached += num_cached
        for sequence in batch.sequences:
            number = self.numbers[sequence.request.id]
            if not self._seen[number]:
                self._seen[number] = 1
                self.order.append(sequence.request.id)

    def applied(self, deltas: list[Delta], now_s: float) -> None:
        """Record the results of a step."""
        self.num_steps += 1
        numbers, first_s, last_s, num_output = self.numbers, self.first_s, self.last_s, self.num_output
        for delta in deltas:
            count = len(delta.ids)
            if count:
                number = numbers[delta.request_id]
                if not num_output[number]:
                    first_s[number] = now_s
                last_s[number] = now_s
                num_output[number] += count
                self.num_tokens += count

    def decoded(self, sequences: Iterable[Sequence], num_steps: int, now_s: float) -> None:
        """Record several steps that generated one token for each of these sequences, none of which is a first token."""
        self.num_steps += num_steps
        numbers, last_s, num_output = self.numbers, self.last_s, self.num_output
        for sequence in sequences:
            number = numbers[sequence.request.id]
            last_s[number] = now_s
            num_output[number] += num_steps
            self.num_tokens += num_steps

    @property
    def first_token_s(self) -> NDArray[np.float64]:
        """Seconds from arrival to the first token, for each request with output."""
        has_output = np.asarray(self.num_output) > 0
        return (np.asarray(self.first_s) - np.asarray(self.arrived_s))[has_output]

    @property
    def token_s(self) -> NDArray[np.float64]:
        """Mean seconds between two tokens, for each request with at least two tokens."""
        count = np.asarray(self.num_output)
        several = count > 1
        return ((np.asarray(self.last_s) - np.asarray(self.first_s))[several]) / (count[several] - 1)

    @property
    def total_s(self) -> NDArray[np.float64]:
        """Seconds from arrival to the last token, for each request with output."""
        has_output = np.asarray(self.num_output) > 0
        return (np.asarray(self.last_s) - np.asarray(self.arrived_s))[has_output]

    def values(self) -> dict[str, Any]:
        """Return the figures of the report, with times in milliseconds."""
        span_s = max(self.end_s, 1e-9)
        return {
            "requests": len(self.arrived_s),
            "refused": self.num_refused,
            "seconds": round(self.end_s, 3),
            "steps": self.num_steps,
            "output_tokens": self.num_tokens,
            "output_tokens_per_s": round(self.num_tokens / span_s, 1),
            "cached_share": round(self.num_cached / max(self.num_prompt, 1), 4),
            "retractions": self.num_retracted,
            "first_token_ms": percentiles(self.first_token_s),
            "time_per_token_ms": percentiles(self.token_s),
            "total_ms": percentiles(self.total_s),
        }


def percentiles(seconds: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean and percentiles in milliseconds, or zeros if there are no values."""
    if not len(seconds):
        return {"mean": 0.0, **{f"p{each}": 0.0 for each in PERCENTILES}}
    points = np.percentile(seconds, PERCENTILES)
    values = {f"p{each}": round(float(point) * 1000, 2) for each, point in zip(PERCENTILES, points, strict=True)}
    return {"mean": round(float(seconds.mean()) * 1000, 2), **values}


def as_text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with one column for each policy."""
    names = list(results)
    rows: list[tuple[str, ...]] = [("", *names)]
    for key, value in results[names[0]].items():
        if isinstance(value, Mapping):
            rows += [(f"{key} {part}", *(f"{results[name][key][part]:,}" for name in names)) for part in value]
        else:
            rows.append((key, *(f"{results[name][key]:,}" for name in names)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(names) + 1)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def as_svg(outcomes: Mapping[str, Outcome]) -> str:
    """Return a plot of the share of requests whose first token arrived within a time. The time axis is logarithmic."""
    samples = {name: np.sort(outcome.first_token_s) for name, outcome in outcomes.items()}
    known = [values for values in samples.values() if len(values)]
    low = max(min((float(values[0]) for values in known), default=0.001), 1e-4)
    high = max(max((float(values[-1]) for values in known), default=1.0), low * 10)
    span, plot_width, plot_height = np.log10(high / low), WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<path d="M{MARGIN},{MARGIN}V{HEIGHT - MARGIN}H{WIDTH - MARGIN}" fill="none" stroke="black"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">time to first token</text>',
    ]
    for power in range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1):
        if low <= 10.0**power <= high:
            x = MARGIN + plot_width * np.log10(10.0**power / low) / span
            label = f"{10.0**power:g} s" if power >= 0 else f"{10.0 ** (power + 3):g} ms"
            lines.append(f'<text x="{x:.0f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{label}</text>')
    for share in (0, 50, 100):
        y = HEIGHT - MARGIN - plot_height * share / 100
        lines.append(f'<text x="{MARGIN - 6}" y="{y + 4:.0f}" text-anchor="end">{share} %</text>')
    for number, (name, values) in enumerate(samples.items()):
        color = COLORS[number % len(COLORS)]
        points = []
        for share in range(101 if len(values) else 0):
            value = max(float(values[min(len(values) - 1, share * len(values) // 100)]), low)
            x = MARGIN + plot_width * np.log10(value / low) / span
            points.append(f"{x:.1f},{HEIGHT - MARGIN - plot_height * share / 100:.1f}")
        text = name.replace("&", "&amp;").replace("<", "&lt;")
        lines.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"/>')
        lines.append(f'<text x="{MARGIN + 10}" y="{MARGIN + 16 * (number + 1)}" fill="{color}">{text}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
