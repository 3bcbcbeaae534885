"""`penstock replay FILE`: repeat a recorded schedule, with the recorded tokens or with the model's tokens."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import orjson

from ops.machine import Machine
from runtime.batch import Runner, StepOutput
from runtime.config import Args
from runtime.errors import ConfigurationError
from runtime.replay.player import Applied, Counts, Difference, Dropped, Launched, Player
from runtime.replay.timeline import as_svg, read_timeline
from serve.demo import demo_path


def main(words: Sequence[str]) -> int:
    """Run `penstock replay`. `words` are the arguments after `replay`.

    Return 0 if every decision and token equals the record, or 1 at the first difference or if the scheduler fails as in
    the record. Raises `ConfigurationError` if the file is not a record, or if the model cannot repeat it.
    """
    parser = argparse.ArgumentParser(
        prog="penstock replay",
        allow_abbrev=False,
        description="Repeat the schedule in a record (penstock serve --record FILE): the scheduler must make the same "
        "decisions again, from the recorded tokens. With the server's options (--model-path ...), the model computes "
        "every step again, and its tokens must be the recorded ones. The exit status is 1 at the first difference, or "
        "if the scheduler fails as it did in the record.",
    )
    parser.add_argument("file", metavar="FILE", help="the record")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--no-check", action="store_true", help="do not verify pages and rows after every step")
    parser.add_argument("--plot", metavar="FILE.svg", help="write a plot of the requests and steps over time, and end")
    flags, rest = parser.parse_known_args(words)
    if flags.plot is not None:
        if rest:
            raise ConfigurationError(f"--plot runs no model, so it takes no options of a server: {rest[0]}.")
        try:
            Path(flags.plot).write_text(as_svg(read_timeline(flags.file)))
        except (OSError, Difference) as error:
            raise ConfigurationError(f"--plot {flags.plot}: {error}.") from error
        return 0
    player = Player(flags.file, check=not flags.no_check)
    difference = None
    try:
        if rest:
            asyncio.run(_with_model(player, Args.parse(rest)))
        else:
            for _ in player.events():
                pass
    except Difference as error:
        difference = str(error)
    sys.stdout.write(_result(player.counts, difference, as_json=flags.json))
    return 1 if difference or player.counts.failures else 0


def _result(counts: Counts, difference: str | None, *, as_json: bool) -> str:
    values = {
        "steps": counts.steps,
        "requests": counts.requests,
        "tokens": counts.tokens,
        "failures": counts.failures,
        "difference": difference,
    }
    if as_json:
        return orjson.dumps(values).decode() + "\n"
    lines = [f"{counts.steps} steps, {counts.requests} requests, {counts.tokens} tokens repeated."]
    lines += [f"The scheduler fails as recorded: {failure}" for failure in counts.failures]
    lines.append(f"First difference: {difference}" if difference else "No difference.")
    return "\n".join(lines) + "\n"


async def _with_model(player: Player, args: Args) -> None:
    """Compute every recorded step with the model, and compare its tokens with the recorded tokens."""
    from runtime.actors.assemble import prepare
    from runtime.actors.replica import start_replica

    header = player.header
    plan, facts = prepare(args, Machine.probe(), demo_path=demo_path())
    if plan.parallel.dp_size > 1:
        raise ConfigurationError("A record is of one replica: leave --dp-size out.")
    cache = replace(plan.cache, max_total_tokens=player.cache.num_tokens, page_size=player.cache.page_size)
    limits = replace(plan.scheduler, record_file=None, max_running=header["scheduler"]["max_running"])
    plan = replace(plan, cache=cache, scheduler=limits)
    replica = await start_replica(plan, facts, 0)
    with closing(replica.runner) as runner:
        _check_sizes(player, replica.scheduler.load.num_pages, replica.plan.scheduler.max_running, facts.vocab_size)
        await _compare(player, runner)


def _check_sizes(player: Player, num_pages: int, max_running: int, vocab_size: int) -> None:
    """Raise `ConfigurationError` if the engine has too few pages or rows for the record, or another vocabulary."""
    needed = player.cache.num_pages, player.header["scheduler"]["max_running"], player.header["vocab_size"]
    if num_pages < needed[0] or max_running < needed[1] or vocab_size != needed[2]:
        raise ConfigurationError(
            f"The record has {needed[0]} pages, {needed[1]} rows and {needed[2]} token ids; with these options the "
            f"model has {num_pages}, {max_running} and {vocab_size}. Give the options of the recorded server."
        )


async def _compare(player: Player, runner: Runner) -> None:
    in_flight: deque[asyncio.Future[StepOutput]] = deque()
    for event in player.events():
        if isinstance(event, Launched):
            for sequence in event.batch.sequences:
                request = sequence.request
                unknown = {"a grammar": request.constraint, "an adapter": request.adapter, "images": sequence.media}
                for what, value in unknown.items():
                    if value is not None:
                        raise ConfigurationError(
                            f"Request {request.id} of the record has {what}, which the record does not contain; "
                            "replay it without a model."
                        )
            in_flight.append(runner.launch(event.batch))
        elif isinstance(event, Applied):
            runner.finish_oldest()
            output = await in_flight.popleft()
            if output.tokens != event.tokens:
                row = next(row for row, ids in enumerate(event.tokens) if ids != output.tokens[row])
                raise Difference(
                    player.line,
                    player.counts.steps,
                    f"row {row} of request {event.batch.sequences[row].request.id}: the model chooses "
                    f"{output.tokens[row]}, and the record has {event.tokens[row]}",
                )
        elif isinstance(event, Dropped):
            while in_flight:
                await in_flight.popleft()
