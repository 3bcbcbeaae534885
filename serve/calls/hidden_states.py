"""Hidden states in answers: the output of the model's final norm, one vector per computed token."""

from __future__ import annotations

from typing import Any

import orjson

from runtime.request import Chunk, TokenParts


def hidden_states(chunk: Chunk) -> list[Any]:
    """Return the hidden states in SGLang's format.

    The first item is an array [P, E] for the prompt. An array [E] follows for each output token except the last. The
    list is empty if the request ended without hidden states.
    """
    found = _hidden(chunk)
    states = None if found is None else found.first(_num_computed(chunk))
    return [] if states is None else [states[: chunk.usage.prompt], *states[chunk.usage.prompt :]]


def last_hidden(chunk: Chunk) -> list[float]:
    """Return the hidden state [E] from which the last token was sampled, or an empty list if there is none."""
    found = _hidden(chunk)
    state = None if found is None else found.last(_num_computed(chunk))
    return [] if state is None else state.tolist()


def _hidden(chunk: Chunk) -> TokenParts | None:
    return None if chunk.parts is None else chunk.parts.hidden


def _num_computed(chunk: Chunk) -> int:
    return chunk.usage.prompt + max(chunk.usage.output - 1, 0)


def as_fragment(states: list[Any]) -> orjson.Fragment:
    """Return `hidden_states` as JSON. Calls orjson once per vector, because orjson holds the GIL during a call."""
    if not states:
        return orjson.Fragment(b"[]")
    prompt, *output = states
    parts = [b"[" + _vectors(prompt) + b"]"]
    if output:
        parts.append(_vectors(output))
    return orjson.Fragment(b"[" + b",".join(parts) + b"]")


def _vectors(states: Any) -> bytes:
    return b",".join(orjson.dumps(state, option=orjson.OPT_SERIALIZE_NUMPY) for state in states)
