"""What a device's memory is used for, as a table that is logged at start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ops.machine import GIB
from runtime.config.plan import Plan
from runtime.errors import ConfigurationError

BALANCE = 0.9
MARGIN = 1.05  # of the measured activations: allocators round up and lose a little between blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What steps take beside weights and KV cache, in bytes, and how that is known."""

    activation_bytes: int = 0  # of the largest step
    graph_bytes: int = 0  # of all CUDA graphs
    measured: bool = False  # by a step that was run; else nothing is known

    @property
    def reserved_bytes(self) -> int:
        """What the KV cache must leave free."""
        return int(self.activation_bytes * MARGIN) + self.graph_bytes


def largest_step_tokens(plan: Plan) -> int:
    """Tokens of the largest step that the schedule can fill."""
    schedule = plan.schedule
    prompt = schedule.chunk_tokens or max(schedule.max_prefill_tokens, plan.model.context_length)
    return max(prompt + schedule.max_running * schedule.mixed, schedule.max_running)


def check_balance(available_bytes: Sequence[int]) -> None:
    """Raise `ConfigurationError` where one GPU has less than nine tenths of the memory that another has free."""
    least, most = min(available_bytes, default=0), max(available_bytes, default=0)
    if least < BALANCE * most:
        raise ConfigurationError(
            f"One GPU has {least / GIB:.1f} GiB free and another {most / GIB:.1f}: other programs take part of it. "
            "End them, or choose other GPUs with --base-gpu-id."
        )


def memory_table(
    *,
    device: str,
    total_bytes: int,
    weight_bytes: int,
    kv_bytes: int,
    kv_because: str,
    free_bytes: int,
    steps: StepMemory | None = None,
) -> str:
    """Lines of "what, GiB, how that came about". `free_bytes` is what nobody holds now that the pool is there.

    Activations and graphs come out of what is free; both are shown where steps were measured.
    """
    rows = [
        ("weights", weight_bytes, ""),
        ("KV cache", kv_bytes, kv_because),
    ]
    if steps is not None and steps.measured:
        rows.append(("activations", steps.activation_bytes, "of the largest step, as measured"))
        if steps.graph_bytes:
            rows.append(("CUDA graphs", steps.graph_bytes, "set aside, captured while the engine runs"))
        free_bytes = max(0, free_bytes - steps.activation_bytes - steps.graph_bytes)
    rows.append(("free", free_bytes, f"of {total_bytes / GIB:.2f} GiB, for other programs too"))
    lines = [f"Memory of {device}, GiB"]
    lines += [f"  {name:<12}{size / GIB:>8.2f}  {note}".rstrip() for name, size, note in rows]
    return "\n".join(lines)
