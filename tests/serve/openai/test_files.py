"""/v1/files and /v1/batches with misbehaving clients, disks and engines."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

import fake_core
import serve.calls.batch as batch_module
from runtime.errors import EngineFailure, InvalidRequest, Overloaded, PayloadTooLarge
from runtime.tokenizer.tokenizer import Tokenizer
from serve.cli.main import FAILED, run
from serve.openai import batches, file_store, files
from serve.python.engine import Engine
from served_core import app_of

CHAT = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 2}
LINE = json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": CHAT}).encode()
BATCH = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
FORM = {"content-type": "multipart/form-data; boundary=x"}


def client_of(core: fake_core.FakeCore) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app_of(core)), base_url="http://127.0.0.1")


@pytest.fixture
async def client(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that stores files in the test's `tmp_path`."""
    async with client_of(fake_core.FakeCore(tokenizer, file_storage=str(tmp_path))) as client:
        yield client


async def upload(client: httpx.AsyncClient, content: bytes = LINE, name: str = "in.jsonl", **data: str) -> Any:
    form = {"purpose": "batch", **data}
    return await client.post("/v1/files", data=form, files={"file": (name, content)})


async def batch_of(client: httpx.AsyncClient, content: bytes = LINE, **options: Any) -> Any:
    source = (await upload(client, content)).json()["id"]
    return await client.post("/v1/batches", json={**BATCH, "input_file_id": source, **options})


async def ended(client: httpx.AsyncClient, batch: Any) -> Any:
    while batch["status"] not in batches.ENDED:
        await asyncio.sleep(0.01)
        batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    return batch


def part(head: str = 'name="file"', content: str = "a") -> bytes:
    return f"--x\r\nContent-Disposition: form-data; {head}\r\n\r\n{content}\r\n".encode()


# --- forms ---


async def test_names_and_contents_of_a_form_are_as_sent(client: httpx.AsyncClient, tmp_path: Path):
    content = b'\r\n--other\r\n\r\n{"a": 1}\r\n'
    for name in ("ü 猫.jsonl", "semi;colon=1.jsonl"):
        made = (await upload(client, content, name)).json()
        assert (made["filename"], made["bytes"]) == (name, len(content))
        assert (await client.get(f"/v1/files/{made['id']}/content")).content == content
    quoted = part(r'name="file"; filename="a\"b\\c"') + part('name="purpose"', "batch") + b"--x--\r\n"
    made = (await client.post("/v1/files", content=quoted, headers=FORM)).json()
    assert made["filename"] == 'a"b\\c'
    assert (await client.delete(f"/v1/files/{made['id']}")).json()["deleted"]
    assert len(os.listdir(tmp_path)) == 4


@pytest.mark.parametrize(
    "body",
    [
        part('name="file"' + ";" * 2_000_000) + b"--x--",
        b"".join(part(f'name="p{i}"') for i in range(17)) + b"--x--",
        part() + part() + b"--x--",
        part("name") + b"--x--",
        part(),
        b"preamble\r\n" + part() + b"--x--",
        b"",
    ],
    ids=["long head", "many parts", "twice", "no name", "no end", "preamble", "empty"],
)
def test_form_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        files.form_fields(body, b"x")


@pytest.mark.parametrize("rest", ["", "; boundary=", f"; boundary={'x' * 71}", f"{';' * 60_000}; boundary=x"])
def test_boundary_that_is_none_is_refused(rest: str) -> None:
    with pytest.raises(InvalidRequest):
        files.boundary_of(f"multipart/form-data{rest}")


async def test_fields_that_mean_nothing_here_are_refused(client: httpx.AsyncClient):
    refused = await client.post(
        "/v1/files",
        data={"purpose": "batch", "expires_after[seconds]": "3600"},
        files={"file": ("in.jsonl", LINE)},
    )
    assert (refused.status_code, refused.json()["param"]) == (400, "expires_after[seconds]")
    for options, param in (
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
    ):
        refused = await batch_of(client, LINE, **options)
        assert (refused.status_code, refused.json()["param"]) == (400, param)


# --- memory and disk ---


