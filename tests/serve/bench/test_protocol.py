from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigurationError
from serve.bench.client import Received, Response
from serve.bench.metrics import Outcome
from serve.bench.protocol import BACKENDS, RequestDefaults, observe, split_events
from serve.bench.workload import Prompt

TEXT = Prompt(text="hello", prompt_tokens=1, output_tokens=5)
IDS = Prompt(ids=(1, 2), prompt_tokens=2, output_tokens=5)
CHAT = Prompt(messages=({"role": "user", "content": "hi"},), prompt_tokens=None, output_tokens=5)
DEFAULTS = RequestDefaults(model="m")


def test_chat_wraps_a_text_in_a_message() -> None:
    body = BACKENDS["openai-chat"].request_body(TEXT, DEFAULTS)
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("m", 5, True, True)
    assert body["stream_options"] == {"include_usage": True}


def test_completions_take_texts_and_ids() -> None:
    assert BACKENDS["openai"].request_body(TEXT, DEFAULTS)["prompt"] == "hello"
    assert BACKENDS["openai"].request_body(IDS, DEFAULTS)["prompt"] == [1, 2]


def test_native_sends_sampling_params() -> None:
    body = BACKENDS["native"].request_body(IDS, RequestDefaults(model=None, ignore_eos=False))
    sampling = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": False}
    assert body == {"input_ids": [1, 2], "sampling_params": sampling, "stream": True}


def test_ignore_eos_can_be_left_out() -> None:
    assert "ignore_eos" not in BACKENDS["openai"].request_body(TEXT, RequestDefaults(model="m", ignore_eos=False))


def test_extra_body_wins() -> None:
    body = BACKENDS["openai"].request_body(TEXT, RequestDefaults(model="m", extra={"temperature": 1, "user": "u"}))
    assert (body["temperature"], body["user"]) == (1, "u")


@pytest.mark.parametrize(("backend", "prompt"), [("openai-chat", IDS), ("openai", CHAT), ("native", CHAT)])
def test_prompts_of_the_wrong_kind_are_refused(backend: str, prompt: Prompt) -> None:
    with pytest.raises(ConfigurationError, match="does not accept"):
        BACKENDS[backend].request_body(prompt, DEFAULTS)


PROMPT = Prompt(text="x", prompt_tokens=4, output_tokens=3)


def frame(event: dict[str, Any] | str) -> bytes:
    return f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()


def seen(backend: str, events: Sequence[tuple[float, dict[str, Any] | str]], status: int = 200) -> Outcome:
    received = [Received(at_s, frame(event)) for at_s, event in events]
    response = Response(status=status, received=received, ended_s=received[-1].at_s)
    return observe(PROMPT, response, BACKENDS[backend], sent_s=10.0, start_s=9.0)


def chat(text: str = "", finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}], **more}


def native(total: int, ids: list[int], finish: str | None = None) -> dict[str, Any]:
    meta = {"prompt_tokens": 9, "completion_tokens": total, "cached_tokens": 2}
    meta["finish_reason"] = {"type": finish} if finish else None  # type: ignore[assignment]
    return {"text": "ab" * total, "output_ids": ids, "meta_info": meta}


@given(st.lists(st.integers(0, 40), max_size=6))
def test_events_do_not_depend_on_how_the_network_cut_them(cuts: list[int]) -> None:
    stream = b": hello\n\ndata: one\r\n\r\nevent: x\ndata: two\ndata: lines\n\ndata:[DONE]\n\n"
    edges = [0, *sorted(cuts), len(stream)]
    received = [Received(float(n), stream[a:b]) for n, (a, b) in enumerate(pairwise(edges))]
    assert [event.data for event in split_events(received)] == [b"one", b"two\nlines", b"[DONE]"]


def test_an_event_has_the_time_of_its_last_byte() -> None:
    received = [Received(1.0, b"data: a"), Received(2.0, b"b\n\nda"), Received(3.0, b"ta: c\n\ndata: cut")]
    assert split_events(received) == [(2.0, b"ab"), (3.0, b"c")]


