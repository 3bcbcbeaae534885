"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the sequence's last tokens.

Outputs that copy or edit their prompt repeat long parts of it. A step that verifies several tokens takes little longer
than a step that computes one token. Earlier occurrences are found by a suffix automaton of the sequence's own prompt
and output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from runtime.speculative.corpus import CorpusLookup
from runtime.speculative.match_odds import MatchOdds
from runtime.speculative.pace import Pace
from runtime.speculative.suffix_automaton import ROOT, SuffixAutomaton

CATCH_UP_TOKENS = 1024  # maximum number of tokens that one call indexes, which takes about 1 ms
STEP_TOKENS = 2048  # maximum number of tokens that all drafters together index in one step, not counting short calls
MAX_CONTINUATIONS = 64  # at most this many continuations of an n-gram are compared
SHORT_TOKENS = 16  # a call with at most this many new tokens is short, and always indexes them


@dataclass(slots=True)
class CatchUp:
    """The number of tokens that all drafters together may still index in this step. Short calls do not reduce it."""

    left: int = STEP_TOKENS


@dataclass(frozen=True, slots=True)
class LookupSettings:
    """How prompt lookup finds tokens.

    With `by_frequency`, the most frequent continuation of an n-gram is proposed, otherwise the most recent one. If an
    n-gram has several continuations, up to `max_breadth` of them are proposed, as alternatives. Without `by_frequency`,
    this limit is lower for longer n-grams (down to `min_breadth`), and falls further with each proposed token. All
    continuations together have at most `max_ids` ids.
    """

    min_window: int = 2  # length of the shortest n-gram that is looked up
    max_window: int = 8  # length of the longest n-gram that is looked up
    min_breadth: int = 1
    max_breadth: int = 1
    by_frequency: bool = False
    max_ids: int = 0
    # Maximum number of states of the automaton; if it is exceeded, only the newest tokens stay indexed.
    capacity: int = 10_000_000
    max_corpus_drafts: int = 64  # maximum number of ids that a proposal takes from a corpus


