"""Compile the regular expressions of `stop_regex` to automata, whose cost per character is bounded."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from runtime.errors import InvalidRequest
from runtime.grammar.patterns.automata import TooComplexError, exact_automaton
from runtime.grammar.patterns.expressions import PatternError, rows
from runtime.tokenizer.stop import StopPattern

MAX_STATES = 256  # maximum number of states of all automata of a request; each state may cost time at every character


def stop_patterns(patterns: Iterable[str]) -> tuple[StopPattern, ...]:
    """Return the automata of a request's patterns. Call this in a thread, like `stop_pattern`.

    Raises `InvalidRequest` if a pattern cannot be used, or if all patterns together are too complex.
    """
    automata = tuple(map(stop_pattern, patterns))
    num_states = sum(len(each.accepts) for each in automata)
    if num_states > MAX_STATES:
        raise InvalidRequest(
            f"The patterns of stop_regex are too complex: they have {num_states} states, up to {MAX_STATES} are "
            "allowed together.",
            param="stop_regex",
        )
    return automata


@lru_cache(256)
def stop_pattern(pattern: str) -> StopPattern:
    """Return the automaton of a pattern. Call this in a thread, because a new pattern takes up to 0.1 s.

    Raises `InvalidRequest` if the pattern is malformed, too complex, has an anchor or matches the empty text.
    """
    try:
        if any(at_start or at_end for at_start, _, at_end in rows(pattern, is_wide=False)):
            raise _refusal(pattern, "it has an anchor, but a stop may begin and end anywhere in the text")
        automaton = exact_automaton(pattern)
    except PatternError as error:
        raise _refusal(pattern, str(error)) from None
    except TooComplexError:
        raise _refusal(pattern, "it is too complex") from None
    accepts = [matched[0] for matched in automaton.matched]
    if accepts[0]:
        raise _refusal(pattern, "it matches the empty text")
    if len(accepts) > MAX_STATES:
        raise _refusal(pattern, f"it is too complex: it has {len(accepts)} states, up to {MAX_STATES} are allowed")
    live = _live_states(automaton.next, accepts)
    edges = sorted((low, number) for number, ranges in enumerate(automaton.classes) for low, _ in ranges)
    return StopPattern(
        text=pattern,
        starts=tuple(low for low, _ in edges),
        classes=tuple(number for _, number in edges),
        next=tuple(tuple(target if target in live else -1 for target in line) for line in automaton.next),
        accepts=tuple(accepts),
    )


def _live_states(next_: list[list[int]], accepts: list[bool]) -> set[int]:
    """Return the states from which an accepting state is reachable."""
    live = {state for state, accepted in enumerate(accepts) if accepted}
    while more := [state for state, line in enumerate(next_) if state not in live and not live.isdisjoint(line)]:
        live.update(more)
    return live


def _refusal(pattern: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"stop_regex {pattern[:80]!r} cannot be used: {reason}.", param="stop_regex")
