"""Compile the grammars of requests in threads, and cache them for requests with the same grammar."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from runtime.constraint import Constraint, DraftData, HostData, Output
from runtime.errors import InvalidRequest, Overloaded
from runtime.grammar.backends.backend import Backend, Matcher
from runtime.grammar.matching.marker import MAX_BYTES, Marker
from runtime.grammar.matching.masks import MaskThread
from runtime.grammar.matching.position import Ends, Position
from runtime.grammar.matching.thinking import LimitedThinking
from runtime.grammar_spec import Grammar, InvalidGrammar, ThinkingLimit
from runtime.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("penstock.grammar")

COMPILE_THREADS = 2
COMPILE_TIMEOUT_S = 20.0  # exceeded only on an overloaded machine, because the size of a grammar is limited
MAX_WAITING = 1024  # maximum number of grammars that wait for a thread; further ones are refused
CACHE_BYTES = 256 * 1024 * 1024
MAX_GRAMMARS = 512  # maximum number in the cache; needed because a grammar's real memory grows with each use
REFUSAL_BYTES = 4096  # size counted for a refused grammar in the cache
MAX_MARKERS = 64

LoadBackend = Callable[[], Backend]


class GrammarCompiler:
    """The grammar compiler of an engine. It compiles in its own threads. Call its methods on the event loop."""

    def __init__(
        self,
        load: LoadBackend,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: frozenset[int],
        max_forced: int = 0,
    ) -> None:
        self._load = load
        self._max_forced = max_forced
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(token_id for token_id in eos_ids if token_id < vocab_size)
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "penstock-grammar")
        self._loading = threading.Lock()
        self._backend: Backend | None = None
        self._masks: MaskThread | None = None
        self._cache = _Cache(CACHE_BYTES)
        self._compiling: dict[Grammar, Future[Matcher]] = {}
        self._markers: OrderedDict[str, Marker] = OrderedDict()

    def start(self) -> None:
        """Start loading the vocabulary, so that the first request does not wait for it. Returns at once."""
        self._threads.submit(self._loaded)

    async def constraint(self, grammar: Grammar, ends: Ends) -> GrammarConstraint:
        """Compile a grammar, and return its constraint for one request.

        Raises `InvalidRequest`, which names the client's parameter, if the grammar is refused, and `Overloaded` if too
        many grammars wait.
        """
        param = grammar.param or grammar.kind
        marker = self._marker(grammar.begins_after, param)
        key = Grammar(grammar.kind, grammar.source, grammar.whitespace, places=grammar.places)
        try:
            compiled = self._cache.get(key) or await asyncio.wait_for(self._compile(key), COMPILE_TIMEOUT_S)
        except InvalidGrammar as error:
            raise InvalidRequest(f"{param} cannot be used: {error}.", param=param) from error
        except TimeoutError:
            raise InvalidRequest(f"{param} took longer than {COMPILE_TIMEOUT_S:g} s to compile.", param=param) from None
        if self._masks is None:
            raise RuntimeError("A grammar is compiled, but its backend is not loaded.")
        model = self._eos_ids
        ends = ends._replace(model=model, request=ends.request - model)
        return GrammarConstraint(compiled, self._masks, ends, marker, grammar.opened_by, grammar.must_begin)

    def limited(self, limit: ThinkingLimit, inner: Constraint | None) -> LimitedThinking:
        """Return a constraint that closes the reasoning block when the block reaches the limit of tokens.

        Raises `InvalidRequest` if this model's tokens cannot close the block.
        """
        close = self._marker(limit.close, limit.param)
        [close_ids] = self._tokenizer.encode_batch([limit.close], add_special_tokens=False)
        matched = 0
        for token_id in close_ids:
            matched = close.advance(matched, token_id) if close is not None else 0
        if close is None or matched < close.length or max(close_ids) >= self._vocab_size:
            raise InvalidRequest("This model's tokens cannot close its reasoning by force.", param=limit.param)
        num_words = -(-max(self._tokenizer.vocab_size, self._vocab_size) // 32)
        markers = self._marker(limit.open, limit.param), close
        others = [self._marker(text, limit.param) for text in limit.also_close]
        also = tuple(marker for marker in others if marker is not None)
        return LimitedThinking(limit, markers, tuple(close_ids), num_words, inner, also)

    def close(self) -> None:
        """End the threads after their current work."""
        self._threads.shutdown(cancel_futures=True)
        if self._masks is not None:
            self._masks.close()
        if self._backend is not None:
            self._backend.close()

    def _compile(self, grammar: Grammar) -> asyncio.Future[Matcher]:
        future = self._compiling.get(grammar)
        if future is None:
            if len(self._compiling) >= MAX_WAITING:
                raise Overloaded("Too many grammars are waiting to be compiled.")
            future = self._compiling[grammar] = self._threads.submit(self._compile_on_thread, grammar)
            loop = asyncio.get_running_loop()
            future.add_done_callback(lambda done: _call_soon(loop, self._keep, grammar, done))
        return asyncio.shield(asyncio.wrap_future(future))

    def _keep(self, grammar: Grammar, future: Future[Matcher]) -> None:
        self._compiling.pop(grammar, None)
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._cache.put(grammar, future.result())
        elif isinstance(error, InvalidGrammar):
            self._cache.put(grammar, error)

    def _compile_on_thread(self, grammar: Grammar) -> Matcher:
        try:
            return self._loaded().compile(grammar)
        except (InvalidGrammar, MemoryError):
            raise
        except Exception as error:  # a grammar library may raise any exception for a client's text
            logger.exception("Compiling a grammar failed.")
            raise InvalidGrammar("it cannot be compiled") from error

    def _loaded(self) -> Backend:
        with self._loading:
            if self._backend is None:
                backend = self._load()
                self._masks = MaskThread(backend, self._eos_ids, self._max_forced)
                self._backend = backend
            return self._backend

    def _marker(self, text: str | None, param: str) -> Marker | None:
        if text is None:
            return None
        table = self._tokenizer.bytes_of
        if table is None or not 0 < len(text.encode()) <= MAX_BYTES:
            raise InvalidRequest(f"A constraint begins after a text of 1 to {MAX_BYTES} bytes.", param=param)
        marker = self._markers.get(text)
        if marker is None:
            marker = self._markers[text] = Marker(text, table.rest, self._tokenizer.vocab_size)
            if len(self._markers) > MAX_MARKERS:
                self._markers.popitem(last=False)
        return marker


class GrammarConstraint:
    """A `runtime.constraint.Constraint` for one request. Each choice of the request starts with a copy of `compiled`.

    The mask thread owns the `Position` of each choice.
    """

    def __init__(
        self,
        compiled: Matcher,
        thread: MaskThread,
        ends: Ends,
        marker: Marker | None = None,
        opened_by: int | None = None,
        must_begin: bool = True,
    ) -> None:
        self._compiled = compiled
        self._thread = thread
        self._positions: dict[int, Position] = {}
        self.ends = ends
        self.marker = marker
        # Token (for example <think>) that begins the unconstrained part if it is the output's first token. None: an
        # output with a marker always starts with the unconstrained part.
        self.opened_by = opened_by
        self.must_begin = must_begin

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """Request the mask of the next token. Before the constraint begins, the mask may allow all tokens."""
        position = self._positions.get(choice)
        if position is None:
            position = self._positions[choice] = Position(
                self._compiled, self.ends, self.marker, self.opened_by, self.must_begin
            )
        self._thread.submit(position, output, data)

    @property
    def takes_drafts(self) -> bool:
        """True, because masks after draft tokens are computed on a copy of the choice's position."""
        return True

    def draft_data_after(self, choice: int, output: Output, first: HostData, drafts: DraftData) -> None:
        """Request the masks after the draft tokens that follow this output."""
        self._thread.submit_drafts(self._positions[choice], output, first, drafts)


class _Cache:
    """A least-recently-used cache of compiled grammars, and of the errors of refused grammars."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[Grammar, Matcher | InvalidGrammar] = OrderedDict()

    def get(self, grammar: Grammar) -> Matcher | None:
        """Return the compiled grammar, or None if it is not cached. If an error is cached, raise it."""
        found = self._kept.get(grammar)
        if found is None:
            return None
        self._kept.move_to_end(grammar)
        if isinstance(found, InvalidGrammar):
            raise found
        return found

    def put(self, grammar: Grammar, compiled: Matcher | InvalidGrammar) -> None:
        if grammar in self._kept:
            return
        self._kept[grammar] = compiled
        self._num_bytes += _size(grammar, compiled)
        while self._num_bytes > self._max_bytes or len(self._kept) > MAX_GRAMMARS:
            self._num_bytes -= _size(*self._kept.popitem(last=False))


def _size(grammar: Grammar, compiled: Matcher | InvalidGrammar) -> int:
    own = REFUSAL_BYTES if isinstance(compiled, InvalidGrammar) else compiled.num_bytes
    return own + 4 * len(grammar.source)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *args)
