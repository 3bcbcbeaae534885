"""DRY ("don't repeat yourself"): penalises tokens that would continue a repetition of earlier text.

If the last tokens of a sequence occurred before, the token that followed the earlier occurrence would extend the
repetition. `multiplier * base ** (length - allowed_length)` is subtracted from its logit, where `length` is the number
of repeated tokens. A sequence breaker (a line break, a quotation mark, ...) ends repetitions, so that formats may
repeat. (https://github.com/oobabooga/text-generation-webui/pull/5677)
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from runtime.constraint import Constraint, HostData, Output
from runtime.sampling_params import MAX_DRY_WINDOW, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_PENALTY = 1e6  # maximum penalty; a larger one would make every logit -inf
MAX_CACHED = 64
SEPARATOR = b"\xff\xfe"  # bytes that no UTF-8 text contains, so that no sequence breaker matches across two tokens


class Breakers:
    """Finds the tokens that end repetitions. Caches them by the texts of the breakers. May be called on any thread."""

    def __init__(self, bytes_of: Mapping[int, bytes], vocab_size: int, encode: Callable[[str], Sequence[int]]) -> None:
        self._bytes_of, self._vocab_size, self._encode = bytes_of, vocab_size, encode
        self._lock = threading.Lock()
        self._joined = b""
        self._starts: list[int] = []  # index in `_joined` where each token starts
        self._cached: OrderedDict[tuple[str, ...], frozenset[int]] = OrderedDict()

    def ids(self, texts: tuple[str, ...]) -> frozenset[int]:
        """Return the tokens that contain one of the texts, and the last token of each text.

        The first call takes 0.1 s.
        """
        with self._lock:
            if texts not in self._cached:
                self._cached[texts] = frozenset(token_id for text in texts for token_id in self._found(text))
                if len(self._cached) > MAX_CACHED:
                    self._cached.popitem(last=False)
            return self._cached[texts]

    def _found(self, text: str) -> set[int]:
        if not self._starts:
            self._join()
        needle = text.encode()
        found, at = set(self._encode(text)[-1:]), self._joined.find(needle)
        while at >= 0:
            index = bisect_right(self._starts, at) - 1
            found.add(index)
            following = self._starts[index + 1] if index + 1 < len(self._starts) else len(self._joined)
            at = self._joined.find(needle, following)
        return found

    def _join(self) -> None:
        parts, length = [], 0
        for token_id in range(self._vocab_size):
            self._starts.append(length)
            parts.append(self._bytes_of[token_id] + SEPARATOR)
            length += len(parts[-1])
        self._joined = b"".join(parts)


class DryPenalties:
    """A `Constraint` that adds DRY's penalties to the data of the inner constraint. Runs on the event loop.

    With a window of 8,192 tokens, the first token takes 5 ms and each further token 40 us (110 us if all tokens are
    equal).
    """

    def __init__(self, params: SamplingParams, breaker_ids: frozenset[int], inner: Constraint | None) -> None:
        self._params = params
        self._breaker_ids = breaker_ids
        self._inner = inner
        last_n = params.dry_penalty_last_n
        self._window = MAX_DRY_WINDOW if last_n == -1 else last_n
        self._repeats: dict[int, _Repeats] = {}

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """Set the biases of the next token, and request the inner constraint's data."""
        if self._window:
            repeats = self._repeats.get(choice)
            num_known = output.num_prompt + output.num_output
            if repeats is None or not output.num_before:
                known = output.ids[max(0, num_known - self._window) : num_known]
                repeats = self._repeats[choice] = _Repeats(known, self._window, self._breaker_ids)
            else:
                for token_id in output.new_ids:
                    repeats.append(token_id)
            data.biases = repeats.biases(self._params)
        if self._inner is None:
            data.give()
        else:
            self._inner.host_data_after(choice, output, data)


class _Repeats:
    """For each position in the window: how many tokens that end there equal the last tokens of the sequence."""

    def __init__(self, ids: Sequence[int], window: int, breaker_ids: frozenset[int]) -> None:
        import numpy as np

        self._window, self._breaker_ids = window, breaker_ids
        self._ids: NDArray[np.int64] = np.zeros(2 * window, np.int64)
        self._lengths: NDArray[np.int64] = np.zeros(2 * window, np.int64)
        self._count = len(ids)
        self._ids[: len(ids)] = ids
        self._lengths[: len(ids)] = _common_suffixes(ids, breaker_ids)

    def append(self, token_id: int) -> None:
        if self._count == len(self._ids):
            for array in (self._ids, self._lengths):
                array[: self._window] = array[-self._window :]
            self._count = self._window
        count = self._count
        lengths, ids = self._lengths, self._ids
        if token_id in self._breaker_ids:
            lengths[: count + 1] = 0
        else:
            lengths[1:count] = (lengths[: count - 1] + 1) * (ids[1:count] == token_id)
            lengths[0] = ids[0] == token_id
            lengths[count] = 0  # the last position is the end of the sequence itself, so it repeats nothing
        ids[count] = token_id
        self._count = count + 1

    def biases(self, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Return (token ids, biases) for the tokens that would continue a repetition, or None if there are none."""
        import numpy as np

        begin = max(0, self._count - self._window)
        # A repetition that begins before the window counts only from the window's start.
        positions = np.arange(begin, self._count - 1)
        lengths = np.minimum(self._lengths[begin : self._count - 1], positions - begin + 1)
        repeated = np.flatnonzero(lengths >= params.dry_allowed_length)
        if not len(repeated):
            return None
        next_ids, lengths = self._ids[begin + repeated + 1], lengths[repeated]
        best = np.zeros(int(next_ids.max()) + 1, np.int64)
        np.maximum.at(best, next_ids, lengths)
        is_best = best[next_ids] == lengths
        longest = dict(zip(next_ids[is_best].tolist(), lengths[is_best].tolist()))
        longest = {token_id: length for token_id, length in longest.items() if token_id not in self._breaker_ids}
        if not longest:
            return None
        with np.errstate(over="ignore"):
            powers = np.power(float(params.dry_base), np.array([*longest.values()]) - params.dry_allowed_length)
            penalties = np.minimum(params.dry_multiplier * powers, MAX_PENALTY)
        return np.array([*longest], np.int64), -penalties.astype(np.float32)


def _common_suffixes(ids: Sequence[int], breaker_ids: frozenset[int]) -> list[int]:
    """Return, for each position, the length of the longest common suffix of ids[: position + 1] and `ids`.

    A common suffix contains no breaker. The value at the last position is 0. The lengths are the Z function of the
    reversed ids.
    """
    backwards, count = ids[::-1], len(ids)
    limit = next((index for index, token_id in enumerate(backwards) if token_id in breaker_ids), count)
    lengths = [0] * count
    left = right = 0
    for at in range(1, count):
        length = min(right - at, lengths[at - left]) if at < right else 0
        while at + length < count and backwards[length] == backwards[at + length]:
            length += 1
        if at + length > right:
            left, right = at, at + length
        lengths[at] = length
    return [min(length, limit) for length in lengths[::-1]]