def test_chat_latencies_start_with_the_first_text() -> None:
    usage = {"prompt_tokens": 6, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
    outcome = seen(
        "openai-chat",
        [
            (10.5, chat()),
            (11.0, chat("a")),
            (11.25, chat("b")),
            (12.0, chat("c")),
            (12.5, chat(finish="length")),
            (13.0, {"choices": [], "usage": usage}),
            (13.0, "[DONE]"),
        ],
    )
    assert outcome.error is None
    assert (outcome.started_s, outcome.ttft_s, outcome.e2e_s, outcome.decode_s) == (1.0, 1.0, 3.0, 1.0)
    assert outcome.itl_s == (0.25, 0.75)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (6, 3, 5)
    assert outcome.tpot_s == 0.5
    assert outcome.text == "abc"


def test_a_gap_is_shared_by_the_tokens_that_ended_it() -> None:
    events = [(11.0, native(1, [1])), (12.0, native(5, [2, 3, 4, 5])), (12.5, native(6, [6], "length"))]
    outcome = seen("native", events)
    assert outcome.itl_s == (0.25, 0.25, 0.25, 0.25, 0.5)
    assert (outcome.output_tokens, outcome.cached_tokens, outcome.text) == (6, 2, "ab" * 6)


def test_native_tokens_without_text_count() -> None:
    first = {**native(1, [1]), "text": ""}
    assert seen("native", [(11.0, first), (12.0, native(2, [2], "stop"))]).ttft_s == 1.0


def test_reasoning_and_tool_calls_are_output() -> None:
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": None}]}
    call = {"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]}
    outcome = seen("openai-chat", [(11.0, thought), (12.0, call), (12.0, chat(finish="stop"))])
    assert (outcome.ttft_s, outcome.itl_s, outcome.text) == (1.0, (1.0,), "hmf{}")


def test_without_usage_the_given_counter_counts() -> None:
    received = [Received(11.0, frame(chat("a b"))), Received(12.0, frame(chat(" c", "stop")))]
    response = Response(status=200, received=received, ended_s=12.0)
    backend = BACKENDS["openai-chat"]
    counted = observe(PROMPT, response, backend, sent_s=0, start_s=0, count=lambda text: len(text.split()))
    assert (counted.output_tokens, counted.prompt_tokens, counted.cached_tokens) == (3, 4, None)
    assert observe(PROMPT, response, backend, sent_s=0, start_s=0).output_tokens == 2


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([(11.0, chat("a")), (12.0, "{oops")], "not JSON"),
        ([(11.0, chat("a")), (12.0, "7")], "not an object"),
        ([(11.0, chat("a")), (12.0, {"error": {"message": "broken step"}})], "broken step"),
        ([(11.0, {"object": "error", "message": "too long"})], "too long"),
        ([(11.0, chat("a"))], "ended before"),
        ([(11.0, chat(finish="stop")), (11.0, "[DONE]")], "no output"),
    ],
)
def test_broken_streams_are_errors(events: list[tuple[float, Any]], words: str) -> None:
    outcome = seen("openai-chat", events)
    assert outcome.error is not None
    assert words in outcome.error
    assert outcome.output_tokens == 0


def test_an_aborted_native_request_is_an_error() -> None:
    aborted = native(2, [2])
    aborted["meta_info"]["finish_reason"] = {"type": "abort", "message": "queue is full"}
    assert seen("native", [(11.0, native(1, [1])), (12.0, aborted)]).error == "queue is full"


def test_other_statuses_are_errors_with_the_servers_words() -> None:
    outcome = seen("openai", [(11.0, {"message": "no such model"})], status=404)
    assert outcome.error is not None
    assert outcome.error.startswith("HTTP 404: ")
    assert "no such model" in outcome.error
