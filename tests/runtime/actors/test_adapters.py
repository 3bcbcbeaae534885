"""Other processes may use an adapter's KV pages only if its files did not change while it was loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.actors.adapters import AdapterRegistry
from runtime.config.plan import LoraPlan


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_pages_of_an_adapter_that_is_replaced_while_it_is_loaded_are_not_shared(
    tmp_path: Path, is_replaced: bool
) -> None:
    """Its weights may be those of the old files, and its digest that of the new ones."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"old")

    async def call(verb: str, payload: Any) -> list[bool]:
        if is_replaced:
            (tmp_path / "new").write_bytes(b"new")
            (tmp_path / "new").rename(tmp_path / "adapter_model.safetensors")
        return [False]

    actor: Any = SimpleNamespace(runner=SimpleNamespace(call=call))
    registry = AdapterRegistry(LoraPlan(enabled=True), lambda: [actor], shares_pages=True)
    adapter = await registry.load("name", str(tmp_path))
    assert bool(adapter.content) is not is_replaced
