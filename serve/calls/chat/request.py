"""The chat request that all chat APIs convert their bodies to, before it is checked and rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from runtime.grammar_spec import Grammar
from runtime.request import USUAL, LogprobParams, Service

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(slots=True, kw_only=True)
class ChatRequest:
    """A chat from any API. Fields and sampling parameters have the names of OpenAI's chat completions.

    Errors use these names too.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters, as `read_sampling` returns them
    tools: Sequence[Mapping[str, Any]] | None = None  # each {"type": "function", "function": {...}}
    tool_choice: str | Mapping[str, Any] | None = None  # None: "auto" if there are tools, else "none"
    parallel_tool_calls: bool = True
    legacy_calls: bool = False  # whether calls are answered in OpenAI's older form, `function_call`
    grammar: Grammar | None = None  # constraint on the answer's text (response_format)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables of the chat template
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    include_reasoning: bool = True
    max_thinking_tokens: int | None = None  # reasoning is ended after this number of tokens; None: no limit
    logprobs: LogprobParams | None = None
    # Alternatives per token in the answer, for the output and the prompt. None: the answer shows no log-probabilities.
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    returns_hidden: bool = False  # whether the answer has the hidden state of the last token
    experts_from: int | None = None  # index of the first token whose routed experts are returned; None: no experts
    returns_ids: bool = False  # whether the answer has the ids of the prompt and the output
    add_special_tokens: bool = False  # usually false, because the chat template writes the special tokens
    keep_last: int | None = None  # number of tokens to keep at the end of the prompt; see `Request.keep_last`
    cut_output: bool = False  # whether `max_new_tokens` is lowered to what fits into the context, instead of refused
    namespace: tuple[str | None, str | None] | None = None  # (cache_salt, extra_key) of the prefix cache
    priority: int | None = None  # None: the priority of the service tier, if any
    service: Service = USUAL  # timeout, service tier and cache pin
    label: str = field(default_factory=lambda: uuid4().hex)


def thinking_switch(enabled: bool) -> dict[str, bool]:
    """Return the chat-template variables that switch reasoning on or off, as Qwen and as DeepSeek templates name it."""
    return {"enable_thinking": enabled, "thinking": enabled}


def effort_switch(effort: str) -> dict[str, bool | str]:
    """Return the chat-template variables for a `reasoning_effort`; "none" switches reasoning off, other values on."""
    return {**thinking_switch(effort != "none"), "reasoning_effort": effort}
