"""Bodies of the OpenAI endpoints.

Keys that no API has, at any depth, are ignored and logged, as clients expect. Fields of other servers are declared
here. `user`, OpenAI's identifier for abuse reports, and the fields in `WITHOUT_EFFECT` are accepted without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from runtime.grammar_spec import Grammar
from runtime.request import MAX_TOP_LOGPROBS
from runtime.sampling_params import MAX_INT32, Api
from serve.calls.bootstrap import Hosts, Ports, Rooms
from serve.calls.chat.request import Effort
from serve.calls.decode import Length, NotBuilt, NotBuiltNumber, NotBuiltOptions, Range
from serve.calls.prompts import (
    MAX_MESSAGES,
    AdapterName,
    CacheKey,
    Ids,
    Label,
    Priority,
    Salt,
    StartLength,
    Texts,
    Tier,
    Timeout,
)
from serve.calls.sampling import sampling_names

ThinkingTokens = Annotated[int, Range(0, MAX_INT32)]
# Fields of OpenAI and other servers that do not change this server's answers.
WITHOUT_EFFECT = frozenset(
    {
        "cache_prompt",  # all prefixes are cached anyway
        "early_stopping",  # an option of beam search, like length_penalty; beam search itself is refused
        "guided_decoding_backend",
        "length_penalty",
        "metadata",
        "mirostat_eta",  # options of mirostat sampling, which itself is refused
        "mirostat_tau",
        "prediction",  # a predicted output, which only speeds up the answer
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
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
        """Whether each event contains the usage so far."""
        return self.include_usage and self.continuous_usage_stats


@dataclass(slots=True, kw_only=True)
class OpenAIBody:
    """Fields of both generating endpoints. `sampling` holds the sampling parameters. None means "not set"."""

    api: ClassVar[Api]
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT

    # Sampling parameters, as `read_sampling` returns them.
    sampling: dict[str, Any] = field(init=False, default_factory=dict)
    grammar: Grammar | None = field(init=False, default=None)  # from response_format or structured_outputs
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: Priority | None = None  # requires --enable-priority-scheduling
    timeout_s: Timeout | None = None  # seconds until the whole answer is due
    service_tier: Tier | None = None  # selects a priority (--service-tier-priorities)
    prompt_cache_key: CacheKey | None = None  # the prompt's pages stay cached under this key (--prefix-pin-share)
    session_id: CacheKey | None = None  # like prompt_cache_key, for all requests of a conversation
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None  # vLLM's output constraints

    guided_whitespace_pattern: NotBuilt = None
    session_params: NotBuilt = None
    return_hidden_states: bool = False  # whether to return the last token's `hidden_states`; see `GenerateBody`
    return_routed_experts: bool = False  # whether choices have `sgl_ext.routed_experts`; see `GenerateBody`
    routed_experts_start_len: StartLength = 0
    bootstrap_host: Hosts | None = None  # prefill server of the prompt, in the fields of SGLang's routers
    bootstrap_port: Ports | None = None
    bootstrap_room: Rooms | None = None
    data_parallel_rank: NotBuilt = None
    return_token_ids: bool = False
    truncate_prompt_tokens: Annotated[int, Range(-1, MAX_INT32)] | None = None
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: Annotated[int, Range(0, MAX_TOP_LOGPROBS)] | None = None  # vLLM's field; not with stream
    use_beam_search: NotBuilt = None
    best_of: int | None = None
    logits_processors: NotBuilt = None
    repetition_detection: NotBuilt = None
    moderation: NotBuilt = None
    kv_transfer_params: NotBuilt = None
    vllm_xargs: NotBuilt = None

    @property
    def experts_from(self) -> int | None:
        """Value of `Request.experts_from` for the requests of this call."""
        return self.routed_experts_start_len if self.return_routed_experts else None


@dataclass(slots=True, kw_only=True)
class CompletionBody(OpenAIBody):
    """The body of /v1/completions."""

    api: ClassVar[Api] = "completions"

    prompt: Texts | Ids
    rid: Label | list[Label] | None = None
    lora_path: AdapterName | list[AdapterName | None] | None = None
    cache_salt: Salt | list[Salt] | None = None
    extra_key: Salt | list[Salt] | None = None
    echo: bool = False
    logprobs: Annotated[int, Range(0, MAX_TOP_LOGPROBS)] | None = None
    prompt_embeds: NotBuilt = None
    suffix: str | None = None  # the text after the generated text
    add_special_tokens: bool = True


@dataclass(slots=True, kw_only=True)
class ImageUrl:
    without_effect: ClassVar[frozenset[str]] = frozenset({"detail"})  # the model's processor decides the resolution

    url: str | None = None  # required; checked in `messages`, whose error explains why a uuid alone is not enough


@dataclass(slots=True, kw_only=True)
class MediaUrl:
    """The URL of a video or audio."""

    url: str | None = None  # as in `ImageUrl`


@dataclass(slots=True, kw_only=True)
class InputAudio:
    """Audio in OpenAI's form."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"format"})  # the file itself determines the format

    data: str


