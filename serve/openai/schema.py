"""Bodies of the OpenAI endpoints. Keys that no API knows are ignored and logged, at any depth, as clients expect; what
other servers know is named here.

Accepted without effect: `user` (an identifier for abuse reports; this server writes none), and `WITHOUT_EFFECT`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from runtime.grammar_spec import Grammar
from runtime.request import MAX_TOP_LOGPROBS
from runtime.sampling_params import MAX_INT32, Api
from serve.decode import Length, NotBuilt, Range
from serve.prompts import MAX_PROMPTS, Label, Priority, Salt
from serve.sampling import sampling_names

MAX_MESSAGES = 4096
ThinkingTokens = Annotated[int, Range(0, MAX_INT32)]
# What clients send to OpenAI and to other servers that changes no answer here.
WITHOUT_EFFECT = frozenset(
    {
        "cache_prompt",  # every prefix is cached
        "early_stopping",  # this and the next but one belong to beams, which are refused
        "guided_decoding_backend",
        "length_penalty",
        "media_io_kwargs",  # of images, which are refused
        "metadata",
        "prediction",  # makes the same answer faster there
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    }
)


@dataclass(slots=True, kw_only=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: NotBuilt = None

    @property
    def in_every_event(self) -> bool:
        """Whether each event says what was used so far."""
        return self.include_usage and self.continuous_usage_stats


@dataclass(slots=True, kw_only=True)
class OpenAIBody:
    """What both generating endpoints take beside the sampling parameters, which `sampling` holds.

    None: not given.
    """

    api: ClassVar[Api]
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT

    sampling: dict[str, Any] = field(init=False, default_factory=dict)  # as `read_sampling` gives them
    grammar: Grammar | None = field(init=False, default=None)  # of response_format or structured_outputs
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: Priority | None = None  # with --enable-priority-scheduling
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None  # vLLM's
    guided_whitespace_pattern: NotBuilt = None
    lora_path: NotBuilt = None
    session_params: NotBuilt = None
    session_id: NotBuilt = None
    return_hidden_states: NotBuilt = None
    custom_logit_processor: NotBuilt = None
    bootstrap_host: NotBuilt = None
    bootstrap_port: NotBuilt = None
    bootstrap_room: NotBuilt = None
    data_parallel_rank: NotBuilt = None
    return_token_ids: NotBuilt = None
    truncate_prompt_tokens: Annotated[int, Range(-1, MAX_INT32)] | None = None
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: NotBuilt = None
    use_beam_search: NotBuilt = None
    best_of: int | None = None
    logits_processors: NotBuilt = None
    repetition_detection: NotBuilt = None
    kv_transfer_params: NotBuilt = None
    vllm_xargs: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class CompletionBody(OpenAIBody):
    """The body of /v1/completions."""

    api: ClassVar[Api] = "completions"

    prompt: (
        str
        | Annotated[list[str], Length(1, MAX_PROMPTS)]
        | list[int]
        | Annotated[list[list[int]], Length(1, MAX_PROMPTS)]
    )
    rid: Label | list[Label] | None = None
    cache_salt: Salt | list[Salt] | None = None
    extra_key: Salt | list[Salt] | None = None
    echo: bool = False
    logprobs: Annotated[int, Range(0, MAX_TOP_LOGPROBS)] | None = None
    prompt_embeds: NotBuilt = None
    suffix: str | None = None  # what comes after the text to be written
    add_special_tokens: bool = True


@dataclass(slots=True, kw_only=True)
class Part:
    """One part of a message's content."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control"})  # every prefix is cached

    type: str
    text: str | None = None


@dataclass(slots=True, kw_only=True)
class CalledFunction:
    without_effect: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})  # by a client, of `arguments`

    name: str
    arguments: str | dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """A call that the assistant made in an earlier turn."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"index", "provider_specific_fields"})

    function: CalledFunction
    id: str | None = None
    type: str = "function"


@dataclass(slots=True, kw_only=True)
class Message:
    # What clients send back of an answer, and marks for caches.
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "cache_control", "parsed", "provider_specific_fields", "refusal"}
    )

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name for it
    function_call: NotBuilt = None
    audio: NotBuilt = None
    images: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class Reasoning:
    without_effect: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary"})  # it is given whole

    enabled: bool | None = None
    enable: bool | None = None
    effort: str | None = None
    max_tokens: ThinkingTokens | None = None  # as max_thinking_tokens
    exclude: bool = False  # as include_reasoning: false


@dataclass(slots=True, kw_only=True)
class Thinking:
    """As DeepSeek, Z.ai and Moonshot say it."""

    type: Literal["enabled", "disabled"]
    budget_tokens: ThinkingTokens | None = None  # as max_thinking_tokens


@dataclass(slots=True, kw_only=True)
class ChatBody(OpenAIBody):
    """The body of /v1/chat/completions."""

    api: ClassVar[Api] = "chat"

    messages: Annotated[list[Message], Length(1, MAX_MESSAGES)]
    rid: Label | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
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
    include_reasoning: bool = True
    max_thinking_tokens: ThinkingTokens | None = None
    thinking_token_budget: ThinkingTokens | None = None  # vLLM's name for it
    thinking: Thinking | None = None
    enable_thinking: bool | None = None  # as chat_template_kwargs say it
    modalities: list[Literal["text"]] | None = None
    functions: NotBuilt = None
    function_call: NotBuilt = None
    audio: NotBuilt = None
    n_probs: NotBuilt = None
    web_search_options: NotBuilt = None
    input_ids: NotBuilt = None
    echo: NotBuilt = None
    chat_template: NotBuilt = None
    documents: NotBuilt = None
    mm_processor_kwargs: NotBuilt = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # the chat template writes its own


# The engine's names for parameters, in the words of these endpoints, which share them.
NAMES: Mapping[str, str] = {
    **sampling_names("chat"),
    "token_ids_logprob": "logprobs",
    "logprob_start_len": "echo",
}
