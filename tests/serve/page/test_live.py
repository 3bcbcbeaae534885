"""The live page with a real engine: its content, and who may see it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import http_server
import tiny_models
from browser import ENTER, Open
from serve import Engine
from serve.server.app import build_app

LONG = {"json_model_override_args": {"max_position_embeddings": 65536}, "max_total_tokens": 65536}
ENDLESS = {"max_new_tokens": 60_000, "ignore_eos": True}
SHORT = {"max_new_tokens": 4, "ignore_eos": True}
ROW = '[...document.querySelectorAll("#requests tr")].find((row) => row.textContent.includes("{}"))'


async def test_page_shows_queue_batch_pages_tree_and_timelines(open_page: Open) -> None:
    async with Engine(tiny_models.cached(), max_running_requests=1, page_size=4, **LONG) as engine:
        app = build_app(engine.core)
        page = await open_page(app)
        await engine.generate("Once upon a time there was a river", SHORT, rid="<b>done</b>")
        running = asyncio.create_task(engine.generate("Once upon a time there was", ENDLESS, rid="runs"))
        waiting = asyncio.create_task(engine.generate("Twice", SHORT, rid="waits"))
        await page.open((await page.value("location.origin")) + "/live")
        await page.until(ROW.format("runs") + ' && document.querySelector("#requests .decode")')
        assert "decode" in await page.value(ROW.format("runs") + ".textContent")
        assert "waiting" in await page.value(ROW.format("waits") + ".textContent")
        done = await page.value(ROW.format("<b>done</b>") + ".textContent")
        assert "length" in done
        shown = await page.value(
            'Object.fromEntries([...document.querySelectorAll(".replica [data-figure]")].map((each) => '
            '[each.dataset.figure, each.querySelector("dd").textContent]))'
        )
        assert (shown["Running"], shown["Waiting"]) == ("1", "1")
        assert int(shown["Pages in use"]) > 0
        await page.click(".prefix-tree summary")
        assert "in use by 1" in await page.text(".prefix-tree .locked")
        await page.click("#pause")
        assert engine.abort("runs") == 1
        await asyncio.gather(running, waiting)
        await page.click("#pause")
        await page.until(f'{ROW.format("runs")}.textContent.includes("abort")')
        assert await page.value('document.querySelectorAll(".prefix-tree[open]").length') == 1


async def test_page_asks_for_the_key(open_page: Open) -> None:
    async with Engine(tiny_models.cached(), api_key="hush") as engine:
        page = await open_page(build_app(engine.core))
        await page.open((await page.value("location.origin")) + "/live")
        await page.until('!document.getElementById("key-form").hidden')
        await page.type("#key", "hush" + ENTER)
        await page.until('document.querySelector("#figures [data-figure=State]")')
        await page.value("sessionStorage.clear()")


async def test_clients_see_their_own_requests(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann key-a\nben key-b\nroot key-r admin\n")
    async with (
        Engine(tiny_models.cached(), api_key_file=str(keys)) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):

        async def state(key: str) -> dict:
            return (await http.get("/live_state", headers={"authorization": f"Bearer {key}"})).json()

        for key, rid in (("key-a", "of ann"), ("key-b", "of ben")):
            body = {"text": "Once", "rid": rid, "sampling_params": SHORT}
            headers = {"authorization": f"Bearer {key}"}
            assert (await http.post("/generate", json=body, headers=headers)).status_code == 200
        assert (await http.get("/live_state")).status_code == 401
        found = {key: await state(key) for key in ("key-a", "key-b", "key-r")}
    rids = {key: sorted(request["rid"] for request in each["requests"]) for key, each in found.items()}
    assert rids == {"key-a": ["of ann"], "key-b": ["of ben"], "key-r": ["of ann", "of ben"]}
    assert [found[key]["num_hidden"] for key in found] == [1, 1, 0]
    assert [found[key]["replicas"][0]["tree"] is None for key in found] == [True, True, False]
    assert "Once" not in json.dumps(found)
    [mine] = found["key-a"]["requests"]
    ages = [mine["ago_s"][name] for name in ("arrived", "tokenized", "queued", "scheduled", "first_token", "ended")]
    assert ages == sorted(ages, reverse=True)
    assert (mine["state"], mine["finish"], mine["output_tokens"]) == ("ended", "length", 4)


async def test_without_keys_on_other_addresses_counts_alone_are_shown() -> None:
    async with Engine(tiny_models.cached(), host="0.0.0.0") as engine:
        await engine.generate("Once", SHORT)
        transport = httpx.ASGITransport(build_app(engine.core))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            found = (await http.get("/live_state")).json()
    assert (found["requests"], found["num_hidden"], found["replicas"][0]["tree"]) == ([], 1, None)


async def test_an_admin_who_asks_sees_the_texts_of_the_tree(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("root admin-key-1 admin\nuser user-key-1\n", encoding="utf-8")
    options: dict[str, Any] = {"api_key_file": str(keys), "page_size": 1}
    async with (
        Engine(tiny_models.cached(), **options) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await engine.generate("Once upon a time", SHORT)

        async def tree(key: str, query: str = "") -> Any:
            answer = await http.get(f"/live_state{query}", headers={"authorization": f"Bearer {key}"})
            return answer.json()["replicas"][0]["tree"]

        assert "texts" not in await tree("admin-key-1")
        assert await tree("user-key-1", "?texts=true") is None
        shown = await tree("admin-key-1", "?texts=true")
        assert len(shown["texts"]) == len(shown["nodes"])
        assert any(text.startswith("Once upon") for text in shown["texts"])


@pytest.mark.parametrize("limit", [1, 5, 1000])
def test_outline_of_a_tree_is_as_long_as_asked(limit: int) -> None:
    from runtime.kv_cache.radix_tree import RadixTree

    tree = RadixTree(1)
    for first in range(3):
        node, _ = tree.lock([], 0)
        for ids in ([first, 7], [first, 8, 9]):
            tree.insert(node, ids, list(range(len(ids))))
            node, _ = tree.lock([], 0)
    nodes, num_nodes = tree.outline(limit)
    assert (len(nodes), num_nodes) == (min(limit, 10), 10)
    assert nodes[0] == (-1, 0, tree.outline(1)[0][0][2])
    assert all(above < index for index, (above, _, _) in enumerate(nodes))
    if limit == 1000:
        assert sum(pages for _, pages, _ in nodes) == 3 * 4
