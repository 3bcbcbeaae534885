"""From a chat, whatever protocol it came in, to the engine's request and the parser of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from runtime.errors import InvalidRequest
from runtime.grammar_spec import Grammar
from runtime.request import Chunk, Finish, LogprobParams, Request
from runtime.sampling_params import grammars_of
from runtime.tokenizer.text_limit import LARGE_TEXT_BYTES, give_back_memory
from serve.chat.events import AssistantMessage, collect
from serve.chat.parser import OutputParser, ParserSettings
from serve.chat.settings import grammar_of_chat, parser_settings, shown_special_ids, thinking_limit
from serve.chat.tools.choice import read_choice
from serve.chat.tools.format import ShapedId
from serve.chat.tools.offered import read_tools
from serve.chat.tools.table import FORMATS
from serve.prompts import check_counted
from serve.sampling import sampling_params

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@dataclass(slots=True, kw_only=True)
class ChatRequest:
    """A chat as every protocol says it, with the names of OpenAI's chat completions.

    Errors name these fields, where sampling parameters have the names of /v1/chat/completions.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any] = field(default_factory=dict)  # as `serve.sampling.read_sampling` gives them
    tools: Sequence[Mapping[str, Any]] | None = None  # {"type": "function", "function": {...}}
    tool_choice: str | Mapping[str, Any] | None = None  # None: "auto" with tools
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None  # what the answer's text must match (response_format)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables of the chat template
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    include_reasoning: bool = True
    max_thinking_tokens: int | None = None  # then the block of reasoning is closed
    logprobs: LogprobParams | None = None
    add_special_tokens: bool = False  # the chat template writes its own
    keep_last: int | None = None  # as in `Request`
    cut_output: bool = False  # as in `Request`
    namespace: tuple[str | None, str | None] | None = None  # as in `Request`
    priority: int | None = None  # as in `Request`
    label: str = field(default_factory=lambda: uuid4().hex)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat that can be submitted, and what reads its output."""

    request: Request
    settings: ParserSettings

    @property
    def parses(self) -> bool:
        """Whether the output may be more than the answer's text."""
        return self.settings.parses

    @property
    def logprobs_as_ids(self) -> bool:
        """Whether log-probabilities name tokens by their ids."""
        wanted = self.request.logprobs
        return wanted is not None and not wanted.text

    def new_parser(self) -> OutputParser:
        """The parser of one choice."""
        return OutputParser(self.settings)

    def message(self, chunk: Chunk, parser: OutputParser) -> AssistantMessage:
        """The answer of a choice that came whole; `parser` is new."""
        return collect(parser.feed_chunk(chunk))

    def finish_kind(self, finish: Finish, parser: OutputParser) -> str:
        """OpenAI's finish_reason: "stop", "length" or "tool_calls"; "abort" for what has no such."""
        return "tool_calls" if finish.kind == "stop" and parser.num_calls else finish.kind


def prepare(core: EngineCore, chat: ChatRequest) -> PreparedChat:
    """Raises `InvalidRequest` naming the field of `chat` that is wrong. Renders, so long chats belong in a thread."""
    offered = read_tools(chat.tools or ())
    choice = read_choice(chat.tool_choice, offered)
    serve = core.plan.serve
    sampling = sampling_params("chat", chat.sampling, serve.preferred_sampling, facts=core.facts)
    wanted, named = chat.grammar, grammars_of(sampling)
    # It is the answer's grammar too, and not that of the thoughts before it.
    if wanted is None and len(named) == 1:
        [wanted] = named
        sampling = replace(sampling, **{wanted.kind: None})
    prompt = render(core, chat, check=_length_check(core, chat))
    settings = parser_settings(core, chat, choice, prompt)
    request = Request(
        text=prompt,
        sampling=sampling,
        logprobs=chat.logprobs,
        add_special_tokens=chat.add_special_tokens,
        keep_last=chat.keep_last,
        cut_output=chat.cut_output,
        truncate=serve.allow_auto_truncate,
        shown_special_ids=shown_special_ids(core.tokenizer, settings),
        grammar=grammar_of_chat(core, wanted, choice, settings, parallel=chat.parallel_tool_calls),
        thinking=thinking_limit(core, chat.max_thinking_tokens, settings, prompt),
        namespace=chat.namespace,
        priority=chat.priority,
        label=chat.label,
    )
    return PreparedChat(request=request, settings=settings)


