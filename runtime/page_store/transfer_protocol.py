"""The protocol with which decode servers request KV pages from prefill servers over TCP.

Each rank of a prefill server listens at the bootstrap port plus its number. The same rank of a decode server connects
to it. With attention groups (--enable-dp-attention), each group of a prefill server has its own prompts. The ports of a
group's ranks follow those of the previous group. A rank of a decode server connects to one rank of each group: the rank
that has the same number in its group.

A connection begins with a greeting that names the model and the page layout. A prefill server therefore refuses a
decode server with another model or layout. The answer to the greeting has the number of attention groups. Each request
after it consists of an operation and 32-byte keys:

EXISTS  answer: the number of leading keys that have a page
GET     answer: as EXISTS, and the bytes of these pages
WATCH   the first key is that of a prompt's last full page, and names the prompt. Each answer has the number of leading
        keys, of the other keys, that have a page, and the prompt's state. An answer is sent after every change and
        every `BEAT_S` seconds, until all keys have a page or the prompt has ended
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

from runtime.page_store.protocol import StoreSpace

EXISTS, GET, WATCH = 1, 2, 3
HEAD = struct.Struct("<BI")  # operation, number of keys
ANSWER = struct.Struct("<I")  # number of pages
PROGRESS = struct.Struct("<IB")  # number of pages, state of the prompt
KEY_BYTES = 32
MAX_KEYS = 1 << 16  # maximum number of keys in one request
MAX_GREETING = 512  # bytes
MAX_GROUPS = 1024  # maximum number of attention groups that a decode server accepts from a prefill server
BEAT_S = 1.0  # longest time between two answers to a `WATCH`, so that both sides notice a lost connection


class PromptState(IntEnum):
    """The state of a prompt on a prefill server."""

    UNKNOWN = 0  # the prompt has not arrived yet, or it ended more than `offered_pages.ENDED_S` seconds ago
    PENDING = 1  # the prompt is queued or being computed, or its pages are not offered yet
    ENDED = 2  # the prompt has ended, so no more of its pages will come


def greeting(space: StoreSpace) -> bytes:
    """Return the line that a decode server sends first on a connection."""
    return f"penstock-pages-4 {space.name} {space.rank}/{space.num_ranks}\n".encode()


def pack_request(operation: int, keys: Sequence[bytes]) -> bytes:
    """Return the bytes of a request."""
    return HEAD.pack(operation, len(keys)) + b"".join(keys)


def num_groups_in(answer: bytes) -> int | None:
    """Return the number of attention groups in the answer to a greeting, or None if the server refused it."""
    word, _, number = answer.strip().partition(b" ")
    return int(number) if word == b"ok" and number.isdigit() and 0 < int(number) <= MAX_GROUPS else None
