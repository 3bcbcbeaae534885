"""The evaluation: held-out questions of every skill, answered greedily, as a table.

The answers come from transformers in this process, or from a server over HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Protocol

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model.conversation import Conversation, Message, Question, call_text
from demo_model.skills import (
    arguments,
    arithmetic,
    conversions,
    dialogue,
    extraction,
    penstock,
    refusal,
    repeating,
    tables,
    tools,
)  # fmt: skip

MOST_TOKENS = 160
BATCH = 32


class Backend(Protocol):
    """Answers conversations greedily."""

    def answers(self, asked: Sequence[Conversation], thinking: bool) -> list[str]:
        """Return the answer to each conversation, without the thought, and with tool calls as text."""
        ...


def without_thought(text: str) -> str:
    """Return the text after the thought."""
    return text.rsplit("</think>", 1)[-1].strip()


def _tools(conversation: Conversation) -> list[dict] | None:
    return [{"type": "function", "function": tool} for tool in conversation.tools] or None


class Transformers:
    """Runs the exported folder with transformers."""

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
    """A running server, which answers through its chat-completions endpoint."""

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


SEED = 20_000  # seed of the questions; no training document has it


@dataclass(frozen=True)
class Exam:
    """One line of the table. `goal` is the required fraction of correct answers, if any."""

    name: str
    questions: Callable[[Random], list[Question]]
    goal: float | None = None


EXAMS: tuple[Exam, ...] = (
    Exam("arguments: what does it do", lambda rng: arguments.questions(rng, 2), 0.90),
    Exam("arithmetic, at once", lambda rng: arithmetic.questions(rng, 300, thinking=False), 0.90),
    Exam("arithmetic, with thinking", lambda rng: arithmetic.questions(rng, 150, thinking=True), 0.90),
    Exam("small products", lambda rng: arithmetic.questions(rng, 100, thinking=False, signs="*")),
    Exam("JSON extraction, exact", lambda rng: extraction.questions(rng, 200), 0.85),
    Exam("tool calls, exact", lambda rng: tools.questions(rng, 192), 0.85),
    Exam("tool results told, exact", lambda rng: tools.result_questions(rng, 96)),
    Exam("tables", tables.questions, 0.80),
    Exam("50 three-turn dialogues", dialogue.written, 0.80),
    Exam("generated dialogues", dialogue.questions),
    Exam("unit conversions", lambda rng: conversions.questions(rng, 150)),
    Exam("repeating words", lambda rng: repeating.questions(rng, 100)),
    Exam("about Penstock", penstock.questions),
    Exam("refusals", lambda rng: refusal.questions(rng, 100)),
)


@dataclass(frozen=True)
class Score:
    """The result of one exam."""

    exam: Exam
    right: int
    asked: int
    wrong: tuple[tuple[Question, str], ...]

    @property
    def share(self) -> float:
        return self.right / self.asked


def take(exam: Exam, backend: Backend, most: int = 0) -> Score:
    """Ask the questions of one exam, or a sample of `most` of them."""
    rng = Random(f"{SEED}/{exam.name}")
    questions = exam.questions(rng)
    if most and len(questions) > most:
        questions = rng.sample(questions, most)
    answers = last_answers(backend, [question.asked for question in questions], questions[0].thinking)
    wrong = tuple((q, answer) for q, answer in zip(questions, answers, strict=True) if not q.right(answer))
    return Score(exam, len(questions) - len(wrong), len(questions), wrong)


def last_answers(backend: Backend, asked: list[Conversation], thinking: bool) -> list[str]:
    """Return the answers to the last user messages.

    If a user message follows another one directly, the model first answers the earlier message.
    """
    pauses = [_pause(conversation.messages) for conversation in asked]
    places = [place for place, pause in enumerate(pauses) if pause]
    if not places:
        return backend.answers(asked, thinking)
    begun = [replace(asked[place], messages=asked[place].messages[: pauses[place]]) for place in places]
    grown = list(asked)
    for place, answer in zip(places, backend.answers(begun, thinking), strict=True):
        messages, pause = asked[place].messages, pauses[place]
        grown[place] = replace(
            asked[place], messages=(*messages[:pause], Message("assistant", answer), *messages[pause:])
        )
    return last_answers(backend, grown, thinking)


def _pause(messages: tuple[Message, ...]) -> int:
    """Return the position between two user messages where an answer is missing, or 0 if none is missing."""
    for place, (first, second) in enumerate(pairwise(messages), start=1):
        if first.role == second.role == "user":
            return place
    return 0


def line(score: Score) -> str:
    """Return one row of the table, in Markdown."""
    goal = f"{score.exam.goal:.0%}" if score.exam.goal else ""
    return f"| {score.exam.name} | {score.asked} | {score.share:.1%} | {goal} |"


HEADER = "| exam | questions | right | goal |\n|---|---|---|---|"
