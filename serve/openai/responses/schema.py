"""Bodies of /v1/responses and /v1/responses/input_tokens.

Unknown fields of the body are refused. Unknown fields of nested objects are logged, or refused with
--refuse-unknown-fields. Accepted without effect: `user`, `safety_identifier` and `client_metadata` (this server sends
no reports), `prompt_cache_retention` (all prefixes are cached), `max_tool_calls` (this server does not run tools),
`text.verbosity`, and all known values of `include` except `message.output_text.logprobs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from runtime.errors import InvalidRequest
from serve.calls.body import decode_open, parse_object
from serve.calls.chat.request import Effort
from serve.calls.decode import Length, NotBuilt, Range
from serve.calls.prompts import MAX_MESSAGES, CacheKey, Priority, Salt, Tier, Timeout
from serve.calls.sampling import read_sampling, sampling_names

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

MAX_TOP_LOGPROBS = 20
MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"

_NOT_HERE = {"n", "max_tokens", "max_completion_tokens"}
_SAMPLING = frozenset(sampling_names("chat").values()) - _NOT_HERE


@dataclass(slots=True, kw_only=True)
class TextFormat:
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None

    def response_format(self) -> Mapping[str, Any] | None:
        """Return the format as `response_format` of chat completions."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "json_object"}
        if self.schema is None:
            raise InvalidRequest("text.format.schema is required.", param="text.format.schema")
        named = {"name": self.name or "response", "schema": self.schema, "strict": self.strict}
        return {"type": "json_schema", "json_schema": named}


@dataclass(slots=True, kw_only=True)
class TextOptions:
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


@dataclass(slots=True, kw_only=True)
class ReasoningOptions:
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # the older name of summary

    @property
    def asked_summary(self) -> str | None:
        return self.summary or self.generate_summary


@dataclass(slots=True, kw_only=True)
class StreamOptions:
    include_obfuscation: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class FunctionTool:
    type: Literal["function"] = "function"
    name: Annotated[str, Length(1, 256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@dataclass(slots=True, kw_only=True)
class CustomFormat:
    """The format of a custom tool's input, which is one string."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


@dataclass(slots=True, kw_only=True)
class CustomTool:
    """A tool whose input is free text. The client runs it."""

    type: Literal["custom"]
    name: Annotated[str, Length(1, 256)]
    description: str | None = None
    format: CustomFormat | None = None

    def as_function(self) -> FunctionTool:
        """Return the function that the model calls in place of this tool. Its only parameter is the string `input`."""
        text: dict[str, Any] = {"type": "string", "description": "The tool's whole input, as text."}
        if self.format is not None and self.format.definition is not None:
            text["pattern"] = f"^(?:{self.format.definition})$"
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        parameters["additionalProperties"] = False
        is_strict = "pattern" in text
        return FunctionTool(name=self.name, description=self.description, parameters=parameters, strict=is_strict)


@dataclass(slots=True, kw_only=True)
class NamespaceTool:
    """A namespace: a named group of functions. A call item names the namespace and the function."""

    type: Literal["namespace"]
    name: Annotated[str, Length(1, 64)]
    description: str | None = None
    tools: Annotated[list[FunctionTool], Length(0, 256)]


@dataclass(slots=True, kw_only=True)
class InputBody:
    """The body of /v1/responses/input_tokens: the fields that form the prompt."""

    closed: ClassVar[bool] = True

    input: str | Annotated[list[dict[str, Any]], Length(0, MAX_MESSAGES)] = field(default_factory=list)
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    text: TextOptions | None = None
    tools: Annotated[list[dict[str, Any]], Length(0, 1024)] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    conversation: NotBuilt = None
    personality: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class ResponsesBody(InputBody):
    """The body of /v1/responses."""

    stream: bool = False
    store: bool = True
    background: bool = False
    max_output_tokens: Annotated[int, Range(1)] | None = None
    top_logprobs: Annotated[int, Range(0, MAX_TOP_LOGPROBS)] = 0
    include: list[str] = field(default_factory=list)
    metadata: dict[str, str] | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: CacheKey | None = None  # the prompt's pages stay cached under this key
    prompt_cache_retention: str | None = None
    client_metadata: dict[str, Any] | None = None  # sent by Codex; without effect
    service_tier: Tier | None = None  # selects a priority (--service-tier-priorities)
    max_tool_calls: int | None = None
    cache_salt: Salt | None = None  # this field and those below are also fields of /v1/chat/completions
    extra_key: Salt | None = None
    priority: Priority | None = None
    timeout_s: Timeout | None = None
    prompt: NotBuilt = None
    context_management: NotBuilt = None
    moderation: NotBuilt = None
    background_options: NotBuilt = None
    num_bytes: int = field(init=False, default=0)  # size of the received body
    # Sampling parameters, as `read_sampling` returns them.
    sampling: dict[str, Any] = field(init=False, default_factory=dict)

    def check(self) -> None:
        """Raise `InvalidRequest` for fields that contradict each other."""
        if self.background and not self.store:
            raise InvalidRequest("background requires store to be true.", param="background")
        if self.background and self.stream:
            raise InvalidRequest("stream is not supported with background; poll the response.", param="stream")
        if self.metadata is not None and len(self.metadata) > MAX_METADATA:
            raise InvalidRequest(f"metadata may have at most {MAX_METADATA} keys.", param="metadata")
        for index, name in enumerate(self.include):
            if name not in _INCLUDES:
                param = f"include.{index}"
                raise InvalidRequest(f'{param} "{name[:80]}" is not known.', param=param)

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs > 0


_INCLUDES = frozenset(
    {
        LOGPROBS,
        "reasoning.encrypted_content",  # without effect, because reasoning is sent unencrypted
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)


def read_input_body(core: EngineCore, raw: bytes) -> InputBody:
    """Decode the body of /v1/responses/input_tokens. Raises `InvalidRequest`, whose `param` is the invalid field."""
    return decode_open(InputBody, parse_object(raw), core, "/v1/responses/input_tokens")


def read_responses_body(core: EngineCore, raw: bytes) -> ResponsesBody:
    """Decode the body of /v1/responses. Raises `InvalidRequest`, whose `param` is the invalid field."""
    json = parse_object(raw)
    if "max_tokens" in json:
        raise InvalidRequest("max_tokens is called max_output_tokens in this API.", param="max_output_tokens")
    sampling = {name: json[name] for name in _SAMPLING & json.keys()}
    others = {name: value for name, value in json.items() if name not in sampling}
    body = decode_open(ResponsesBody, others, core, "/v1/responses")
    body.num_bytes = len(raw)
    body.sampling = read_sampling("chat", sampling)
    if body.max_output_tokens is not None:
        body.sampling["max_new_tokens"] = body.max_output_tokens
    body.check()
    return body
