"""The engine in real kernels: interrupts, errors of one line, forgotten engines, two engines, many cycles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

ROOT = Path(__file__).parents[3]
START = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import asyncio
from penstock import Engine, SyncEngine
engine = Engine()
await engine.start()
"""
ENDLESS = "print('begun', flush=True)\nawait engine.generate('Once', max_new_tokens=1900, ignore_eos=True)"
IDLE = """
while engine.status().num_requests:
    await asyncio.sleep(0.01)
print("idle", engine.status().num_used_pages)
"""


WAIT: dict[str, Any] = {"reply": True, "timeout": 60}  # a blocking client's own keywords


class Kernel:
    """A kernel and its client."""

    def __init__(self) -> None:
        self.manager: KernelManager
        self.client: BlockingKernelClient
        self.manager, self.client = start_new_kernel(cwd=str(ROOT))

    def run(self, code: str, *, begun: Callable[[], None] | None = None) -> tuple[str, list[str], list[dict]]:
        """Run a cell. Return its output, the lines of its error, and its displays. `begun` runs after first output."""
        asked, text, lines, shown = self.client.execute(code), "", [], []
        while True:
            message = self.client.get_iopub_msg(timeout=100)
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                text += content["text"]
            elif kind == "error":
                lines = content["traceback"]
            elif kind in ("display_data", "execute_result", "update_display_data"):
                shown.append(content["data"])
            if text and begun is not None:
                begun()
                begun = None
            if content.get("execution_state") == "idle":
                return text, lines, shown

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    try:
        _, lines, _ = kernel.run(START)
        assert not lines, "\n".join(lines)
        yield kernel
    finally:
        kernel.close()


pytestmark = pytest.mark.slow


def test_an_interrupted_cell_shows_one_line_and_the_engine_goes_on(kernel: Kernel) -> None:
    for _ in range(3):
        _, lines, _ = kernel.run(ENDLESS, begun=kernel.manager.interrupt_kernel)
        assert len(lines) == 1, lines
        assert "Interrupted" in lines[0]
        text, lines, _ = kernel.run(IDLE)
        assert (text, lines) == ("idle 0\n", [])


def test_only_the_interrupted_cells_requests_end(kernel: Kernel) -> None:
    other = "other = asyncio.create_task(engine.generate('Other', max_new_tokens=300, ignore_eos=True))"
    kernel.run(other)
    kernel.run(ENDLESS, begun=kernel.manager.interrupt_kernel)
    text, lines, _ = kernel.run("print((await other).meta_info.completion_tokens)")
    assert (text, lines) == ("300\n", [])


def test_a_wrong_call_is_one_line(kernel: Kernel) -> None:
    _, lines, _ = kernel.run("await engine.generate('x', temperature=-1)")
    assert len(lines) == 1
    assert lines[0].startswith("InvalidRequest: ")
    assert "temperature" in lines[0]
    text, _, _ = kernel.run("import sys; print(type(sys.last_value).__name__)")
    assert text == "InvalidRequest\n"


def test_a_wrong_model_is_one_line_without_warnings(kernel: Kernel) -> None:
    hub = "import os; os.environ['HF_HUB_OFFLINE'] = '1'"
    text, lines, _ = kernel.run(f"{hub}\nawait Engine('no-such-org/no-such-model').start()")
    assert text == ""
    assert len(lines) == 1
    assert "no-such-org/no-such-model" in lines[0]


def test_results_views_and_completion(kernel: Kernel) -> None:
    _, _, shown = kernel.run("await engine.generate('Once', max_new_tokens=4)")
    assert "prompt" in shown[-1]["text/html"]
    _, _, shown = kernel.run("view = engine.watch(per_second=10)\nview")
    assert "pages" in shown[0]["text/html"]
    _, _, shown = kernel.run("await engine.generate('Once', max_new_tokens=400, ignore_eos=True)\nview.stop()")
    reply: Any = kernel.client.complete("Engine(page_si", **WAIT)
    assert any("page_size" in match for match in reply["content"]["matches"])
    reply = kernel.client.inspect("Engine.generate", **WAIT)
    assert "sampling_params" in reply["content"]["data"]["text/plain"]


def test_two_engines_and_twenty_cycles_leave_nothing(kernel: Kernel) -> None:
    code = """
import gc, threading
async def cycle():
    async with Engine() as first, Engine() as second:
        one, two = await asyncio.gather(*(e.generate("Once", temperature=0, max_new_tokens=4) for e in (first, second)))
        return one.text == two.text
before = len(asyncio.all_tasks()), threading.active_count()
same = [await cycle() for _ in range(20)]
await asyncio.sleep(0); gc.collect()
print(all(same), len(asyncio.all_tasks()) - before[0], threading.active_count() - before[1] < 8)
"""
    text, lines, _ = kernel.run(code)
    assert not lines, "\n".join(lines)
    assert text == "True 0 True\n"


def test_a_deleted_engine_warns(kernel: Kernel) -> None:
    text, lines, _ = kernel.run("import gc\nsecond = Engine()\nawait second.start()\ndel second\n_ = gc.collect()")
    assert not lines
    assert "deleted without" in text


def test_sync_engine_under_the_kernels_loop(kernel: Kernel) -> None:
    code = """
with SyncEngine() as sync:
    print(len(sync.generate('Once', max_new_tokens=3, ignore_eos=True).output_ids))
"""
    assert kernel.run(code)[0] == "3\n"


def test_a_restarted_kernel_starts_an_engine_again(kernel: Kernel) -> None:
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=60)
    began = time.monotonic()
    text, lines, _ = kernel.run(START + "\nprint((await engine.generate('Once', max_new_tokens=2)).finish_reason)")
    assert not lines, "\n".join(lines)
    assert text.endswith("length\n")
    assert time.monotonic() - began < 90
