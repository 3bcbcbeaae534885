"""The route /generate."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import fake_core
from runtime.request import Request
from served_core import Serve, Served


async def test_single_prompt_is_answered_with_an_object(served: Served) -> None:
    answer = await served.post("/generate", text="Hi", rid="mine", sampling_params={"max_new_tokens": 100})
    assert answer["text"] == fake_core.TEXT
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": 0}
    assert meta["completion_tokens"] == len(answer["output_ids"])
    assert meta["prompt_tokens"] == 1 + 1
    assert meta["weight_version"] == "default"
    assert meta["e2e_latency"] > 0


async def test_length_is_the_reason_when_the_budget_ends(served: Served) -> None:
    answer = await served.post("/generate", text="Hi", sampling_params={"max_new_tokens": 4})
    assert len(answer["output_ids"]) == 4
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 4}


async def test_stop_string_ends_the_text_and_is_named(served: Served) -> None:
    answer = await served.post("/generate", text="Hi", sampling_params={"stop": [" small"]})
    assert answer["text"] == "Once upon a time a"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": " small"}


async def test_sampling_parameters_reach_the_engine(served: Served) -> None:
    asked = {"temperature": 0.5, "top_k": 3, "stop_token_ids": [5], "logit_bias": {"7": -2}, "seed": 9}
    await served.post("/generate", text="Hi", sampling_params=asked)
    [request] = served.core.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 3, 9)
    assert (sampling.stop_token_ids, dict(sampling.logit_bias)) == (frozenset({5}), {7: -2.0})
    assert sampling.max_new_tokens == 128


async def test_preferred_parameters_stand_below_the_request(serve: Serve) -> None:
    served = await serve(preferred_sampling={"temperature": 0.2, "top_p": 0.3})
    await served.post("/generate", text="Hi", sampling_params={"top_p": 0.9})
    [request] = served.core.submitted
    assert (request.sampling.temperature, request.sampling.top_p) == (0.2, 0.9)


async def test_batch_is_answered_in_order_prompt_by_prompt(serve: Serve) -> None:
    def ids_of(request: Request, index: int) -> list[int]:
        return [40 + len(request.text or ""), 40 + index]

    served = await serve(ids_of=ids_of)
    answers = await served.post("/generate", text=["a", "bb"], rid="job", sampling_params={"n": 2})
    assert [answer["output_ids"][:2] for answer in answers] == [[41, 40], [41, 41], [42, 40], [42, 41]]
    assert [answer["meta_info"]["id"] for answer in answers] == ["job_0", "job_0", "job_1", "job_1"]


async def test_list_of_one_prompt_is_answered_with_a_list(served: Served) -> None:
    assert len(await served.post("/generate", text=["a"])) == 1
    assert len(await served.post("/generate", input_ids=[[5, 6]])) == 1
    assert isinstance(await served.post("/generate", input_ids=[5, 6]), dict)


async def test_each_prompt_of_a_batch_may_have_its_own_parameters(served: Served) -> None:
    await served.post(
        "/generate",
        text=["a", "b"],
        rid=["x", "y"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        return_logprob=[True, False],
        token_ids_logprob=[[5], None],
    )
    first, second = served.core.submitted
    assert (first.label, second.label) == ("x", "y")
    assert (first.sampling.max_new_tokens, second.sampling.max_new_tokens) == (1, 2)
    assert first.logprobs is not None
    assert first.logprobs.token_ids == (5,)
    assert second.logprobs is None


async def test_logprobs_are_listed_by_position(served: Served) -> None:
    answer = await served.post(
        "/generate",
        input_ids=[50, 51, 52],
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[60],
    )
    meta, output = answer["meta_info"], answer["output_ids"]
    assert meta["input_token_logprobs"] == [[None, 50, None], [-0.5, 51, None], [-0.75, 52, None]]
    assert meta["output_token_logprobs"] == [[-0.25, output[0], None], [-0.5, output[1], None]]
    assert meta["input_top_logprobs"][0] is None
    assert meta["output_top_logprobs"][0] == [[-0.25, output[0], None], [-1.25, 101, None]]
    assert meta["output_token_ids_logprobs"] == [[[-1.25, 60, None]], [[-1.5, 60, None]]]


async def test_logprobs_carry_texts_when_asked(served: Served) -> None:
    body: dict[str, Any] = {"text": "Hi", "return_logprob": True, "return_text_in_logprobs": True}
    meta = (await served.post("/generate", **body))["meta_info"]
    assert meta["output_token_logprobs"][0][2] == "On"
    assert "output_top_logprobs" not in meta
    assert meta["input_token_logprobs"] == []


async def test_stream_repeats_text_and_logprobs_but_not_ids(served: Served) -> None:
    body: dict[str, Any] = {"text": "Hi", "sampling_params": {"max_new_tokens": 40}, "return_logprob": True}
    whole = await served.post("/generate", **body)
    events = await served.events("/generate", **body)
    assert [e["text"] for e in events] == sorted((e["text"] for e in events), key=len)
    assert events[-1]["text"] == whole["text"]
    assert [token for event in events for token in event["output_ids"]] == whole["output_ids"]
    last, meta = events[-1]["meta_info"], whole["meta_info"]
    assert last["output_token_logprobs"] == meta["output_token_logprobs"]
    assert last["finish_reason"] == meta["finish_reason"]
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    assert all("index" not in event for event in events)
    assert set(last) == set(meta)


async def test_streamed_batch_numbers_its_choices(served: Served) -> None:
    events = await served.events("/generate", text=["a", "b"], sampling_params={"n": 2})
    finals = {event["index"]: event["text"] for event in events}
    assert finals == dict.fromkeys(range(4), fake_core.TEXT)


async def test_error_in_one_prompt_of_a_batch_answers_it_and_aborts_the_others(serve: Serve) -> None:
    served = await serve(held=True)
    response = await served.http.post("/generate", json={"text": ["short", "long " * 600]})
    assert response.status_code == 400
    assert "is too long" in response.json()["error"]["message"]
    assert served.core.aborted == [served.core.submitted[0].id]
    assert served.core.num_open == 0


async def test_refused_prompt_of_a_batch_leaves_nothing_behind(serve: Serve) -> None:
    served = await serve(held=True)
    response = await served.http.post("/generate", json={"input_ids": [[5], [5], [99999]]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input_ids"
    assert served.core.num_open == 0


async def test_abort_by_prefix_ends_with_a_partial_answer(serve: Serve) -> None:
    served = await serve(held=True)
    asked = asyncio.create_task(served.post("/generate", text="Hi", rid="job-1"))
    while not served.core.num_open:
        await asyncio.sleep(0)
    served.core.step()
    response = await served.http.post("/abort_request", json={"rid": "job"})
    assert (response.status_code, response.content) == (200, b"")
    answer = await asked
    assert answer["text"] == "On"
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_put_is_taken_as_post(served: Served) -> None:
    response = await served.http.put("/generate", json={"text": "Hi"})
    assert response.json()["text"] == fake_core.TEXT


async def test_server_without_tokenizer_speaks_ids(serve: Serve) -> None:
    served = await serve(fake_core.FakeCore(None))
    answer = await served.post("/generate", input_ids=[5, 6], sampling_params={"max_new_tokens": 2})
    assert answer["output_ids"] == [7, 8]
    response = await served.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert (response.status_code, response.json()["param"]) == (400, "messages")


@pytest.mark.parametrize("count", [20_000])
async def test_large_bodies_are_read_in_a_thread(served: Served, count: int) -> None:
    response = await served.http.post("/generate", json={"input_ids": [5] * count})
    assert response.status_code == 400
    assert f"{count} tokens" in response.json()["error"]["message"]
