"""Routes for health, information and administration."""

from __future__ import annotations

import asyncio

import openai
import pytest

import fake_core
from ops.machine import Machine
from runtime.config import Args
from runtime.config.resolve import ANY_MODEL, decide
from runtime.errors import Overloaded
from serve.calls.server_info import by_option
from serve.demo import demo_path
from served_core import Serve, Served


@pytest.mark.parametrize("path", ["/health", "/ready"])
@pytest.mark.parametrize(("state", "status"), [("starting", 503), ("ready", 200), ("draining", 503), ("failed", 503)])
async def test_health_follows_the_engine(served: Served, path: str, state: str, status: int) -> None:
    served.core.state = state
    response = await served.http.get(path)
    assert response.status_code == status
    assert path == "/ready" or response.content == b""
    assert (await served.http.head(path)).status_code == status
    assert served.core.submitted == []


async def test_health_generate_makes_one_token(served: Served) -> None:
    assert (await served.http.get("/health_generate")).status_code == 200
    [probe] = served.core.submitted
    assert probe.sampling.max_new_tokens == 1
    assert probe.label.startswith("HEALTH_CHECK_")


async def test_health_generate_tells_a_failing_engine_from_a_busy_one(served: Served) -> None:
    served.core.failure = fake_core.broken_step()
    assert (await served.http.get("/health_generate")).status_code == 503
    served.core.refusal = Overloaded("Too much is waiting.")
    assert (await served.http.get("/health_generate")).status_code == 200


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
async def test_model_info_has_the_known_fields(serve: Serve, path: str) -> None:
    served = await serve(preferred_sampling={"temperature": 0.5}, weight_version="v2")
    info = (await served.http.get(path)).json()
    assert info["model_path"] == "org/tiny"
    assert info["is_generation"] is True
    assert info["preferred_sampling_params"] == '{"temperature":0.5}'
    assert info["weight_version"] == "v2"


@pytest.mark.parametrize("path", ["/get_server_info", "/server_info"])
async def test_server_info_tells_the_plan_but_no_secret(serve: Serve, path: str) -> None:
    served = await serve(api_key="open-sesame")
    response = await served.http.get(path, headers={"authorization": "Bearer open-sesame"})
    info = response.json()
    assert "open-sesame" not in response.text
    assert "api_key" not in info
    assert (info["model_path"], info["page_size"], info["status"]) == ("org/tiny", 16, "ready")
    assert info["max_total_num_tokens"] == 4096
    [state] = info["internal_states"]
    assert (state["num_running"], state["last_gen_throughput"], state["load"]) == (0, 0.0, 0)
    assert state["kernels"] == "C++ kernels of a test"


@pytest.mark.parametrize("asked", [False, True])
def test_server_info_says_what_is_done_in_the_words_of_the_options(asked: bool) -> None:
    flags = (
        "disable_radix_cache",
        "disable_overlap_schedule",
        "disable_chat_page",
        "disable_cuda_graph_padding",
    )
    flags += ("disable_jump_forward", "log_requests", "prefill_only_one_req", "disable_outlines_disk_cache")
    args = Args.of(**dict.fromkeys(flags, asked), log_requests_level=0, chunked_prefill_size=40, page_size=16)
    plan, _ = decide(args, Machine.named("cpu"), ANY_MODEL, demo_path=demo_path())
    info = by_option(plan)
    assert {name: info[name] for name in flags} == dict.fromkeys(flags, asked)
    assert (info["chunked_prefill_size"], info["enable_torch_compile"], info["model_impl"]) == (
        48,
        False,
        "native",
    )
    elsewhere = {"base_gpu_id", "cuda_graph_max_bs", "schedule_conservativeness"}
    assert not elsewhere & info.keys()  # internal values of other servers are not imitated


