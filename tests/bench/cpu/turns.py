"""The order of measurements: each row of work runs on all engines in turn (A B A B), while the other engines are
stopped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple, Protocol

from bench.cpu.engines import OURS
from bench.cpu.work import (
    FIRST_PROMPT,
    IN_PROCESS,
    LAG,
    MEMORY,
    PROMPT,
    START,
    STREAMS,
    Draw,
    Ids,
    Measure,
    WorkError,
)

TOLERATED = 0.05  # share of the machine that other processes may use without a note in the result
MIN_WATCH_S = 1.0  # minimum CPU time, over all processors, for a measurement with a resolution of 10 ms
WARM_UP = -1  # number of the round that is not counted
Stream = Callable[[str, Sequence[Ids]], dict[str, float]]
Say = Callable[[str], None]


class Turn(NamedTuple):
    """One value of one figure."""

    engine: str
    figure: str
    round: int
    value: float
    others: float = 0.0  # share of the machine's CPU time that other processes used during the turn

    @property
    def disturbed(self) -> bool:
        return self.others > TOLERATED


class Failure(NamedTuple):
    """An engine that dropped out, with the reason."""

    engine: str
    what: str
    reason: str


class Contender(Protocol):
    """A participating engine: a `process.Runner`, or a scripted one in tests."""

    name: str
    url: str | None
    versions: Mapping[str, str]

    def start(self) -> None: ...
    def generate(self, prompts: Sequence[Ids], new_tokens: int) -> float: ...
    def ask(self, job: Mapping[str, Any]) -> Mapping[str, Any]: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def cpu_s(self) -> float: ...
    def peak_bytes(self) -> int: ...
    def stop(self) -> None: ...


class CpuWatch:
    """Measures the CPU time of other processes (neither this process nor the contender) since its creation."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._before = self._now()

    def _now(self) -> tuple[float, float, float]:
        busy_s, all_s = machine_s()
        return busy_s, all_s, self._contender.cpu_s() + process_time()

    def others(self) -> float:
        """Return the share of the machine's CPU time that other processes used; 0 if the time was too short."""
        busy_s, all_s, own_s = (after - before for before, after in zip(self._before, self._now()))
        return max(busy_s - own_s, 0.0) / all_s if all_s >= MIN_WATCH_S else 0.0


def machine_s() -> tuple[float, float]:
    """Return the busy seconds of all processors, and their total seconds, since the machine started."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    except OSError:
        return 0.0, 0.0
    user, nice, system, idle, wait, *rest = (int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in first.split()[1:9])
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + wait


@dataclass
class Contest:
    """Contenders on one model, and their results. Use `measure_in_process`, then `measure_streams`.

    `alone` is a context around each round, which may wait while the machine has other work.
    """

    seed: str
    vocab: int
    rounds: int
    say: Say
    alone: Callable[[], AbstractContextManager[object]] = nullcontext
    turns: list[Turn] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def measure_in_process(self, contenders: Sequence[Contender], measures: Sequence[Measure], *, starts: bool) -> None:
        """Run rows of work in the engines' processes. With `starts`, also measure their start and their memory."""
        with self._running(contenders, starts=starts) as alive:
            for measure in measures:
                for number in range(WARM_UP, self.rounds):
                    with self.alone():
                        for contender in list(alive):
                            self._take(alive, contender, measure, number)
            if starts:
                for contender in alive:
                    self._note(contender.name, {MEMORY.name: contender.peak_bytes() / 2**20}, 0)

    def measure_streams(self, contenders: Sequence[tuple[Contender, Stream]]) -> None:
        """Measure streaming on contenders that serve HTTP. For Penstock, also measure the event loop's lag."""
        streams = {contender.name: stream for contender, stream in contenders}
        with self._running([contender for contender, _ in contenders], starts=False) as alive:
            for number in range(WARM_UP, self.rounds):
                with self.alone():
                    for contender in list(alive):
                        self._stream(alive, contender, streams[contender.name], number)

    @contextmanager
    def _running(self, contenders: Sequence[Contender], *, starts: bool) -> Iterator[list[Contender]]:
        """Yield the contenders that could be started, stopped."""
        alive: list[Contender] = []
        try:
            for contender in contenders:
                self._start(alive, contender, starts)
            yield alive
        finally:
            for contender in contenders:
                contender.stop()

    def _start(self, alive: list[Contender], contender: Contender, starts: bool) -> None:
        with self._out_if_failing(alive, contender, "start"):
            if not starts:
                contender.start()
            for number in range(self.rounds if starts else 0):
                self._time_start(contender, number)
            contender.pause()
            self.versions[contender.name] = contender.versions
            alive.append(contender)

    def _time_start(self, contender: Contender, number: int) -> None:
        contender.stop()
        prompt = self._draw("start", number).prompt(FIRST_PROMPT)
        with self.alone():
            watch = CpuWatch(contender)
            began = perf_counter()
            contender.start()
            contender.generate([prompt], 1)
            self._note(contender.name, {START.name: perf_counter() - began}, number, watch)

    def _take(self, alive: list[Contender], contender: Contender, measure: Measure, number: int) -> None:
        draw = self._draw(measure.figures[0].name, number)
        with self._out_if_failing(alive, contender, measure.figures[0].name):
            contender.resume()
            watch = CpuWatch(contender)
            if number == WARM_UP:
                measure.warm_up(contender, draw)
            else:
                self._note(contender.name, measure.run(contender, draw), number, watch)
            contender.pause()

    def _stream(self, alive: list[Contender], contender: Contender, stream: Stream, number: int) -> None:
        draw, url = self._draw("streams", number), contender.url
        with self._out_if_failing(alive, contender, "HTTP"):
            if url is None:
                raise WorkError(f"{contender.name} does not serve")
            contender.resume()
            prompts, watch = draw.prompts(STREAMS, PROMPT), CpuWatch(contender)
            if contender.name == OURS:
                found = self._stream_ours(contender, url, stream, prompts, number)
            else:
                found = stream(url, prompts)
            if number != WARM_UP:
                self._note(contender.name, found, number, watch)
            contender.pause()

    def _stream_ours(
        self, ours: Contender, url: str, stream: Stream, prompts: Sequence[Ids], number: int
    ) -> dict[str, float]:
        """Measure Penstock's streams, with its throughput in process and its event loop's lag during the streams."""
        direct = IN_PROCESS.run(ours, self._draw("beside streams", number))
        ours.ask({"watch": True})
        streamed = stream(url, prompts)
        return {**streamed, **direct, LAG.name: 1e3 * ours.ask({"lag": True})["lag_s"]}

    @contextmanager
    def _out_if_failing(self, alive: list[Contender], contender: Contender, what: str) -> Iterator[None]:
        try:
            yield
        except WorkError as error:
            self.failures.append(Failure(contender.name, what, str(error)))
            self.say(f"{contender.name} takes no further part: {what}: {error}")
            contender.stop()
            if contender in alive:
                alive.remove(contender)

    def _note(self, engine: str, values: Mapping[str, float], number: int, watch: CpuWatch | None = None) -> None:
        others = 0.0 if watch is None else watch.others()
        for figure, value in values.items():
            turn = Turn(engine, figure, number, value, others)
            self.turns.append(turn)
            busy = f"   others used {others:.0%} of the machine" if turn.disturbed else ""
            self.say(f"{engine:<14}{figure:<28}{value:>12,.1f}{busy}")

    def _draw(self, what: str, number: int) -> Draw:
        return Draw(f"{self.seed} {what} {number}", self.vocab)
