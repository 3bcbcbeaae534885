"""Who is asked when: each row of work goes round all engines, A B A B, while the others stand still."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from serve.bench.cpu.engines import OURS
from serve.bench.cpu.work import (
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

WARM_UP = -1  # the number of a round that is not counted
Stream = Callable[[str, Sequence[Ids]], dict[str, float]]
Say = Callable[[str], None]


class Turn(NamedTuple):
    """One value of one figure."""

    engine: str
    figure: str
    round: int
    value: float


class Failure(NamedTuple):
    """An engine that took no further part, and why."""

    engine: str
    what: str
    reason: str


class Contender(Protocol):
    """An engine that takes part: a `process.Runner`, or a scripted other."""

    name: str
    url: str | None
    versions: Mapping[str, str]

    def start(self) -> None: ...
    def generate(self, prompts: Sequence[Ids], new_tokens: int) -> float: ...
    def ask(self, job: Mapping[str, Any]) -> Mapping[str, Any]: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def peak_bytes(self) -> int: ...
    def stop(self) -> None: ...


@dataclass
class Contest:
    """Contenders on one model, and what came of it. Use `measure_in_process`, then `measure_streams`."""

    seed: str
    vocab: int
    rounds: int
    say: Say
    turns: list[Turn] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def measure_in_process(
        self, contenders: Sequence[Contender], measures: Sequence[Measure], *, starts: bool
    ) -> None:
        """Rows of work in the engines' own processes; with `starts` also how they start and what they hold."""
        with self._running(contenders, starts=starts) as alive:
            for measure in measures:
                for number in range(WARM_UP, self.rounds):
                    for contender in list(alive):
                        self._take(alive, contender, measure, number)
            if starts:
                for contender in alive:
                    self._note(contender.name, {MEMORY.name: contender.peak_bytes() / 2**20}, 0)

    def measure_streams(self, contenders: Sequence[tuple[Contender, Stream]]) -> None:
        """Row 5: contenders that serve, each with how requests go to it. Ours also says its loop's lag."""
        streams = {contender.name: stream for contender, stream in contenders}
        with self._running([contender for contender, _ in contenders], starts=False) as alive:
            for number in range(WARM_UP, self.rounds):
                for contender in list(alive):
                    self._stream(alive, contender, streams[contender.name], number)

    @contextmanager
    def _running(self, contenders: Sequence[Contender], *, starts: bool) -> Iterator[list[Contender]]:
        """Those that could be started, standing still."""
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
            for number in range(self.rounds if starts else 1):
                contender.stop()
                began = perf_counter()
                contender.start()
                if starts:
                    contender.generate([self._draw("start", number).prompt(FIRST_PROMPT)], 1)
                    self._note(contender.name, {START.name: perf_counter() - began}, number)
            contender.pause()
            self.versions[contender.name] = contender.versions
            alive.append(contender)

    def _take(self, alive: list[Contender], contender: Contender, measure: Measure, number: int) -> None:
        draw = self._draw(measure.figures[0].name, number)
        with self._out_if_failing(alive, contender, measure.figures[0].name):
            contender.resume()
            if number == WARM_UP:
                measure.warm_up(contender, draw)
            else:
                self._note(contender.name, measure.run(contender, draw), number)
            contender.pause()

    def _stream(self, alive: list[Contender], contender: Contender, stream: Stream, number: int) -> None:
        draw, url = self._draw("streams", number), contender.url
        with self._out_if_failing(alive, contender, "HTTP"):
            if url is None:
                raise WorkError(f"{contender.name} does not serve")
            contender.resume()
            prompts = draw.prompts(STREAMS, PROMPT)
            if contender.name == OURS:
                found = self._stream_ours(contender, url, stream, prompts, number)
            else:
                found = stream(url, prompts)
            if number != WARM_UP:
                self._note(contender.name, found, number)
            contender.pause()

    def _stream_ours(
        self, ours: Contender, url: str, stream: Stream, prompts: Sequence[Ids], number: int
    ) -> dict[str, float]:
        """The same engine is also asked in process, and how late its loop was while it streamed."""
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

    def _note(self, engine: str, values: Mapping[str, float], number: int) -> None:
        for figure, value in values.items():
            self.turns.append(Turn(engine, figure, number, value))
            self.say(f"{engine:<14}{figure:<28}{value:>12,.1f}")

    def _draw(self, what: str, number: int) -> Draw:
        return Draw(f"{self.seed} {what} {number}", self.vocab)
