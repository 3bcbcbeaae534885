"""Content keys of pages. A key is a hash of the page's tokens and of all tokens before them.

A key is the same in every process. It does not depend on the model or the page layout, so a store for several models
must keep their pages apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from hashlib import blake2b

import numpy as np

from runtime.sequence import Sequence

KEY_BYTES = 32
IMAGE_KEY_BYTES = 40
LOCAL = 1  # bit of a key's first byte that marks pages which only this process can use


def page_keys(sequence: Sequence, count: int, page_size: int) -> list[bytes]:
    """Return the keys of the first `count` full pages of a sequence. The keys are cached in `sequence.page_keys`."""
    keys = sequence.page_keys
    missing = count - len(keys)
    if missing > 0:
        start = len(keys) * page_size
        tokens = sequence.keys[start : start + missing * page_size]
        local = not is_portable(sequence)
        parent = keys[-1] if keys else _root(sequence.namespace)
        for content in _contents(tokens, page_size, plain=sequence.media is None):
            digest = blake2b(parent + content, digest_size=KEY_BYTES).digest()
            parent = bytes((digest[0] & ~LOCAL | local,)) + digest[1:]
            keys.append(parent)
    return keys if missing >= 0 else keys[:count]


def _contents(tokens: list[int], page_size: int, *, plain: bool) -> Iterator[bytes]:
    """Yield the bytes to hash for each page: the keys of its tokens.

    `plain` means that the sequence has no media (images, videos, audio). The token keys of media have more than 64
    bits.
    """
    if plain:
        content, width = np.array(tokens, np.int64).tobytes(), 8 * page_size
        yield from (content[offset : offset + width] for offset in range(0, len(content), width))
        return
    for offset in range(0, len(tokens), page_size):
        page = tokens[offset : offset + page_size]
        if max(page) < 2**63:
            yield np.array(page, np.int64).tobytes()
        else:
            yield b"".join(key.to_bytes(IMAGE_KEY_BYTES, "little") for key in page)


def is_portable(sequence: Sequence) -> bool:
    """Return whether other processes can use the pages of this sequence.

    The pages of an adapter are portable only if the digest of its files is known: its id is valid in this process only.
    """
    adapter = sequence.request.adapter
    return adapter is None or bool(adapter.content)


def is_local(key: bytes) -> bool:
    """Return whether only this process can use the page of this key, for example because of an adapter id."""
    return bool(key[0] & LOCAL)


def _root(namespace: Hashable) -> bytes:
    return blake2b(repr(namespace).encode(), digest_size=KEY_BYTES).digest()