@dataclass(slots=True, kw_only=True)
class Part:
    """One part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    video_url: str | MediaUrl | None = None
    audio_url: str | MediaUrl | None = None
    input_audio: InputAudio | None = None
    cache_control: dict[str, Any] | None = None  # the prompt's pages stay cached, as with `prompt_cache_key`
    uuid: str | None = None  # vLLM's id of an image; this server identifies images by their pixels
    # SGLang's field. "image" and "multi-images" have no effect, because the processor counts the images itself.
    # "video", which marks images as frames of a video, is refused.
    modalities: Literal["image", "multi-images", "video"] | None = None


@dataclass(slots=True, kw_only=True)
class CalledFunction:
    # OpenAI's client library adds this field to calls.
    without_effect: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})

    name: str
    arguments: str | dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """A call of the assistant in an earlier turn."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"index", "provider_specific_fields"})

    function: CalledFunction
    id: str | None = None
    type: str = "function"


@dataclass(slots=True, kw_only=True)
class Message:
    # Fields that clients copy from answers into later requests, and `cache_control`.
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "cache_control", "parsed", "provider_specific_fields"}
    )

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None  # used as the text of an assistant's message without content
    reasoning: str | None = None  # vLLM's newer name of reasoning_content
    function_call: CalledFunction | None = None  # the older form of tool_calls
    audio: NotBuilt = None
    images: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class Reasoning:
    # The complete reasoning is returned, so summaries do not apply.
    without_effect: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary"})

    enabled: bool | None = None
    enable: bool | None = None
    effort: Effort | None = None
    max_tokens: ThinkingTokens | None = None  # like max_thinking_tokens
    exclude: bool = False  # like include_reasoning: false


@dataclass(slots=True, kw_only=True)
class Thinking:
    """Reasoning settings in the format of DeepSeek, Z.ai and Moonshot."""

    type: Literal["enabled", "disabled"]
    budget_tokens: ThinkingTokens | None = None  # like max_thinking_tokens


@dataclass(slots=True, kw_only=True)
class ChatBody(OpenAIBody):
    """The body of /v1/chat/completions."""

    api: ClassVar[Api] = "chat"

    messages: Annotated[list[Message], Length(1, MAX_MESSAGES)]
    rid: Label | None = None
    lora_path: AdapterName | list[AdapterName | None] | None = None  # a list must have one item
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Range(0, MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    include_reasoning: bool = True
    max_thinking_tokens: ThinkingTokens | None = None
    thinking_token_budget: ThinkingTokens | None = None  # vLLM's name of max_thinking_tokens
    thinking: Thinking | None = None
    enable_thinking: bool | None = None  # sets the chat-template variable of the same name
    modalities: list[Literal["text"]] | None = None
    functions: list[dict[str, Any]] | None = None  # the older form of tools and tool_choice
    function_call: str | dict[str, Any] | None = None
    audio: NotBuilt = None
    n_probs: NotBuiltNumber = None
    web_search_options: NotBuiltOptions = None
    input_ids: NotBuilt = None
    echo: NotBuilt = None
    chat_template: NotBuilt = None
    documents: NotBuilt = None
    mm_processor_kwargs: dict[str, Any] | None = None  # options of the model's processor for images and videos
    media_io_kwargs: NotBuilt = None  # vLLM's options for reading media; `mm_processor_kwargs` has those of videos
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # the chat template writes them


# Maps the engine's parameter names to their names in these endpoints.
NAMES: Mapping[str, str] = {
    **sampling_names("chat"),
    "token_ids_logprob": "logprobs",
    "logprob_start_len": "echo",
}
