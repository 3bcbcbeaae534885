"""Plots the timeline of a record: when each request waited, was prefilled and decoded, and what each step computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from runtime.replay.player import Added, Applied, Player, Timed
from runtime.sequence import Sequence

MAX_REQUESTS = 200  # maximum number of requests that get a bar in the plot
WIDTH, LEFT, RIGHT = 900, 70, 10
STEPS_HEIGHT = 90
COLOURS = {"queue": "hsl(40,90%,50%)", "prefill": "hsl(210,80%,50%)", "decode": "hsl(130,60%,42%)"}


class Step(NamedTuple):
    """A step of a record."""

    begin_s: float  # seconds since the record began
    seconds: float
    num_decode_tokens: int  # number of all other tokens that it computed, including draft tokens
    num_prompt_tokens: int  # number of prompt tokens that it computed


@dataclass(slots=True)
class Lifetime:
    """The times of one output, in seconds since the record began. None: did not happen in the record."""

    name: str
    added_s: float
    num_prompt: int
    begun_s: float | None = None  # time at which its first step began
    first_s: float | None = None  # time of its first token
    last_s: float | None = None  # time of its last token or of its end
    num_output: int = 0
    finish: str = ""  # "stop", "length" or "abort"; empty if the record does not say


@dataclass(slots=True)
class Timeline:
    """The requests and steps of a record, in order."""

    requests: list[Lifetime]
    steps: list[Step]
    end_s: float  # time of the last event


def read_timeline(path: str | Path) -> Timeline:
    """Replay a record of `--record`, and return its timeline.

    Raises `ConfigurationError` if the file is not a record of this version, and `Difference` if the scheduler now makes
    other decisions.
    """
    lives: dict[Sequence, Lifetime] = {}
    by_name: dict[tuple[int, int], Lifetime] = {}
    steps: list[Step] = []
    now_s = 0.0
    for event in Player(path, check=False).events():
        if isinstance(event, Added):
            now_s = max(now_s, event.time_s)
            for each in event.sequences:
                name = f"{each.request.id}.{each.index}" if len(event.sequences) > 1 else str(each.request.id)
                life = Lifetime(name, event.time_s, each.num_prompt)
                lives[each] = by_name[each.request.id, each.index] = life
        elif isinstance(event, Applied):
            now_s = max(now_s, event.time_s)
            for delta in event.deltas:
                life = by_name[delta.request_id, delta.index]
                if delta.ids:
                    life.first_s = event.time_s if life.first_s is None else life.first_s
                    life.num_output += len(delta.ids)
                life.last_s = event.time_s
                if delta.finish is not None:
                    life.finish = delta.finish.kind
        elif isinstance(event, Timed):
            begin_s, batch = now_s - event.seconds, event.batch
            steps.append(
                Step(
                    begin_s,
                    event.seconds,
                    len(batch.token_ids) - batch.stats.num_prompt_tokens,
                    batch.stats.num_prompt_tokens,
                )
            )
            for each in batch.sequences:
                life = lives[each]
                if life.begun_s is None:
                    life.begun_s = max(begin_s, life.added_s)
    return Timeline(list(by_name.values()), steps, now_s)


def as_svg(timeline: Timeline) -> str:
    """Return the timeline as SVG, in the text color of the page that contains it. Bars of requests have tooltips.

    The upper part shows how many prompt tokens and decode tokens the steps computed. Below it, each request has a bar.
    """
    shown = timeline.requests[:MAX_REQUESTS]
    start = min((each.added_s for each in timeline.requests), default=0.0)
    span = max(timeline.end_s - start, 1e-6)
    scale = (WIDTH - LEFT - RIGHT) / span
    lane = 14 if len(shown) <= 30 else 5
    top = STEPS_HEIGHT + 40
    height = top + lane * len(shown) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        'style="max-width:100%" font-family="sans-serif" font-size="11" fill="currentColor">',
        *_step_bars(timeline.steps, start, scale),
    ]
    for number, life in enumerate(shown):
        y = top + lane * number
        if lane > 10:
            lines.append(f'<text x="{LEFT - 6}" y="{y + 10}" text-anchor="end">{life.name[:10]}</text>')
        lines += _request_bars(life, timeline.end_s, start, scale, y, lane - 2)
    for part in range(6):
        x = LEFT + (WIDTH - LEFT - RIGHT) * part / 5
        anchor = "end" if part == 5 else "middle"
        lines.append(f'<text x="{x:.0f}" y="{height - 24}" text-anchor="{anchor}">{_seconds(span * part / 5)}</text>')
    x = LEFT
    for name, colour in COLOURS.items():
        lines.append(f'<rect x="{x}" y="{height - 14}" width="10" height="10" fill="{colour}" fill-opacity="0.7"/>')
        lines.append(f'<text x="{x + 14}" y="{height - 5}">{name}</text>')
        x += 80
    more = len(timeline.requests) - len(shown)
    words = f"{len(timeline.requests)} requests, {len(timeline.steps)} steps" + (f" ({more} not shown)" if more else "")
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{height - 5}" text-anchor="end">{words}</text></svg>')
    return "\n".join(lines) + "\n"


def _step_bars(steps: list[Step], start: float, scale: float) -> list[str]:
    """Return bars of two pixels each, which show the decode and prompt tokens of the steps that begin there."""
    bins: dict[int, list[int]] = {}
    for step in steps:
        found = bins.setdefault(max(0, int((step.begin_s - start) * scale)) // 2, [0, 0])
        found[0] += step.num_prompt_tokens
        found[1] += step.num_decode_tokens
    most = max((sum(each) for each in bins.values()), default=1) or 1
    bottom = STEPS_HEIGHT + 20
    lines = [
        f'<text x="{LEFT - 6}" y="{bottom - STEPS_HEIGHT + 8}" text-anchor="end">{most}</text>',
        f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end">tokens</text>',
        f'<path d="M{LEFT},{bottom}H{WIDTH - RIGHT}" stroke="currentColor" stroke-opacity="0.4"/>',
    ]
    for place, (prompt, rows) in sorted(bins.items()):
        x, y = LEFT + 2 * place, float(bottom)
        for count, name in ((rows, "decode"), (prompt, "prefill")):
            size = STEPS_HEIGHT * count / most
            y -= size
            if count:
                lines.append(
                    f'<rect x="{x}" y="{y:.1f}" width="2" height="{size:.1f}" fill="{COLOURS[name]}" '
                    'fill-opacity="0.7"/>'
                )
    return lines


def _request_bars(life: Lifetime, end_s: float, start: float, scale: float, y: float, height: int) -> list[str]:
    end = end_s if not life.finish else life.last_s or end_s
    begun = life.begun_s if life.begun_s is not None else end
    first = life.first_s if life.first_s is not None else end
    lines = []
    counts = f"request {life.name}: {life.num_prompt} + {life.num_output} tokens"
    for name, low, high in (("queue", life.added_s, begun), ("prefill", begun, first), ("decode", first, end)):
        if high > low:
            title = f"{counts}, {name} {_seconds(high - low)}" + (f", ended by {life.finish}" if life.finish else "")
            lines.append(
                f'<rect x="{LEFT + (low - start) * scale:.1f}" y="{y}" width="{max(0.5, (high - low) * scale):.1f}" '
                f'height="{height}" fill="{COLOURS[name]}" fill-opacity="0.7"><title>{title}</title></rect>'
            )
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