class NgramDrafter:
    """Proposes draft tokens for one sequence: the tokens after an earlier occurrence of its last tokens.

    After failures it pauses (see `Pace` and `MatchOdds`), separately for ids from a corpus and from the sequence.
    """

    __slots__ = (
        "_catch_up",
        "_corpora",
        "_corpus_pace",
        "_first",
        "_from_corpus",
        "_index",
        "_length",
        "_num_prompt",
        "_odds",
        "_pace",
        "_pending",
        "_proposed_length",
        "_proposed_odds",
        "_settings",
        "_state",
    )
    by_model = False  # whether the draft model must read the sequence's steps

    def __init__(
        self,
        max_drafts: int,
        settings: LookupSettings,
        catch_up: CatchUp | None = None,
        odds: MatchOdds | None = None,
        corpora: CorpusLookup | None = None,
        num_prompt: int = 0,
    ) -> None:
        """Create the drafter. `catch_up`, `odds` and `corpora` are shared by all drafters of a scheduler.

        If `catch_up` is None, only `CATCH_UP_TOKENS` limits a call. If `odds` is None, ids are proposed after every
        match. The first `num_prompt` tokens of the sequence are its prompt.
        """
        self._odds = odds
        self._corpora = corpora
        self._pace = Pace(max_drafts)
        self._num_prompt = num_prompt
        self._corpus_pace = Pace(min(max_drafts, settings.max_corpus_drafts))
        self._catch_up = catch_up
        self._settings = settings
        self._index = SuffixAutomaton(settings.max_window + 1)
        self._first = 0  # position in the sequence of the first indexed token
        self._state, self._length = ROOT, 0  # automaton state and length of the n-gram that `_find` found last
        self._from_corpus = False  # whether the ids that were proposed last come from a corpus
        self._proposed_length = 0  # for `odds`: length of the n-gram after which ids were proposed last
        self._proposed_odds = odds  # where to record the proposal's result: the odds of this drafter or of the corpora
        self._pending: list[int] = []  # the ids that the pending tokens were assumed to have

    def propose(self, ids: list[int], num_pending: int, limit: int) -> list[int]:
        """Return up to `limit` ids that follow the known `ids` and `num_pending` pending tokens.

        Returns [] if there is no match, during a pause, or while known tokens are not indexed yet. The pending tokens
        are assumed to be the tokens that followed the match. A match in a corpus is used if it is longer than that in
        the sequence.
        """
        matches = len(ids) >= self._pace.resume and self._extend(ids) and self._find()
        length, found = self._of_corpora(ids, self._length if matches else 0, num_pending, limit)
        odds, is_corpus = self._odds, bool(length)
        if self._corpora is not None and is_corpus:
            odds = self._corpora.odds
        elif matches:
            # Only output tokens count. A match in the prompt, for example in the chat template, does not show that
            # the model copies text.
            length = min(self._length, len(ids) + num_pending - self._num_prompt)
            if odds is None or odds.pays(length):
                found = self._continuation(ids, num_pending + min(self._pace.length, limit))
        if not found:
            return []
        if odds is not None:
            odds.begin(length)
        self._proposed_length, self._proposed_odds, self._from_corpus = length, odds, is_corpus
        self._pending = found[:num_pending]
        return found[num_pending:]

    def alternatives(self, proposed: list[int]) -> list[tuple[int, list[int]]]:
        """Return (number of the replaced draft token, ids) for each alternative to the ids that were proposed last.

        Better alternatives come first. With the proposed ids, they have at most `max_ids` ids in total. Ids from a
        corpus have no alternatives.
        """
        settings, left = self._settings, self._settings.max_ids - len(proposed)
        if settings.max_breadth == 1 or left <= 0 or self._from_corpus:
            return []
        found = self._branches(proposed)[:left]
        if not found:
            return []
        longest = max(left // len(found), 1)
        return [
            (depth, self._follow(state, length, min(longest, len(proposed) + 1 - depth), token))
            for depth, state, length, token in found
        ]

    def note(self, num_proposed: int, num_accepted: int, num_known: int) -> None:
        """Record the result of a proposal. `num_known` is the number of known tokens of the sequence."""
        pace = self._corpus_pace if self._from_corpus else self._pace
        pace.note(num_proposed, num_accepted, num_known)
        if self._proposed_odds is not None:
            self._proposed_odds.note(self._proposed_length, num_accepted)

    def _of_corpora(self, ids: list[int], above: int, num_pending: int, limit: int) -> tuple[int, list[int]]:
        """Return the proposal of the corpora (see `CorpusLookup.propose`), or (0, []) while it pauses."""
        if self._corpora is None or self._corpora.index is None or len(ids) < self._corpus_pace.resume:
            return 0, []
        return self._corpora.propose(ids, above, num_pending, min(self._corpus_pace.length, limit))

    def _extend(self, ids: list[int]) -> bool:
        """Index the known tokens, or the next part of a long text. Return True if all known tokens are indexed."""
        done = self._first + self._index.num_tokens
        count = min(len(ids) - done, CATCH_UP_TOKENS)
        if count > SHORT_TOKENS and self._catch_up is not None:
            count = min(count, self._catch_up.left)
            self._catch_up.left -= count
        self._index.extend(ids[done : done + count])
        if len(self._index.nexts) > self._settings.capacity:
            self._first += self._index.num_tokens - self._settings.capacity // 4
            self._index = SuffixAutomaton(self._settings.max_window + 1)
            return False
        return self._first + self._index.num_tokens == len(ids)

    def _find(self) -> bool:
        """Find the longest suffix that occurred earlier, followed by a token. Return whether it is long enough."""
        index, settings = self._index, self._settings
        state, length = index.suffix(index.state, index.length, settings.max_window)
        while length >= settings.min_window and not index.nexts[state]:
            state = index.links[state]
            length = min(length, index.lengths[state])
        self._state, self._length = state, length
        return length >= settings.min_window

    def _continuation(self, ids: list[int], count: int) -> list[int]:
        """Return the `count` ids that are expected to follow the match."""
        if self._settings.by_frequency:
            return self._follow(self._state, self._length, count)
        begin = self._first + self._index.befores[self._state]  # the last occurrence is the end of the text itself
        found = ids[begin : begin + count]
        # Fewer than `count` tokens follow the match, so the match overlaps its continuation: the text repeats itself.
        while len(found) < count:
            found += found[: count - len(found)]
        return found

    def _ranked(self, state: int) -> list[int]:
        """Return the tokens that followed the strings of this state, the most recent or most frequent token first."""
        index, nexts = self._index, self._index.nexts[state]
        rank = index.counts if self._settings.by_frequency else index.ends
        compared = self._compared(nexts)
        return sorted(compared, key=lambda token: (rank[nexts[token]], index.ends[nexts[token]]), reverse=True)

    def _compared(self, nexts: dict[int, int]) -> Iterable[int]:
        """Return the tokens of `nexts` to compare: the first or the newest `MAX_CONTINUATIONS`."""
        if len(nexts) <= MAX_CONTINUATIONS:
            return nexts
        return islice(nexts if self._settings.by_frequency else reversed(nexts), MAX_CONTINUATIONS)

    def _follow(self, state: int, length: int, count: int, token: int | None = None) -> list[int]:
        """Return up to `count` ids that follow a string of this state, beginning with `token` if it is not None."""
        found, index, most = [], self._index, self._settings.max_window
        while len(found) < count:
            while not index.nexts[state]:  # no token follows, because the string is only at the end of the text
                state = index.links[state]
                length = min(length, index.lengths[state])
            if token is None:
                nexts, rank = index.nexts[state], index.counts if self._settings.by_frequency else index.ends
                token = max(self._compared(nexts), key=lambda each: (rank[nexts[each]], index.ends[nexts[each]]))
            found.append(token)
            state, length = index.suffix(index.nexts[state][token], length + 1, most)
            token = None
        return found

    def _branches(self, proposed: list[int]) -> list[tuple[int, int, int, int]]:
        """Return (number of the replaced draft token, state, length, other token) for each alternative, best first."""
        index, settings = self._index, self._settings
        state, length = self._state, self._length
        scale = (settings.max_breadth - settings.min_breadth) / settings.max_window
        breadth = settings.max_breadth - length * scale
        found, shares, share = list[tuple[int, int, int, int]](), list[float](), 1.0
        for depth, own in enumerate([*self._pending, *proposed], 1 - len(self._pending)):
            while own not in index.nexts[state]:  # the proposal repeats a period, beyond the end of the text
                if state == ROOT:
                    return found
                state = index.links[state]
                length = min(length, index.lengths[state])
            nexts = index.nexts[state]
            total = max(index.counts[state] - (index.ends[state] == index.num_tokens), 1)
            most = settings.max_breadth if settings.by_frequency else max(int(breadth), 1)
            others = [token for token in self._ranked(state)[:most] if token != own][: most - 1] if depth > 0 else ()
            found += [(depth, state, length, token) for token in others]
            shares += [share * index.counts[nexts[token]] / total for token in others]
            share *= index.counts[nexts[own]] / total
            breadth -= scale
            state, length = index.suffix(nexts[own], length + 1, settings.max_window)
        if settings.by_frequency:
            order = sorted(range(len(found)), key=lambda place: -shares[place])
            found = [found[place] for place in order]
        return found
