"""Evaluation of the turns: medians, the best peer for each figure, and Penstock's ratio to it with its spread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from bench.cpu.engines import OURS, PEERS
from bench.cpu.turns import Turn
from bench.cpu.work import FIGURES, IN_PROCESS, STREAMED, Figure

Values = Mapping[str, Mapping[str, Sequence[float]]]  # figure -> engine -> values in the order of rounds


class Ratio(NamedTuple):
    """How many times better Penstock is than the best peer: median, minimum and maximum over pairs of rounds."""

    peer: str
    median: float
    low: float
    high: float


class Goal(NamedTuple):
    """A performance goal."""

    text: str
    reached: bool


class Line(NamedTuple):
    """One figure with the median of every engine."""

    figure: Figure
    medians: Mapping[str, float]
    ratio: Ratio | None  # None without Penstock or without a peer
    share: float | None  # Penstock (else the best peer) as a share of the machine's limit

    @property
    def goals(self) -> list[Goal]:
        """Return the goals for which it is known whether they are reached."""
        figure, own, found = self.figure, self.medians.get(OURS), []
        if figure.goal is not None and self.ratio is not None:
            found.append(Goal(f"{figure.goal:.1f}", self.ratio.median >= figure.goal))
        if figure.share_goal is not None and self.share is not None and own is not None:
            found.append(Goal(f"{figure.share_goal:.0%}", self.share >= figure.share_goal))
        if figure.most is not None and own is not None:
            found.append(Goal(f"at most {figure.most:g}", own <= figure.most))
        return found


def by_figure(turns: Iterable[Turn]) -> Values:
    """The values that count: disturbed turns only where an engine has no other of that figure."""
    found: dict[str, dict[str, list[Turn]]] = defaultdict(lambda: defaultdict(list))
    for turn in sorted(turns, key=lambda turn: turn.round):
        found[turn.figure][turn.engine].append(turn)
    return {
        figure: {engine: _undisturbed(made) for engine, made in engines.items()} for figure, engines in found.items()
    }


def _undisturbed(turns: Sequence[Turn]) -> list[float]:
    quiet = [turn.value for turn in turns if not turn.disturbed]
    return quiet or [turn.value for turn in turns]


def disturbed(turns: Iterable[Turn]) -> set[tuple[str, str]]:
    """Engine and figure where every turn was disturbed."""
    of_all = {(turn.engine, turn.figure) for turn in turns}
    return of_all - {(turn.engine, turn.figure) for turn in turns if not turn.disturbed}


def compare(
    values: Values,
    best: Mapping[str, float],
    *,
    near_limits: bool = True,
    goals: Mapping[str, tuple[float, float | None]] = MappingProxyType({}),
) -> list[Line]:
    """A line for each figure that somebody has, in the order of the rows. `best` is what limits allow.

    `goals` are ratios and shares of the limit that stand in the place of a figure's own.

    Without `near_limits` no share of them is aimed at: a tiny model is bound by something else.
    """
    lines = []
    for known in FIGURES.values():
        ratio_goal, share_goal = goals.get(known.name, (known.goal, known.share_goal))
        figure = replace(known, goal=ratio_goal, share_goal=share_goal if near_limits else None)
        engines = values.get(figure.name, {})
        if not engines:
            continue
        medians = {engine: median(found) for engine, found in engines.items()}
        peer = best_peer(figure, medians)
        shown = OURS if OURS in medians else peer
        limit = best.get(figure.name)
        share = medians[shown] / limit if limit and shown is not None else None
        ratio = None
        if OURS in engines and peer is not None:
            ratio = ratio_of(figure, peer, engines[OURS], engines[peer])
        lines.append(Line(figure, medians, ratio, share))
    return lines


def best_peer(figure: Figure, medians: Mapping[str, float]) -> str | None:
    peers = {engine: value for engine, value in medians.items() if engine != OURS}
    if not peers:
        return None
    return (max if figure.higher_is_better else min)(peers, key=lambda engine: peers[engine])


def ratio_of(figure: Figure, peer: str, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the ratio, which is above 1 if Penstock is better. Rounds are compared pair by pair, as they were
    measured.
    """
    pairs = [(a, b) if figure.higher_is_better else (b, a) for a, b in zip(ours, theirs)]
    ratios = [above / below for above, below in pairs]
    return Ratio(peer, median(ratios), min(ratios), max(ratios))


def streamed_share(values: Values) -> float | None:
    """Return Penstock's throughput over HTTP as a share of its throughput in process at equal concurrency; None if not
    measured.
    """
    streamed = values.get(STREAMED.name, {}).get(OURS)
    direct = values.get(IN_PROCESS.figures[0].name, {}).get(OURS)
    return median(streamed) / median(direct) if streamed and direct else None


def table(title: str, lines: Sequence[Line]) -> str:
    """Return a table with a column for each engine that has a figure, Penstock first."""
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
