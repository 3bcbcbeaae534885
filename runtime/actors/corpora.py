"""The external corpora of an engine: texts in which prompt lookup also finds draft tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import numpy as np

from runtime.errors import InvalidRequest
from runtime.speculative.corpus import CorpusIndex, Tokens

if TYPE_CHECKING:
    from runtime.actors.scheduler import SchedulerActor

MAX_CORPORA = 64
MAX_CORPUS_TOKENS = 4_000_000  # maximum number of tokens of a corpus; each document counts as one additional token
MAX_TOTAL_TOKENS = 10_000_000  # maximum number of tokens of all corpora; they take up to 400 MB of memory


class ExternalCorpora:
    """Adds and removes corpora while requests run. All replicas use one immutable index of all corpora."""

    def __init__(self, schedulers: Callable[[], Sequence[SchedulerActor]]) -> None:
        """Create an empty set. `schedulers` returns the actors of the live replicas."""
        self._schedulers = schedulers
        self._corpora: dict[str, Tokens] = {}
        self._counts: dict[str, int] = {}
        self._lock = anyio.Lock()
        self.index: CorpusIndex | None = None  # None: there are no corpora

    @property
    def token_counts(self) -> dict[str, int]:
        """The number of tokens of each corpus, by corpus id."""
        return dict(self._counts)

    async def add(self, corpus_id: str, read: Callable[[int], Tokens]) -> int:
        """Add a corpus and return its number of tokens.

        `read` is called on a thread. It gets the maximum number of tokens, and returns the tokens, with `SEPARATOR`
        after each document. Raises `InvalidRequest` if the id is in use or there are too many corpora, and the errors
        of `read`. After an error or a cancellation, the corpora are unchanged.
        """
        async with self._lock:
            if corpus_id in self._corpora:
                raise InvalidRequest(f"There is a corpus {corpus_id} already; remove it first.", param="corpus_id")
            left = MAX_TOTAL_TOKENS - sum(map(len, self._corpora.values()))
            if len(self._corpora) >= MAX_CORPORA or left <= 0:
                raise InvalidRequest(
                    f"There are {len(self._corpora)} corpora; at most {MAX_CORPORA} are allowed, with "
                    f"{MAX_TOTAL_TOKENS:,} tokens together. Remove one first."
                )
            tokens = await anyio.to_thread.run_sync(read, min(MAX_CORPUS_TOKENS, left))
            await self._use({**self._corpora, corpus_id: tokens})
            self._counts[corpus_id] = int(np.count_nonzero(tokens >= 0))
            return self._counts[corpus_id]

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
