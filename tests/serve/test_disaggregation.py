"""Prompts and outputs have servers of their own: the output is that of one server, whatever dies in between."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from itertools import count
from random import Random, SystemRandom
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import greedy
import runtime.actors.storage as storage_module
import tiny_seeing
from http_server import serving as app_serving
from lora_adapters import adapter
from runtime.errors import ConfigurationError, InvalidRequest
from serve import Engine
from serve.cli import router as router_module
from serve.cli.router import router_app
from serve.demo import demo_path
from serve.http.access import PREFILLED
from serve.server.app import build_app
from server_process import serving

OPTIONS: dict[str, Any] = {"random_seed": 1, "page_size": 16, "max_total_tokens": 4096, "hicache_ratio": 2.0}


def free_port(count: int = 8) -> int:
    """Return the first of `count` consecutive free ports.

    They are below the ports of outgoing connections, so that no connection takes the port of a rank before it listens.
    """
    while True:
        first = SystemRandom().randrange(20_000, 32_000)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


async def attached(*engines: Engine) -> None:
    """Wait until these engines move pages."""
    while any(engine.core.attachment is None for engine in engines):
        await asyncio.sleep(0.01)


@asynccontextmanager
async def pair(
    of_prefill: Mapping[str, Any] = {}, of_decode: Mapping[str, Any] = {}, **options: Any
) -> AsyncIterator[tuple[Engine, Engine, str]]:
    """A prefill engine, a decode engine, and the address of a router in front of both.

    `options` are the options of both, and `of_prefill` and `of_decode` those of one.
    """
    port = free_port()
    async with AsyncExitStack() as stack:
        common, peers = {**OPTIONS, **options}, [f"127.0.0.1:{port}"]
        prefill = Engine(disaggregation_mode="prefill", disaggregation_bootstrap_port=port, **common, **of_prefill)
        decode = Engine(disaggregation_mode="decode", disaggregation_prefill=peers, **common, **of_decode)
        await stack.enter_async_context(prefill)
        await stack.enter_async_context(decode)
        await attached(prefill, decode)
        urls = [await stack.enter_async_context(app_serving(build_app(each.core))) for each in (prefill, decode)]
        router = await stack.enter_async_context(app_serving(router_app(urls[:1], urls[1:]), lifespan="on"))
        yield prefill, decode, router


GROUPS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
PROMPTS = [
    f"{number}: " + "What does an option of the server do, and when is it worth it? " * 6 for number in range(12)
]
SAMPLING = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}


async def outputs(url: str, prompts: Sequence[str], **fields: Any) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:

        async def one(prompt: str) -> dict[str, Any]:
            answer = await client.post("/generate", json={"text": prompt, "sampling_params": SAMPLING, **fields})
            assert answer.status_code == 200, answer.text
            return answer.json()

        return list(await asyncio.gather(*map(one, prompts)))


async def plain(prompts: Sequence[str], **options: Any) -> list[str]:
    async with Engine(**{**OPTIONS, **options}) as engine:
        return [answer["text"] for answer in await engine.generate(list(prompts), SAMPLING)]


async def test_outputs_are_those_of_one_server_and_pages_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "MAX_WATCHES", 2)
    reference = await plain(PROMPTS)
    async with pair() as (prefill, decode, url):
        answers = await outputs(url, PROMPTS)
        assert [answer["text"] for answer in answers] == reference
        size = decode.core.status().page_size
        for answer in answers:  # all whole pages of the prompt before its last token came from the prefill server
            assert answer["meta_info"]["cached_tokens"] == (answer["meta_info"]["prompt_tokens"] - 1) // size * size
        assert prefill.core.status().num_generated <= len(PROMPTS)

        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(
                model="penstock-demo", prompt=PROMPTS[0] + "More.", max_tokens=8, temperature=0, stream=True
            )
            text = "".join([event.choices[0].text async for event in stream if event.choices])
        assert text
        schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]}
        [answer] = await outputs(url, ["Write JSON. " * 20], sampling_params={**SAMPLING, "json_schema": schema})
        assert answer["text"].lstrip().startswith("{")

        monkeypatch.setattr(storage_module, "STALL_S", 600.0)
        async with (
            app_serving(build_app(decode.core)) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            bodies = [{"text": f"{number} " * 60, "sampling_params": SAMPLING} for number in range(5)]
            posts = [client.post("/generate", json=body, headers={PREFILLED: "1"}, timeout=60) for body in bodies[:4]]
            routed = [asyncio.create_task(post) for post in posts]
            while decode.core.status().num_requests < len(routed):
                await asyncio.sleep(0.01)
            answer = await client.post("/generate", json=bodies[4], timeout=60)
            assert answer.status_code == 200, "it does not wait for prompts that reach no prefill server"
            assert not any(task.done() for task in routed)
            for task in routed:
                task.cancel()


async def test_pages_of_an_adapter_travel_if_its_files_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of an adapter decides nothing: under "b", the servers have adapters with different weights."""
    monkeypatch.setattr(
        storage_module, "STALL_S", 0.1
    )  # no prefill server computes the prompts of the decode server's b
    one, other = adapter(str(demo_path()), 1), adapter(str(demo_path()), 2)
    paths = [f"a={one}", f"b={other}"]
    async with Engine(**OPTIONS, lora_paths=paths) as engine:
        given = [await engine.generate(PROMPTS[:2], SAMPLING, lora_path=name) for name in ("a", "b")]
    reference = [[answer["text"] for answer in answers] for answers in given]
    async with pair({"lora_paths": [f"a={one}", f"b={one}"]}, {"lora_paths": paths}) as (_, _, url):
        for name, texts, share in zip("ab", reference, (1, 0), strict=True):
            answers = await outputs(url, PROMPTS[:2], lora_path=name)
            assert [answer["text"] for answer in answers] == texts
            for answer in answers:
                full = (answer["meta_info"]["prompt_tokens"] - 1) // 16 * 16
                assert answer["meta_info"]["cached_tokens"] == full * share
    async with replicas(lora_paths=paths) as engine, app_serving(build_app(engine.core)) as url:
        await attached(engine)
        answers = await outputs(url, PROMPTS[:2], lora_path="b")
        assert [answer["text"] for answer in answers] == reference[1]
        assert all(answer["meta_info"]["cached_tokens"] for answer in answers)


