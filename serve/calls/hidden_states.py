"""Hidden states in answers: the output of the final norm, one vector for each token that the model has computed."""

from __future__ import annotations

from typing import Any

import orjson

from runtime.request import Chunk


def hidden_states(chunk: Chunk) -> list[Any]:
    """Return the hidden states in SGLang's format.

    The first item is an array [P, E] for the prompt. An array [E] follows for each output token except the last. The
    list is empty if the request ended without hidden states.
    """
    if chunk.hidden is None:
        return []
    prompt, states = chunk.usage.prompt, chunk.hidden
    return [states[:prompt], *states[prompt : prompt + max(chunk.usage.output - 1, 0)]]


def last_hidden(chunk: Chunk) -> list[float]:
    """Return the hidden state [E] from which the last token was sampled, or an empty list if there is none."""
    states = hidden_states(chunk)
    if not states:
        return []
    return (states[-1] if len(states) > 1 else states[0][-1]).tolist()


def as_fragment(states: list[Any]) -> orjson.Fragment:
    """Return the list as JSON. Vectors are written one by one, because orjson holds the interpreter lock."""
    if not states:
        return orjson.Fragment(b"[]")
    prompt, *output = states
    parts = [b"[" + _vectors(prompt) + b"]"]
    if output:
        parts.append(_vectors(output))
    return orjson.Fragment(b"[" + b",".join(parts) + b"]")


def _vectors(states: Any) -> bytes:
    return b",".join(orjson.dumps(state, option=orjson.OPT_SERIALIZE_NUMPY) for state in states)
