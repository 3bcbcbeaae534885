"""`/parse_function_call` and `/separate_reasoning`: parse outputs without the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.config.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from runtime.errors import InvalidRequest
from serve.calls.body import parse_object
from serve.calls.chat.events import AssistantMessage, collect
from serve.calls.chat.parser import OutputParser, ParserSettings
from serve.calls.chat.reasoning import FORMATS as REASONING_FORMATS
from serve.calls.chat.settings import HARMONY
from serve.calls.chat.tools.offered import MAX_TOOLS, read_tools
from serve.calls.chat.tools.table import FORMATS as TOOL_FORMATS
from serve.calls.decode import Length, decode
from serve.http.endpoint import decodes, json_response, read_body

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@dataclass(slots=True, kw_only=True)
class ParseBody:
    text: str
    tools: Annotated[list[dict[str, Any]], Length(0, MAX_TOOLS)] = field(default_factory=list)
    tool_call_parser: str | None = None


@dataclass(slots=True, kw_only=True)
class SeparateBody:
    text: str
    reasoning_parser: str | None = None


@decodes(ParseBody)
async def parse_function_call(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the tool calls in a text. The body may name their format; the default is the server's format."""
    return json_response(await read_body(http, partial(_parse, core)))


@decodes(SeparateBody)
async def separate_reasoning(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Split a text into its leading reasoning and the answer.

    The body may name the format of the reasoning; the default is the server's format.
    """
    return json_response(await read_body(http, partial(_separate, core)))


def _parse(core: EngineCore, raw: bytes) -> dict[str, Any]:
    body = decode(ParseBody, parse_object(raw))
    name = body.tool_call_parser or core.plan.tokenizer.tool_call_parser or ""
    if name not in TOOL_CALL_PARSERS:
        raise _unknown("tool_call_parser", name, sorted(TOOL_CALL_PARSERS))
    tools = read_tools(body.tools)
    message = _read(ParserSettings(calls=TOOL_FORMATS.get(name), harmony=name == HARMONY, tools=tools), body.text)
    calls = [
        {"tool_index": index, "name": call.name, "parameters": call.arguments}
        for index, call in enumerate(message.tool_calls)
    ]
    return {"normal_text": message.content or "", "calls": calls}


def _separate(core: EngineCore, raw: bytes) -> dict[str, Any]:
    body = decode(SeparateBody, parse_object(raw))
    name = body.reasoning_parser or core.plan.tokenizer.reasoning_parser or ""
    if name not in REASONING_PARSERS:
        raise _unknown("reasoning_parser", name, sorted(REASONING_PARSERS))
    form = REASONING_FORMATS.get(name)
    is_open = form is not None and (form.forced or form.closes_unopened(body.text))
    message = _read(ParserSettings(reasoning=form, harmony=name == HARMONY, is_open=is_open), body.text)
    return {"reasoning_text": message.reasoning or "", "text": message.content or ""}


def _read(settings: ParserSettings, text: str) -> AssistantMessage:
    return collect(OutputParser(settings).feed(text, final=True))


def _unknown(param: str, name: str, known: list[str]) -> InvalidRequest:
    problem = f"{name[:40]!r} is not known" if name else "is required, because this server has no default"
    return InvalidRequest(f"{param} {problem}; known parsers: {', '.join(known)}.", param=param)
