"""If one request fails for any reason, its client learns it, nothing leaks, and the bytes of other answers do not
change.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch

import tiny_models
from runtime.constraint import HostData, Output
from runtime.errors import EngineFailure, InvalidRequest, NotFinite, OutOfMemory, StepFailed
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from runtime.tokenizer.chat_template import ChatTemplate
from serve import Engine

# What can break inside an engine, done on purpose to one request, each through a seam of a running engine: what is
# served has no code for it.
MARK = "@@fault@@"  # in the text of the request with the fault
IDS = (9, 8, 7, 6, 5)  # prompt of a request that is given as ids
NEW = 16
LABEL = "victim"


class FaultPoint(NamedTuple):
    """A fault, and its effect on the request."""

    name: str
    act: Callable[[Engine], Awaitable[object]]
    error: type[Exception] | None  # error that the client gets; None: the request ends in another way


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def is_hit(batch: Any) -> bool:
    return any(sequence.request.label == LABEL for sequence in batch.sequences)


async def ask(engine: Engine, **changes: Any) -> Any:
    """Send the victim's request with ids."""
    sampling = SamplingParams(max_new_tokens=NEW, seed=5, ignore_eos=True)
    request = Request(**{"ids": IDS, "sampling": sampling, "label": LABEL, **changes})
    [chunk] = await engine.core.submit(request).whole()
    return chunk


# --- the tokenizer ---


async def encoding_raises(engine: Engine, error: Exception, text: str) -> None:
    def encode(texts: Any, **flags: Any) -> Any:
        if any(MARK in each for each in texts):
            raise error
        return before(texts, **flags)

    tokenizer: Any = engine.core.tokenizer
    before = tokenizer.encode_batch
    with replaced(tokenizer, "encode_batch", encode):
        await engine.generate(text, {"max_new_tokens": 2})


async def encoding_gives(engine: Engine, ids: list[int]) -> None:
    tokenizer: Any = engine.core.tokenizer
    before = tokenizer.encode_batch

    def encode(texts: Any, **flags: Any) -> Any:
        return [ids if MARK in text else found for text, found in zip(texts, before(texts, **flags), strict=True)]

    with replaced(tokenizer, "encode_batch", encode):
        await engine.generate(MARK, {"max_new_tokens": 2})


# --- the detokenizer ---


async def decoding_raises(engine: Engine, error: Exception, at: int) -> None:
    tokenizer: Any = engine.core.tokenizer
    before = tokenizer.decoder

    def decoder(prompt_ids: Any, *flags: Any) -> Any:
        made = before(prompt_ids, *flags)
        if tuple(prompt_ids) != IDS:
            return made
        if at < 0:
            raise error
        push, turns = made.push, iter(range(10_000))

        class Broken:
            def __getattr__(self, name: str) -> Any:
                return getattr(made, name)

            def push(self, ids: Any) -> Any:
                if next(turns) == at:
                    raise error
                return push(ids)

        return Broken()

    with replaced(tokenizer, "decoder", decoder):
        await ask(engine)


# --- the device ---


async def step_raises(engine: Engine, error: Exception, at: int, *, reading: bool = False, again: bool = False) -> None:
    """Raise at the victim's step number `at`, and with `again` at all later steps."""
    [runner] = engine.core.runners
    executor: Any = runner._executor  # pyright: ignore[reportAttributeAccessIssue]
    before, turns = executor.run, iter(range(10_000))

    def run(batch: Any) -> Any:
        if not is_hit(batch):
            return before(batch)
        turn = next(turns)
        if turn < at or (turn > at and not again):
            return before(batch)
        if not reading:
            raise error
        before(batch)

        def read() -> Any:
            raise error

        return read

    with replaced(executor, "run", run):
        await ask(engine)


# --- constraints: grammars and logits processors ---


class Broken:
    """A constraint that fails in some way before output token number `at`."""

    def __init__(self, kind: str, at: int) -> None:
        self.kind, self.at = kind, at

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        if output.num_output != self.at:
            data.give()
        elif self.kind == "raises":
            raise RuntimeError("a grammar broke")
        elif self.kind == "fails":
            data.fail()
        elif self.kind == "allows nothing":
            data.give(np.zeros(4096, np.int32))
        elif self.kind == "breaks logits":
            data.give(process=lambda logits: logits.fill_(torch.nan))
        else:
            data.give(process=_raise)


def _raise(logits: Any) -> None:
    raise MemoryError


