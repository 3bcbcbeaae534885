"""What a grammar backend is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.grammar_spec import Grammar


class Matcher(Protocol):
    """How far an output has come in its grammar. Used by one thread at a time."""

    @property
    def num_bytes(self) -> int:
        """Of memory that it takes while it is kept, about."""
        ...

    @property
    def error(self) -> str:
        """Why it can go no further: a limit was reached, or a token was not allowed; empty where it can."""
        ...

    def consume(self, token_ids: list[int]) -> bool:
        """Go on by these tokens; False where the grammar does not allow them, and then for good."""
        ...

    def copy(self) -> Matcher:
        """Another one in the same place."""
        ...


class Backend(Protocol):
    """Compiles grammars for one vocabulary and computes what they allow. Methods are called on any thread."""

    @property
    def matcher(self) -> type:
        """What it compiles to."""
        ...

    @property
    def num_words(self) -> int:
        """Of a mask."""
        ...

    def compile(self, grammar: Grammar) -> Matcher:
        """At the beginning of an output. Takes long, without Python's lock for most of it.

        Raises `InvalidGrammar` for what is malformed, too large, or cannot be enforced.
        """
        ...

    def fill_masks(self, matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
        """Write into row i of `masks`, int32 [n, words], which tokens `matchers[i]` allows next.

        The ends of the output are among them where the grammar accepts, and only they where it can go no further.
        A row of zeros: none, because of an error.
        """
        ...

    def close(self) -> None:
        """End its threads. Waits for what they compute now."""
        ...


def refused(token_ids: Iterable[int], accept: Callable[[int], bool]) -> str:
    """The error of the first of these that a library does not accept, one by one; empty where it accepts all."""
    token_id = next((each for each in token_ids if not accept(each)), None)
    return "" if token_id is None else f"token {token_id} is not allowed"
