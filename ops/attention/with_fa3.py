"""Paged attention by FlashAttention 3, as FlashInfer contains it."""

from __future__ import annotations

from ops.attention import Attend
from ops.attention.with_flashinfer import FA3, FlashInfer


def make_attend() -> Attend:
    """An `attend` for one engine."""
    return FlashInfer(FA3).attend