async def constraint_breaks(engine: Engine, kind: str, at: int) -> None:
    chunk = await ask(engine, constraint=Broken(kind, at))
    if chunk.finish.kind != "abort":
        raise AssertionError(f"the request ended as {chunk.finish}")


# --- the scheduler, templates, logs ---


async def scheduler_raises(engine: Engine, name: str, at: int) -> None:
    """The scheduler runs out of memory while the victim runs. The victim is recomputed, and no request is lost."""
    [actor] = engine.core.schedulers
    cache: Any = actor.scheduler._cache
    before, turns = getattr(cache, name), iter(range(10_000))

    def call(*values: Any, **more: Any) -> Any:
        runs = any(sequence.request.label == LABEL for sequence in actor.scheduler)
        if runs and next(turns) == at:
            raise MemoryError
        return before(*values, **more)

    with replaced(cache, name, call):
        if len((await ask(engine)).ids) != NEW:
            raise AssertionError("the output was cut")


async def template_takes_long(engine: Engine, source: str) -> None:
    with replaced(engine.core.tokenizer, "template", ChatTemplate({"default": source}, {})):
        await engine.chat("hello", chat_template_kwargs={"n": 99_999})


async def disk_is_full(engine: Engine) -> None:
    """Fail to write every line of the log."""

    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError:
                self.handleError(record)  # like the handlers of the standard library

    log, handler = logging.getLogger("penstock"), Full()
    level = log.level
    with replaced(logging, "raiseExceptions", False):
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        try:
            if len((await ask(engine)).ids) != NEW:
                raise AssertionError("the output was cut")
        finally:
            log.setLevel(level)
            log.removeHandler(handler)


# --- clients ---


async def client_leaves(engine: Engine, turns: int) -> None:
    task = asyncio.create_task(ask(engine))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def stream_is_closed(engine: Engine, pieces: int) -> None:
    stream = engine.stream(input_ids=list(IDS), sampling_params={"max_new_tokens": NEW, "ignore_eos": True})
    for _ in range(pieces):
        await anext(stream)
    await stream.aclose()


async def aborted(engine: Engine, turns: int, times: int) -> None:
    task = asyncio.create_task(ask(engine))
    for _ in range(turns):
        await asyncio.sleep(0)
    for _ in range(times):
        engine.abort(LABEL)
    await asyncio.wait([task])


async def clock_jumps(engine: Engine, by_s: float) -> None:
    now = time.time
    with replaced(time, "time", lambda: now() + by_s):
        if len((await ask(engine)).ids) != NEW:
            raise AssertionError("the output was cut")


def fault_points() -> list[FaultPoint]:
    """Return all fault points in a fixed order."""
    points: list[FaultPoint] = []

    def add(
        name: str,
        error: type[Exception] | None,
        act: Any,
        *values: Any,
        **more: Any,
    ):
        call = partial(_call, act, values, more)
        points.append(FaultPoint(name, call, error))

    for size, text in (("short", MARK), ("long", MARK + " lorem" * 400)):
        for raised in (RuntimeError("broken"), MemoryError(), ValueError("broken"), RecursionError()):
            name = f"encoding a {size} text raises {type(raised).__name__}"
            add(name, EngineFailure, encoding_raises, raised, text)
    add("encoding gives ids beyond the vocabulary", InvalidRequest, encoding_gives, [5, 10**6])
    add("encoding gives nothing", InvalidRequest, encoding_gives, [])
    add("making a decoder raises", EngineFailure, decoding_raises, RuntimeError("broken"), -1)
    for at in (0, 1, 5):
        for raised in (RuntimeError("broken"), MemoryError()):
            add(
                f"decoding raises {type(raised).__name__} at piece {at}",
                EngineFailure,
                decoding_raises,
                raised,
                at,
            )
    for at in (0, 1, 5):
        no_memory = OutOfMemory("The device ran out of memory in a step.")
        add(f"the device has no memory at step {at}", OutOfMemory, step_raises, no_memory, at)
        broken = RuntimeError("the device broke")
        for reading in (False, True):
            what = "reading a step fails" if reading else "a step fails"
            add(f"{what} at step {at}", None, step_raises, broken, at, reading=reading)
            add(f"{what} from step {at}", StepFailed, step_raises, broken, at, reading=reading, again=True)
    for kind in (
        "raises",
        "fails",
        "allows nothing",
        "breaks logits",
        "breaks in a processor",
    ):
        for at in (0, 3):
            error = NotFinite if kind == "breaks logits" else None
            add(f"a constraint {kind} at token {at}", error, constraint_breaks, kind, at)
    for name in ("allocate", "lock", "insert"):
        add(f"the cache's {name} has no memory", None, scheduler_raises, name, 0)
    # the second call stores the KV at the end of the victim's output
    add("the cache has no memory for what is to be kept", StepFailed, scheduler_raises, "insert", 1)
    loops = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
    grows = "{% set s = namespace(x='xx') %}{% for i in range(n) %}{% set s.x = s.x + s.x %}{% endfor %}"
    for kind, source in (("loops", loops), ("grows", grows), ("multiplies", "{{ 'x' * (n * n) }}")):
        add(f"a chat template {kind} without end", InvalidRequest, template_takes_long, source)
    add("the disk of the log is full", None, disk_is_full)
    for turns in (0, 1, 2, 5, 20, 60):
        add(f"a client leaves after {turns} turns", None, client_leaves, turns)
    for pieces in (0, 1, 3):
        add(f"a stream is closed after {pieces} pieces", None, stream_is_closed, pieces)
    for turns in (0, 8, 40):
        add(f"a request is aborted after {turns} turns", None, aborted, turns, 1)
    add("a request is aborted twice", None, aborted, 20, 2)
    for by_s in (-86400.0, 86400.0):
        add(f"the clock jumps by {by_s:g} s", None, clock_jumps, by_s)
    return points


