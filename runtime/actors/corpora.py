"""The external corpora of an engine: texts in which prompt lookup also finds draft tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import numpy as np

from runtime.actors.corpus_texts import joined_tokens, texts_of_file, tokens_of_texts
from runtime.errors import ConfigurationError, InvalidRequest
from runtime.speculative.corpus import CorpusIndex, Tokens
from runtime.tokenizer.backend import check_surrogates

if TYPE_CHECKING:
    from runtime.actors.scheduler import SchedulerActor
    from runtime.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("penstock.core")
MAX_CORPORA = 64
PATH_FLAG = "--speculative-ngram-external-corpus-path"


class ExternalCorpora:
    """Adds and removes corpora while requests run. All replicas use one immutable index of all corpora."""

    def __init__(self, schedulers: Callable[[], Sequence[SchedulerActor]], max_tokens: int) -> None:
        """Create an empty set. `schedulers` returns the actors of the live replicas.

        All corpora together may have `max_tokens` tokens, where each document counts as one additional token.
        """
        self._schedulers = schedulers
        self._max_tokens = max_tokens
        self._corpora: dict[str, Tokens] = {}
        self._counts: dict[str, int] = {}
        self._lock = anyio.Lock()
        self.index: CorpusIndex | None = None  # None: there are no corpora

    @property
    def token_counts(self) -> dict[str, int]:
        """The number of tokens of each corpus, by corpus id."""
        return dict(self._counts)

    async def start(self, path: str, tokenizer: Tokenizer) -> None:
        """Add the corpus of the plan, whose id is its path. Raises `ConfigurationError` if it cannot be used."""
        begin = time.monotonic()
        try:
            pieces = tokens_of_texts(texts_of_file(path), tokenizer)
            count = await self.add(path, partial(joined_tokens, pieces, "file_path"))
        except InvalidRequest as error:
            raise ConfigurationError(f"{PATH_FLAG} {path}: {error.message}") from error
        logger.info("Added the corpus %s: %d tokens in %.1f s.", path, count, time.monotonic() - begin)

    async def add(self, corpus_id: str, read: Callable[[int], Tokens]) -> int:
        """Add a corpus and return its number of tokens.

        `read` is called on a thread. It gets the maximum number of tokens, and returns the tokens, with `SEPARATOR`
        after each document. Raises `InvalidRequest` if the id is in use or cannot be listed, or if there are too many
        corpora, and the errors of `read`. After an error or a cancellation, the corpora are unchanged.
        """
        try:
            check_surrogates(corpus_id)  # names of files may have bytes that are not UTF-8
        except TypeError as error:
            raise InvalidRequest(
                "The id of the corpus has a lone surrogate (half of a UTF-16 pair).", param="corpus_id"
            ) from error
        async with self._lock:
            if corpus_id in self._corpora:
                raise InvalidRequest(f"There is a corpus {corpus_id} already; remove it first.", param="corpus_id")
            left = self._max_tokens - sum(map(len, self._corpora.values()))
            if len(self._corpora) >= MAX_CORPORA or left <= 0:
                raise InvalidRequest(
                    f"There are {len(self._corpora)} corpora; at most {MAX_CORPORA} are allowed, with "
                    f"{self._max_tokens:,} tokens together. Remove one first."
                )
            tokens, count = await anyio.to_thread.run_sync(_counted, read, left)
            await self._use({**self._corpora, corpus_id: tokens})
            self._counts[corpus_id] = count
            return count

    async def remove(self, corpus_id: str) -> None:
        """Remove a corpus. Raises `InvalidRequest` if no corpus has this id."""
        async with self._lock:
            if corpus_id not in self._corpora:
                raise InvalidRequest(f"There is no corpus {corpus_id}.", param="corpus_id")
            await self._use({name: each for name, each in self._corpora.items() if name != corpus_id})
            del self._counts[corpus_id]

    async def _use(self, corpora: dict[str, Tokens]) -> None:
        """Index `corpora` on a thread. Then replace the corpora of every replica."""
        index = await anyio.to_thread.run_sync(CorpusIndex, list(corpora.values())) if corpora else None
        self._corpora, self.index = corpora, index
        for actor in self._schedulers():
            actor.scheduler.use_corpora(index)


def _counted(read: Callable[[int], Tokens], limit: int) -> tuple[Tokens, int]:
    """Return the tokens that `read` returns, and their number without separators."""
    tokens = read(limit)
    return tokens, int(np.count_nonzero(tokens >= 0))
