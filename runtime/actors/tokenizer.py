"""The tokenizer actor: encodes prompts (long ones on threads), and passes requests to the scheduler actor."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from itertools import chain
from time import monotonic

import anyio
import anyio.to_thread

from runtime.actors.adapters import AdapterRegistry
from runtime.actors.input_processor import IDS_AT_ONCE, InputProcessor
from runtime.actors.live_requests import LiveRequest, LiveRequests
from runtime.actors.mailbox import Mailbox
from runtime.actors.router import Router
from runtime.actors.scheduler import SchedulerActor
from runtime.actors.sessions import Sessions
from runtime.constraint import Constraint
from runtime.errors import EngineFailure, InvalidRequest, Overloaded, PenstockError
from runtime.grammar.compiler import GrammarCompiler
from runtime.grammar.patterns.stop_patterns import stop_patterns
from runtime.media.fair_slots import Asker
from runtime.media.precomputed import is_precomputed
from runtime.media.preparation import MediaPreparer
from runtime.media_source import Kind
from runtime.request import Request
from runtime.tokenizer.text_limit import LARGE_TEXT_BYTES, give_back_memory
from runtime.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("penstock.tokenizer")

# Texts up to this length are encoded on the event loop, which takes at most 0.5 ms. Starting a thread takes as long.
INLINE_CHARS = 2048
NO_GRAMMARS = "This server cannot constrain outputs: it has no tokenizer or runs with --grammar-backend none."
# Maximum memory in bytes of the texts that wait to be encoded. Encoding this many bytes takes about 20 s.
MAX_WAITING_BYTES = 64 * 1024 * 1024


class TokenizerActor:
    """Encodes new requests, creates their sequences, and admits them to the scheduler or fails them."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        processor: InputProcessor,
        requests: LiveRequests,
        scheduler: SchedulerActor | Router,
        grammars: GrammarCompiler | None = None,
        adapters: AdapterRegistry | None = None,
        media: MediaPreparer | None = None,
        sessions: Sessions | None = None,
        *,
        num_threads: int = 2,
    ) -> None:
        self._tokenizer = tokenizer
        self._processor = processor
        self._requests = requests
        self._scheduler = scheduler
        self._grammars = grammars
        self._adapters = adapters
        self._media = media
        # For each kind of media: the token id of its placeholder, or None if the placeholder is several tokens.
        places = {} if media is None or tokenizer is None else media.placeholders
        self._placeholder_ids: dict[Kind, int | None] = {
            kind: tokenizer and _single_id(tokenizer, text) for kind, text in places.items()
        }
        self._sessions = sessions
        # Only one thread compiles the texts of sampling parameters: several threads of Python code would block the
        # event loop.
        self._reading = anyio.CapacityLimiter(1)
        self._encoding = anyio.CapacityLimiter(num_threads)  # threads that encode long texts
        # Submitted requests. The bool is True if the request's media, grammar and adapter are ready.
        self._inbox: Mailbox[tuple[LiveRequest, bool]] = Mailbox()
        self._num_waiting = 0  # choices of requests that are not yet admitted to the scheduler
        self._waiting_bytes = 0

    def check_queue_space(self, request: Request | None = None) -> None:
        """Raise `Overloaded` if the requests that are being tokenized already fill the scheduler's queue.

        `request` is None if the request's body has not been read yet.
        """
        if self._num_waiting >= self._scheduler.queue_space and (
            request is None or not (request.follows or self._processor.urgency(request) > self._scheduler.least_urgency)
        ):
            raise Overloaded("The request queue is full.", retry_after_s=self._scheduler.retry_after_s)
        if request is None:
            return
        if request.media and self._media is not None:
            self._media.check_space(num_media_bytes(request), self._scheduler.retry_after_s)
        if not self._waiting_bytes:
            return
        if self._waiting_bytes + num_text_bytes(request) > MAX_WAITING_BYTES:
            retry_after_s = self._scheduler.retry_after_s
            raise Overloaded("Too much text is waiting to be tokenized.", retry_after_s=retry_after_s)

    def submit(self, live: LiveRequest) -> None:
        """Start to tokenize a request that has a text or ids, and then admit it. Returns immediately."""
        self._num_waiting += live.request.sampling.n
        self._waiting_bytes += num_text_bytes(live.request)
        if live.request.media and self._media is not None:
            self._media.hold(num_media_bytes(live.request))
        request = live.request
        needs_compiling = request.grammar is not None or request.thinking is not None or _needs_thread(request)
        is_ready = not (needs_compiling or request.media) and self._has_adapter(request)
        self._inbox.put((live, is_ready))

    async def run(self) -> None:
        """Process submitted requests until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                short: list[LiveRequest] = []
                for live, is_ready in await self._inbox.take_all():
                    if not is_ready:
                        tasks.start_soon(self._compile, live)
                    elif live.request.ids is not None:
                        self._admit(live, live.request.ids)
                    elif len(live.request.text or "") + len(live.request.second_text or "") <= INLINE_CHARS:
                        short.append(live)
                    else:
                        tasks.start_soon(self._encode_on_thread, live)
                for start in range(0, len(short), 8):  # in small groups, so that other tasks run every few milliseconds
                    for live in short[start : start + 8]:
                        self._admit(live, self._encode(live))
                    await anyio.lowlevel.checkpoint()

    def _has_adapter(self, request: Request) -> bool:
        """Return whether the request's adapter is in host memory, or the request names none."""
        return request.adapter is None or self._adapters is None or self._adapters.is_ready(request.adapter)

    async def _compile(self, live: LiveRequest) -> None:
        """Prepare the request's media, compile its grammar and load its adapter. Other requests are encoded meanwhile.

        Then put the request back into the inbox.
        """
        try:
            if live.request.media:
                await self._prepare_media(live)
            constraint = live.request.constraint
            if live.request.grammar is not None or live.request.thinking is not None:
                constraint = await self._constraint(live.request)
            if _needs_thread(live.request):
                await anyio.to_thread.run_sync(self._read_texts, live, limiter=self._reading)
            if live.request.adapter is not None and self._adapters is not None:
                await self._adapters.ready(live.request.adapter)
                live.request = replace(live.request, adapter=self._adapters.current(live.request.adapter))
        except PenstockError as error:
            self._admit(live, error)
        except Exception:  # an error in a library or in a model of transformers: only this request fails
            logger.exception("preparing request %s failed", live.request.label)
            self._admit(live, EngineFailure("The request could not be prepared."))
        else:
            live.request = replace(live.request, constraint=constraint)
            self._inbox.put((live, True))

    def _read_texts(self, live: LiveRequest) -> None:
        """Compile stop patterns and sequence breakers. Raises `InvalidRequest` if a pattern is invalid."""
        sampling = live.request.sampling
        live.breaker_ids = self._processor.breaker_ids(sampling)
        live.stop_patterns = stop_patterns(sampling.stop_regex)

    async def _prepare_media(self, live: LiveRequest) -> None:
        """Encode the request's media, and set its ids and `prompt_media`."""
        request, media = live.request, self._media
        try:
            if media is None:
                raise InvalidRequest("Media are not accepted by this engine.", param=request.media[0].param)
            media.check(request.media)
            live.times.tokenizing = monotonic()
            asker = Asker(request.owner, request.id)
            if is_precomputed(request.media, has_ids=request.ids is not None):
                given = request.ids or ()
                ids, prompt_media = await media.place_precomputed(
                    given, request.media, lambda: not live.output.finished, asker
                )
                live.request = replace(request, ids=ids, media=(), prompt_media=prompt_media)
                return
            blocks = await media.encode(request.media, lambda: not live.output.finished, asker)
            if request.ids is not None:
                ids, blocks = media.expanded_ids(request.ids, self._placeholder_ids, blocks)
            else:
                text, blocks = media.expanded(request.text or "", blocks)
                longer = replace(request, text=text)
                ids = await anyio.to_thread.run_sync(self._encode_text, longer, limiter=self._encoding)
            if isinstance(ids, PenstockError):
                raise ids
            ids, prompt_media = await media.place(ids, blocks)
            live.request = replace(request, ids=ids, media=(), prompt_media=prompt_media)
        finally:
            live.times.tokenized = monotonic()
            if media is not None:
                media.let_go(num_media_bytes(request))

    async def _constraint(self, request: Request) -> Constraint | None:
        grammar, limit = request.grammar, request.thinking
        if self._grammars is None:
            param = (grammar.param or grammar.kind) if grammar is not None else limit.param if limit else None
            raise InvalidRequest(NO_GRAMMARS, param=param)
        constraint: Constraint | None = request.constraint
        if grammar is not None:
            constraint = await self._grammars.constraint(grammar, self._processor.grammar_ends(request))
        return constraint if limit is None else self._grammars.limited(limit, constraint)

    async def _encode_on_thread(self, live: LiveRequest) -> None:
        self._admit(live, await anyio.to_thread.run_sync(self._encode, live, limiter=self._encoding))

    def _encode(self, live: LiveRequest) -> tuple[int, ...] | PenstockError:
        """Encode the request's text.

        Return its ids, all within the vocabulary, or the error with which the request fails.
        """
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
            if num_text_bytes(request) > LARGE_TEXT_BYTES:
                give_back_memory()
        except PenstockError as error:
            return error
        except Exception:  # an error of a tokenizer library: only this request fails
            logger.exception("encoding request %s failed", request.label)
            return EngineFailure("The prompt could not be encoded.")
        chunks = (ids[start : start + IDS_AT_ONCE] for start in range(0, len(ids), IDS_AT_ONCE))
        return tuple(chain.from_iterable(chunks))

    def _encode_pair(self, live: LiveRequest) -> tuple[int, ...] | PenstockError:
        """Encode both texts of a pair, and set the request's `second_start`. Return the ids, or the request's error."""
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
        except Exception:  # a tokenizer library failed on a client's text: only this request fails
            logger.exception("encoding request %s failed", request.label)
            return EngineFailure("The prompt could not be encoded.")
        if 1 in pair.types:
            live.request = replace(request, second_start=pair.types.index(1))
        return tuple(pair.ids)

    def _admit(self, live: LiveRequest, ids: tuple[int, ...] | PenstockError) -> None:
        """Admit a request to the scheduler. If `ids` is an error, fail the request with it."""
        request = live.request
        self._num_waiting -= request.sampling.n
        self._waiting_bytes -= num_text_bytes(request)
        if live.output.finished:  # the request was aborted while it was encoded
            return
        try:
            if isinstance(ids, PenstockError):
                raise ids
            if request.session is not None and self._sessions is not None:
                ids = self._sessions.continued(request, ids)
            live.request, live.sequences = self._processor.prepare(request, ids, live.breaker_ids)
        except PenstockError as error:
            self._requests.fail(request.id, error)
        else:
            self._scheduler.admit(live)


def _needs_thread(request: Request) -> bool:
    """Return whether sampling parameters contain texts that must be compiled on a thread."""
    return bool(request.sampling.dry_multiplier or request.sampling.stop_regex)


def num_text_bytes(request: Request) -> int:
    """Return the memory of a request's texts in bytes.

    If a text has one non-Latin-1 character, Python stores each of its characters in 2 or 4 bytes.
    """
    return sum(sys.getsizeof(text) for text in (request.text, request.second_text) if text)


def num_media_bytes(request: Request) -> int:
    """Return the number of bytes that the client sent for the request's media."""
    return sum(source.num_bytes for source in request.media)


def _single_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the token id of a text, or None if it is not a single token."""
    [ids] = tokenizer.encode_batch([text], add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
