"""Routed experts in answers: the experts that each layer's router chose for each token."""

from __future__ import annotations

from base64 import b64encode

import numpy as np

from runtime.request import Chunk

PIECE_BYTES = 3 * 2**18  # bytes per call of base64, which holds the interpreter lock; a multiple of 3


def routed_experts(chunk: Chunk) -> str | None:
    """Return the routed experts in SGLang's format: base64 of int32 [N, L, k], or None if no token was computed.

    N counts the tokens of prompt and output, without the first `routed_experts_start_len` tokens and without the last
    token, which no layer has processed. L is the number of all layers; layers without experts have zeros. k is the
    number of experts per token.
    """
    num_computed = chunk.usage.prompt + max(chunk.usage.output - 1, 0)
    found = None if chunk.parts is None else chunk.parts.experts
    experts = None if found is None else found.first(num_computed)
    if experts is None:
        return None
    content = experts.astype("<i4").reshape(-1).view(np.uint8).data
    pieces = [b64encode(content[at : at + PIECE_BYTES]) for at in range(0, len(content), PIECE_BYTES)]
    return b"".join(pieces).decode("ascii")
