"""An adapter keeps the files with which it was loaded first."""

from __future__ import annotations

import asyncio
import gc
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.actors.adapters import AdapterRegistry
from runtime.config.plan import LoraPlan
from runtime.errors import InvalidRequest


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


async def test_an_adapter_whose_files_changed_is_not_loaded_again(tmp_path: Path) -> None:
    """It would be another adapter under the same name: on one replica only, or after it left host memory."""
    weights = [tmp_path / name / "adapter_model.safetensors" for name in ("a", "b")]
    for file in weights:
        file.parent.mkdir()
        file.write_bytes(b"old")
    verbs: list[str] = []

    async def call(verb: str, payload: Any) -> list[bool]:
        verbs.append(verb)
        return [False]

    scheduler = SimpleNamespace(forget_adapter=lambda number: None)
    actor: Any = SimpleNamespace(runner=SimpleNamespace(call=call), scheduler=scheduler)
    registry = AdapterRegistry(LoraPlan(enabled=True, max_loaded=1), lambda: [actor])
    first, second = [await registry.load(file.parent.name, str(file.parent)) for file in weights]
    weights[1].write_bytes(b"old")  # written again with equal bytes
    await registry.restore(actor.runner)
    weights[1].write_bytes(b"new")
    await registry.ready(first)
    with pytest.raises(InvalidRequest, match="files of the adapter b changed after it was loaded"):
        await registry.ready(second)
    assert not registry.is_ready(second)
    assert verbs[-1] == "drop_adapter"
    await registry.ready(await registry.load("b", str(weights[1].parent), replace=True))


async def test_a_load_that_is_cancelled_while_it_waits_leaves_no_coroutine(tmp_path: Path) -> None:
    """An event loop that closes cancels all tasks, also those that have not begun."""
    registry = AdapterRegistry(LoraPlan(enabled=True), list)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loading = asyncio.create_task(registry.load("name", str(tmp_path)))
        await asyncio.sleep(0)
        [task] = registry._tasks
        task.cancel()
        await asyncio.wait({loading})
        assert loading.cancelled()
        del loading, task
        gc.collect()
    assert not [each for each in found if issubclass(each.category, RuntimeWarning)]


async def test_a_replica_starts_again_without_an_adapter_whose_files_changed(tmp_path: Path) -> None:
    weights = [tmp_path / name / "adapter_model.safetensors" for name in ("a", "b")]
    for file in weights:
        file.parent.mkdir()
        file.write_bytes(b"old")
    calls: list[tuple[str, int]] = []

    async def call(verb: str, payload: Any) -> list[bool]:
        calls.append((verb, payload["id"]))
        return [False]

    scheduler = SimpleNamespace(forget_adapter=lambda number: None)
    actor: Any = SimpleNamespace(runner=SimpleNamespace(call=call), scheduler=scheduler)
    registry = AdapterRegistry(LoraPlan(enabled=True), lambda: [actor])
    first, second = [await registry.load(file.parent.name, str(file.parent)) for file in weights]
    live: Any = SimpleNamespace(request=SimpleNamespace(adapter=first))
    registry.began(live)
    weights[0].write_bytes(b"new")
    calls.clear()
    await registry.restore(actor.runner)
    assert calls == [("load_adapter", first.id), ("drop_adapter", first.id), ("load_adapter", second.id)]
    assert registry.is_ready(first)  # for its request on another replica
    with pytest.raises(InvalidRequest, match="adapter a is not loaded"):
        registry.acquire("a")
    assert registry.acquire("b") == second
    registry.ended(live, None)
    while registry.is_ready(first):
        await asyncio.sleep(0)
    await registry.load("a", str(weights[0].parent))
