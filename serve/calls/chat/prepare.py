"""Convert a chat of any API to an engine request and the settings to parse its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.errors import InvalidRequest
from runtime.media_source import MediaSource
from runtime.request import Chunk, Finish, Request
from runtime.sampling_params import grammars_of
from runtime.tokenizer.text_limit import LARGE_TEXT_BYTES, give_back_memory
from serve.calls.chat.events import AssistantMessage, collect
from serve.calls.chat.parser import OutputParser, ParserSettings
from serve.calls.chat.request import ChatRequest
from serve.calls.chat.settings import grammar_of_chat, parser_settings, shown_special_ids, thinking_limit
from serve.calls.chat.tools.choice import read_choice
from serve.calls.chat.tools.format import ShapedId
from serve.calls.chat.tools.offered import read_tools
from serve.calls.chat.tools.table import FORMATS
from serve.calls.media import for_template, media_of, num_tokens
from serve.calls.prompts import check_counted
from serve.calls.sampling import sampling_of_call

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat as an engine request, and the settings to parse its output."""

    request: Request
    settings: ParserSettings
    top_logprobs: int | None = None  # see `ChatRequest`
    prompt_logprobs: int | None = None
    legacy_calls: bool = False

    @property
    def parses(self) -> bool:
        """Whether the output can contain reasoning or calls, so that it must be parsed."""
        return self.settings.parses

    @property
    def logprobs_as_ids(self) -> bool:
        """Whether log-probabilities name tokens by id (`token_id:5`) instead of by text."""
        params = self.request.logprobs
        return params is not None and not params.text

    def new_parser(self) -> OutputParser:
        """Return a parser for one choice."""
        return OutputParser(self.settings)

    def message(self, chunk: Chunk, parser: OutputParser) -> AssistantMessage:
        """Return the message of a complete choice; `parser` must be new."""
        return collect(parser.feed_chunk(chunk))

    def finish_kind(self, finish: Finish, parser: OutputParser) -> str:
        """Return OpenAI's finish_reason: "stop", "length", "tool_calls" or "function_call".

        An aborted request has "abort", which OpenAI does not have.
        """
        calls = "function_call" if self.legacy_calls else "tool_calls"
        return calls if finish.kind == "stop" and parser.num_calls else finish.kind


def prepare(core: EngineCore, chat: ChatRequest, adapter: str | None = None) -> PreparedChat:
    """Return the request and the parser settings of a chat. `adapter` is the name of its LoRA adapter.

    Raises `InvalidRequest`, whose `param` is the invalid field of `chat`. Call it in a thread for long chats, because
    rendering the prompt takes long.
    """
    offered = read_tools(chat.tools or ())
    choice = read_choice(chat.tool_choice, offered)
    serve = core.plan.serve
    sampling = sampling_of_call(core, "chat", chat.sampling)
    grammar, sampling_grammars = chat.grammar, grammars_of(sampling)
    # A grammar in the sampling parameters must not constrain the reasoning, so it is treated like `chat.grammar`.
    if grammar is None and len(sampling_grammars) == 1:
        [grammar] = sampling_grammars
        sampling = replace(sampling, **{grammar.kind: None})
    prompt = render(core, chat, check=_length_check(core, chat))
    settings = parser_settings(core, chat, choice, prompt)
    request = Request(
        text=prompt,
        media=media_of(chat.messages),
        sampling=sampling,
        logprobs=chat.logprobs,
        returns_ids=chat.returns_ids,
        returns_hidden=chat.returns_hidden,
        experts_from=chat.experts_from,
        add_special_tokens=chat.add_special_tokens,
        keep_last=chat.keep_last,
        cut_output=chat.cut_output,
        truncate=serve.allow_auto_truncate,
        shown_special_ids=shown_special_ids(core.tokenizer, settings),
        grammar=grammar_of_chat(
            core,
            grammar,
            choice,
            settings,
            parallel=chat.parallel_tool_calls,
            fix_names=sampling.allowed_token_ids is None,
        ),
        thinking=thinking_limit(core, chat.max_thinking_tokens, settings, prompt),
        namespace=chat.namespace,
        priority=chat.priority,
        service=chat.service,
        lora=adapter,
        label=chat.label,
    )
    return PreparedChat(
        request=request,
        settings=settings,
        top_logprobs=chat.top_logprobs,
        prompt_logprobs=chat.prompt_logprobs,
        legacy_calls=chat.legacy_calls,
    )