def count_tokens(core: EngineCore, chat: ChatRequest) -> int:
    """How many tokens its prompt has, which may be more than the model can read. Belongs in a thread.

    Raises `InvalidRequest` as `render`, and for many times what the model can read.
    """
    text = render(core, chat, check=partial(check_counted, core, param="messages"))
    if core.tokenizer is None:  # `render` has refused it
        return 0
    [ids] = core.tokenizer.encode_batch([text], add_special_tokens=chat.add_special_tokens)
    if len(text) > LARGE_TEXT_BYTES:
        give_back_memory()
    return len(ids)


def thinking_switch(enabled: bool) -> dict[str, bool]:
    """Both words that templates use: Qwen's and its followers', DeepSeek's."""
    return {"enable_thinking": enabled, "thinking": enabled}


def effort_switch(effort: str) -> dict[str, bool | str]:
    """What a `reasoning_effort` means to a template: any but "none" also switches thinking on."""
    return {**thinking_switch(effort != "none"), "reasoning_effort": effort}


def _length_check(core: EngineCore, chat: ChatRequest) -> Callable[[Sequence[str]], None] | None:
    """What refuses a prompt that cannot fit while it is in parts; None where it would be cut, or nothing is known."""
    limit = core.tokenizer.text_limit if core.tokenizer is not None else None
    if limit is None or core.plan.serve.allow_auto_truncate or chat.keep_last is not None:
        return None
    return partial(limit.check, context_length=core.plan.model.context_length)


def render(
    core: EngineCore, chat: ChatRequest, *, check: Callable[[Sequence[str]], None] | None = None
) -> str:
    """The prompt's text; without `add_generation_prompt` it ends with the last message.

    Raises `InvalidRequest` naming what is wrong, and what `check` raises, which sees the text in parts.
    """
    if core.tokenizer is None:
        raise InvalidRequest("This server has no tokenizer; use /generate with input_ids.", param="messages")
    if core.tokenizer.template is None:
        raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
    if chat.continue_final_message and chat.messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs the last message to be the assistant's.",
            param="continue_final_message",
        )
    calls = bool(chat.tools) and chat.tool_choice != "none"
    if calls and not core.tokenizer.template.mentions("tools"):
        raise InvalidRequest("This model's chat template has no place for tools.", param="tools")
    form = FORMATS.get(core.plan.tokenizer.tool_call_parser or "")
    shaped_id = None if form is None else form.shaped_id
    return core.tokenizer.template.render(
        chat.messages if shaped_id is None else _with_ids(chat.messages, shaped_id),
        check,
        **({"tools": list(chat.tools or ())} if calls else {}),
        add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
        **chat.template_kwargs,
    )


def _with_ids(messages: Sequence[Mapping[str, Any]], shaped_id: ShapedId) -> list[Mapping[str, Any]]:
    """The messages with the ids of calls, and of their results, as the chat template takes them.

    A result without an id is that of the first call that has none yet.
    """
    known: dict[str, str] = {}
    waiting: dict[str, None] = {}  # for their results
    num_calls = 0
    made: list[Mapping[str, Any]] = []
    for message in messages:
        calls: list[Mapping[str, Any]] = []
        for call in message.get("tool_calls") or ():
            given = str(call.get("id") or f"call {num_calls}")
            waiting[given] = None
            known[given] = shaped_id(given, call["function"]["name"], num_calls)
            calls.append({**call, "id": known[given]})
            num_calls += 1
        if calls:
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id") or next(iter(waiting), "none")
            waiting.pop(given, None)
            message = {**message, "tool_call_id": known.get(given) or shaped_id(given, "", num_calls)}
        made.append(message)
    return made
