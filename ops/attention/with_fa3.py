"""Paged attention with FlashAttention 3, which FlashInfer contains."""

from __future__ import annotations

from ops.attention import Attend
from ops.attention.with_flashinfer import FA3, FlashInfer


def make_attend() -> Attend:
    """Return an `attend` for one engine."""
    return FlashInfer(FA3).attend
