"""Limit the reasoning of a model: close the reasoning block after a number of tokens."""

from __future__ import annotations

from copy import copy

from runtime.constraint import Constraint, DraftData, DraftedConstraint, HostData, Output, allowing_only
from runtime.grammar.matching.marker import Marker
from runtime.grammar_spec import ThinkingLimit

BEFORE_OPEN = 4  # maximum number of tokens (for example line breaks) before the block


class LimitedThinking:
    """A `runtime.constraint.Constraint` that runs on the event loop.

    After `max_tokens` tokens in the reasoning block, only the tokens of the closing marker are allowed until the block
    is closed. For all other tokens, the inner constraint applies.
    """

    def __init__(
        self,
        limit: ThinkingLimit,
        markers: tuple[Marker | None, Marker],
        close_ids: tuple[int, ...],
        num_words: int,
        inner: Constraint | None,
        also_close: tuple[Marker, ...] = (),
    ) -> None:
        self._limit = limit
        self._markers = markers
        self._close_ids = close_ids
        self._num_words = num_words
        self._inner = inner
        self._also_close = also_close
        self._blocks: dict[int, _Block] = {}

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """Request the next token's host data, that is, its mask."""
        if not output.num_before:
            self._blocks[choice] = _Block(*self._markers, self._limit, self._also_close)
        block = self._blocks[choice]
        over = block.advance(output.new_ids) - self._limit.max_tokens
        if 0 <= over < len(self._close_ids):
            ids = self._close_ids[over:]
            data.give(allowing_only(ids[:1], self._num_words), block.closed_by(ids))
        elif self._inner is None:
            data.give()
        else:
            output = output._replace(num_before=block.num_passed_on)
            block.num_passed_on = output.num_output
            self._inner.host_data_after(choice, output, data)

    @property
    def takes_drafts(self) -> bool:
        """Whether the inner constraint, if there is one, takes draft tokens."""
        return self._inner is None or (isinstance(self._inner, DraftedConstraint) and self._inner.takes_drafts)

    def draft_data_after(self, choice: int, output: Output, first: HostData, drafts: DraftData) -> None:
        """Set the masks after draft tokens where the block must be closed. The inner constraint sets other masks."""
        block = self._blocks[choice].copy()

        def follow() -> None:
            for token_id, data in zip(drafts.ids or (), drafts.after):
                over = block.advance([token_id]) - self._limit.max_tokens
                if 0 <= over < len(self._close_ids):
                    data.give(allowing_only(self._close_ids[over : over + 1], self._num_words))
                elif self._inner is None:
                    data.give()

        drafts.when_proposed(follow)
        if isinstance(self._inner, DraftedConstraint):
            self._inner.draft_data_after(choice, output, first, drafts)


class _Block:
    """The state of one choice's reasoning block."""

    __slots__ = (
        "_also_close", "_close", "_is_closed", "_limit", "_num_matched", "_num_seen", "_num_tokens", "_open", "_reopen",
        "num_passed_on",
    )  # fmt: skip

    def __init__(
        self, opening: Marker | None, close: Marker, limit: ThinkingLimit, also_close: tuple[Marker, ...]
    ) -> None:
        self._open = opening  # the marker that will open the block; None: the block is open
        self._reopen = opening if limit.reopens else None
        self._limit = limit
        self._close = close
        self._is_closed = False
        self._also_close = [(marker, 0) for marker in also_close]  # other closing markers, with their matched bytes
        self._num_matched = 0  # number of matched bytes of the next marker (opening or closing)
        self._num_tokens = 0  # number of tokens in the block
        self._num_seen = 0  # number of output tokens
        self.num_passed_on = 0  # number of output tokens that the inner constraint has seen

    def copy(self) -> _Block:
        """Return an independent block in the same state."""
        return copy(self)  # a shallow copy is enough: lists and markers are replaced, never changed

    def advance(self, new_ids: list[int]) -> int:
        """Read new tokens. Return the number of tokens in the block, or -1 if no block is open."""
        for token_id in new_ids:
            self._num_seen += 1
            if not self._is_closed:
                self._take(token_id)
        return -1 if self._is_closed or self._open is not None else self._num_tokens

    def closed_by(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens up to and including the token that closes the block, or all tokens if none closes it."""
        matched = self._num_matched
        for count, token_id in enumerate(ids, 1):
            matched = self._close.advance(matched, token_id)
            if matched == self._close.length:
                return ids[:count]
        return ids

    def _take(self, token_id: int) -> None:
        if self._open is not None:
            self._num_matched = self._open.advance(self._num_matched, token_id)
            if self._num_matched == self._open.length:
                self._open, self._num_matched = None, 0
            elif self._reopen is None and self._num_seen > BEFORE_OPEN + self._num_matched:
                self._is_closed = True  # the output has no reasoning block
            return
        self._num_matched = self._close.advance(self._num_matched, token_id)
        self._also_close = [(marker, marker.advance(matched, token_id)) for marker, matched in self._also_close]
        is_closed = self._num_matched == self._close.length
        is_closed = is_closed or any(matched == marker.length for marker, matched in self._also_close)
        self._num_tokens += 1
        if is_closed and self._reopen is not None:
            self._open, self._num_matched = self._reopen, 0
            self._num_tokens = min(self._num_tokens, self._limit.max_tokens)
        else:
            self._is_closed = is_closed