@pytest.mark.parametrize("family", ["llava", pytest.param("qwen2_vl", marks=pytest.mark.slow)])
async def test_pages_of_images_travel_and_positions_continue(family: str) -> None:
    """Pages of another image of the same size are no hits. qwen2_vl has positions of three axes."""
    path, options = tiny_seeing.cached(family), {"dtype": "float32", "page_size": 4}
    pictures = [tiny_seeing.picture(40, 30, seed) for seed in (1, 3)]
    text = tiny_seeing.prompt(family, "Once upon a time", 1)
    async with pair(model_path=path, **options) as (prefill, _, url):
        for number, picture in enumerate(pictures):
            reference = tiny_seeing.reference(path, family, text, [picture], SAMPLING["max_new_tokens"])
            image = base64.b64encode(tiny_seeing.png(picture)).decode()
            [answer] = await outputs(url, [text], image_data=image)
            assert answer["output_ids"] == reference.ids
            meta = answer["meta_info"]
            assert meta["cached_tokens"] == (meta["prompt_tokens"] - 1) // 4 * 4
            assert prefill.core.status().num_generated == number + 1


async def test_without_a_prefill_server_the_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = await plain(PROMPTS[:2])
    async with pair() as (prefill, _, url):
        await prefill.aclose()
        monkeypatch.setattr(storage_module, "STALL_S", 600.0)  # the decode server cannot reach it, so it does not wait
        answers = await outputs(url, PROMPTS[:2])
        assert [answer["text"] for answer in answers] == reference
        assert all(answer["meta_info"]["cached_tokens"] == 0 for answer in answers)


