"""Updates of the weights over a group, with workers that only record what they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from runtime.actors.weight_control import WeightControl
from runtime.errors import CheckpointError, InvalidRequest

NUM_PARTS = 4


@pytest.mark.parametrize("by", ["adapters", "tensors"])
async def test_after_a_failure_the_rest_is_received_and_all_is_dropped(by: str) -> None:
    """A trainer sends all parts, so a part that is not received would become a part of the next update."""
    calls: list[tuple[str, bool]] = []

    def call(verb: str, payload: Mapping[str, Any]) -> asyncio.Future[list[Any]]:
        calls.append((verb, payload.get("discard", False)))
        num_received = sum(verb == "receive_weights" for verb, _ in calls)
        error = "A tensor is too large." if verb == "stage_weights" and by == "tensors" else None
        answered = asyncio.get_running_loop().create_future()
        answered.set_result([{"error": error, "left": NUM_PARTS - num_received, "unknown": [], "waiting": []}])
        return answered

    def check_adapters() -> None:
        if by == "adapters":
            raise InvalidRequest("Unload the adapters first.")

    actors: Any = [SimpleNamespace(index=0, runner=SimpleNamespace(call=call))]
    plan: Any = SimpleNamespace(pp_size=1)
    control = WeightControl(lambda: actors, anyio.Lock(), None, plan, lambda version: None, check_adapters)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"too large|Unload.*The old weights stay\."):
        await control.update_from_group({"name": "trainers"}, flush=True)
    received = [is_discarded for verb, is_discarded in calls if verb == "receive_weights"]
    assert received == [False, False, True, True]
    assert calls[-1][0] == "drop_weights"
    assert "commit_weights" not in [verb for verb, _ in calls]
