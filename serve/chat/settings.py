"""How the output of a chat is read: the formats of this server, and what of them the request wants."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.config.plan import TokenizerPlan
from runtime.errors import InvalidRequest
from runtime.grammar_spec import Grammar, ThinkingLimit
from serve.chat.harmony import MARKS as HARMONY_MARKS
from serve.chat.harmony import THOUGHT_CLOSE, THOUGHT_OPEN
from serve.chat.parser import ParserSettings
from serve.chat.reasoning import FORMATS as REASONING_FORMATS
from serve.chat.reasoning import ReasoningFormat
from serve.chat.tools.choice import ToolChoice
from serve.chat.tools.enforce import Marks, calls_grammar, places
from serve.chat.tools.offered import OfferedTools
from serve.chat.tools.table import FORMATS as TOOL_FORMATS

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.tokenizer.tokenizer import Tokenizer
    from serve.chat.request import ChatRequest

HARMONY = "gpt-oss"


def parser_settings(core: EngineCore, chat: ChatRequest, choice: ToolChoice, prompt: str) -> ParserSettings:
    """For the output that follows `prompt`. Raises `InvalidRequest` for tools whose format is not known."""
    text, tokenizer = core.plan.tokenizer, core.tokenizer
    if not (chat.include_reasoning or chat.separate_reasoning):
        raise InvalidRequest(
            "include_reasoning must be true where separate_reasoning is false.", param="include_reasoning"
        )
    if choice.calls and text.tool_call_parser is None:
        raise InvalidRequest(
            "How this model writes tool calls is not known: start the server with --tool-call-parser.",
            param="tools",
        )
    tools = OfferedTools({tool.name: tool for tool in choice.tools})
    harmony = text.reasoning_parser == HARMONY or (choice.calls and text.tool_call_parser == HARMONY)
    reasoning = None if harmony else _reasoning(text, chat, prompt)
    ids = tokenizer.ids_of(reasoning.marks) if reasoning is not None and tokenizer is not None else {}
    return ParserSettings(
        reasoning=reasoning,
        is_open=reasoning is not None and reasoning.is_open(prompt, continues=chat.continue_final_message),
        open_id=ids.get(reasoning.open.strip()) if reasoning is not None else None,
        close_id=ids.get(reasoning.close.strip()) if reasoning is not None else None,
        separate_reasoning=chat.separate_reasoning,
        stream_reasoning=chat.stream_reasoning,
        include_reasoning=chat.include_reasoning,
        calls=TOOL_FORMATS.get(text.tool_call_parser or "") if choice.calls else None,
        tools=tools,
        harmony=harmony,
        max_calls=None if chat.parallel_tool_calls else 1,
        token_bytes=tokenizer.bytes_of.rest if tokenizer is not None and tokenizer.bytes_of else None,
    )


def grammar_of_chat(
    core: EngineCore,
    wanted: Grammar | None,
    choice: ToolChoice,
    settings: ParserSettings,
    *,
    parallel: bool,
) -> Grammar | None:
    """What the output must match: the calls that must be made, those to strict tools, and the answer's text (`wanted`).

    It begins behind the reasoning. Raises `InvalidRequest` for what cannot be enforced.
    """
    think = settings.reasoning
    after = think.close.strip() if think is not None and settings.is_open else None
    needs_calls = choice.must_call or any(tool.strict for tool in choice.tools)
    is_free = not choice.calls and not settings.harmony  # then the answer's grammar is the output's
    answer = None if choice.must_call or is_free else _schema_of(wanted)
    if not needs_calls and answer is None:
        if wanted is None:
            return None
        if think is not None and not settings.is_open and settings.open_id is not None:
            return replace(wanted, begins_after=think.close.strip(), opened_by=settings.open_id)
        return replace(wanted, begins_after=after)
    texts = [*(settings.calls.marks if settings.calls is not None else HARMONY_MARKS)]
    texts += think.marks if think is not None else ()
    marks = Marks(_token_marks(core.tokenizer, texts))
    source = calls_grammar(
        settings.calls,
        choice,
        marks,
        parallel=parallel,
        think=None if settings.is_open else think,
        answer=answer,
    )
    named = "" if wanted is None else wanted.param or wanted.kind
    return Grammar(
        "lark",
        source,
        begins_after=after,
        param="tools" if choice.tools else named,
        places=places(choice, named),
    )


def thinking_limit(
    core: EngineCore, max_tokens: int | None, settings: ParserSettings, prompt: str
) -> ThinkingLimit | None:
    """Where the model may think. Raises `InvalidRequest` where its block of reasoning is not known."""
    if max_tokens is None:
        return None
    if settings.harmony:
        return ThinkingLimit(max_tokens, THOUGHT_OPEN, THOUGHT_CLOSE, reopens=True)
    form = REASONING_FORMATS.get(core.plan.tokenizer.reasoning_parser or "")
    if form is None:
        raise InvalidRequest(
            "max_thinking_tokens needs a model that thinks between marks (--reasoning-parser).",
            param="max_thinking_tokens",
        )
    if form.is_closed(prompt):
        return None
    return ThinkingLimit(max_tokens, None if settings.is_open else form.open.strip(), form.close.strip())


def _token_marks(tokenizer: Tokenizer | None, texts: Iterable[str]) -> dict[str, int]:
    """The marks that are special tokens, or added tokens between angle brackets, which llguidance takes for special."""
    if tokenizer is None:
        return {}
    found = tokenizer.ids_of(texts)
    return {
        text: token_id
        for text, token_id in found.items()
        if token_id in tokenizer.special_ids or (text.startswith("<") and text.endswith(">"))
    }


def _schema_of(wanted: Grammar | None) -> str | None:
    """The answer's schema, beside tools that may be called, or on Harmony's channel for answers."""
    if wanted is None:
        return None
    if wanted.kind == "json_object":
        return '{"type": "object"}'
    if wanted.kind == "json_schema":
        return wanted.source
    raise InvalidRequest(
        f"A {wanted.kind} cannot be enforced beside tools and for gpt-oss; only JSON and JSON schemas can.",
        param=wanted.param or wanted.kind,
    )


def _reasoning(text: TokenizerPlan, chat: ChatRequest, prompt: str) -> ReasoningFormat | None:
    """The format, unless no reasoning is to be expected."""
    form = REASONING_FORMATS.get(text.reasoning_parser or "")
    if form is None or (not chat.separate_reasoning and text.tool_call_parser is None):
        return None
    return None if form.is_closed(prompt) else form


def shown_special_ids(tokenizer: Tokenizer | None, settings: ParserSettings) -> frozenset[int]:
    """Special tokens that are marks of the formats: their text must reach the parser."""
    if tokenizer is None or not settings.parses:
        return frozenset()
    marks: tuple[str, ...] = HARMONY_MARKS if settings.harmony else ()
    if settings.reasoning is not None:
        marks += settings.reasoning.marks
    if settings.calls is not None:
        marks += settings.calls.marks
    found = tokenizer.ids_of(part for mark in marks for part in _parts(mark))
    return frozenset(found.values()) & tokenizer.special_ids


def _parts(mark: str) -> list[str]:
    """A mark, and the tokens that it may consist of: <|channel>thought is a token and a word."""
    ends = [index + 1 for index, letter in enumerate(mark) if letter in ">]"]
    begins = [index for index, letter in enumerate(mark) if letter in "<["]
    return [mark, *(mark[begin:end] for begin in begins for end in ends if begin < end)]
