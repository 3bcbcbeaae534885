"""Prefixes in a folder survive a restart and serve other servers, and a wrong page is never used."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from greedy import GREEDY, model_path, prompts, reference
from runtime.actors.status import Status
from runtime.actors.storage import STALL_S, Attachment
from runtime.errors import ConfigurationError, InvalidRequest, NotSupported
from runtime.kv_cache import storage_tier
from runtime.kv_cache.host_tier import HostTier
from runtime.request import Caller, Request
from runtime.sampling_params import SamplingParams
from serve import Engine
from serve.server.app import build_app

SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "random_seed": 1,
    "max_total_tokens": 288,
    "page_size": 4,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 40.0,
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load and copy pages even if computing them would be faster, as it is with tiny models."""
    monkeypatch.setattr(storage_tier, "GAIN", 1e9)
    monkeypatch.setattr(HostTier, "_pays", True)


def options(folder: Path, **more: Any) -> dict[str, Any]:
    config = {"path": str(folder), "prefetch_threshold": 4, **more.pop("config", {})}
    return {**SMALL, "hicache_storage_backend_extra_config": config, **more}


async def until(engine: Engine, condition: Any) -> Status:
    """Wait until the engine's status satisfies the condition."""
    with anyio.fail_after(60):
        while not condition(engine.status()):
            await anyio.sleep(0.01)
    return engine.status()


async def attached(engine: Engine) -> None:
    with anyio.fail_after(60):
        while engine.core.attachment is None:
            await anyio.sleep(0.01)


async def fill(folder: Path, family: str = "llama", **more: Any) -> int:
    """Compute all prompts and return the number of stored pages."""
    async with Engine(model_path(family), **options(folder, **more)) as engine:
        await attached(engine)
        answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
        assert [answer["output_ids"] for answer in answers] == reference(family)
        status = await until(engine, lambda status: status.storage.num_saved >= status.host_tier.num_written > 0)
        engine.core.check()
        return status.storage.num_saved


async def again(folder: Path, family: str = "llama", **more: Any) -> tuple[Status, int]:
    """Compute all prompts in a new engine. Return its status and the number of cached tokens."""
    async with Engine(model_path(family), **options(folder, **more)) as engine:
        await attached(engine)
        answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
        assert [answer["output_ids"] for answer in answers] == reference(family)
        engine.core.check()
        return engine.status(), sum(answer["meta_info"]["cached_tokens"] for answer in answers)


def page_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if len(path.name) == 64]


