"""Bodies of Ollama's routes.

As in Ollama, unknown fields and options are ignored; they are logged. With --refuse-unknown-fields, they are refused.
Accepted without effect: `keep_alive` (the model stays loaded), and options for loading the model (`num_ctx`, `num_gpu`,
...), for which this server has command-line options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from runtime.errors import InvalidRequest
from serve.calls.decode import Length, NotBuilt, Range
from serve.calls.prompts import MAX_MESSAGES, Texts

MAX_TOP_LOGPROBS = 20

Think = bool | Literal["low", "medium", "high", "max"]


@dataclass(slots=True, kw_only=True)
class Options:
    """Sampling parameters under Ollama's names. None means "not set"."""

    num_predict: Annotated[int, Range(-2)] | None = None
    temperature: float | None = None
    top_k: Annotated[int, Range(0)] | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    tfs_z: float = 1.0
    typical_p: float = 1.0
    mirostat: int = 0
    mirostat_tau: float | None = None  # an option of mirostat sampling, which is refused
    mirostat_eta: float | None = None
    penalize_newline: bool = True
    numa: Any = None  # this option and the options below concern the loading of the model
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that are set, under their names in `SamplingParams`."""
        self._refuse_foreign()
        params = {
            "max_new_tokens": self.num_predict if self.num_predict and self.num_predict > 0 else None,
            "temperature": self.temperature,
            "top_k": -1 if self.top_k == 0 else self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "typical_p": self.typical_p if self.typical_p != 1.0 else None,
            "seed": None if self.seed is not None and self.seed < 0 else self.seed,
            "stop": self.stop,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        return {name: value for name, value in params.items() if value is not None}

    def _refuse_foreign(self) -> None:
        """Raise `InvalidRequest` for values that this server does not support."""
        penalty = self.repeat_penalty not in (None, 1.0)
        wrong = {
            "num_predict": (self.num_predict == 0, "must be at least 1, or -1 for no limit"),
            "tfs_z": (self.tfs_z != 1.0, "is not supported; leave it out"),
            "mirostat": (self.mirostat != 0, "is not supported; leave it out"),
            "penalize_newline": (not self.penalize_newline and penalty, "is not supported; leave it out"),
            "repeat_last_n": (
                penalty and self.repeat_last_n not in (None, -1),
                "must be -1: repeat_penalty looks at the whole text",
            ),
        }
        for name, (is_wrong, words) in wrong.items():
            if is_wrong:
                raise InvalidRequest(f"options.{name} {words}.", param=f"options.{name}")


@dataclass(slots=True, kw_only=True)
class OllamaBody:
    """Fields of both generating routes."""

    model: Annotated[str, Length(1, 1024)]
    stream: bool = True
    options: Options = field(default_factory=Options)
    format: str | dict[str, Any] | None = None
    think: Think | None = None
    keep_alive: float | str | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Range(0, MAX_TOP_LOGPROBS)] = 0

    def response_format(self) -> Mapping[str, Any] | None:
        """Return `format` as OpenAI's response_format, or None if any text is allowed."""
        if isinstance(self.format, dict):
            return {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
        if self.format in (None, ""):
            return None
        if self.format != "json":
            raise InvalidRequest('format must be "json" or a JSON schema.', param="format")
        return {"type": "json_object"}


@dataclass(slots=True, kw_only=True)
class CalledFunction:
    without_effect: ClassVar[frozenset[str]] = frozenset({"index"})  # the order of the calls gives their index

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """A call of the assistant in an earlier turn."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"type"})  # OpenAI clients send "function"

    function: CalledFunction
    id: str | None = None


@dataclass(slots=True, kw_only=True)
class Message:
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[str] | None = None  # base64


@dataclass(slots=True, kw_only=True)
class ChatBody(OllamaBody):
    """The body of /api/chat."""

    messages: Annotated[list[Message], Length(0, MAX_MESSAGES)] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


@dataclass(slots=True, kw_only=True)
class GenerateBody(OllamaBody):
    """The body of /api/generate."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    suffix: NotBuilt = None
    template: NotBuilt = None
    context: NotBuilt = None
    images: list[str] | None = None  # base64
    width: NotBuilt = None
    height: NotBuilt = None
    steps: NotBuilt = None


@dataclass(slots=True, kw_only=True)
class EmbedBody:
    """The body of /api/embed. Texts that are too long are cut, unless `truncate` is false."""

    model: Annotated[str, Length(1, 1024)]
    input: Texts
    truncate: bool = True
    dimensions: Annotated[int, Range(1, 1 << 20)] | None = None
    options: Options = field(default_factory=Options)
    keep_alive: float | str | None = None


@dataclass(slots=True, kw_only=True)
class EmbeddingsBody:
    """The body of /api/embeddings, the older route for the embedding of one text."""

    model: Annotated[str, Length(1, 1024)]
    prompt: str
    options: Options = field(default_factory=Options)
    keep_alive: float | str | None = None


@dataclass(slots=True, kw_only=True)
class ShowBody:
    """The body of /api/show."""

    model: str | None = None
    name: str | None = None  # the older name of model
    verbose: bool = False
