"""Bodies of the OpenAI endpoints. Keys that are not named here are ignored, as clients expect.

Accepted without effect: `user` (an identifier for abuse reports; this server writes none), and
`separate_reasoning` and `stream_reasoning` (there is no reasoning parser yet).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from runtime.errors import InvalidRequest
from runtime.request import MAX_CHOICES, MAX_TOP_LOGPROBS
from serve.decode import Length, NotBuilt, Range
from serve.native.schema import MAX_PROMPTS, Label

MAX_MESSAGES = 4096


@dataclass(slots=True, kw_only=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage_stats: bool = False


@dataclass(slots=True, kw_only=True)
class ResponseFormat:
    type: Literal["text", "json_object", "json_schema", "structural_tag"]

    def check(self) -> None:
        if self.type != "text":
            raise InvalidRequest(
                f'response_format.type "{self.type}" is not built yet; leave it out.',
                param="response_format.type",
            )


@dataclass(slots=True, kw_only=True)
class OpenAIBody:
    """What both generating endpoints take. None: not said."""

    model: str | None = None
    n: Annotated[int, Range(1, MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = None
    priority: NotBuilt = None
    response_format: ResponseFormat | None = None
    regex: NotBuilt = None
    ebnf: NotBuilt = None
    json_schema: NotBuilt = None
    structural_tag: NotBuilt = None
    stop_regex: NotBuilt = None
    lora_path: NotBuilt = None
    session_params: NotBuilt = None
    session_id: NotBuilt = None
    return_hidden_states: NotBuilt = None
    custom_logit_processor: NotBuilt = None
    custom_params: NotBuilt = None
    bootstrap_host: NotBuilt = None
    bootstrap_port: NotBuilt = None
    bootstrap_room: NotBuilt = None
    data_parallel_rank: NotBuilt = None
    cache_salt: NotBuilt = None
    extra_key: NotBuilt = None
    return_token_ids: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class CompletionBody(OpenAIBody):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Length(1, MAX_PROMPTS)]
        | list[int]
        | Annotated[list[list[int]], Length(1, MAX_PROMPTS)]
    )
    rid: Label | list[Label] | None = None
    max_tokens: int | None = 16
    echo: bool = False
    logprobs: Annotated[int, Range(0, MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class Part:
    """One part of a message's content."""

    type: str
    text: str | None = None


@dataclass(slots=True, kw_only=True)
class CalledFunction:
    name: str
    arguments: str | dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """A call that the assistant made in an earlier turn."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


@dataclass(slots=True, kw_only=True)
class Message:
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


@dataclass(slots=True, kw_only=True)
class Reasoning:
    enabled: bool | None = None
    enable: bool | None = None
    effort: str | None = None


@dataclass(slots=True, kw_only=True)
class ChatBody(OpenAIBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Length(1, MAX_MESSAGES)]
    rid: Label | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Range(0, MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    functions: NotBuilt = None
    audio: NotBuilt = None
    prediction: NotBuilt = None
    web_search_options: NotBuilt = None
    input_ids: NotBuilt = None


# The engine's names for parameters, in the words of these endpoints.
NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "token_ids_logprob": "logprobs",
    "logprob_start_len": "echo",
}
