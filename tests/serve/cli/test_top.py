"""`penstock top` with a running server, and its message without one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from rich.console import Console

import http_server
import tiny_models
from serve import Engine
from serve.cli.main import REFUSED, run
from serve.cli.top import Scrape, quantile, rate, read, screen
from serve.server.app import build_app


async def top(*words: str) -> int:
    return await asyncio.to_thread(run, ["top", "--interval", "0.05", *words])


async def test_a_running_server_is_shown(capsys: pytest.CaptureFixture[str]):
    never_ends = {"max_new_tokens": 1500, "ignore_eos": True}
    async with (
        Engine(tiny_models.cached(), enable_metrics=True, max_running_requests=1) as engine,
        http_server.serving(build_app(engine.core)) as url,
    ):
        asked = [asyncio.create_task(engine.generate("Once", never_ends)) for _ in range(2)]
        while engine.status().num_running != 1 or engine.status().num_waiting != 1:
            await asyncio.sleep(0.01)
        assert await top("--url", url, "--count", "1") == 0
        engine.abort(abort_all=True)
        await asyncio.gather(*asked)
    shown = capsys.readouterr().out
    assert "1 running, 1 waiting" in shown
    assert url in shown
    assert "free" in shown


async def test_a_server_without_metrics_and_none_at_all_are_told_apart(capsys: pytest.CaptureFixture[str]):
    async with (
        Engine(tiny_models.cached()) as engine,
        http_server.serving(build_app(engine.core)) as url,
    ):
        assert await top("--url", url) == REFUSED
    assert "--enable-metrics" in capsys.readouterr().err
    assert await top("--url", url) == REFUSED
    assert "Cannot reach" in capsys.readouterr().err
    assert await top("--interval", "0") == REFUSED


def exposed(counts: Iterable[int], tokens: int) -> str:
    name = "sglang:time_to_first_token_seconds"
    lines = [f'{name}_bucket{{le="{bound}"}} {n}' for bound, n in zip(("0.1", "0.5", "+Inf"), counts)]
    counter = f"# TYPE sglang:generation_tokens counter\nsglang:generation_tokens_total {tokens}"
    return "\n".join([f"# TYPE {name} histogram", *lines, counter, ""])


def test_rates_and_quantiles_are_of_what_came_between_two_looks():
    before, now = read(exposed((90, 99, 100), 50), 10.0), read(exposed((90, 108, 110), 250), 12.0)
    assert rate("sglang:generation_tokens_total", before, now) == 100
    assert rate("sglang:generation_tokens_total", now, before._replace(at_s=14.0)) == 0  # the server was restarted
    name = "sglang:time_to_first_token_seconds"
    assert quantile(name, 0.5, before, now) == 0.5
    assert quantile(name, 0.99, before, now) == float("inf")
    assert quantile(name, 0.5, now, now) is None


def test_tokens_of_running_requests_count_at_once(capsys: pytest.CaptureFixture[str]):
    def scrape(at_s: float, decoded: int) -> Scrape:
        name = "sglang:realtime_tokens"
        values = {"prefill_compute": 50, "prefill_cache": 0, "decode": decoded}
        lines = [f'{name}_total{{mode="{mode}"}} {value}' for mode, value in values.items()]
        return read("\n".join([f"# TYPE {name} counter", *lines, ""]), at_s)

    Console(width=120).print(screen("http://server", scrape(10.0, 100), scrape(12.0, 300)))
    assert "100 out/s, 0 in/s" in capsys.readouterr().out
