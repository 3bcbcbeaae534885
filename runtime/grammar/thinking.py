"""A limit to how long a model thinks: its block of reasoning is closed by force."""

from __future__ import annotations

from runtime.constraint import Constraint, HostData, Output, allowing_only
from runtime.grammar.marker import Marker
from runtime.grammar_spec import ThinkingLimit

BEFORE_OPEN = 4  # tokens, such as line breaks, that may stand before the block opens


class LimitedThinking:
    """See `runtime.constraint.Constraint`. Lives on the event loop.

    Once the block has so many tokens, those of its closing mark are the only ones allowed. Before and after, it is the
    inner constraint that decides.
    """

    def __init__(
        self,
        limit: ThinkingLimit,
        markers: tuple[Marker | None, Marker],
        close_ids: tuple[int, ...],
        num_words: int,
        inner: Constraint | None,
    ) -> None:
        self._limit = limit
        self._markers = markers
        self._close_ids = close_ids
        self._num_words = num_words
        self._inner = inner
        self._blocks: dict[int, _Block] = {}

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """What applies to the next token."""
        if not output.num_before:
            self._blocks[choice] = _Block(*self._markers, self._limit)
        block = self._blocks[choice]
        over = block.advance(output.new_ids) - self._limit.max_tokens
        if 0 <= over < len(self._close_ids):
            ids = self._close_ids[over:]
            data.give(allowing_only(ids[:1], self._num_words), block.closed_by(ids))
        elif self._inner is None:
            data.give()
        else:
            output = output._replace(num_before=block.num_told)
            block.num_told = output.num_output
            self._inner.host_data_after(choice, output, data)


class _Block:
    """How far an output has come."""

    __slots__ = (
        "_close", "_is_closed", "_limit", "_matched", "_num_seen", "_num_tokens", "_open", "_reopen", "num_told",
    )  # fmt: skip

    def __init__(self, opening: Marker | None, close: Marker, limit: ThinkingLimit) -> None:
        self._open = opening  # None: the block is open
        self._reopen = opening if limit.reopens else None
        self._limit = limit
        self._close = close
        self._is_closed = False
        self._matched = 0  # bytes of the mark that is looked for
        self._num_tokens = 0  # within the block
        self._num_seen = 0
        self.num_told = 0  # tokens that the inner constraint knows

    def advance(self, new_ids: list[int]) -> int:
        """The tokens within the block, up to the end of the output; -1 where it is not open."""
        for token_id in new_ids:
            self._num_seen += 1
            if not self._is_closed:
                self._take(token_id)
        return -1 if self._is_closed or self._open is not None else self._num_tokens

    def closed_by(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """As many of these tokens as it takes to close the block."""
        matched = self._matched
        for count, token_id in enumerate(ids, 1):
            matched = self._close.advance(matched, token_id)
            if matched == self._close.length:
                return ids[:count]
        return ids

    def _take(self, token_id: int) -> None:
        if self._open is not None:
            self._matched = self._open.advance(self._matched, token_id)
            if self._matched == self._open.length:
                self._open, self._matched = None, 0
            elif self._reopen is None and self._num_seen > BEFORE_OPEN + self._matched:
                self._is_closed = True  # there is no block
            return
        self._matched = self._close.advance(self._matched, token_id)
        is_closed = self._matched == self._close.length
        self._num_tokens += 1
        if is_closed and self._reopen is not None:
            self._open, self._matched = self._reopen, 0
            self._num_tokens = min(self._num_tokens, self._limit.max_tokens)
        else:
            self._is_closed = is_closed