async def test_upload_is_refused_by_its_announced_length(client: httpx.AsyncClient):
    async def never_read() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    headers = {**FORM, "content-length": str(files.MAX_FILE_BYTES + 1)}
    assert (await client.post("/v1/files", content=never_read(), headers=headers)).status_code == 413


async def test_all_uploads_together_have_so_much_memory(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "MAX_ARRIVING_BYTES", 4096)
    refused = await upload(client, b"a" * 4096)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    for _ in range(3):  # ended uploads no longer count
        assert (await upload(client, b"a" * 2048)).status_code == 200


def test_a_client_with_a_key_may_use_half_of_the_memory_of_uploads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "MAX_ARRIVING_BYTES", 100)
    uploads = files.Uploads()
    for _ in range(2):  # ended uploads no longer count
        with uploads.one("a") as first, uploads.one("a") as second, uploads.one("b") as third, uploads.one("") as open:
            uploads.grow(first, b"x" * 40, "a")
            with pytest.raises(Overloaded, match="You are uploading"):
                uploads.grow(second, b"x" * 11, "a")
            uploads.grow(second, b"x" * 10, "a")
            uploads.grow(third, b"x" * 30, "b")
            with pytest.raises(Overloaded, match="Too many files"):
                uploads.grow(open, b"x" * 21, "")
            uploads.grow(open, b"x" * 20, "")
        assert uploads.num_bytes == 0


