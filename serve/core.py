"""What the HTTP handlers need: `runtime.actors.engine_core.EngineCore`, or a scripted one in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.request import Request

if TYPE_CHECKING:
    from runtime.actors.output_stream import OutputStream
    from runtime.tokenizer.tokenizer import Tokenizer


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


class EngineCore(Protocol):
    """The engine as a door sees it. Called on its loop only."""

    plan: Plan
    facts: ModelFacts
    tokenizer: Tokenizer | None

    def submit(self, request: Request) -> OutputStream:
        """Raises `InvalidRequest`, `Overloaded` or `EngineClosed` at once; later errors are the reply's."""
        ...

    def abort_label(self, label: str) -> int: ...
    def abort_all(self) -> int: ...
    def flush_cache(self) -> bool: ...
    def status(self) -> Status: ...
