"""A suffix automaton of a growing text (Blumer et al., Theoretical Computer Science 40, 1985).

Each state stands for all substrings of the text that end at the same set of positions. Appending a token takes constant
amortised time. The automaton has at most two states per token.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0


class SuffixAutomaton:
    """All substrings of a text.

    For each substring of up to `max_length` tokens, it has the number of occurrences and the ends of the last two.
    `state` is the state of the text's last `length` tokens, where `length` is at most `max_length`.
    """

    __slots__ = (
        "_last",
        "befores",
        "counts",
        "ends",
        "length",
        "lengths",
        "links",
        "max_length",
        "nexts",
        "num_tokens",
        "state",
    )

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        # [state]: token -> state of the state's strings with this token appended.
        self.nexts: list[dict[int, int]] = [{}]
        self.links = [-1]  # [state]: state of the longest suffix that also occurs at other positions
        self.lengths = [0]  # [state]: length of its longest string
        self.ends = [0]  # [state]: position after its last occurrence
        self.befores = [0]  # [state]: position after the occurrence before the last one
        self.counts = [0]  # [state]: number of occurrences
        self.num_tokens = 0
        self.state, self.length = ROOT, 0
        self._last = ROOT  # state of the whole text

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        links, ends, befores, counts = self.links, self.ends, self.befores, self.counts
        for token in tokens:
            self.num_tokens += 1
            self._append(token)
            state = self.state
            while state > ROOT:
                befores[state], ends[state] = ends[state], self.num_tokens
                counts[state] += 1
                state = links[state]

    def _append(self, token: int) -> None:
        nexts, links, lengths = self.nexts, self.links, self.lengths
        state, new = self._last, len(nexts)
        nexts.append({})
        lengths.append(lengths[state] + 1)
        links.append(ROOT)
        self.ends.append(self.num_tokens)
        self.befores.append(0)
        self.counts.append(0)
        while state != -1 and token not in nexts[state]:
            nexts[state][token] = new
            state = links[state]
        if state != -1:
            links[new] = self._exactly(state, token)
        self._last = new
        self.state, self.length = self.step(self.state, self.length, token)

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state and the length of a string with `token` appended.

        The string has `length` tokens and belongs to `state`. If the new string is longer than `max_length`, its first
        token is removed. Raises KeyError if the text does not contain the string followed by `token`.
        """
        return self.suffix(self.nexts[state][token], length + 1, self.max_length)

    def suffix(self, state: int, length: int, most: int) -> tuple[int, int]:
        """Return the state and the length of the last `most` tokens of a string of `state` with `length` tokens."""
        if length > most:
            length, links, lengths = most, self.links, self.lengths
            while lengths[links[state]] >= length:
                state = links[state]
        return state, length

    def _exactly(self, state: int, token: int) -> int:
        """Return the state whose longest string is that of `state` followed by `token`. May split a state."""
        nexts, links, lengths = self.nexts, self.links, self.lengths
        following, length = nexts[state][token], lengths[state] + 1
        if lengths[following] == length:
            return following
        split = len(nexts)
        nexts.append(nexts[following].copy())
        lengths.append(length)
        links.append(links[following])
        self.ends.append(self.ends[following])
        self.befores.append(self.befores[following])
        self.counts.append(self.counts[following])
        links[following] = split
        if self.state == following and self.length <= length:
            self.state = split
        while state != -1 and nexts[state].get(token) == following:
            nexts[state][token] = split
            state = links[state]
        return split
