"""`cpu`: measure the requested work, or join earlier results, and print the tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import PROGRAM
from bench.checkpoints import SHAPES
from bench.cpu.engines import (
    OUR_OPTIONS,
    OURS,
    PEERS,
    Peer,
    checkpoint,
    chosen_peers,
    converted,
    environment,
    our_command,
    our_environment,
    peer_command,
)
from bench.cpu.limits import Limits, measured
from bench.cpu.process import Runner
from bench.cpu.result import Part, Result, join, limits_text, render, sitting
from bench.cpu.streams import stream_all
from bench.cpu.turns import Contest, Failure, Stream
from bench.cpu.work import FIGURES, ROWS, measures_of
from bench.families import FAMILIES
from ops.machine import cache_folder
from runtime.errors import ConfigurationError
from serve.bench import report
from serve.bench.options import new_parser
from serve.bench.workload import Vocabulary

STREAM_ROW, START_ROW = 5, 6


def parser() -> argparse.ArgumentParser:
    options = new_parser("cpu", "Compare this engine with its peers on this machine's CPU.", program=PROGRAM)
    options.add_argument("--shapes", nargs="+", choices=(*SHAPES, *FAMILIES), default=["T", "S"])
    options.add_argument("--weights", nargs="+", choices=tuple(OUR_OPTIONS), default=["bf16"])
    options.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=list(ROWS))
    options.add_argument("--figures", nargs="+", metavar="NAME", help="of the rows only these")
    options.add_argument("--rounds", type=int, default=3, help="times that each engine is asked")
    options.add_argument("--peers-only", metavar="NAMES", help=f"of {','.join(PEERS)}; default: all installed")
    options.add_argument("--without-ours", action="store_true")
    options.add_argument("--ours", default="", metavar="OPTIONS", help="options of our engine, in one word")
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--peers", default=str(cache_folder("peers")), metavar="DIR")
    options.add_argument("--models", default=str(cache_folder("models")), metavar="DIR")
    options.add_argument("--logs", metavar="DIR", help="keep what the engines print")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--prepare", action="store_true", help="write and convert the models, measure nothing")
    options.add_argument("--output-file", help="write the result as JSON")
    options.add_argument("--join", nargs="+", metavar="FILE", help="measure nothing, join earlier results")
    return options


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    if options.join:
        result = join(options.join)
    else:
        if options.rounds < 1 or options.threads < 1:
            raise ConfigurationError("--rounds and --threads must be at least 1.")
        limits, parts = run(options)
        if limits is None:
            return 0
        result = Result(limits, parts, [sitting(argv)])
    report.say(render(result))
    if options.output_file:
        report.write(options.output_file, report.document("cpu", vars(options), result, argv=argv, program=PROGRAM))
    return 0


def run(options: argparse.Namespace) -> tuple[Limits | None, list[Part]]:
    """Measure. Return no limits if models were only prepared."""
    only = None if options.peers_only is None else [name for name in options.peers_only.split(",") if name]
    peers = chosen_peers(Path(options.peers), only)
    limits = None
    if not options.prepare:
        limits = measured(options.threads, our_environment(options.threads))
        say(limits_text(limits))
    parts = [run_part(options, peers, shape, weights) for shape in options.shapes for weights in options.weights]
    return limits, parts


def run_part(options: argparse.Namespace, peers: Sequence[Peer], shape: str, weights: str) -> Part:
    models = Path(options.models)
    source = checkpoint(models, shape)
    vocab = (FAMILIES if shape in FAMILIES else SHAPES)[shape].vocab
    contest = Contest(seed=f"{options.seed} {shape}", vocab=vocab, rounds=options.rounds, say=say)
    able: list[tuple[Peer, Path]] = []
    for peer in peers:
        if weights not in peer.weights:
            continue
        try:
            able.append((peer, converted(peer, Path(options.peers), models, shape, weights)))
        except ConfigurationError as error:
            contest.failures.append(Failure(peer.name, "conversion", str(error)))
            say(f"{peer.name} cannot take part: {error}")
    if not options.prepare:
        say(f"== {shape}, {weights}")
        with logs(options.logs) as directory:
            entrants = Entrants(options, source, able, weights, directory)
            _measure(options, contest, entrants, Vocabulary.of_tokenizer(str(source)))
    return Part(shape, weights, contest.turns, contest.failures, contest.versions)


class Entrants:
    """The runners of one part of the comparison."""

    def __init__(
        self,
        options: argparse.Namespace,
        source: Path,
        able: Sequence[tuple[Peer, Path]],
        weights: str,
        logs: Path,
    ) -> None:
        self._options = options
        self._source = source
        self._able = able
        self._weights = weights
        self._logs = logs

    def in_process(self) -> list[Runner]:
        return [runner for runner, _ in self._runners(serving=False)]

    def serving(self) -> list[tuple[Runner, bool]]:
        """Yield the runners that serve HTTP, each with whether it accepts token ids."""
        return self._runners(serving=True)

    def _runners(self, *, serving: bool) -> list[tuple[Runner, bool]]:
        options, weights, threads = self._options, self._weights, self._options.threads
        commands = []
        if not options.without_ours:
            command = our_command(self._source, weights, threads, options.ours)
            commands.append((OURS, command, our_environment(threads), True))
        for peer, model in self._able:
            if peer.serves or not serving:
                command = peer_command(peer, Path(options.peers), model, weights, threads)
                commands.append((peer.name, command, environment(threads), peer.takes_ids))
        more = ["--serve"] if serving else []
        return [
            (Runner(name, [*command, *more], variables, self._logs / f"{name}.log"), takes_ids)
            for name, command, variables, takes_ids in commands
        ]


def _measure(options: argparse.Namespace, contest: Contest, entrants: Entrants, vocabulary: Vocabulary) -> None:
    measures = list(measures_of(options.rows))
    if options.figures:
        unknown = set(options.figures) - FIGURES.keys()
        if unknown:
            raise ConfigurationError(f"There is no figure {', '.join(sorted(unknown))}: {', '.join(FIGURES)}.")
        measures = [one for one in measures if any(figure.name in options.figures for figure in one.figures)]
    if measures or START_ROW in options.rows:
        contest.measure_in_process(entrants.in_process(), measures, starts=START_ROW in options.rows)
    if STREAM_ROW in options.rows:
        contest.measure_streams(
            [(runner, _stream(vocabulary, as_text=not takes_ids)) for runner, takes_ids in entrants.serving()]
        )


def _stream(vocabulary: Vocabulary, *, as_text: bool) -> Stream:
    return partial(stream_all, vocabulary=vocabulary, as_text=as_text)


@contextmanager
def logs(kept: str | None) -> Iterator[Path]:
    if kept is not None:
        Path(kept).mkdir(parents=True, exist_ok=True)
        yield Path(kept)
        return
    with TemporaryDirectory() as name:
        yield Path(name)


def say(text: str) -> None:
    """Print progress to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
