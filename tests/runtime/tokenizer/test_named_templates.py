"""Built-in chat templates, against prompts as the families' publishers write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.config.chat_templates import CHAT_TEMPLATES, middle_template
from runtime.errors import ConfigurationError
from runtime.tokenizer.chat_template import load_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Who?"},
]
PROMPTS = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n",
    "gemma-it": "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
    "<start_of_turn>user\nWho?<end_of_turn>\n<start_of_turn>model\n",
    "llama-2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello! </s><s>[INST] Who? [/INST]",
    "llama-3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama-4": "<s><|header_start|>system<|header_end|>\n\nBe brief.<|eot|>"
    "<|header_start|>user<|header_end|>\n\nHi<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\nHello!<|eot|><|header_start|>user<|header_end|>\n\nWho?<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\n",
    "mistral": "<s>[INST] Hi [/INST] Hello!</s>[INST] Be brief.\n\nWho? [/INST]",
    "vicuna_v1.1": "Be brief. USER: Hi ASSISTANT: Hello!</s> USER: Who? ASSISTANT:",
}


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_tokenizers_without_bos_and_eos_tokens_can_use_every_template(name: str) -> None:
    template = load_template(name, {}, {})
    assert template is not None
    assert template.render(CHAT) == PROMPTS[name].replace("<s>", "").replace("</s>", "")


def rendered(name: str, count: int = 4) -> str:
    template = load_template(name, {"default": "{{ not_ours }}"}, SPECIAL)
    assert template is not None
    return template.render(CHAT[-count:] if count < 4 else CHAT)


def test_prompts_are_those_of_the_families():
    assert {name: rendered(name) for name in CHAT_TEMPLATES} == PROMPTS
    assert rendered("llama-3-instruct") == PROMPTS["llama-3"]
    assert rendered("mistral", 3) == "<s>[INST] Hi [/INST] Hello!</s>[INST] Who? [/INST]"
    assert rendered("llama-2", 1) == "<s>[INST] Who? [/INST]"
    with pytest.raises(ConfigurationError, match="names are chatml, gemma-it"):
        load_template("llama-5", {}, SPECIAL)


def test_prompts_with_a_hole(tmp_path: Path):
    assert middle_template("star_coder").prompt("a", "b") == "<fim_prefix>a<fim_suffix>b<fim_middle>"
    assert middle_template("deepseek_coder").prompt("a", "b") == "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"
    own = tmp_path / "own.json"
    marks = {"fim_begin_token": "<P>", "fim_middle_token": "<M>", "fim_end_token": "<S>"}
    own.write_text(json.dumps({"name": "own", **marks, "fim_position": "end"}))
    assert middle_template(str(own)).prompt("a", "b") == "<P>a<S>b<M>"
    own.write_text(json.dumps(marks))
    for wrong in (str(own), "nothing"):
        with pytest.raises(ConfigurationError, match="--completion-template"):
            middle_template(wrong)
