"""Decode the bodies of chat and completion calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.errors import InvalidRequest
from runtime.sampling_params import APIS, SamplingParams
from serve.calls.body import decode_open, parse_object, report_unknown
from serve.calls.chat_completions.schema import ChatBody, OpenAIBody
from serve.calls.prompts import check_parts
from serve.calls.response_format import grammar_of, structured_outputs_of
from serve.calls.sampling import read_sampling, sampling_fields, sampling_of_call

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Body = TypeVar("Body", bound=OpenAIBody)

_SCHEMA = frozenset({"name", "schema", "strict", "description"})
_FORMAT = _SCHEMA | {"type", "json_schema"}  # some clients send the schema's fields next to "type"
_TOOL = frozenset({"type", "function", "cache_control"})
_FUNCTION = frozenset({"name", "description", "parameters", "strict", "return", "response"})


def decode_body(cls: type[Body], raw: bytes, core: EngineCore) -> Body:
    """Decode a body. Raises `InvalidRequest` for invalid or unsupported fields.

    With --refuse-unknown-fields, it also raises for unknown fields.
    """
    json = parse_object(raw)
    body = decode_open(cls, json, core, APIS[cls.api], also_known=sampling_fields(cls.api))
    body.sampling = read_sampling(body.api, json)
    for path, known, fate in _unknown_nested(body):
        report_unknown(path, known, core, APIS[cls.api], fate=fate)
    if body.best_of is not None and body.best_of != (body.sampling.get("n") or 1):
        raise InvalidRequest("best_of is not supported yet; remove it or set it to n.", param="best_of")
    body.grammar = grammar_of(body.response_format)
    structured = structured_outputs_of(body.structured_outputs)
    if structured is not None:
        if body.grammar is not None:
            raise InvalidRequest(
                "structured_outputs and response_format exclude each other.", param="structured_outputs"
            )
        body.grammar = structured
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options requires stream to be true.", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed; set stream to false.", param="prompt_logprobs")
    check_parts(hidden=body.return_hidden_states, routed=body.return_routed_experts, num_choices=1, stream=body.stream)
    return body


def _unknown_nested(body: OpenAIBody) -> Iterator[tuple[tuple[str | int, ...], frozenset[str], str]]:
    """Yield the unknown fields of nested objects that `decode` does not check: response_format and tools.

    Each item has the path, the known names, and the fate of the field (see `report_unknown`).
    """
    response_format = body.response_format or {}
    ignored, seen = "which is ignored", "which only the chat template sees"
    objects: list[tuple[tuple[str | int, ...], Any, frozenset[str], str]] = []
    if response_format.get("type") not in (
        "structural_tag",
        "grammar",
    ):  # fields of a structural_tag are checked by the grammar library
        objects.append((("response_format",), response_format, _FORMAT, ignored))
        objects.append((("response_format", "json_schema"), response_format.get("json_schema"), _SCHEMA, ignored))
    if isinstance(body, ChatBody):
        for index, tool in enumerate(body.tools or ()):
            objects.append((("tools", index), tool, _TOOL, seen))
            objects.append((("tools", index, "function"), tool.get("function"), _FUNCTION, seen))
    for path, value, known, fate in objects:
        if isinstance(value, dict):
            for name in value.keys() - known:
                if value[name] is not None:
                    yield (*path, name), known, fate


def keep_last_of(body: OpenAIBody) -> int | None:
    """Return the number of tokens to keep at the end of the prompt.

    None keeps all tokens. -1 keeps as many as fit into the context with room for the output.
    """
    if body.truncate_prompt_tokens == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1, not 0.", param="truncate_prompt_tokens")
    return body.truncate_prompt_tokens


def sampling_of(core: EngineCore, body: OpenAIBody) -> SamplingParams:
    """Return the request's sampling parameters, with the server's defaults for those that the request leaves out."""
    return sampling_of_call(core, body.api, body.sampling)
