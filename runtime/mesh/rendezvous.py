"""Rendezvous of the ranks of a mesh. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Address at which the ranks of one model connect. It is sent to other processes as JSON."""

    host: str  # address of rank 0's machine; collectives listen only there
    timeout_s: float  # time for all ranks to connect, and for each collective
    path: str | None = None  # private file if all ranks are on one machine; else None
    port: int = 0  # port of the host if `path` is None
    key_prefix: str = ""  # secret prefix of the store's keys, known only to these ranks
