"""What the doors need from the engine. `runtime.actors.core.Core` is the one; tests have a scripted other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from runtime.facts import ModelFacts
from runtime.plan import Plan
from runtime.request import Request

if TYPE_CHECKING:
    from runtime.actors.reply import Reply
    from runtime.text.tokenizer import Tokenizer


class Status(Protocol):
    """A look at the engine."""

    @property
    def state(self) -> str: ...  # "starting", "ready", "draining", "failed", "closed"
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_used_tokens(self) -> int: ...
    @property
    def max_total_tokens(self) -> int: ...
    @property
    def gen_throughput(self) -> float: ...


class Core(Protocol):
    """The engine as a door sees it. Called on its loop only."""

    plan: Plan
    facts: ModelFacts
    tokenizer: Tokenizer | None

    def submit(self, request: Request) -> Reply:
        """Raises `InvalidRequest`, `Overloaded` or `EngineClosed` at once; later errors are the reply's."""
        ...

    def abort_label(self, label: str) -> int: ...
    def abort_all(self) -> int: ...
    def flush_cache(self) -> bool: ...
    def status(self) -> Status: ...
