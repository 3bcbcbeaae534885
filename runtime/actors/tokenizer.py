"""The tokenizer actor: text to ids, off the loop when it is long; then to the scheduler."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from itertools import chain
from time import monotonic

import anyio
import anyio.to_thread

from runtime.actors.input_processor import IDS_AT_ONCE, InputProcessor
from runtime.actors.live_requests import LiveRequest, LiveRequests
from runtime.actors.mailbox import Mailbox
from runtime.actors.router import Router
from runtime.actors.scheduler import SchedulerActor
from runtime.constraint import Constraint
from runtime.errors import EngineFailure, InvalidRequest, Overloaded, PenstockError
from runtime.grammar.compiler import GrammarCompiler
from runtime.request import Request
from runtime.tokenizer.text_limit import LARGE_TEXT_BYTES, give_back_memory
from runtime.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("penstock.tokenizer")

INLINE_CHARS = 2048  # about 0.5 ms of encoding; a thread's round trip costs as much
NO_GRAMMARS = "This server constrains no outputs: it has no tokenizer, or runs with --grammar-backend none."
MAX_WAITING_BYTES = 64 * 1024 * 1024  # about twenty seconds of encoding


class TokenizerActor:
    """Finds the ids of new requests, makes their sequences and has them scheduled, or fails them."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        processor: InputProcessor,
        requests: LiveRequests,
        scheduler: SchedulerActor | Router,
        grammars: GrammarCompiler | None = None,
        *,
        num_threads: int = 2,
    ) -> None:
        self._tokenizer = tokenizer
        self._processor = processor
        self._requests = requests
        self._scheduler = scheduler
        self._grammars = grammars
        self._num_threads = num_threads  # that encode long texts
        # With each request whether its constraint has been found, or it asks for none.
        self._inbox: Mailbox[tuple[LiveRequest, bool]] = Mailbox()
        self._num_waiting = 0  # choices of requests that are not handed on yet
        self._waiting_bytes = 0

    def check_room(self, request: Request | None = None) -> None:
        """Raise `Overloaded` where those that wait to be tokenized will already fill the scheduler's queue.

        None: a request of which nothing is known yet.
        """
        if self._num_waiting >= self._scheduler.room and (
            request is None
            or not (request.follows or self._processor.urgency(request) > self._scheduler.least_urgency)
        ):
            raise Overloaded("The request queue is full.", retry_after_s=self._scheduler.retry_after_s)
        if request is None or not self._waiting_bytes:
            return
        if self._waiting_bytes + num_bytes_held(request) > MAX_WAITING_BYTES:
            retry_after_s = self._scheduler.retry_after_s
            raise Overloaded("Too much text is waiting to be tokenized.", retry_after_s=retry_after_s)

    def submit(self, live: LiveRequest) -> None:
        """Take a request of which the text or the ids are known."""
        self._num_waiting += live.request.sampling.n
        self._waiting_bytes += num_bytes_held(live.request)
        is_ready = live.request.grammar is None and live.request.thinking is None
        self._inbox.put((live, is_ready))

    async def run(self) -> None:
        """Until cancelled."""
        limiter = anyio.CapacityLimiter(self._num_threads)
        async with anyio.create_task_group() as tasks:
            while True:
                short: list[LiveRequest] = []
                for live, is_ready in await self._inbox.take_all():
                    if not is_ready:
                        tasks.start_soon(self._compile, live)
                    elif live.request.ids is not None:
                        self._hand_on(live, live.request.ids)
                    elif len(live.request.text or "") + len(live.request.second_text or "") <= INLINE_CHARS:
                        short.append(live)
                    else:
                        tasks.start_soon(self._encode_on_thread, live, limiter)
                for start in range(0, len(short), 8):  # some milliseconds of work at most between awaits
                    for live in short[start : start + 8]:
                        self._hand_on(live, self._encode(live))
                    await anyio.lowlevel.checkpoint()

    async def _compile(self, live: LiveRequest) -> None:
        """A grammar is compiled beside everybody else's encoding; its own prompt is encoded when that is done."""
        try:
            constraint = await self._constraint(live.request)
        except PenstockError as error:
            self._hand_on(live, error)
        else:
            live.request = replace(live.request, constraint=constraint)
            self._inbox.put((live, True))

    async def _constraint(self, request: Request) -> Constraint | None:
        grammar, limit = request.grammar, request.thinking
        if self._grammars is None:
            param = (grammar.param or grammar.kind) if grammar is not None else limit.param if limit else None
            raise InvalidRequest(NO_GRAMMARS, param=param)
        found: Constraint | None = request.constraint
        if grammar is not None:
            found = await self._grammars.constraint(grammar, self._processor.grammar_ends(request))
        return found if limit is None else self._grammars.limited(limit, found)

    async def _encode_on_thread(self, live: LiveRequest, limiter: anyio.CapacityLimiter) -> None:
        self._hand_on(live, await anyio.to_thread.run_sync(self._encode, live, limiter=limiter))

    def _encode(self, live: LiveRequest) -> tuple[int, ...] | PenstockError:
        """The ids of the text, all of them in the vocabulary; or what is wrong with it."""
        live.times.tokenizing = monotonic()
        try:
            if live.request.second_text is not None:
                return self._encode_pair(live)
            return self._encode_text(live.request)
        finally:
            live.times.tokenized = monotonic()

    def _encode_text(self, request: Request) -> tuple[int, ...] | PenstockError:
        if self._tokenizer is None:
            return InvalidRequest("This engine has no tokenizer: send input_ids.", param="text")
        try:
            self._processor.check_texts(request)
            [ids] = self._tokenizer.encode_batch(
                [request.text or ""],
                add_special_tokens=request.add_special_tokens,
                max_tokens=None if request.cuts else self._processor.context_length,
            )
            self._processor.check_ids(ids)
            if num_bytes_held(request) > LARGE_TEXT_BYTES:
                give_back_memory()
        except PenstockError as error:
            return error
        except Exception:  # a foreign library on a client's text: this request's border
            logger.exception("encoding request %s failed", request.label)
            return EngineFailure("The prompt could not be encoded.")
        pieces = (ids[start : start + IDS_AT_ONCE] for start in range(0, len(ids), IDS_AT_ONCE))
        return tuple(chain.from_iterable(pieces))

    def _encode_pair(self, live: LiveRequest) -> tuple[int, ...] | PenstockError:
        """The ids of two texts; the request learns where the second begins."""
        request = live.request
        if self._tokenizer is None:
            return InvalidRequest("This engine has no tokenizer: pairs cannot be encoded.", param="text")
        try:
            self._processor.check_texts(request)
            pair = self._tokenizer.encode_pair(request.text or "", request.second_text or "")
            self._processor.check_ids(pair.ids)
            self._processor.check_pair(pair.second)
        except PenstockError as error:
            return error
        except Exception:  # as above
            logger.exception("encoding request %s failed", request.label)
            return EngineFailure("The prompt could not be encoded.")
        if 1 in pair.types:
            live.request = replace(request, second_start=pair.types.index(1))
        return tuple(pair.ids)

    def _hand_on(self, live: LiveRequest, found: tuple[int, ...] | PenstockError) -> None:
        """Have a request scheduled, or fail it."""
        request = live.request
        self._num_waiting -= request.sampling.n
        self._waiting_bytes -= num_bytes_held(request)
        if live.output.finished:  # aborted meanwhile
            return
        try:
            if isinstance(found, PenstockError):
                raise found
            live.request, live.sequences = self._processor.prepare(request, found)
        except PenstockError as error:
            self._requests.fail(request.id, error)
        else:
            self._scheduler.admit(live)


def num_bytes_held(request: Request) -> int:
    """Memory that a request's text takes: of one character other than Latin letters, two or four bytes for each."""
    return sum(sys.getsizeof(text) for text in (request.text, request.second_text) if text)
