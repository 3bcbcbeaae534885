"""How large a request's body may be: in bytes, before it has arrived in full, and in lists and objects once it has.

Parsing holds the interpreter for its whole time, in whichever thread it runs, and so do the streams of everybody
else. What takes long are not long texts (10 MB in 10 ms) but many small values (10 MB of short lists in 830 ms).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from runtime.errors import PayloadTooLarge

if TYPE_CHECKING:
    from runtime.config.plan import Plan

TEXT_BYTES = 2_000_000
IDS_BYTES = 10_000_000  # where prompts may be token ids: up to ten characters each
BYTES_PER_TOKEN = 8  # a context's worth of text is always accepted
MAX_CONTAINERS = 50_000  # lists and objects in one body: 4096 messages with a dozen each

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def max_body_bytes(plan: Plan, *, takes_ids: bool) -> int:
    """What a route accepts that takes text, or token ids too."""
    if plan.serve.max_body_bytes is not None:
        return plan.serve.max_body_bytes
    return max(IDS_BYTES if takes_ids else TEXT_BYTES, BYTES_PER_TOKEN * plan.model.context_length)


def check_containers(body: bytes) -> None:
    """Raises `PayloadTooLarge` for more lists and objects than any honest body holds."""
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:
        return
    outside = start = 0
    for string in _STRING.finditer(body):  # texts may hold as many brackets as they like
        outside += body.count(b"[", start, string.start()) + body.count(b"{", start, string.start())
        start = string.end()
        if outside > MAX_CONTAINERS:
            break
    outside += body.count(b"[", start) + body.count(b"{", start)
    if outside > MAX_CONTAINERS:
        raise PayloadTooLarge(f"The body holds more than {MAX_CONTAINERS} lists and objects.")