async def test_a_server_of_another_model_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    path = greedy.model_path(greedy.FAMILIES[0])
    async with (
        Engine(disaggregation_mode="prefill", disaggregation_bootstrap_port=port, **OPTIONS) as prefill,
        Engine(
            model_path=path,
            skip_tokenizer_init=True,
            disaggregation_mode="decode",
            disaggregation_prefill=[f"127.0.0.1:{port}"],
            **OPTIONS,
        ) as decode,
    ):
        await attached(prefill, decode)
        ids = [1 + number % 50 for number in range(60)]
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
        async with app_serving(build_app(decode.core)) as url, httpx.AsyncClient(trust_env=False) as client:
            answer = await client.post(f"{url}/generate", json=body, headers={PREFILLED: "1"}, timeout=60)
            assert answer.status_code == 200
    assert "has another model" in caplog.text


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"disaggregation_mode": "decode"}, "--disaggregation-prefill"),
        ({"disaggregation_mode": "decode", "disaggregation_prefill": ["nowhere"]}, "HOST:PORT"),
        ({"disaggregation_prefill": ["a:1"]}, "needs --disaggregation-mode decode"),
        ({"disaggregation_mode": "prefill", "dp_size": 2}, "--dp-size"),
        ({"disaggregation_mode": "prefill", "hicache_storage_backend": "file"}, "--hicache-storage-backend"),
        ({"disaggregation_transfer_backend": "nixl"}, "needs the package nixl and an RDMA network card.*use tcp"),
        ({"disaggregation_transfer_backend": "mooncake"}, "needs the package mooncake-transfer-engine"),
        ({"disaggregation_ib_device": "mlx5_0"}, "RDMA network card"),
        (
            {"disaggregation_mode": "prefill", "disaggregation_decode_tp": 2},
            "same --tp-size by attention group, here 1",
        ),
        ({"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 65535, "tp_size": 2}, "up to 65536"),
        ({"disaggregation_prefill_replicas": 2, "dp_size": 2}, "needs a larger --dp-size: 2 of 2"),
        (
            {"disaggregation_prefill_replicas": 1, "dp_size": 2, "tp_size": 2, "enable_dp_attention": True},
            "--enable-dp-attention",
        ),
        ({"num_reserved_decode_tokens": 7}, "needs --disaggregation-mode decode"),
        ({"disaggregation_mode": "prefill", "disable_radix_cache": True}, "--disable-radix-cache"),
    ],
)
async def test_combinations_that_cannot_work_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        async with Engine(**options):
            pass


async def as_sglang_routes(prefill: str, decode: str, port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a body as SGLang's load balancer for prefill and decode servers does, and join the answers as it does."""
    prompts = body.get("text", body.get("input_ids"))
    count = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else None
    fields: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 2**63 - 1}
    if count is not None:
        fields = {name: [value] * count for name, value in fields.items()}
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        first, answer = await asyncio.gather(
            *(client.post(url + path, json=body | fields) for url in (prefill, decode))
        )
    assert (first.status_code, answer.status_code) == (200, 200), (first.text, answer.text)
    joined = answer.json()
    if body.get("return_logprob"):
        name = "input_token_logprobs"
        joined["meta_info"][name] = first.json()["meta_info"][name] + joined["meta_info"][name]
    return joined


async def test_a_router_of_sglang_drives_both_servers() -> None:
    reference = await plain(PROMPTS[:4])
    asked = {"text": PROMPTS[4], "sampling_params": SAMPLING, "return_logprob": True, "logprob_start_len": 0}
    async with Engine(**OPTIONS) as engine:
        scored = await engine.generate(PROMPTS[4], SAMPLING, return_logprob=True, logprob_start_len=0)
    async with (
        pair() as (prefill, decode, _),
        app_serving(build_app(prefill.core)) as first,
        app_serving(build_app(decode.core)) as second,
    ):
        port = decode.core.plan.cache.storage_config["peers"][0][1]

        async def ask(path: str, body: dict[str, Any]) -> Any:
            return await as_sglang_routes(first, second, port, path, body)

        answers = await ask("/generate", {"text": PROMPTS[:3], "sampling_params": SAMPLING})
        assert [answer["text"] for answer in answers] == reference[:3]
        assert all(answer["meta_info"]["cached_tokens"] for answer in answers)
        answer = await ask(
            "/v1/completions", {"prompt": PROMPTS[3], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        )
        assert answer["choices"][0]["text"] == reference[3]
        answer = await ask(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPTS[5]}], "max_tokens": 4}
        )
        assert answer["choices"][0]["message"]["content"]
        answer = await ask("/generate", asked)
        assert answer["text"] == scored["text"]
        for name in ("input_token_logprobs", "output_token_logprobs"):
            found, expected = answer["meta_info"][name], scored["meta_info"][name]
            assert [each[1] for each in found] == [each[1] for each in expected]
            assert [each[0] for each in found][1:] == pytest.approx([each[0] for each in expected][1:], abs=1e-2)
        assert prefill.core.status().num_generated <= 6  # one token of each prompt

        async with httpx.AsyncClient(base_url=second, trust_env=False) as client:
            for fields, word in (
                ({"bootstrap_host": "10.0.0.9", "bootstrap_port": port}, "--disaggregation-prefill"),
                ({"bootstrap_host": "127.0.0.1", "bootstrap_port": port + 1}, "--disaggregation-prefill"),
                ({"bootstrap_room": 1}, "needs bootstrap_host"),
                ({"bootstrap_host": ["127.0.0.1"] * 2}, "2 items for 1"),
                ({"bootstrap_host": "127.0.0.1", "bootstrap_room": -1}, "bootstrap_room"),
            ):
                refused = await client.post("/generate", json={"text": "x"} | fields)
                assert refused.status_code == 400
                assert word in refused.json()["error"]["message"]


