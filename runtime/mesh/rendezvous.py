"""Rendezvous of the ranks of a mesh. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address at which the ranks of a model connect. Sent to other processes as JSON."""

    host: str  # address of rank 0's machine; collectives listen only there
    timeout_s: float  # seconds for all ranks to connect, and for each collective
    path: str | None = None  # private file, if all ranks are on one machine; otherwise None
    port: int = 0  # port of the host if `path` is None
    key_prefix: str = ""  # secret prefix of the store's keys, known only to these ranks
