"""The page's HTTP responses, without a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

import fake_core
import serve.page
from ops.machine import Machine
from runtime.config import Args
from runtime.config.resolve import resolve
from serve.page import PATHS
from served_core import app_of

FOLDER = Path(serve.page.__file__).parent


def client(**serve_options: Any) -> httpx.AsyncClient:
    app = app_of(fake_core.FakeCore(None, **serve_options))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


@pytest.mark.parametrize("path", PATHS)
async def test_page_and_its_files_answer_get_and_head(path: str) -> None:
    async with client() as http:
        got, head = await http.get(path), await http.head(path)
    assert (got.status_code, head.status_code) == (200, 200)
    assert got.content == (FOLDER / PATHS[path]).read_bytes()
    assert head.headers["content-type"] == got.headers["content-type"]


async def test_policy_allows_the_servers_own_files_only() -> None:
    async with client() as http:
        policy = (await http.get("/")).headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"


@pytest.mark.parametrize("path", PATHS)
async def test_without_the_page_nothing_is_there(path: str) -> None:
    async with client(chat_page=False) as http:
        assert (await http.get(path)).status_code == 404
        assert (await http.get("/health")).status_code == 200


async def test_page_needs_no_key_but_the_api_does() -> None:
    async with client(api_key="hush") as http:
        assert [(await http.get(path)).status_code for path in PATHS] == [200] * len(PATHS)
        for path in ("/server_info", "/page", "/page/", "/page/x.js", "/v1/models"):
            assert (await http.get(path)).status_code == 401


async def test_page_cannot_be_posted_to() -> None:
    async with client() as http:
        assert (await http.post("/")).status_code == 405


@pytest.mark.parametrize(("options", "there"), [({}, True), ({"disable_chat_page": True}, False)])
def test_option_decides(options: dict[str, bool], there: bool) -> None:
    args = Args.of(model_path="/models/tiny", **options)
    made = resolve(args, Machine.named("cpu"), fake_core.make_facts())
    assert made.serve.chat_page is there


def test_every_file_is_served_and_every_reference_is_ours() -> None:
    there = {path.name for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js")}
    assert there == set(PATHS.values())
    html = "".join(path.read_text() for path in FOLDER.glob("*.html"))
    references = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert {f"/{reference}" for reference in references if reference != "data:,"} <= {*PATHS, "/docs", "/./"}
    for script in FOLDER.glob("*.js"):
        imported = re.findall(r'from "\./([^"]+)"', script.read_text())
        assert set(imported) <= set(PATHS.values())


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.js")), ids=lambda path: path.name)
def test_no_script_can_turn_text_into_html(script: Path) -> None:
    ways = r"(inner|outer|Adjacent)HTML|document\.write|createContextualFragment|\beval\b|\bFunction\("
    assert re.findall(ways, script.read_text()) == []
    assert "http:" not in script.read_text()