FULL = sum((len(prompt) - 1) // 4 * 4 for prompt in prompts())


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("deepseek_v3", {}),
        ("mistral", {"hicache_storage_prefetch_policy": "timeout", "hicache_write_policy": "write_back"}),
        pytest.param("llama", {"tp_size": 2}, id="two ranks"),
        pytest.param("llama", {"pp_size": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {"dp_size": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {"dp_size": 2, "tp_size": 2, "enable_dp_attention": True}, marks=pytest.mark.slow),
    ],
)
async def test_a_new_engine_reads_what_an_earlier_one_stored(tmp_path: Path, family: str, more: dict[str, Any]):
    num_saved = await fill(tmp_path, family, **more)
    assert len(page_files(tmp_path)) == num_saved * more.get("tp_size", 1) * more.get("pp_size", 1) or "dp_size" in more
    status, cached = await again(tmp_path, family, **more)
    assert status.storage.num_loaded > 0
    assert status.storage.num_corrupt == 0
    if "hicache_write_policy" not in more:
        assert cached >= 0.9 * FULL


async def test_flipped_bytes_are_misses_and_counted(tmp_path: Path):
    await fill(tmp_path)
    files = page_files(tmp_path)
    for number, path in enumerate(files):
        content = bytearray(path.read_bytes())
        content[number * 7919 % len(content)] ^= 1 << number % 8
        path.write_bytes(content)
    status, _ = await again(tmp_path)
    assert status.storage.num_corrupt > 0
    assert status.storage.num_loaded == 0


@pytest.mark.parametrize("how", ["truncated", "empty", "swapped", "unreadable"])
async def test_damaged_files_are_misses(tmp_path: Path, how: str):
    await fill(tmp_path)
    files = page_files(tmp_path)
    contents = [path.read_bytes() for path in files]
    for path, content, other in zip(files, contents, contents[1:] + contents[:1], strict=True):
        if how == "unreadable":
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes({"truncated": content[:-1], "empty": b"", "swapped": other}[how])
    status, _ = await again(tmp_path)
    assert status.storage.num_loaded == 0


async def test_two_engines_share_a_folder_and_another_model_does_not(tmp_path: Path):
    path = model_path("llama")
    async with Engine(path, **options(tmp_path)) as one, Engine(path, **options(tmp_path)) as two:
        await attached(one)
        await attached(two)
        first = await one.generate(input_ids=prompts()[6], sampling_params=GREEDY)
        await until(one, lambda status: status.storage.num_saved >= status.host_tier.num_written > 0)
        second = await two.generate(input_ids=prompts()[6], sampling_params=GREEDY)
        assert second["output_ids"] == first["output_ids"]
        assert second["meta_info"]["cached_tokens"] == 44
    status, _ = await again(tmp_path, "qwen3")
    assert status.storage.num_loaded == 0


async def test_storage_is_attached_detached_and_cleared_while_requests_run(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    more = {**SMALL, "hicache_storage_backend": None, "hicache_mem_layout": "page_first"}
    del more["hicache_storage_prefetch_policy"]
    async with Engine(model_path("llama"), **more) as engine:
        core, file = engine.core, Attachment("file", {"prefetch_threshold": 4})
        with pytest.raises(InvalidRequest, match="No storage"):
            await core.clear_storage()
        await core.attach_storage(file)
        with pytest.raises(InvalidRequest, match="attached already"):
            await core.attach_storage(file)
        for unknown in ("", "redis"):
            with pytest.raises(InvalidRequest, match="is unknown; use one of file"):
                await core.attach_storage(Attachment(unknown, {}))
        for elsewhere in (Attachment("file", {"path": "/tmp/x"}), Attachment("dynamic", {"module_path": "os"})):
            with pytest.raises(NotSupported, match="when the server starts"):
                await core.attach_storage(elsewhere)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(engine.generate, input_ids=prompts(), sampling_params=GREEDY))
            await until(engine, lambda status: status.storage.num_saved > 0)
            await core.detach_storage()
            assert core.attachment is None
            await core.attach_storage(file)
        assert page_files(tmp_path)
        await core.clear_storage()
        assert page_files(tmp_path) == []
        answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
        assert [answer["output_ids"] for answer in answers] == reference("llama")
        engine.core.check()


async def test_new_weights_end_the_use_of_stored_pages(tmp_path: Path):
    async with Engine(model_path("llama"), **options(tmp_path)) as engine:
        await attached(engine)
        await engine.core.update_weights(model_path("llama"), flush_cache=False)
        assert engine.core.attachment is None
        answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
        assert [answer["output_ids"] for answer in answers] == reference("llama")
        assert page_files(tmp_path) == []


async def test_a_folder_that_cannot_be_written_turns_storage_off(tmp_path: Path):
    (tmp_path / "file").write_text("")
    async with Engine(model_path("llama"), **options(tmp_path / "file" / "folder")) as engine:
        answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
        assert [answer["output_ids"] for answer in answers] == reference("llama")
        assert engine.core.attachment is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"folder": "x"}, "folder is unknown"), ({"max_gb": -1}, "positive number"), ({"path": 3}, "must be a text")],
)
async def test_wrong_settings_are_refused(tmp_path: Path, config: dict[str, Any], reason: str):
    with pytest.raises(ConfigurationError, match=reason):
        async with Engine(model_path("llama"), **options(tmp_path, config=config)):
            pass


