"""The comparison as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.cpu.compare import Line, Ratio
from bench.cpu.engines import OURS, PEERS


def table(title: str, lines: Sequence[Line]) -> str:
    """A column for each engine that has a figure, ours first."""
    engines = [name for name in (OURS, *PEERS) if any(name in line.medians for line in lines)]
    heads = ["row", title, *engines, "ratio to the best peer", "of the limit", "goals"]
    rows = [_row(line, engines) for line in lines]
    parts = [heads, ["---"] * 2 + ["---:"] * (len(heads) - 2), *rows]
    return "\n".join(f"| {' | '.join(part)} |" for part in parts)


def _row(line: Line, engines: Iterable[str]) -> list[str]:
    best = line.ratio.peer if line.ratio else None
    cells = [_value(line.medians.get(name), bold=name == best) for name in engines]
    share = "" if line.share is None else f"{line.share:.0%}"
    name = f"{line.figure.name}, {line.figure.unit}"
    return [str(line.figure.row), name, *cells, _ratio(line.ratio), share, _goal(line)]


def _value(value: float | None, *, bold: bool) -> str:
    if value is None:
        return ""
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"**{text}**" if bold else text


def _ratio(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _goal(line: Line) -> str:
    return ", ".join(f"{goal.text} {'reached' if goal.reached else 'missed'}" for goal in line.goals)
