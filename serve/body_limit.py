"""How large a request's body may be, in bytes. `json_pieces` counts what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.config.plan import Plan

TEXT_BYTES = 2_000_000
IDS_BYTES = 10_000_000  # where prompts may be token ids: up to ten characters each
BYTES_PER_TOKEN = 8  # a context's worth of text is always accepted


def max_body_bytes(plan: Plan, *, takes_ids: bool) -> int:
    """What a route accepts that takes text, or token ids too."""
    if plan.serve.max_body_bytes is not None:
        return plan.serve.max_body_bytes
    return max(IDS_BYTES if takes_ids else TEXT_BYTES, BYTES_PER_TOKEN * plan.model.context_length)
