"""Typical misuse of engines: interrupted, not closed, called from the wrong place, or started with a wrong path."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

import tiny_models
from runtime.errors import ConfigurationError, WrongEventLoop
from serve.python.engine import Engine, ForgottenEngine
from serve.python.sync_engine import SyncEngine

ROOT = Path(__file__).parents[3]
SETUP = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from serve.python.sync_engine import SyncEngine
engine = SyncEngine({{path!r}})
engine.start()
"""
STREAM = """
print("begun", flush=True)
for piece in engine.stream("Once", {"max_new_tokens": 1900, "ignore_eos": True}):
    pass
"""
LEFT = """
import time
for _ in range(200):
    if not engine.status().num_requests:
        break
    time.sleep(0.05)
print("left", engine.status().num_requests)
"""


def printed(
    client: BlockingKernelClient, code: str, *, begun: Callable[[], None] | None = None
) -> tuple[str, list[str]]:
    """Run a cell, and return its output and the lines of its traceback. `begun` is called after the first output."""
    asked, text, lines = client.execute(code), "", []
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != asked:
            continue
        content = message["content"]
        if message["msg_type"] == "stream":
            text += content["text"]
        elif message["msg_type"] == "error":
            lines = content["traceback"]
        if text and begun is not None:
            begun()
            begun = None
        if content.get("execution_state") == "idle":
            return text, lines


@pytest.mark.slow
def test_interrupted_cell_ends_its_request() -> None:
    manager, client = start_new_kernel(cwd=str(ROOT))
    try:
        _, lines = printed(client, SETUP.format(path=tiny_models.cached()))
        assert not lines, "\n".join(lines)
        for _ in range(5):
            _, lines = printed(client, STREAM, begun=manager.interrupt_kernel)
            assert "KeyboardInterrupt" in lines[-1]
            text, lines = printed(client, LEFT)
            assert text.endswith("left 0\n"), (text, lines)
        printed(client, "engine.close()")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_generator_kept_alive_by_a_traceback_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with SyncEngine(tiny_models.cached()) as engine:
        real, calls = engine._call, 0

        def interrupted(function):
            nonlocal calls
            calls += 1
            if calls == 3:  # while it waits for the third piece
                raise KeyboardInterrupt
            return real(function)

        monkeypatch.setattr(engine, "_call", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:  # keeps the frame alive
            for _ in engine.stream("Once", {"max_new_tokens": 1900, "ignore_eos": True}):
                pass
        monkeypatch.undo()
        while engine.status().num_requests:  # takes a step or two; otherwise the test's time limit ends the loop
            time.sleep(0.01)
        del kept


async def test_call_from_another_loop_says_what_to_do() -> None:
    async with Engine(tiny_models.cached()) as engine:

        def elsewhere() -> None:
            asyncio.run(engine.generate("Once", {"max_new_tokens": 1}))

        with pytest.raises(WrongEventLoop, match="SyncEngine"):
            await asyncio.to_thread(elsewhere)
        assert (await engine.generate("Once", {"max_new_tokens": 1}))["output_ids"]


async def test_forgotten_engine_warns_and_ends() -> None:
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    engine = Engine(tiny_models.cached())
    await engine.start()
    with pytest.warns(ForgottenEngine, match="aclose"):  # noqa: PT031
        del engine
        gc.collect()
    async with asyncio.timeout(30):
        while asyncio.all_tasks() != tasks:
            await asyncio.sleep(0.01)
    assert not [t for t in set(threading.enumerate()) - threads if t.name.startswith("penstock")]


async def test_closed_engine_is_forgotten_silently(recwarn: pytest.WarningsRecorder) -> None:
    engine = Engine(tiny_models.cached())
    await engine.start()
    await engine.aclose()
    del engine
    gc.collect()
    assert not [warning for warning in recwarn if warning.category is ForgottenEngine]


@pytest.mark.parametrize("path", ["/nowhere/at-all", "no-such-org/no-such-model"])
def test_wrong_model_is_one_clear_line(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigurationError) as caught:
        SyncEngine(path).start()
    shown = "".join(traceback.format_exception(caught.value)).splitlines()
    assert path in shown[-1]
    assert sum("Traceback" in line for line in shown) == 1
    assert len(shown) <= 8