async def _call(act: Any, values: tuple[Any, ...], more: dict[str, Any], engine: Engine) -> object:
    return await act(engine, *values, **more)


NEIGHBOURS = 3
OPTIONS = {"max_total_tokens": 2048, "page_size": 4, "chunked_prefill_size": 64, "max_running_requests": 8}


async def neighbour(engine: Engine, seed: int) -> list[int]:
    sampling = {"max_new_tokens": 40, "seed": seed, "temperature": 1, "ignore_eos": True}
    return (await engine.generate(f"A story about the number {seed}", sampling))["output_ids"]


async def settled(engine: Engine) -> None:
    async with asyncio.timeout(30):
        while engine.status().num_requests or engine.status().num_running:
            await asyncio.sleep(0.001)


async def trouble(engine: Engine, point: FaultPoint, alone: list[list[int]], before: tuple[int, int, int]) -> str:
    """Return a description of everything that went wrong; empty if all is well."""
    others = [asyncio.create_task(neighbour(engine, seed)) for seed in range(NEIGHBOURS)]
    while engine.status().num_running < NEIGHBOURS and not all(task.done() for task in others):
        await asyncio.sleep(0)
    raised: Exception | None = None
    try:
        async with asyncio.timeout(30):
            await point.act(engine)
    except Exception as error:
        raised = error
    if (None if raised is None else type(raised)) is not point.error:
        return f"ended with {raised!r}, not with {point.error}"
    if [await task for task in others] != alone:
        return "other requests got other tokens"
    await settled(engine)
    engine.core.check()
    status = engine.status()
    if status.num_used_pages or status.num_waiting or status.state != "ready":
        return f"left {status}"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while grown(before):
                await asyncio.sleep(0.01)
    if grown(before):
        return f"tasks, threads and descriptors were {before} and are {counts()}"
    if await neighbour(engine, 0) != alone[0]:
        return "a later request got other tokens"
    return ""


def grown(before: tuple[int, int, int]) -> bool:
    """Whether anything is left over. Idle threads of a pool may have ended."""
    return any(now > then for now, then in zip(counts(), before, strict=True))


def counts() -> tuple[int, int, int]:
    return len(asyncio.all_tasks()), threading.active_count(), psutil.Process().num_fds()


@pytest.mark.slow
async def test_every_fault_is_contained(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "penstock")
    points = fault_points()
    assert len(points) >= 40
    assert len({point.name for point in points}) == len(points)
    async with Engine(tiny_models.cached(), **OPTIONS) as engine:
        alone = [await neighbour(engine, seed) for seed in range(NEIGHBOURS)]
        await ask(engine)
        before = counts()
        # starts the threads that encode long texts, which stay alive
        await engine.generate("lorem " * 400, {"max_new_tokens": 1})
        await settled(engine)
        before = counts()
        found = {point.name: await trouble(engine, point, alone, before) for point in points}
        wrong = {name: said for name, said in found.items() if said}
        assert not wrong, f"{len(wrong)} of {len(points)} faults are not contained: {wrong}"
        assert engine.flush_cache()
        engine.core.check()
        assert engine.status().num_cached_pages == 0
