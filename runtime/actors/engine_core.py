"""The core: three actors in one task group, the requests they work on, and what a door may ask of them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

import anyio

from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.output_stream import OutputStream
from runtime.actors.replica import Replica
from runtime.actors.router import Renew, Router
from runtime.actors.tokenizer import TokenizerActor
from runtime.batch import Runner
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.errors import ContextOverflow, EngineClosed, EngineFailure, InvalidRequest, PenstockError
from runtime.request import Chunk, Finish, Request, Usage
from runtime.scheduler.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("penstock.core")

SEED_MASK = 2**64 - 1
CHOICE_STRIDE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: far apart for neighbouring choices

State = Literal["starting", "ready", "draining", "failed", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A look at the core from outside."""

    state: State
    num_running: int
    num_waiting: int
    num_requests: int
    num_pages: int
    num_used_pages: int  # held by running sequences
    num_cached_pages: int  # kept for their prefix alone
    page_size: int
    num_used_tokens: int
    max_total_tokens: int
    num_retracted: int  # retractions since the start
    num_steps: int
    num_generated: int
    gen_throughput: float
    kernels: str = ""  # what computes the model


class EngineCore:
    """One engine: submit requests, read replies.

    `run` is the whole tree and belongs to one task; every other method is called on the same loop. When `run`
    ends, however it ends, every open reply has ended too and the runners are closed. `others` are further
    copies of the model, which share the requests; `renew` starts one again that has failed.
    """

    def __init__(
        self,
        plan: Plan,
        facts: ModelFacts,
        tokenizer: Tokenizer | None,
        schedule: Scheduler,
        runner: Runner,
        *,
        others: Seq[Replica] = (),
        renew: Renew | None = None,
    ) -> None:
        self.plan = plan
        self.facts = facts
        self.tokenizer = tokenizer
        self.schedule = schedule
        self._state: State = "starting"
        self._replies: dict[int, OutputStream] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._random = random.Random(plan.model.random_seed)
        self._eos_ids = facts.eos_ids | (tokenizer.eos_ids if tokenizer else frozenset())
        self._tokenizer_actor = TokenizerActor(tokenizer, admit=self._admit, fail=self._fail)
        self._detokenizer_actor = DetokenizerActor(
            tokenizer,
            self._replies,
            stop_early=self._stop_early,
            forget=self._forget,
            stream_interval=plan.schedule.stream_interval,
        )
        self._fleet = Router(
            [Replica(plan, schedule, runner), *others],
            renew,
            plan.parallel.balance,
            emit=self._detokenizer_actor.inbox.put,
            fail=self._fail,
        )

    # --- life ---

    async def run(self, started: Callable[[], None]) -> None:
        """Run the actors until cancelled. Calls `started` once requests are taken.

        Raises `EngineFailure` when an actor died; its cause is chained.
        """
        try:
            async with anyio.create_task_group() as actors:
                actors.start_soon(self._detokenizer_actor.run)
                actors.start_soon(self._fleet.run)
                actors.start_soon(self._tokenizer_actor.run)
                self._state = "ready"
                started()
        except BaseExceptionGroup as group:
            self._state = "failed"
            failure = _failure(group)
            self._fail_all(failure)
            raise failure from group
        finally:
            if self._state != "failed":
                self._state = "closed"
            self._fail_all(EngineClosed("The engine is shut down."))
            with anyio.CancelScope(shield=True):
                await self._fleet.close()

    async def drain(self) -> None:
        """Take no new requests and return when the last one has ended. Cancelled, it stays draining."""
        if self._state == "ready":
            self._state = "draining"
        await self._idle.wait()

    # --- requests ---

    def submit(self, request: Request) -> OutputStream:
        """Take a request in.

        Raises `InvalidRequest` or `EngineClosed` at once; what is found later reaches the reply.
        """
        if self._state != "ready":
            raise EngineClosed(f"The engine is {self._state}.")
        self._check(request)
        reply = OutputStream(request, self.abort)
        self._replies[request.id] = reply
        self._idle.clear()
        self._tokenizer_actor.inbox.put(request)
        return reply

    def abort(self, request_id: int) -> None:
        """End a request wherever it is; its reply ends with `Finish("abort")`. Unknown ids are ignored."""
        reply = self._replies.get(request_id)
        if reply is not None and not reply.closing:
            reply.closing = True
            self._fleet.abort(request_id, Finish("abort", message="Aborted by the user."))

    def abort_label(self, label: str) -> int:
        """Abort every request whose label starts with `label`; returns how many."""
        return self._abort_where(lambda request: request.label.startswith(label))

    def abort_all(self) -> int:
        return self._abort_where(lambda request: True)

    def _abort_where(self, wanted: Callable[[Request], bool]) -> int:
        ids = [reply.request.id for reply in self._replies.values() if wanted(reply.request)]
        for request_id in ids:
            self.abort(request_id)
        return len(ids)

    def flush_cache(self) -> bool:
        """Empty the prefix tree. False, and nothing done, while requests are in the engine."""
        return not self._replies and self._fleet.flush()

    @property
    def runners(self) -> list[Runner]:
        """Of the replicas that are alive, for measurements."""
        return [replica.runner for replica in self._fleet.replicas]

    def status(self) -> Status:
        load, progress = self._fleet.load, self._fleet.progress
        page_size = self.plan.cache.page_size
        return Status(
            state=self._state,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_requests=len(self._replies),
            num_pages=load.num_pages,
            num_used_pages=load.num_used_pages,
            num_cached_pages=load.num_evictable_pages,
            page_size=page_size,
            num_used_tokens=load.num_used_pages * page_size,
            max_total_tokens=load.num_pages * page_size,
            num_retracted=load.num_retracted,
            num_steps=sum(each.num_steps for each in progress),
            num_generated=sum(each.num_generated for each in progress),
            gen_throughput=sum(each.gen_throughput for each in progress),
        )

    # --- between the actors ---

    def _admit(self, request: Request) -> None:
        """From the tokenizer: ids are known; make the sequences."""
        reply = self._replies.get(request.id)
        if reply is None:
            return
        if reply.closing:
            self._end_unscheduled(reply)
            return
        try:
            request = self._fit(request)
            sequences = self._sequences(request)
        except PenstockError as error:
            self._fail(request.id, error)
            return
        reply.request = request
        self._fleet.admit(sequences)

    def _end_unscheduled(self, reply: OutputStream) -> None:
        request = reply.request
        finish = Finish("abort", message="Aborted before it was scheduled.")
        for index in range(request.sampling.n):
            reply.put(Chunk(index, "", [], finish, Usage(len(request.ids or ()), 0, 0)))
        self._forget(request.id)

    def _sequences(self, request: Request) -> list[Sequence]:
        sampling, ids = request.sampling, request.ids or ()
        stop_ids = frozenset() if sampling.ignore_eos else self._eos_ids | sampling.stop_token_ids
        context = self.plan.model.context_length
        new = context if sampling.max_new_tokens is None else sampling.max_new_tokens
        seed = self._random.getrandbits(64) if sampling.seed is None else sampling.seed
        return [
            Sequence(
                request,
                index,
                ids,
                max_tokens=min(len(ids) + new, context),
                stop_ids=stop_ids,
                seed=(seed + index * CHOICE_STRIDE) & SEED_MASK,
            )
            for index in range(sampling.n)
        ]

    def _stop_early(self, request_id: int, index: int) -> None:
        self._fleet.stop_early(request_id, index)

    def _fail(self, request_id: int, error: PenstockError) -> None:
        reply = self._replies.get(request_id)
        if reply is not None:
            reply.fail(error)
            self._detokenizer_actor.drop(request_id, reply.request.sampling.n)
            self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        self._replies.pop(request_id, None)
        self._fleet.forget(request_id)
        if not self._replies:
            self._idle.set()

    def _fail_all(self, error: EngineFailure) -> None:
        for request_id in list(self._replies):
            self._fail(request_id, error)

    # --- checks that need the model's facts ---

    def _check(self, request: Request) -> None:
        vocab = self.facts.vocab_size
        if request.text is None and request.ids is None:
            raise InvalidRequest("Either text or input_ids must be given.", param="text")
        if request.ids is not None:
            if not request.ids:
                raise InvalidRequest("The prompt is empty.", param="input_ids")
            # Before every id is looked at: a body holds millions, and this is the loop.
            if not request.truncate and len(request.ids) > self.plan.model.context_length:
                raise self._too_long(request, len(request.ids))
            if min(request.ids) < 0 or max(request.ids) >= vocab:
                raise InvalidRequest(f"Token ids must be in [0, {vocab}).", param="input_ids")
        sampling = request.sampling
        named = {"stop_token_ids": sampling.stop_token_ids, "logit_bias": sampling.logit_bias}
        if request.logprobs is not None:
            named["token_ids_logprob"] = request.logprobs.token_ids
        for param, token_ids in named.items():
            if token_ids and not all(0 <= token_id < vocab for token_id in token_ids):
                raise InvalidRequest(f"Token ids in {param} must be in [0, {vocab}).", param=param)
        if self.tokenizer is None and sampling.stop:
            raise InvalidRequest("Stop strings need a tokenizer; this engine has none.", param="stop")

    def _fit(self, request: Request) -> Request:
        """The request, cut to the context where it allowed that. Raises `ContextOverflow` otherwise."""
        context = self.plan.model.context_length
        ids, sampling = request.ids or (), request.sampling
        if not ids:
            raise InvalidRequest("The prompt is empty.", param="text")
        needs_room = 0 if sampling.max_new_tokens == 0 else 1
        if len(ids) + needs_room > context:
            if not request.truncate:
                raise self._too_long(request, len(ids))
            ids = ids[: context - needs_room]
        new = sampling.max_new_tokens
        if new is not None and len(ids) + new > context:
            if not request.truncate:
                raise ContextOverflow(
                    f"Requested token count exceeds the model's maximum context length of {context} tokens. "
                    f"You requested a total of {len(ids) + new} tokens: {len(ids)} of input and "
                    f"{new} of output.",
                    param="max_new_tokens",
                )
            new = context - len(ids)
            sampling = replace(sampling, max_new_tokens=new, min_new_tokens=min(sampling.min_new_tokens, new))
        if request.logprobs is not None and request.logprobs.start >= len(ids):
            raise InvalidRequest(
                f"logprob_start_len ({request.logprobs.start}) is beyond the prompt's {len(ids)} tokens.",
                param="logprob_start_len",
            )
        return replace(request, ids=ids, sampling=sampling)

    def _too_long(self, request: Request, count: int) -> ContextOverflow:
        context = self.plan.model.context_length
        trouble = "is longer than" if count > context else "leaves no room for output in"
        return ContextOverflow(
            f"The input ({count} tokens) {trouble} the model's context length ({context} tokens).",
            param="text" if request.text is not None else "input_ids",
        )


def _failure(group: BaseExceptionGroup) -> EngineFailure:
    """What to tell callers: which process is gone, if one is, and else that something of ours broke."""
    while isinstance(group.exceptions[0], BaseExceptionGroup):
        group = group.exceptions[0]
    for error in group.exceptions:
        if isinstance(error, EngineFailure):
            return type(error)(error.message)
    return EngineFailure("An actor of the engine died.")


__all__ = ["EngineCore", "Status"]
