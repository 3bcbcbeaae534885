"""Derive how to parse and constrain a chat's output, from the server's formats and the request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.config.plan import TokenizerPlan
from runtime.errors import InvalidRequest
from runtime.grammar_spec import Grammar, ThinkingLimit
from serve.calls.chat.harmony import MARKS as HARMONY_MARKS
from serve.calls.chat.harmony import THOUGHT_CLOSE, THOUGHT_OPEN
from serve.calls.chat.parser import ParserSettings
from serve.calls.chat.reasoning import FORMATS as REASONING_FORMATS
from serve.calls.chat.reasoning import ReasoningFormat
from serve.calls.chat.tools.choice import ToolChoice
from serve.calls.chat.tools.enforce import Marks, calls_grammar, names_grammar, schema_paths
from serve.calls.chat.tools.offered import OfferedTools
from serve.calls.chat.tools.table import FORMATS as TOOL_FORMATS

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.tokenizer.tokenizer import Tokenizer
    from serve.calls.chat.request import ChatRequest

HARMONY = "gpt-oss"


def parser_settings(core: EngineCore, chat: ChatRequest, choice: ToolChoice, prompt: str) -> ParserSettings:
    """Return the settings to parse the output after `prompt`.

    Raises `InvalidRequest` if the request offers tools and the model's tool call format is not known.
    """
    text, tokenizer = core.plan.tokenizer, core.tokenizer
    if not (chat.include_reasoning or chat.separate_reasoning):
        raise InvalidRequest(
            "include_reasoning must be true if separate_reasoning is false.", param="include_reasoning"
        )
    if choice.calls and text.tool_call_parser is None:
        raise InvalidRequest(
            "The tool call format of this model is not known: start the server with --tool-call-parser.",
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
    fix_names: bool = True,
) -> Grammar | None:
    """Return the grammar that enforces a chat's constraints on its output, or None if no grammar is needed.

    The constraints are: required calls, calls to strict tools, and the format of the answer's text (`wanted`). They
    apply to the output after the reasoning. If there are none and `fix_names` is true, the grammar takes effect at the
    first call, and only lets calls name tools of the request. Raises `InvalidRequest` for constraints that cannot be
    enforced.
    """
    think = settings.reasoning
    after = think.close.strip() if think is not None and settings.is_open else None
    needs_calls = choice.must_call or any(tool.strict for tool in choice.tools)
    is_free = not choice.calls and not settings.harmony  # `wanted` constrains the whole output after the reasoning
    answer = None if choice.must_call or is_free else _schema_of(wanted)
    if not needs_calls and answer is None:
        if wanted is None:
            names = choice.calls and fix_names
            return _names_grammar(core, choice, settings, parallel=parallel) if names else None
        if think is not None and not settings.is_open and settings.open_id is not None:
            return replace(wanted, begins_after=think.close.strip(), opened_by=settings.open_id)
        return replace(wanted, begins_after=after)
    marks = _marks(core, settings)
    source = calls_grammar(
        settings.calls,
        choice,
        marks,
        parallel=parallel,
        think=None if settings.is_open else think,
        answer=answer,
    )
    param = "" if wanted is None else wanted.param or wanted.kind
    return Grammar(
        "lark",
        source,
        begins_after=after,
        param="tools" if choice.tools else param,
        places=schema_paths(choice, param),
    )


def _names_grammar(core: EngineCore, choice: ToolChoice, settings: ParserSettings, *, parallel: bool) -> Grammar | None:
    tokenizer = core.tokenizer
    if tokenizer is None or tokenizer.bytes_of is None or core.plan.tokenizer.grammar_backend == "none":
        return None
    made = names_grammar(settings.calls, choice, _marks(core, settings), parallel=parallel)
    if made is None:
        return None
    return Grammar("lark", made[1], begins_after=made[0], must_begin=False, param="tools")


def _marks(core: EngineCore, settings: ParserSettings) -> Marks:
    texts = [*(settings.calls.marks if settings.calls is not None else HARMONY_MARKS)]
    texts += settings.reasoning.marks if settings.reasoning is not None else ()
    return Marks(_token_marks(core.tokenizer, texts))


def thinking_limit(
    core: EngineCore, max_tokens: int | None, settings: ParserSettings, prompt: str
) -> ThinkingLimit | None:
    """Return the limit of the reasoning block, or None if there is no limit or no block.

    Raises `InvalidRequest` if the model's reasoning format is not known.
    """
    if max_tokens is None:
        return None
    if settings.harmony:
        return ThinkingLimit(max_tokens, THOUGHT_OPEN, THOUGHT_CLOSE, reopens=True)
    form = REASONING_FORMATS.get(core.plan.tokenizer.reasoning_parser or "")
    if form is None:
        raise InvalidRequest(
            "max_thinking_tokens requires a model with a reasoning format (--reasoning-parser).",
            param="max_thinking_tokens",
        )
    if form.is_closed(prompt):
        return None
    opening = None if settings.is_open else form.open.strip()
    return ThinkingLimit(
        max_tokens, opening, form.close.strip(), also_close=settings.calls.distinct_openers if settings.calls else ()
    )


def _token_marks(tokenizer: Tokenizer | None, texts: Iterable[str]) -> dict[str, int]:
    """Map each mark that llguidance matches as a token to its id.

    These are special tokens, and added tokens in angle brackets. llguidance matches other marks as text.
    """
    if tokenizer is None:
        return {}
    found = tokenizer.ids_of(texts)
    return {
        text: token_id
        for text, token_id in found.items()
        if token_id in tokenizer.special_ids or (text.startswith("<") and text.endswith(">"))
    }


def _schema_of(wanted: Grammar | None) -> str | None:
    """Return the JSON schema of the answer, or None if any text is allowed.

    Raises `InvalidRequest` for other constraints, which cannot be combined with calls or Harmony.
    """
    if wanted is None:
        return None
    if wanted.kind == "json_object":
        return '{"type": "object"}'
    if wanted.kind == "json_schema":
        return wanted.source
    raise InvalidRequest(
        f"A {wanted.kind} cannot be combined with tools or gpt-oss; use JSON or a JSON schema.",
        param=wanted.param or wanted.kind,
    )


def _reasoning(text: TokenizerPlan, chat: ChatRequest, prompt: str) -> ReasoningFormat | None:
    """Return the format of the reasoning block that the parser must find, or None.

    None: the model has no reasoning format, the prompt already closes the block, or neither the client nor the parser
    of tool calls needs the block to be found.
    """
    form = REASONING_FORMATS.get(text.reasoning_parser or "")
    if form is None or (not chat.separate_reasoning and text.tool_call_parser is None):
        return None
    return None if form.is_closed(prompt) else form


def shown_special_ids(tokenizer: Tokenizer | None, settings: ParserSettings) -> frozenset[int]:
    """Return the ids of the special tokens in the formats' marks.

    Detokenization must keep the text of these tokens, because the parser needs it.
    """
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
    """Return a mark and all its substrings in brackets, each of which may be a token.

    For example, the mark <|channel>thought contains the token <|channel>.
    """
    ends = [index + 1 for index, letter in enumerate(mark) if letter in ">]"]
    begins = [index for index, letter in enumerate(mark) if letter in "<["]
    return [mark, *(mark[begin:end] for begin in begins for end in ends if begin < end)]