async def test_cache_is_flushed_only_when_idle(serve: Serve) -> None:
    served = await serve(held=True)
    assert (await served.http.post("/flush_cache")).status_code == 200
    asked = asyncio.create_task(served.post("/generate", text="a"))
    while not served.core.num_open:
        await asyncio.sleep(0)
    refused = await served.http.get("/flush_cache")
    assert refused.status_code == 400
    assert "requests are running" in refused.json()["error"]["message"]
    assert served.core.num_flushes == 1
    served.core.abort_all()
    await asked


async def test_abort_all_ends_everything(serve: Serve) -> None:
    served = await serve(held=True)
    asked = [asyncio.create_task(served.post("/generate", text="a")) for _ in range(3)]
    while served.core.num_open < 3:
        await asyncio.sleep(0)
    assert (await served.http.post("/abort_request", json={"abort_all": True})).status_code == 200
    answers = await asyncio.gather(*asked)
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}


async def test_abort_of_an_unknown_rid_is_fine_and_of_an_empty_one_is_not(serve: Serve) -> None:
    served = await serve(held=True)
    asked = asyncio.create_task(served.post("/generate", text="a", rid="mine"))
    while not served.core.num_open:
        await asyncio.sleep(0)
    assert (await served.http.post("/abort_request", json={"rid": "other"})).status_code == 200
    assert (await served.http.post("/abort_request", json={"rid": ""})).status_code == 400
    assert (await served.http.post("/abort_request", json={})).status_code == 400
    assert served.core.num_open == 1
    served.core.abort_all()
    await asked


async def test_load_is_a_number(served: Served) -> None:
    assert (await served.http.get("/get_load")).json() == {"load": 0}


async def test_models_lists_the_one(served: Served) -> None:
    [card] = [model async for model in served.openai.models.list()]
    assert (card.id, card.object) == (fake_core.MODEL, "model")
    assert (await served.http.post("/v1/models")).json()["data"][0]["max_model_len"] == fake_core.CONTEXT
    assert (await served.http.get("/v1/models/")).json()["data"][0]["id"] == fake_core.MODEL
    assert (await served.openai.models.retrieve(fake_core.MODEL)).id == fake_core.MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        await served.openai.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def test_model_names_may_hold_slashes(serve: Serve) -> None:
    served = await serve(served_model_name="org/name")
    assert (await served.http.get("/v1/models/org/name")).json()["id"] == "org/name"


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokens_there_and_back(served: Served, prefix: str) -> None:
    found = await served.post(f"{prefix}/tokenize", prompt="Größe 🚀")
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == fake_core.CONTEXT
    assert (await served.post(f"{prefix}/detokenize", tokens=found["tokens"]))["text"] == "Größe 🚀"
    many = await served.post(f"{prefix}/tokenize", prompt=["a", "Größe 🚀"])
    assert many["count"] == [1, found["count"]]
    assert (await served.post(f"{prefix}/detokenize", tokens=many["tokens"]))["text"] == ["a", "Größe 🚀"]


async def test_messages_are_tokenized_through_the_template(served: Served) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    found = await served.post("/tokenize", messages=messages)
    text = (await served.post("/detokenize", tokens=found["tokens"], skip_special_tokens=False))["text"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    shorter = await served.post("/tokenize", messages=messages, add_generation_prompt=False)
    text = (await served.post("/detokenize", tokens=shorter["tokens"], skip_special_tokens=False))["text"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


async def test_tokens_are_shown_as_the_tokenizer_writes_them(served: Served) -> None:
    found = await served.post("/tokenize", prompt=["a b", "a"], return_token_strs=True)
    assert ["".join(strings) for strings in found["token_strs"]] == ["aĠb", "a"]
    assert (await served.post("/tokenize", prompt="a"))["token_strs"] is None


@pytest.mark.parametrize("tokens", [[99999], [-1], [[5], [512]], [5] * 131_073, [[5] * 70_000] * 2])
async def test_ids_beyond_the_vocabulary_or_too_many_are_refused(served: Served, tokens: list[int]) -> None:
    response = await served.http.post("/detokenize", json={"tokens": tokens})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")