async def test_folder_counts_all_that_lies_there(
    client: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = (await upload(client)).json()["id"]
    orphan, old = (tmp_path / f"file-{digit * 32}" for digit in "ab")
    orphan.write_bytes(b"a" * 4096)
    old.write_bytes(b"a" * 4096)
    os.utime(old, (0, 0))
    monkeypatch.setattr(file_store, "MAX_FOLDER_BYTES", 4096)
    assert (await upload(client)).status_code == 413
    made = await client.post("/v1/batches", json={**BATCH, "input_file_id": source})
    assert made.status_code == 413
    assert (orphan.exists(), old.exists()) == (True, False)


async def test_uploads_at_once_share_the_room_that_there_is(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file_store, "MAX_FOLDER_BYTES", 2500)
    room = file_store.FileStore.room

    def slow_room(store: file_store.FileStore, owner: str) -> int:
        left = room(store, owner)
        time.sleep(0.05)  # gives the other uploads time to check the limit
        return left

    monkeypatch.setattr(file_store.FileStore, "room", slow_room)
    answers = await asyncio.gather(*(upload(client, b"a" * 1500) for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [200, 413, 413]


async def test_no_key_can_fill_the_folder(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = tmp_path / "keys"
    keys.write_text("first: sk-first-0123456789\nsecond: sk-second-0123456789\n")
    first, second = ({"authorization": f"Bearer sk-{name}-0123456789"} for name in ("first", "second"))
    monkeypatch.setattr(file_store, "MAX_FOLDER_BYTES", 10_000)
    folder = str(tmp_path / "files")
    async with client_of(fake_core.FakeCore(tokenizer, file_storage=folder, api_key_file=str(keys))) as client:

        async def status(key: dict[str, str], num_bytes: int) -> int:
            files = {"file": ("in.jsonl", b"a" * num_bytes)}
            return (await client.post("/v1/files", data={"purpose": "batch"}, files=files, headers=key)).status_code

        assert await status(first, 6000) == 413
        assert await status(first, 4500) == 200
        assert await status(first, 1000) == 413
        assert await status(second, 2000) == 200
        assert await status(first, 100) == 413
        kept = (await client.get("/v1/files", headers=first)).json()["data"][0]["id"]
        await client.delete(f"/v1/files/{kept}", headers=first)
        assert await status(first, 2000) == 200
        monkeypatch.setattr(file_store, "MAX_FILES", 3)
        assert [await status(first, 1), await status(second, 1)] == [413, 413]


async def test_restart_and_unfinished_answers_count_to_the_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file_store, "MAX_FOLDER_BYTES", 10_000)
    file_store.FileStore(tmp_path).add("in.jsonl", "batch", b"a" * 2000, "first")
    store = file_store.FileStore(tmp_path)
    unfinished = store.new("out.jsonl", "batch_output", "first")
    store.path(unfinished.id).write_bytes(b"a" * 2500)
    with pytest.raises(PayloadTooLarge, match="no space"):
        store.add("in.jsonl", "batch", b"a" * 1000, "first")
    assert store.add("in.jsonl", "batch", b"a" * 1000, "second").bytes == 1000


@pytest.mark.parametrize("part", ["", ".json.new"])
async def test_a_full_disk_refuses_the_upload_only(
    client: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
):
    """Every write to /dev/full fails as on a full disk."""
    kept = (await upload(client)).json()["id"]
    number = UUID(int=7)
    with monkeypatch.context() as patch:
        patch.setattr(file_store, "uuid4", lambda: number)
        patch.setattr(file_store, "ORPHAN_S", float("inf"))
        (tmp_path / f"file-{number.hex}{part}").symlink_to("/dev/full")
        refused = await upload(client)
    assert refused.status_code == 503, refused.text
    assert refused.headers["retry-after"] == "60"
    assert "disk" in refused.json()["error"]["message"]
    assert not list(tmp_path.glob(f"file-{number.hex}*"))
    assert (await client.get(f"/v1/files/{kept}/content")).content == LINE
    assert (await upload(client)).status_code == 200


async def test_what_cannot_be_described_is_not_left_on_disk(
    client: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(file_store.os, "replace", full)
    assert (await upload(client)).status_code == 500
    assert not os.listdir(tmp_path)


async def test_answers_of_a_batch_stop_where_the_folder_is_full(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batches, "ROOM_BYTES", 1)
    monkeypatch.setattr(file_store, "MAX_FOLDER_BYTES", 4096)
    batch = await ended(client, (await batch_of(client, b"\n".join([LINE] * 12))).json())
    assert batch["status"] == "failed"
    assert "full" in batch["errors"]["data"][0]["message"]
    assert batch["request_counts"]["completed"] < 12


async def test_other_users_of_the_machine_cannot_read_a_new_folder(tokenizer: Tokenizer, tmp_path: Path):
    folder = tmp_path / "new"
    async with client_of(fake_core.FakeCore(tokenizer, file_storage=str(folder))) as client:
        assert (await upload(client)).status_code == 200
    assert folder.stat().st_mode & 0o777 == 0o700


async def test_a_broken_description_harms_nobody(client: httpx.AsyncClient, tmp_path: Path):
    made = (await upload(client)).json()
    (tmp_path / f"file-{'a' * 32}.json").write_bytes(b'{"id": "file-')
    (tmp_path / f"file-{'b' * 32}.json").write_bytes(b'{"other": 1}')
    assert (await client.get(f"/v1/files/{made['id']}")).json() == made
    assert [each["id"] for each in (await client.get("/v1/files")).json()["data"]] == [made["id"]]
    assert (await client.get(f"/v1/files/file-{'a' * 32}")).status_code == 404


# --- lists ---


async def test_lists_come_in_pages(client: httpx.AsyncClient):
    for _ in range(3):
        await ended(client, (await batch_of(client)).json())
    for path, num, query in (("batches", 3, ""), ("files", 3, "&purpose=batch")):
        whole = (await client.get(f"/v1/{path}?{query}")).json()["data"]
        assert len(whole) == num
        page = (await client.get(f"/v1/{path}?limit=1&after={whole[0]['id']}{query}")).json()
        assert (page["data"], page["has_more"]) == (whole[1:2], True)
        oldest = (await client.get(f"/v1/{path}?order=asc{query}")).json()
        assert (oldest["data"], oldest["has_more"]) == (whole[::-1], False)
        for wrong in ("limit=0", "limit=x", "order=up", "after=nothing"):
            assert (await client.get(f"/v1/{path}?{wrong}")).status_code == 400


# --- batches ---


@pytest.mark.parametrize("method", ["new", "keep"])
async def test_batch_whose_files_fail_has_failed(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, method: str
):
    source = (await upload(client)).json()["id"]

    def broken(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(file_store.FileStore, method, broken)
    made = await client.post("/v1/batches", json={**BATCH, "input_file_id": source})
    batch = await asyncio.wait_for(ended(client, made.json()), 5)
    assert (batch["status"], batch["errors"]["data"][0]["message"]) == ("failed", "The batch failed.")


async def test_lines_are_counted_before_they_are_answered(tokenizer: Tokenizer, tmp_path: Path):
    core = fake_core.FakeCore(tokenizer, held=True, file_storage=str(tmp_path))
    async with client_of(core) as client:
        batch = (await batch_of(client, b"\n\n".join([LINE] * 10))).json()
        while not core.submitted:
            await asyncio.sleep(0.01)
        counts = (await client.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]
        assert counts == {"total": 10, "completed": 0, "failed": 0}
        for _ in range(2):
            await client.post(f"/v1/batches/{batch['id']}/cancel")
        assert (await ended(client, batch))["status"] == "cancelled"


async def test_large_lines_are_read_in_threads_and_too_large_ones_not_at_all(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    read: dict[int, int] = {}
    parse = batch_module.parse_object

    def noted(body: bytes) -> dict[str, Any]:
        read[len(body)] = threading.get_ident()
        return parse(body)

    monkeypatch.setattr(batch_module, "parse_object", noted)
    large = LINE + b" " * 5000
    batch = await ended(client, (await batch_of(client, b"\n".join([large, b"[" * 2_100_000, LINE]))).json())
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert set(read) == {len(LINE), len(large) + 1}
    assert read[len(LINE)] == threading.get_ident() != read[len(large) + 1]
    wrong = (await client.get(f"/v1/files/{batch['error_file_id']}/content")).json()
    assert wrong["error"]["message"].startswith("Line 2: The line has more than")


async def test_lines_that_are_long_in_coming_hold_up_nobody():
    asked = asyncio.Event()
    loop, more = asyncio.get_running_loop(), threading.Event()

    def lines() -> Iterator[bytes]:
        yield LINE
        assert more.wait(60)
        yield LINE

    def answer(request: httpx.Request) -> httpx.Response:
        loop.call_soon_threadsafe(asked.set)
        return httpx.Response(200, json={})

    counts = batch_module.BatchCounts()
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://a") as client:
        work = batch_module.answer_lines(
            client, lines(), lambda line, is_good: None, counts, num_at_once=3, max_line_bytes=4096
        )
        working = asyncio.create_task(work)
        await asked.wait()
        more.set()
        await working
    assert counts.completed == 2


async def test_line_of_an_engine_that_is_always_busy_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_module, "MAX_TRIES", 3)
    monkeypatch.setattr(batch_module, "MAX_WAIT_S", 0.0)
    asked: list[httpx.Request] = []

    def busy(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(503, json={"error": "busy"})

    written: list[tuple[Any, bool]] = []
    counts = batch_module.BatchCounts()
    async with httpx.AsyncClient(transport=httpx.MockTransport(busy), base_url="http://a") as client:
        await batch_module.answer_lines(
            client,
            [LINE],
            lambda line, is_good: written.append((json.loads(line), is_good)),
            counts,
            num_at_once=1,
            max_line_bytes=4096,
        )
    [(answer, is_good)] = written
    assert (len(asked), is_good, counts.failed) == (3, False, 1)
    assert (answer["response"]["status_code"], answer["response"]["body"]) == (503, {"error": "busy"})


def test_command_ends_with_its_engine(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class DeadEngine:
        core = fake_core.FakeCore(tokenizer)

        async def __aenter__(self) -> DeadEngine:
            self.core.state = "draining"  # requests are answered with status 503
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def wait(self) -> None:
            await asyncio.sleep(0.05)
            raise EngineFailure("The engine is gone.")

    monkeypatch.setattr(Engine, "of", lambda args: DeadEngine())
    (tmp_path / "in.jsonl").write_bytes(LINE)
    assert run(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]) == FAILED
    assert "The engine is gone." in capsys.readouterr().err


def test_each_client_has_its_own_share_of_running_batches() -> None:
    store = batches.BatchStore()

    def add(owner: str) -> None:
        store.add(batches.Batch(owner, {"id": f"{owner}{len(store.of(owner))}", "status": "in_progress"}))

    for _ in range(batches.MAX_RUNNING):
        add("first")
    with pytest.raises(Overloaded, match="16 of your batches"):
        add("first")
    add("second")
