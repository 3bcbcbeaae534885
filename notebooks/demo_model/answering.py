"""Who answers the questions of the evaluation: transformers in this process, or a server over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model.conversation import Conversation, call_text

MOST_TOKENS = 160
BATCH = 32


class Backend(Protocol):
    """Answers conversations greedily."""

    def answers(self, asked: Sequence[Conversation], thinking: bool) -> list[str]:
        """The text after the thought, tool calls written out, for each conversation."""
        ...


def without_thought(text: str) -> str:
    """What stands after the thought."""
    return text.rsplit("</think>", 1)[-1].strip()


def _tools(conversation: Conversation) -> list[dict] | None:
    return [{"type": "function", "function": tool} for tool in conversation.tools] or None


class Transformers:
    """The exported folder, run by transformers."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model = model.to(device).eval()

    def answers(self, asked: Sequence[Conversation], thinking: bool) -> list[str]:
        prompts = [self._prompt(conversation, thinking) for conversation in asked]
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        found = [""] * len(prompts)
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            for place, text in zip(places, self._generate([prompts[place] for place in places]), strict=True):
                found[place] = without_thought(text)
        return found

    def _prompt(self, conversation: Conversation, thinking: bool) -> str:
        return self.tokenizer.apply_chat_template(
            [message.as_chat() for message in conversation.messages],
            tools=_tools(conversation),
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=thinking,
        )

    @torch.inference_mode()
    def _generate(self, prompts: list[str]) -> list[str]:
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.model.device)
        out = self.model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=MOST_TOKENS,
            do_sample=False, temperature=None, top_p=None,
        )  # fmt: skip
        return self.tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


class Server:
    """A running server, asked through its chat-completions endpoint."""

    def __init__(self, address: str, parallel: int = 8) -> None:
        self.client = httpx.Client(base_url=address, timeout=120)
        self.parallel = parallel

    def answers(self, asked: Sequence[Conversation], thinking: bool) -> list[str]:
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(lambda conversation: self._answer(conversation, thinking), asked))

    def _answer(self, conversation: Conversation, thinking: bool) -> str:
        body = {
            "model": "default",
            "messages": [message.as_chat() for message in conversation.messages],
            "temperature": 0,
            "max_tokens": MOST_TOKENS,
            "chat_template_kwargs": {"enable_thinking": thinking},
        }
        if conversation.tools:
            body["tools"] = _tools(conversation)
        reply = self.client.post("/v1/chat/completions", json=body)
        reply.raise_for_status()
        message = reply.json()["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        parsed = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls]
        written = "\n".join(call_text(call) for call in parsed)
        return without_thought(f"{message.get('content') or ''}{written}")
