"""The limit on log-probabilities in one call."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.request import LogprobParams, Request
from runtime.sampling_params import SamplingParams
from serve.calls.work_budget import MAX_LOGPROBS, MAX_REPEATED, check_logprobs, check_repeated
from served_core import Serve, Served

CONTEXT = 2**20


def request(new: int | None, logprobs: LogprobParams | None, n: int = 1, prompt: int = 1) -> Request:
    return Request(ids=(5,) * prompt, sampling=SamplingParams(max_new_tokens=new, n=n), logprobs=logprobs)


@pytest.mark.parametrize(
    "within",
    [
        [request(MAX_LOGPROBS, LogprobParams())],
        [request(MAX_LOGPROBS // 10, LogprobParams(top=4), n=2)],
        [request(MAX_LOGPROBS // 2, LogprobParams())] * 2,
        [request(MAX_LOGPROBS // 4, LogprobParams(token_ids=(7, 8, 9)))],
        [request(MAX_LOGPROBS - 100, LogprobParams(start=50), prompt=150)],
    ],
)
def test_a_million_is_within_the_budget_and_one_token_more_is_not(within: list[Request]) -> None:
    check_logprobs(within, CONTEXT)
    with pytest.raises(InvalidRequest, match="at most 1000000") as caught:
        check_logprobs([*within, request(1, LogprobParams())], CONTEXT)
    assert caught.value.param == "top_logprobs_num"


def test_tokens_without_logprobs_are_the_queues_business() -> None:
    check_logprobs([request(CONTEXT, None, n=128)] * 1024, CONTEXT)


def test_an_open_end_counts_as_4096_tokens_and_never_more_than_the_context() -> None:
    asked = request(None, LogprobParams(top=128), n=2)
    with pytest.raises(InvalidRequest):
        check_logprobs([asked], CONTEXT)
    check_logprobs([asked], 2000)


def test_a_stream_is_counted_by_what_its_events_repeat() -> None:
    num = 4000  # 4000 * 2000 * (1 + 1) = 16,000,000
    assert num * num // 2 * 2 == MAX_REPEATED
    check_repeated([request(num, LogprobParams(top=1))], CONTEXT)
    with pytest.raises(InvalidRequest, match="incremental"):
        check_repeated([request(num + 1, LogprobParams(top=1))], CONTEXT)
    with pytest.raises(InvalidRequest, match="incremental"):
        check_repeated([request(200, LogprobParams(start=0), prompt=80_000)], CONTEXT)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/generate",
            {
                "text": "a",
                "sampling_params": {"n": 128, "max_new_tokens": 300},
                "return_logprob": True,
                "top_logprobs_num": 128,
            },
            "top_logprobs_num",
        ),
        ("/v1/completions", {"prompt": ["a"] * 1024, "n": 4, "max_tokens": 100, "logprobs": 5}, "logprobs"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "n": 128, "logprobs": True, "top_logprobs": 20},
            "top_logprobs",
        ),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_every_api_refuses_what_costs_too_much(
    served: Served, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    response = await served.http.post(path, json={**body, "stream": stream})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert "at most 1000000" in error["message"]
    assert served.core.submitted == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": "a", "sampling_params": {"n": 4, "max_new_tokens": 251}}, "sampling_params.n"),
        ("/v1/completions", {"prompt": "a", "n": 4, "max_tokens": 251}, "n"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}, "n"),
    ],
)
async def test_choices_of_one_prompt_have_a_limit_on_their_tokens(
    serve: Serve, path: str, body: dict[str, Any], param: str
) -> None:
    served = await serve(max_choice_tokens=1000)
    response = await served.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "this server allows 1000" in error["message"]


async def test_a_stream_may_ask_for_what_is_new_only(served: Served) -> None:
    body: dict[str, Any] = {
        "text": "Hi",
        "sampling_params": {"max_new_tokens": 40, "n": 2},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    whole = await served.post("/generate", **body)
    events = await served.events("/generate", **body, incremental=True)
    for index, answer in enumerate(whole):
        mine = [event for event in events if event["index"] == index]
        assert mine  # the number depends on how much arrived while the first were sent
        assert "".join(event["text"] for event in mine) == answer["text"]
        lists = [name for name in answer["meta_info"] if name.endswith("_logprobs")]
        assert len(lists) == 4
        for name in lists:
            joined = [entry for event in mine for entry in event["meta_info"][name]]
            assert joined == answer["meta_info"][name], name


async def test_a_stream_that_repeats_too_much_is_told_what_to_do(served: Served) -> None:
    body = {
        "input_ids": [5] * 100,
        "sampling_params": {"n": 64, "max_new_tokens": 400},
        "return_logprob": True,
        "top_logprobs_num": 8,
        "stream": True,
    }
    response = await served.http.post("/generate", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "incremental")
    assert (await served.http.post("/generate", json={**body, "incremental": True})).status_code == 200
