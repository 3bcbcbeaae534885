"""The protocol of a grammar backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.grammar_spec import Grammar


class Matcher(Protocol):
    """An output's position in its grammar. Not thread-safe."""

    @property
    def num_bytes(self) -> int:
        """Approximate size in bytes, which the cache of compiled grammars counts."""
        ...

    @property
    def error(self) -> str:
        """The reason why the matcher cannot continue (a limit, or a token that is not allowed), or ""."""
        ...

    def consume(self, token_ids: list[int]) -> bool:
        """Advance by these tokens. Return False if the grammar does not allow them.

        After a call that returned False, all later calls return False.
        """
        ...

    def copy(self) -> Matcher:
        """Return an independent matcher at the same position."""
        ...


class Backend(Protocol):
    """Compiles grammars for one vocabulary, and computes token masks. Thread-safe."""

    @property
    def matcher(self) -> type:
        """The class of the matchers that `compile` returns."""
        ...

    @property
    def num_words(self) -> int:
        """Number of int32 words in a mask."""
        ...

    def compile(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the beginning of an output.

        The call may take seconds, and releases the GIL for most of that time. Raises `InvalidGrammar` for a grammar
        that is malformed, too large, or cannot be enforced.
        """
        ...

    def fill_masks(self, matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
        """Write the tokens that `matchers[i]` allows next into row i of `masks`, int32 [n, words].

        The model's end-of-sequence ids are allowed where the output matches the grammar. If the output is complete and
        cannot be extended, only these ids are allowed. If a matcher has an error, its row becomes zero. Raises
        `TypeError` for a matcher of another backend.
        """
        ...

    def close(self) -> None:
        """End the backend's threads after their current work."""
        ...


M = TypeVar("M")


def all_of_class(matchers: Sequence[Matcher], cls: type[M]) -> list[M]:
    """Return the matchers, typed as `cls`. Raises `TypeError` if a matcher is of another class."""
    typed = [matcher for matcher in matchers if isinstance(matcher, cls)]
    if len(typed) != len(matchers):
        raise TypeError(f"{cls.__name__} is the only kind of matcher that this backend has masks for.")
    return typed


def refused(token_ids: Iterable[int], accept: Callable[[int], bool]) -> str:
    """Pass tokens to `accept` until it refuses one. Return an error text about this token, or "" if none is refused."""
    token_id = next((each for each in token_ids if not accept(each)), None)
    return "" if token_id is None else f"token {token_id} is not allowed"