class FaultyStore:
    """A store of a user that fails, lies and forgets."""

    pages: dict[bytes, bytes] = {}
    num_calls = 0

    def __init__(self, space: Any, config: dict[str, Any]) -> None:
        assert space.page_bytes == 0 or space.page_bytes > 32

    def _fail(self) -> int:
        FaultyStore.num_calls += 1
        if FaultyStore.num_calls % 5 == 0:
            raise OSError("the network is down")
        return FaultyStore.num_calls

    def exists(self, keys: Any) -> int:
        return len(keys) if self._fail() % 3 == 0 else sum(key in self.pages for key in keys[:1])

    def get(self, key: bytes, parts: Any) -> bool:
        number = self._fail()
        whole = bytearray(self.pages.get(key, b""))
        if number % 7 == 0 and whole:
            whole[number % len(whole)] ^= 255
        start = 0
        for part in parts:
            piece = whole[start : start + len(part)]
            part[: len(piece)] = piece
            start += len(part)
        return True  # also for pages that are missing

    def set(self, key: bytes, parts: Any) -> None:
        self._fail()
        self.pages[key] = b"".join(parts)

    def delete(self, keys: Any) -> None:
        self._fail()

    def clear(self) -> None:
        self.pages.clear()

    def close(self) -> None:
        self._fail()


async def test_no_fault_of_a_store_changes_a_token(tmp_path: Path):
    FaultyStore.pages.clear()
    config = {"module_path": __name__, "class_name": "FaultyStore", "prefetch_threshold": 4}
    more = {**SMALL, "hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": config}
    loaded = corrupt = 0
    for number in range(3):
        async with Engine(model_path("llama"), **more) as engine:
            await attached(engine)
            for _ in range(2):
                answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
                assert [answer["output_ids"] for answer in answers] == reference("llama"), number
            engine.core.check()
            loaded += engine.status().storage.num_loaded
            corrupt += engine.status().storage.num_corrupt
    assert loaded > 0
    assert corrupt > 0


async def test_a_killed_writer_leaves_a_folder_that_opens_clean(tmp_path: Path):
    await fill(tmp_path)
    partial = tmp_path / "partial"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (partial / f"{socket.gethostname()}-{ended.pid}-0").write_bytes(b"half")
    mine = partial / f"{socket.gethostname()}-{os.getpid()}-0"
    mine.write_bytes(b"half")
    _, cached = await again(tmp_path)
    assert cached >= 0.9 * FULL
    assert list(partial.iterdir()) == [mine]


async def test_storage_over_http(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    more = {**SMALL, "hicache_storage_backend": None, "hicache_mem_layout": "page_first"}
    async with Engine(model_path("llama"), **more) as engine:
        transport = httpx.ASGITransport(build_app(engine.core))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            backend = "/hicache/storage-backend"
            assert (await http.post("/clear_hicache_storage_backend")).status_code == 400
            attached = await http.put(
                backend,
                json={
                    "hicache_storage_backend": "file",
                    "hicache_storage_backend_extra_config_json": '{"max_gb": 1}',
                },
            )
            assert attached.status_code == 200, attached.text
            await http.post("/generate", json={"input_ids": list(range(3, 103)) * 2, "sampling_params": GREEDY})
            await until(engine, lambda status: status.storage.num_saved == 55)
            shown = (await http.get(backend)).json()
            assert shown["hicache_storage_backend"] == "file"
            assert shown["storage"]["num_saved"] == len(page_files(tmp_path))
            assert (await http.get("/clear_hicache_storage_backend")).text.endswith("cleared.\n")
            assert page_files(tmp_path) == []
            assert (await http.delete(backend)).status_code == 200
            assert (await http.get(backend)).json()["hicache_storage_backend"] is None
            for body, status in (
                ({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config": {"path": "/etc"}}, 501),
                ({"hicache_storage_backend": "dynamic"}, 501),
                ({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config": {"max_gb": "x"}}, 400),
                ({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": "{"}, 400),
                ({}, 400),
            ):
                assert (await http.put(backend, json=body)).status_code == status, body


async def test_a_client_cannot_make_lookups_wait_for_a_prefill_server(tmp_path: Path) -> None:
    async with Engine(model_path("llama"), **options(tmp_path)) as engine:
        await attached(engine)
        request = Request(
            ids=tuple(range(5, 45)), sampling=SamplingParams(max_new_tokens=1), caller=Caller(prefilled=True)
        )
        with anyio.fail_after(STALL_S / 2):
            await engine.core.submit(request).whole()