async def test_the_fields_of_a_prefill_server_need_a_role() -> None:
    async with (
        Engine(**OPTIONS) as engine,
        app_serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        refused = await client.post("/generate", json={"text": "x", "bootstrap_host": "127.0.0.1"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "bootstrap_host")
        predict = {"instances": [{"text": "x"}], "parameters": {"bootstrap_host": "127.0.0.1"}}
        assert "bootstrap_host needs a server" in (await client.post("/vertex_generate", json=predict)).text
        for refused_call in (engine.generate, engine.chat):
            with pytest.raises(InvalidRequest, match="bootstrap_host needs a server"):
                await refused_call("x", bootstrap_host="127.0.0.1")


async def test_the_router_limits_the_bodies_and_the_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    began, release = asyncio.Event(), asyncio.Event()

    async def compute(request: Request) -> Response:
        await request.body()
        began.set()
        await release.wait()
        return Response("done")

    monkeypatch.setattr(router_module, "MAX_BODIES_BYTES", 1000)
    monkeypatch.setattr(router_module, "SMALL_BYTES", 150)
    app = Starlette(routes=[Route("/v1/embeddings", compute, methods=["POST"])])
    async with (
        app_serving(app) as url,
        app_serving(router_app([url], [url]), lifespan="on") as router,
        app_serving(router_app([url], [url], answer_s=0.05), lifespan="on") as hasty,
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        late = await client.post(f"{hasty}/v1/embeddings", content=b"x")
        assert (late.status_code, late.json()["error"]["type"]) == (504, "RouterError")
        began.clear()
        first = asyncio.create_task(client.post(f"{router}/v1/embeddings", content=b"x" * 900))
        await began.wait()
        full = await client.post(f"{router}/v1/embeddings", content=b"y" * 200)
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")
        began.clear()
        small = asyncio.create_task(client.post(f"{router}/v1/embeddings", content=b"z" * 150))
        await asyncio.wait({small, asyncio.ensure_future(began.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert began.is_set(), "large bodies keep no small one out"
        release.set()
        assert {(await first).text, (await small).text} == {"done"}
        for path in ("/v1/embeddings", "/generate", "/generate", "/v1/embeddings"):  # all bytes are free again
            while (answer := await client.post(f"{router}{path}", content=b"y" * 1000)).status_code == 503:
                continue  # a moment after an answer, its body still counts
            assert answer.status_code in (200, 404)


async def test_admin_routes_behind_the_router_need_the_key_and_bad_paths_are_refused() -> None:
    async with (
        Engine(random_seed=1) as engine,
        app_serving(build_app(engine.core)) as url,
        app_serving(router_app([url], [url]), lifespan="on") as router,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        assert (await client.post(f"{url}/flush_cache")).status_code == 200
        assert (await client.post(f"{router}/flush_cache")).status_code == 403
        assert (
            (await client.get(f"{router}/v1/models/a%2Fb%3Fc"))
            .json()["error"]["message"]
            .startswith("The model 'a/b?c'")
        )
        for path in ("%00", "%ff"):
            assert (await client.get(f"{router}/v1/models/{path}")).status_code == 404
        deep = b'{"text": "x", "sampling_params": {"max_new_tokens": 1}, "a": ' + b"[" * 400 + b"]" * 400 + b"}"
        answer = await client.post(f"{router}/generate", content=deep, headers={"content-type": "application/json"})
        assert answer.status_code == 200


async def test_a_client_that_leaves_before_the_answer_ends_its_request() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def compute(request: Request) -> Response:
        await request.body()
        began.set()
        message = await request.receive()
        assert message["type"] == "http.disconnect"
        ended.set()
        return Response()

    decode = Starlette(routes=[Route("/v1/embeddings", compute, methods=["POST"])])
    async with (
        app_serving(decode) as url,
        app_serving(router_app([url], [url]), lifespan="on") as router,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        asking = asyncio.create_task(client.post(f"{router}/v1/embeddings", json={"input": "x"}, timeout=60))
        async with asyncio.timeout(10):
            await began.wait()
            asking.cancel()
            await ended.wait()


@pytest.mark.parametrize("headers", [{}, {"content-encoding": "gzip"}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses", "/api/chat"])
async def test_a_stream_of_a_lost_server_ends_with_an_error_of_its_api(path: str, headers: dict[str, str]) -> None:
    """Only complete lines precede the error."""
    is_lines = path.startswith("/api/")
    before, between = (b"", b"\n") if is_lines else (b"data: ", b"\n\n")

    async def sent() -> AsyncIterator[bytes]:
        yield before + b'{"a": 1}' + between + before[:2]
        yield before[2:] + b'{"sequence_number"'
        yield b":41}" + between[:1]
        yield between[1:] + before + b"{"
        raise httpx.ReadError("reset")

    kind = "application/x-ndjson" if is_lines else "text/event-stream"
    answer = httpx.Response(200, headers={"content-type": kind, **headers}, content=sent())
    parts: list[bytes] = []
    try:
        parts += [part async for part in router_module._parts(answer, path, "http://decode")]
    except httpx.ReadError:
        assert headers, "bytes after a compressed stream would break it"
        return
    lines = [line for line in b"".join(parts).splitlines() if line]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if not line.startswith(b"event: ")]
    assert events[:2] == [{"a": 1}, {"sequence_number": 41}]
    message = "The decode server http://decode failed during the answer: ReadError."
    assert lines.count(b"event: error") == (path in ("/v1/messages", "/v1/responses"))
    error: Any = {"message": message, "type": "RouterError", "param": None, "code": None}
    expected: dict[str, Any] = {
        "/v1/completions": {"error": error},
        "/v1/messages": {"type": "error", "error": {"type": "api_error", "message": message}, "request_id": None},
        "/v1/responses": {
            "type": "error",
            "sequence_number": 42,
            "code": "server_error",
            "message": message,
            "param": None,
        },
        "/api/chat": {"error": message},
    }
    assert events[2:] == [expected[path]]


def replicas(**options: Any) -> Engine:
    """Return an engine whose first replica computes prompts and whose second replica generates outputs."""
    roles = {"dp_size": 2, "disaggregation_prefill_replicas": 1, "disaggregation_bootstrap_port": free_port()}
    return Engine(**{**OPTIONS, **roles, **options})


async def test_replicas_of_one_process_compute_prompts_for_others() -> None:
    reference = await plain(PROMPTS)
    async with replicas() as engine, app_serving(build_app(engine.core)) as url:
        await attached(engine)
        first, second = engine.core.schedulers
        answers = await outputs(url, PROMPTS)
        assert [answer["text"] for answer in answers] == reference
        size = engine.core.status().page_size
        for answer in answers:
            assert answer["meta_info"]["cached_tokens"] == (answer["meta_info"]["prompt_tokens"] - 1) // size * size
        assert first.progress.num_generated == len(PROMPTS)
        assert second.progress.num_generated == len(PROMPTS) * SAMPLING["max_new_tokens"]

        again = await outputs(url, PROMPTS)  # the decode replica has these prompts now
        assert [answer["text"] for answer in again] == reference
        assert first.progress.num_generated == len(PROMPTS)

        engine.core.check()


@pytest.mark.slow
async def test_a_killed_prefill_server_costs_time_alone() -> None:
    """A process is killed while prompts are on their way."""
    port = free_port()
    reference = await plain(PROMPTS)
    common = ("--random-seed", "1", "--page-size", "16", "--max-total-tokens", "4096")
    with serving("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port), *common) as prefill:
        peers = [f"127.0.0.1:{port}"]
        async with (
            Engine(disaggregation_mode="decode", disaggregation_prefill=peers, **OPTIONS) as decode,
            app_serving(build_app(decode.core)) as decode_url,
            app_serving(router_app([prefill.url], [decode_url]), lifespan="on") as url,
        ):
            await attached(decode)
            asking = asyncio.create_task(outputs(url, PROMPTS))
            await outputs(url, PROMPTS[:1])
            prefill.process.send_signal(signal.SIGKILL)
            answers = await asking
            assert [answer["text"] for answer in answers] == reference


@pytest.mark.slow
@pytest.mark.timeout(400)  # four processes
@pytest.mark.parametrize(
    ("of_prefill", "of_decode"),
    [
        ({"tp_size": 2}, {"tp_size": 2}),
        ({"pp_size": 2}, {"pp_size": 2}),
        (GROUPS, {}),
        ({}, GROUPS),
    ],
    ids=["tp2", "pp2", "prefill groups", "decode groups"],
)
async def test_ranks_fetch_their_shares(of_prefill: dict[str, Any], of_decode: dict[str, Any]) -> None:
    """Every rank of a stage or attention group fetches its part, from whichever group has the prompt."""
    reference = await plain(PROMPTS[:4])
    async with pair(of_prefill, of_decode) as (prefill, decode, url):
        answers = await outputs(url, PROMPTS[:4])
        assert [answer["text"] for answer in answers] == reference
        for answer in answers:
            assert answer["meta_info"]["cached_tokens"] == (answer["meta_info"]["prompt_tokens"] - 1) // 16 * 16
        for engine in (prefill, decode):
            assert all(actor.progress.num_generated for actor in engine.core.schedulers), "a group was idle"
            engine.core.check()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_pages_of_latent_attention_travel_between_other_numbers_of_ranks() -> None:
    path, options = greedy.model_path("deepseek_v3"), {"skip_tokenizer_init": True, "page_size": 4}
    prompts = greedy.prompts()
    one = {"disaggregation_decode_tp": 1, "tp_size": 2}
    async with (
        pair(one, model_path=path, **options) as (_, _, url),
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
    ):
        for prompt, reference in list(zip(prompts, greedy.reference("deepseek_v3"), strict=True))[5:8]:
            body = {"input_ids": prompt, "sampling_params": greedy.GREEDY}
            answer = (await client.post("/generate", json=body)).json()
            assert answer["output_ids"] == reference
            assert answer["meta_info"]["cached_tokens"] == (len(prompt) - 1) // 4 * 4


@pytest.mark.slow
async def test_a_killed_decode_server_ends_its_requests_alone() -> None:
    """Their streams end with an error that names the cause. The prefill server keeps running."""
    port = free_port()
    common = ("--random-seed", "1", "--page-size", "16", "--max-total-tokens", "4096")
    prefill = Engine(disaggregation_mode="prefill", disaggregation_bootstrap_port=port, **OPTIONS)
    decode = serving("--disaggregation-mode", "decode", "--disaggregation-prefill", f"127.0.0.1:{port}", *common)
    async with prefill, app_serving(build_app(prefill.core)) as prefill_url:
        await attached(prefill)
        with decode as server:
            async with app_serving(router_app([prefill_url], [server.url]), lifespan="on") as url:
                client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
                streams = [
                    await client.completions.create(
                        model="penstock-demo",
                        prompt=prompt,
                        max_tokens=900,
                        stream=True,
                        extra_body={"ignore_eos": True},
                    )
                    for prompt in PROMPTS[:4]
                ]
                for stream in streams:
                    await anext(aiter(stream))
                server.process.send_signal(signal.SIGKILL)
                for stream in streams:
                    with pytest.raises(openai.APIError, match="decode server .* failed during the answer"):
                        async for _ in stream:
                            pass
                with pytest.raises(openai.InternalServerError, match="cannot be reached"):
                    await client.completions.create(model="penstock-demo", prompt=PROMPTS[0], max_tokens=1)
                await client.close()
        answer = await prefill.generate(PROMPTS[5], SAMPLING | {"max_new_tokens": 1})
        assert answer["meta_info"]["completion_tokens"] == 1
        while prefill.core.status().num_requests:
            await asyncio.sleep(0.01)
        prefill.core.check()


@pytest.mark.slow
async def test_a_killed_prefill_replica_costs_time_alone() -> None:
    """Its prompts are computed by the decode replica, and it is started again."""
    long_prompts = [f"{number}: " + "What does an option of the server do? " * 40 for number in range(12)]
    reference = await plain(long_prompts, tp_size=2)
    async with replicas(tp_size=2) as engine, app_serving(build_app(engine.core)) as url:
        await attached(engine)
        prefill, decode = engine.core.schedulers
        asked = asyncio.create_task(outputs(url, long_prompts))
        while not prefill.progress.num_steps:
            await asyncio.sleep(0)
        [worker] = vars(prefill.runner)["_group"].workers
        os.kill(worker.process_id, signal.SIGKILL)
        assert [answer["text"] for answer in await asked] == reference
        while len(engine.core.schedulers) < 2 or engine.core.schedulers[0] is prefill:
            await asyncio.sleep(0.05)
        assert engine.core.schedulers[1] is decode
        await attached(engine)
        for number in count():  # a busy machine may stall the new process for so long that prompts are not awaited
            answers = await outputs(url, [f"{number} more: " + prompt for prompt in PROMPTS])
            if all(answer["meta_info"]["cached_tokens"] for answer in answers):
                break
        engine.core.check()


def mixed_requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the kind and the body of requests of many kinds, in random order."""
    random = Random(3)
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
    requests: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        kind = ("chat", "long", "stream", "several", "grammar", "scored", "adapter", "cancelled")[number % 8]
        words = "What does an option of the server do, and when is it worth it? "
        text = f"{random.randrange(40)}: " + words * (60 if kind == "long" else random.randrange(1, 12))
        sampling: dict[str, Any] = {"max_new_tokens": random.randrange(1, 20), "temperature": 0, "ignore_eos": True}
        if number % 3 == 0:
            sampling |= {"temperature": 0.8, "sampling_seed": number, "top_p": 0.9}
        body: dict[str, Any] = {"text": text, "sampling_params": sampling}
        if kind == "chat":
            messages = [{"role": "user", "content": text}]
            body = {"messages": messages, "max_tokens": 9, "temperature": sampling["temperature"], "seed": number}
        elif kind == "several":
            sampling["n"] = 3
        elif kind == "grammar":
            sampling |= {"json_schema": json.dumps(schema), "max_new_tokens": 30, "ignore_eos": False}
        elif kind == "scored":
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        elif kind == "adapter":
            body["lora_path"] = "a"
        elif kind in ("stream", "cancelled"):
            body["stream"] = True
        requests.append((kind, body))
    random.shuffle(requests)
    return requests


async def answer_of(client: httpx.AsyncClient, kind: str, body: dict[str, Any]) -> Any:
    """Return what must be equal in the answers of two servers. None for a request that is cancelled."""
    if kind == "chat":
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]
    if kind in ("stream", "cancelled"):
        ids: list[int] = []
        async with client.stream("POST", "/generate", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    if kind == "cancelled":
                        return None
                    ids = json.loads(line[6:])["output_ids"]
        return ids
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    found = found if isinstance(found, list) else [found]
    tops = [[pair[1] for pair in each["meta_info"].get("output_token_logprobs", ())] for each in found]
    return [each["output_ids"] for each in found], tops


async def answers_to(url: str, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    turn = asyncio.Semaphore(24)
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:

        async def one(kind: str, body: dict[str, Any]) -> Any:
            async with turn:
                return await answer_of(client, kind, body)

        return list(await asyncio.gather(*(one(*request) for request in requests)))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [{}, {"tp_size": 2}], ids=["one process", "two ranks"])
async def test_many_kinds_of_requests_are_answered_as_by_one_server(options: dict[str, Any]) -> None:
    """Both engines are in this process; with several ranks, each of them has worker processes."""
    adapted = {**options, "lora_paths": [f"a={adapter(str(demo_path()), 1)}"]}
    requests = mixed_requests(500)
    async with Engine(**{**OPTIONS, **adapted}) as engine, app_serving(build_app(engine.core)) as url:
        expected = await answers_to(url, requests)
    async with pair(**adapted) as (prefill, decode, url):
        found = await answers_to(url, requests)
        for each in (prefill, decode):
            while each.status().num_running:  # requests that clients left end soon
                await asyncio.sleep(0.01)
            each.core.check()
        assert decode.core.status().num_generated > prefill.core.status().num_generated
    different = [kind for (kind, _), one, other in zip(requests, expected, found, strict=True) if one != other]
    assert different == []
    if options:
        return
    async with replicas(**adapted) as engine, app_serving(build_app(engine.core)) as url:
        await attached(engine)
        found = await answers_to(url, requests)
        while engine.status().num_running:
            await asyncio.sleep(0.01)
        engine.core.check()
        assert engine.core.schedulers[0].progress.num_generated > 0
    different = [kind for (kind, _), one, other in zip(requests, expected, found, strict=True) if one != other]
    assert different == []
