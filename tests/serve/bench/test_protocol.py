from __future__ import annotations

import pytest

from runtime.errors import ConfigurationError
from serve.bench.protocol import BACKENDS, Asking
from serve.bench.workload import Prompt

TEXT = Prompt(text="hello", prompt_tokens=1, output_tokens=5)
IDS = Prompt(ids=(1, 2), prompt_tokens=2, output_tokens=5)
CHAT = Prompt(messages=({"role": "user", "content": "hi"},), prompt_tokens=None, output_tokens=5)
ASKING = Asking(model="m")


def test_chat_wraps_a_text_in_a_message() -> None:
    body = BACKENDS["openai-chat"].ask(TEXT, ASKING)
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("m", 5, True, True)
    assert body["stream_options"] == {"include_usage": True}


def test_completions_take_texts_and_ids() -> None:
    assert BACKENDS["openai"].ask(TEXT, ASKING)["prompt"] == "hello"
    assert BACKENDS["openai"].ask(IDS, ASKING)["prompt"] == [1, 2]


def test_native_sends_sampling_params() -> None:
    body = BACKENDS["native"].ask(IDS, Asking(model=None, ignore_eos=False))
    sampling = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": False}
    assert body == {"input_ids": [1, 2], "sampling_params": sampling, "stream": True}


def test_ignore_eos_can_be_left_out() -> None:
    assert "ignore_eos" not in BACKENDS["openai"].ask(TEXT, Asking(model="m", ignore_eos=False))


def test_extra_body_wins() -> None:
    body = BACKENDS["openai"].ask(TEXT, Asking(model="m", extra={"temperature": 1, "user": "u"}))
    assert (body["temperature"], body["user"]) == (1, "u")


@pytest.mark.parametrize(("backend", "prompt"), [("openai-chat", IDS), ("openai", CHAT), ("native", CHAT)])
def test_prompts_of_the_wrong_kind_are_refused(backend: str, prompt: Prompt) -> None:
    with pytest.raises(ConfigurationError, match="cannot take"):
        BACKENDS[backend].ask(prompt, ASKING)