class CountedPrompt(NamedTuple):
    """A rendered prompt whose tokens are to be counted."""

    text: str
    media: tuple[MediaSource, ...]
    add_special_tokens: bool

    async def ids(self, core: EngineCore) -> list[int]:
        """Return the token ids, including those of images."""
        ids = await num_tokens(core, self.text, self.media, add_special_tokens=self.add_special_tokens)
        if len(self.text) > LARGE_TEXT_BYTES:
            give_back_memory()
        return ids


def counted_prompt(core: EngineCore, chat: ChatRequest) -> CountedPrompt:
    """Render the chat's prompt to count its tokens. Call it in a thread.

    The prompt may exceed the model's context. Raises `InvalidRequest` for invalid fields, and for prompts that are many
    times longer than the context.
    """
    text = render(core, chat, check=partial(check_counted, core, param="messages"))
    return CountedPrompt(text, media_of(chat.messages), chat.add_special_tokens)


def _length_check(core: EngineCore, chat: ChatRequest) -> Callable[[Sequence[str]], None] | None:
    """Return a function that takes a prompt as a list of texts, and raises if it certainly exceeds the context.

    `render` calls this function before it joins the texts, so that a prompt that is too long is not copied. Returns
    None if prompts that are too long are truncated, or if the tokenizer has no limit for texts.
    """
    limit = core.tokenizer.text_limit if core.tokenizer is not None else None
    if limit is None or core.plan.serve.allow_auto_truncate or chat.keep_last is not None:
        return None
    return partial(limit.check, context_length=core.plan.model.context_length)


def render(core: EngineCore, chat: ChatRequest, *, check: Callable[[Sequence[str]], None] | None = None) -> str:
    """Return the text of the prompt, rendered with the model's chat template.

    If the chat's `add_generation_prompt` is false, the prompt ends with the last message. `check` is called with the
    pieces of the text before they are joined, and may raise. Raises `InvalidRequest`, whose `param` is the invalid
    field.
    """
    if core.tokenizer is None:
        raise InvalidRequest("This server has no tokenizer; use /generate with input_ids.", param="messages")
    if core.tokenizer.template is None:
        raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
    if chat.continue_final_message and chat.messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message requires the last message to be the assistant's.",
            param="continue_final_message",
        )
    calls = bool(chat.tools) and chat.tool_choice != "none"
    if calls and not core.tokenizer.template.mentions("tools"):
        raise InvalidRequest("This model's chat template does not support tools.", param="tools")
    form = FORMATS.get(core.plan.tokenizer.tool_call_parser or "")
    shaped_id = None if form is None else form.shaped_id
    messages = for_template(core, chat.messages)
    return core.tokenizer.template.render(
        messages if shaped_id is None else _with_ids(messages, shaped_id),
        check,
        **({"tools": list(chat.tools or ())} if calls else {}),
        add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
        **{**core.plan.serve.template_kwargs, **chat.template_kwargs},
    )


def _with_ids(messages: Sequence[Mapping[str, Any]], shaped_id: ShapedId) -> list[Mapping[str, Any]]:
    """Return the messages, with call ids rewritten to the format that the chat template requires.

    A tool result without an id belongs to the first call that has no result yet.
    """
    shaped_ids: dict[str, str] = {}
    waiting: dict[str, None] = {}  # original ids of the calls that have no result yet
    num_calls = 0
    shaped: list[Mapping[str, Any]] = []
    for message in messages:
        calls: list[Mapping[str, Any]] = []
        for call in message.get("tool_calls") or ():
            call_id = str(call.get("id") or f"call {num_calls}")
            waiting[call_id] = None
            shaped_ids[call_id] = shaped_id(call_id, call["function"]["name"], num_calls)
            calls.append({**call, "id": shaped_ids[call_id]})
            num_calls += 1
        if calls:
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            call_id = message.get("tool_call_id") or next(iter(waiting), "none")
            waiting.pop(call_id, None)
            message = {
                **message,
                "tool_call_id": shaped_ids.get(call_id) or shaped_id(call_id, "", num_calls),
            }
        shaped.append(message)
    return shaped
