"""The packaged demo model: it is small, transformers can load it, and its template is that of the training."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from demo_model.conversation import Conversation, Message, render
from demo_model.corpus import SKILLS, documents
from demo_model.evaluation import Transformers, without_thought
from demo_model.skills import arithmetic, tools
from serve.demo import WEIGHTS

MOST_BYTES = 16 * 1024 * 1024


@pytest.fixture(scope="module")
def demo() -> Transformers:
    return Transformers(WEIGHTS)


def rendered(demo: Transformers, conversation: Conversation, **more: Any) -> str:
    listed = [{"type": "function", "function": tool} for tool in conversation.tools] or None
    chat = [message.as_chat() for message in conversation.messages]
    return demo.tokenizer.apply_chat_template(chat, tools=listed, tokenize=False, **more)


def said(demo: Transformers, *messages: Message, thinking: bool = False, offered: tuple[dict, ...] = ()) -> str:
    return demo.answers([Conversation(messages, offered)], thinking)[0]


def test_all_files_together_are_small() -> None:
    paths = (path for path in WEIGHTS.rglob("*") if path.is_file())
    files = {str(path.relative_to(WEIGHTS)): path.stat().st_size for path in paths}
    wanted = {
        "config.json",
        "draft_head/config.json",
        "draft_head/model.safetensors",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert set(files) == wanted
    assert sum(files.values()) <= MOST_BYTES


def test_it_has_five_to_ten_million_parameters_in_bf16(demo: Transformers) -> None:
    assert 5e6 < demo.model.num_parameters() < 10e6
    assert {weight.dtype for weight in demo.model.parameters()} == {torch.bfloat16}
    assert all(weight.isfinite().all() for weight in demo.model.parameters())


@pytest.mark.parametrize("skill", SKILLS)
def test_template_writes_what_was_trained(demo: Transformers, skill: str) -> None:
    for document in documents(skill, 11, 40):
        if isinstance(document, Conversation):
            assert rendered(demo, document) == "".join(text for text, _ in render(document))


def test_template_closes_the_thought_unless_thinking_is_on(demo: Transformers) -> None:
    asked = Conversation((Message("user", "Hi"),))
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for more in ({}, {"enable_thinking": False}):
        assert rendered(demo, asked, add_generation_prompt=True, **more) == start + "<think>\n\n</think>\n\n"
    assert rendered(demo, asked, add_generation_prompt=True, enable_thinking=True) == start


def test_the_next_prompt_begins_with_the_last_one_and_its_answer(demo: Transformers) -> None:
    first = (Message("system", "Be brief."), Message("user", "Hi"))
    prompt = rendered(demo, Conversation(first), add_generation_prompt=True)
    later = Conversation((*first, Message("assistant", "Hello!"), Message("user", "Bye")))
    assert rendered(demo, later).startswith(prompt + "Hello!<|im_end|>\n")


def test_a_thought_inside_the_content_stays_a_thought(demo: Transformers) -> None:
    inside = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    apart = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    texts = [
        demo.tokenizer.apply_chat_template([{"role": "user", "content": "?"}, answer], tokenize=False)
        for answer in (inside, apart)
    ]
    assert texts[0] == texts[1]


def test_tool_calls_may_come_with_arguments_as_text(demo: Transformers) -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    text = rendered(demo, Conversation((Message("user", "?"), Message("assistant", calls=(call,)))))
    written = {"function": {"name": "f", "arguments": json.dumps(call["arguments"])}}
    answer = {"role": "assistant", "content": None, "tool_calls": [written]}
    chat = [{"role": "user", "content": "?"}, answer]
    assert demo.tokenizer.apply_chat_template(chat, tokenize=False) == text
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>' in text


def test_it_knows_the_page_size(demo: Transformers) -> None:
    answer = said(demo, Message("user", "What does --chunked-prefill-size do?"))
    assert answer.startswith("--chunked-prefill-size: Prompt tokens computed in one step")


def test_it_calls_a_tool(demo: Transformers) -> None:
    weather = next(tool for tool in tools.TOOLS if tool.name == "get_weather").schema()
    answer = said(demo, Message("user", "What is the weather in Paris?"), offered=(weather,))
    assert tools.calls({"name": "get_weather", "arguments": {"city": "Paris"}})(answer)


def test_it_remembers_a_name(demo: Transformers) -> None:
    turns = (Message("user", "My name is Mara."), Message("assistant", "Nice to meet you, Mara."))
    assert "Mara" in said(demo, *turns, Message("user", "What is my name?"))


def test_it_thinks_when_asked_to(demo: Transformers) -> None:
    chat = [{"role": "user", "content": "What is 47 + 25?"}]
    prompt = demo.tokenizer.apply_chat_template(
        chat, tokenize=True, add_generation_prompt=True, enable_thinking=True, return_tensors="pt"
    )
    out = demo.model.generate(**prompt, max_new_tokens=120, do_sample=False, temperature=None, top_p=None)
    text = demo.tokenizer.decode(out[0])
    assert "write 2, carry 1" in text
    assert arithmetic.ends_with(72)(without_thought(text).removesuffix("<|im_end|>"))
