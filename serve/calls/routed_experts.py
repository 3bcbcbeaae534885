"""Chosen experts in answers: for each token and layer, the experts that the router chose."""

from __future__ import annotations

from base64 import b64encode

import numpy as np

from runtime.request import Chunk

PIECE_BYTES = 3 * 2**18  # encoded at once, because base64 holds the interpreter lock; a multiple of 3


def routed_experts(chunk: Chunk) -> str | None:
    """Return the experts as SGLang writes them: base64 of int32 [N, L, k], or None if no token was computed.

    N counts the tokens of prompt and output from `routed_experts_start_len` on, except the last, which the model has
    not computed. L is the number of all layers; layers without experts have zeros.
    """
    num_computed = chunk.usage.prompt + max(chunk.usage.output - 1, 0)
    experts = None if chunk.experts is None else chunk.experts.first(num_computed)
    if experts is None:
        return None
    content = experts.astype("<i4").reshape(-1).view(np.uint8).data
    pieces = [b64encode(content[at : at + PIECE_BYTES]) for at in range(0, len(content), PIECE_BYTES)]
    return b"".join(pieces).decode("ascii")
