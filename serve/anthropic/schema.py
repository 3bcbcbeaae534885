"""Bodies of /v1/messages and /v1/messages/count_tokens. Unknown fields of the body are refused; of what is in it,
named in the log (--refuse-unknown-fields: refused).

Accepted without effect: `metadata` (an identifier for abuse reports; this server writes none), `service_tier` (there
is one), `cache_control` (prefixes are cached anyway), `signature` of thinking blocks (theirs is ours: it says nothing),
`citations` of text that the assistant wrote, `caller` of its calls (the model alone), and of tools
`eager_input_streaming` (arguments are streamed as they come).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from serve.decode import Length, NotBuilt, Range
from serve.openai.schema import MAX_MESSAGES

MAX_TOOLS = 1024


@dataclass(slots=True, kw_only=True)
class TextBlock:
    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations"})

    type: Literal["text"]
    text: str


@dataclass(slots=True, kw_only=True)
class ThinkingBlock:
    without_effect: ClassVar[frozenset[str]] = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


@dataclass(slots=True, kw_only=True)
class ToolUseBlock:
    """A call that the assistant made in an earlier turn."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control", "caller"})

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class ToolResultBlock:
    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool = False


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
    """A document whose source is text; files and addresses of files are refused."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["document"]
    source: PlainText
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


Block = TextBlock | DocumentBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


@dataclass(slots=True, kw_only=True)
class Turn:
    """One message. Which blocks it may have, its role says: see `serve.anthropic.conversation`."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


@dataclass(slots=True, kw_only=True)
class Tool:
    """A function of the client's; tools that would run here are refused by their `type`."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control", "eager_input_streaming"})

    name: Annotated[str, Length(1, 256)]
    input_schema: dict[str, Any] | None = None  # required of functions, checked when their `type` is
    description: str | None = None
    strict: bool = False
    type: str | None = None


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
    """Keeping all thoughts of earlier turns: the one edit that leaves the messages as they are."""

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
    thread: NotBuilt = None  # clients' tool runners go on without, if it is refused as their API does
