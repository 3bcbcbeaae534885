"""Bodies of /v1/messages and /v1/messages/count_tokens.

Unknown fields of the body are refused. Unknown fields of nested objects are logged, or refused with
--refuse-unknown-fields. Accepted without effect: `metadata` (an identifier for abuse reports, which this server does
not send), `service_tier` (this server has one tier), `signature` of thinking blocks (a constant of this server),
`citations` of the assistant's text, `caller` of the assistant's calls (always the model), and `eager_input_streaming`
of tools (arguments are always streamed).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from serve.calls.decode import Length, NotBuilt, Range
from serve.calls.prompts import MAX_MESSAGES

MAX_TOOLS = 1024


@dataclass(slots=True, kw_only=True)
class TextBlock:
    without_effect: ClassVar[frozenset[str]] = frozenset({"citations"})

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class ThinkingBlock:
    without_effect: ClassVar[frozenset[str]] = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


@dataclass(slots=True, kw_only=True)
class ToolUseBlock:
    """A call of the assistant in an earlier turn."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"caller"})

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Base64Image:
    type: Literal["base64"]
    data: str
    media_type: Literal["image/png", "image/jpeg", "image/gif", "image/webp"] = "image/png"


@dataclass(slots=True, kw_only=True)
class UrlImage:
    type: Literal["url"]
    url: str


@dataclass(slots=True, kw_only=True)
class ImageBlock:
    """An image. References to Anthropic's files API are refused."""

    type: Literal["image"]
    source: Base64Image | UrlImage
    cache_control: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class ToolResultBlock:
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool = False
    cache_control: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class PlainText:
    type: Literal["text"]
    data: str
    media_type: Literal["text/plain"] = "text/plain"


@dataclass(slots=True, kw_only=True)
class Citations:
    enabled: bool = False


@dataclass(slots=True, kw_only=True)
class DocumentBlock:
    """A document with a text source. Files and URLs are refused."""

    type: Literal["document"]
    source: PlainText
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: dict[str, Any] | None = None


Block = TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


@dataclass(slots=True, kw_only=True)
class Turn:
    """One message. `serve.anthropic.conversation` checks which blocks its role allows."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


@dataclass(slots=True, kw_only=True)
class Tool:
    """A function that the client runs. Tools that the server would run have another `type` and are refused."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"eager_input_streaming"})

    name: Annotated[str, Length(1, 256)]
    # Required for functions. Only tools of other types, which are refused later, may leave it out.
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool = False
    type: str | None = None
    cache_control: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class ToolChoice:
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


@dataclass(slots=True, kw_only=True)
class Thinking:
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Range(1)] | None = None
    display: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class JsonFormat:
    type: Literal["json_schema"]
    schema: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class OutputConfig:
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


@dataclass(slots=True, kw_only=True)
class ContextEdit:
    """A context edit without effect: it keeps all earlier reasoning. Edits that change messages are refused."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


@dataclass(slots=True, kw_only=True)
class ContextManagement:
    edits: list[ContextEdit] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class CountBody:
    """The body of /v1/messages/count_tokens."""

    closed: ClassVar[bool] = True

    model: str
    messages: Annotated[list[Turn], Length(1, MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Length(0, MAX_TOOLS)] = field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    speed: Literal["standard"] | None = None
    context_management: ContextManagement | None = None
    mcp_servers: NotBuilt = None
    user_profile_id: NotBuilt = None
    workspace_id: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class MessagesBody(CountBody):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, Range(1)]
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: NotBuilt = None
    diagnostics: NotBuilt = None
    inference_geo: NotBuilt = None
    # Refused with the error of Anthropic's API, after which clients' tool runners continue without this field.
    thread: NotBuilt = None
