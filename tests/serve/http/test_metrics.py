"""`/metrics` with the real engine core: the metrics agree with the requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import http_server
import scripted_core
from runtime.actors.engine_core import EngineCore
from runtime.config.plan import ObservePlan
from runtime.metrics import series
from runtime.metrics.declarations import BY_NAME, METRICS, REPLICA
from serve.server.app import build_app

ON = ObservePlan(metrics=True)
LENGTHS = ObservePlan(metrics=True, prompt_bounds=(2.0, 4.0), output_bounds=(5.0, 50.0))


class Running(NamedTuple):
    core: EngineCore
    runners: list[scripted_core.ScriptedRunner]
    http: httpx.AsyncClient

    async def generate(self, num_tokens: int = 9, *, ids=(5, 6, 7), status: int = 200, headers=None, **more) -> dict:
        sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, **more}
        body = {"input_ids": list(ids), "sampling_params": sampling}
        answer = await self.http.post("/generate", json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def values(self) -> Values:
        answer = await self.http.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        return Values(answer.text)


class Values:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """Return the sum over the samples with these labels, of which at least one must exist."""
        found = [
            sample.value for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"{name} {labels}"
        return sum(found)


@asynccontextmanager
async def running(observe: ObservePlan = ON, replicas: int = 1, **schedule) -> AsyncIterator[Running]:
    async with (
        scripted_core.running_several(replicas, observe=observe, **schedule) as (core, runners),
        http_server.serving(build_app(core)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        yield Running(core, runners, client)


async def test_every_declared_metric_is_served_with_its_kind_and_labels():
    async with running(LENGTHS) as server:
        await server.generate()
        values = await server.values()
    served = {name: family for name, family in values.families.items() if not name.startswith("process_")}
    of_images = {name for name in BY_NAME if name.startswith("penstock:image")}  # of models that see
    assert set(served) == set(BY_NAME) - {"penstock:adapter_requests"} - of_images  # no adapter was named
    for metric in METRICS:
        if metric.name not in served:
            continue
        family = served[metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels), metric.name
            assert sample.labels["model_name"] == "tiny-model"
            if "engine_type" in sample.labels:
                assert sample.labels["engine_type"] == "unified"
    assert values("process_resident_memory_bytes") > 0


async def test_predicted_first_tokens_are_shown_beside_the_measured_ones():
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
    async with running() as server:
        unknown = await server.http.post("/generate", json=body)  # no step was measured before
        answer = await server.http.post("/generate", json=body)
        streamed = await server.http.post("/generate", json=body | {"stream": True})
        values = await server.values()
    assert "x-predicted-first-token-ms" not in unknown.headers
    meta = answer.json()["meta_info"]
    predicted_s, measured_s = meta["predicted_first_token_latency"], meta["first_token_latency"]
    assert 0 < measured_s < meta["e2e_latency"]
    assert float(answer.headers["x-predicted-first-token-ms"]) == pytest.approx(predicted_s * 1000, abs=0.06)
    assert float(answer.headers["x-first-token-ms"]) == pytest.approx(measured_s * 1000, abs=0.06)
    assert float(streamed.headers["x-predicted-first-token-ms"]) > 0
    assert streamed.text.count("predicted_first_token_latency") == 1
    assert values("penstock:predicted_first_token_seconds_count") == 2
    assert values("penstock:predicted_first_token_seconds_sum") >= predicted_s
    assert values("penstock:first_token_error_seconds_sum") >= 0.99 * abs(predicted_s - measured_s)


async def test_counts_are_those_of_the_requests():
    async with running(LENGTHS) as server:
        await server.generate(9)
        await server.generate(3, n=2, ids=(1, 2))
        values = await server.values()
    assert values("sglang:num_requests_total") == 2
    assert values("sglang:prompt_tokens_total") == 3 + 2
    assert values("sglang:generation_tokens_total") == 9 + 2 * 3
    assert values("sglang:time_to_first_token_seconds_count") == 2
    assert values("sglang:inter_token_latency_seconds_count") <= 8 + 2 * 2 + 1  # choices start at the same time
    assert values("sglang:inter_token_latency_seconds_count") >= 8
    assert values("sglang:e2e_request_latency_seconds_count") == 2
    assert values("sglang:e2e_request_latency_seconds_sum") > 0
    assert values("sglang:prompt_tokens_histogram_bucket", le="2.0") == 1
    assert values("sglang:prompt_tokens_histogram_bucket", le="4.0") == 2
    assert values("sglang:generation_tokens_histogram_bucket", le="+Inf") == 2
    assert values("sglang:generation_tokens_histogram_bucket", le="5.0") == 0
    assert values("sglang:queue_time_s_count") == 2
    assert values("sglang:realtime_tokens_total", mode="decode") == 9 + 2 * 3
    assert values("sglang:realtime_tokens_total", mode="prefill_compute") >= 3 + 2
    assert values("penstock:http_requests_total", endpoint="/generate", status_code="200") == 2
    assert values("penstock:requests") == values("sglang:num_running_reqs") == values("sglang:num_queue_reqs") == 0
    steps = values("penstock:steps_total")
    assert steps == values("penstock:step_seconds_count") == values("penstock:step_rows_count") > 9


async def test_gauges_are_of_the_moment_of_the_scrape():
    async with running(max_running=1) as server:
        server.runners[0].open.clear()
        asked = [asyncio.create_task(server.generate(ids=(9, number))) for number in range(3)]
        while server.core.status().num_running + server.core.status().num_waiting < 3:
            await asyncio.sleep(0)
        values = await server.values()
        assert (values("sglang:num_running_reqs"), values("sglang:num_queue_reqs")) == (1, 2)
        assert values("penstock:requests") == 3
        assert values("penstock:queue_age_seconds") > 0
        owners = {owner: values("penstock:pages", owner=owner) for owner in ("running", "prefix", "free")}
        assert owners["running"] > 0
        assert sum(owners.values()) == values("sglang:num_pages") == scripted_core.NUM_PAGES
        assert values("sglang:kv_used_tokens") == owners["running"] * scripted_core.PAGE_SIZE
        server.runners[0].open.set()
        await asyncio.gather(*asked)
        assert (await server.values())("penstock:queue_age_seconds") == 0


async def test_prefix_hits_are_counted():
    async with running() as server:
        await server.generate(ids=range(1, 21))
        first = await server.values()
        await server.generate(ids=range(1, 21))
        values = await server.values()
    assert first("penstock:prefix_lookups_total", result="hit") == 0
    assert values("penstock:prefix_lookups_total", result="hit") == 1
    assert values("sglang:cached_tokens_total") == values("sglang:realtime_tokens_total", mode="prefill_cache") == 16
    assert values("sglang:cache_hit_rate") == 16 / 20


async def test_refusals_and_failures_are_counted_by_reason():
    async with running(max_running=1, max_queued=1) as server:
        await server.generate(ids=[10**6], status=400)
        await server.generate(ids=range(1, 500), status=400)
        server.runners[0].failures = 3  # fails in its step, in the next step, and alone
        await server.generate(status=500)
        server.runners[0].open.clear()
        running_one = asyncio.create_task(server.generate())
        while not server.core.status().num_running:
            await asyncio.sleep(0)
        queued = asyncio.create_task(server.generate())
        while server.core.status().num_requests < 2:
            await asyncio.sleep(0)
        await server.generate(status=503)
        server.runners[0].open.set()
        await asyncio.gather(running_one, queued)
        values = await server.values()
    counts = {reason: values("penstock:rejected_requests_total", reason=reason) for reason in series.REASONS}
    assert counts == {"invalid": 1, "too_long": 1, "overloaded": 1, "failed": 1, "closed": 0}
    assert values("penstock:http_requests_total", endpoint="/generate", status_code="503") == 1


async def test_requests_given_up_are_counted():
    async with running() as server:
        server.runners[0].open.clear()
        asked = asyncio.create_task(server.generate(200))
        while not server.core.status().num_running:
            await asyncio.sleep(0)
        assert (await server.http.post("/abort_request", json={"abort_all": True})).status_code == 200
        server.runners[0].open.set()
        await asked
        assert (await server.values())("sglang:num_aborted_requests_total") == 1


async def test_replicas_have_labels_of_their_own():
    async with running(replicas=2) as server:
        for _ in range(4):
            await server.generate()
        values = await server.values()
    for rank in ("0", "1"):
        assert values("penstock:steps_total", dp_rank=rank) > 0
        assert values("sglang:queue_time_s_count", dp_rank=rank) == 2
    assert values("sglang:num_requests_total") == 4


async def test_header_labels_the_metrics_of_its_requests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(series, "MAX_LABEL_SETS", 3)
    observe = ObservePlan(metrics=True, request_labels=("tenant", "team"))
    async with running(observe) as server:
        for tenant in ("a", "b", "c", "d", "a"):
            given = {"tenant": tenant, "team": 7, "unknown": "x"}
            await server.generate(headers={"x-customer-labels": json.dumps(given)})
        await server.generate(headers={"x-customer-labels": "no json"})
        values = await server.values()
    counted = {
        sample.labels["tenant"]: (sample.labels["team"], sample.value)
        for sample in values.samples
        if sample.name == "sglang:num_requests_total"
    }
    assert counted == {"": ("", 1), "a": ("", 2), "b": ("", 1), "other": ("other", 2)}


async def test_engines_do_not_share_what_they_count():
    async with running() as one, running() as other:
        await one.generate()
        assert (await one.values())("sglang:num_requests_total") == 1
        assert (await other.values())("sglang:num_requests_total") == 0


async def test_names_keep_their_colons_whatever_is_accepted():
    async with running() as server:
        answer = await server.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "\nsglang:num_requests_total{" in answer.text


async def test_without_the_option_there_are_none():
    async with running(ObservePlan()) as server:
        answer = await server.http.get("/metrics")
        assert answer.status_code == 404
        assert "--enable-metrics" in answer.json()["error"]["message"]
        assert server.core.metrics is None


def test_replica_labels_are_those_of_the_surface():
    assert REPLICA == ("model_name", "engine_type", "tp_rank", "pp_rank")
