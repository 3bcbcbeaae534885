"""Convert a chat body to a `ChatRequest`: check its messages, and collect the template's variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from runtime.config.chat_templates import RESERVED_KWARGS
from runtime.errors import InvalidRequest
from runtime.media_source import Kind
from runtime.request import LogprobParams, Service
from serve.calls.chat.request import ChatRequest, effort_switch, thinking_switch
from serve.calls.chat_completions.functions import is_legacy, legacy_choice, legacy_tools, with_tool_calls
from serve.calls.chat_completions.requests import keep_last_of
from serve.calls.chat_completions.schema import ChatBody, Message, Part
from serve.calls.media import OBJECT, media_part, native_source, with_options
from serve.calls.prompts import namespaces_of, pin_of, service_of

_MEDIA: Mapping[str, Kind] = {  # types of parts
    "image_url": "image", "input_image": "image", "video_url": "video", "audio_url": "audio",
}  # fmt: skip
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def chat_of(body: ChatBody, objects: Sequence[Any] = ()) -> ChatRequest:
    """Convert the body to a `ChatRequest`.

    `objects` are images, videos and audio from Python, to which URLs in the body refer. Raises `InvalidRequest`, whose
    `param` is the path of the invalid field.
    """
    legacy = is_legacy(body)
    messages = [read_message(message, f"messages.{index}", objects) for index, message in enumerate(body.messages)]
    return ChatRequest(
        messages=with_options(with_tool_calls(messages), body.mm_processor_kwargs),
        sampling=body.sampling,
        tools=legacy_tools(body) if legacy else body.tools,
        tool_choice=legacy_choice(body) if legacy else body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls and not legacy,
        legacy_calls=legacy,
        grammar=body.grammar,
        template_kwargs=_template_kwargs(body),
        continue_final_message=body.continue_final_message,
        separate_reasoning=body.separate_reasoning,
        stream_reasoning=body.stream_reasoning,
        include_reasoning=body.include_reasoning and not (body.reasoning and body.reasoning.exclude),
        max_thinking_tokens=_thinking_tokens(body),
        logprobs=_logprobs(body),
        top_logprobs=body.top_logprobs or 0 if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        returns_ids=body.return_token_ids,
        returns_hidden=body.return_hidden_states,
        experts_from=body.experts_from,
        add_generation_prompt=body.add_generation_prompt,
        add_special_tokens=body.add_special_tokens,
        keep_last=keep_last_of(body),
        namespace=namespaces_of(body.cache_salt, body.extra_key, 1)[0],
        priority=body.priority,
        service=_service(body),
        label=body.rid or uuid4().hex,
    )


def _service(body: ChatBody) -> Service:
    """Return the `Service` of a body.

    If a part has `cache_control`, the prompt is pinned in the KV cache, as with `prompt_cache_key`.
    """
    service = service_of(body.timeout_s, body.service_tier, body.prompt_cache_key, body.session_id)
    if service.pin is not None or not body.messages:
        return service
    contents = [message.content for message in body.messages if isinstance(message.content, list)]
    if all(part.cache_control is None for content in contents for part in content):
        return service
    return service._replace(pin=pin_of(body.messages[0].content))


def read_message(message: Message, path: str, objects: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a message in the form that chat templates expect.

    Raises `InvalidRequest`, whose `param` is the path of the invalid field, below `path`.
    """
    role = message.role.lower()
    if role not in ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(ROLES)}.", param=f"{path}.role")
    content: Any = message.content
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    called = message.function_call
    if content is None and role == "assistant" and not (message.tool_calls or called or reasoning):
        content = message.refusal or ""
    if content is None and role != "assistant":
        raise InvalidRequest(f"{path}.content is required.", param=f"{path}.content")
    if isinstance(content, list):
        content = _parts(message, path, objects)
    return {
        "role": "system" if role == "developer" else role,  # chat templates know only the older name
        "content": content,
        "name": message.name,
        "tool_calls": [_tool_call(call) for call in message.tool_calls] if message.tool_calls else None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": reasoning,
        "function_call": None if called is None else {"name": called.name, "arguments": called.arguments or {}},
    }


def _parts(message: Message, path: str, objects: Sequence[Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(message.content or ()):
        path_of_part = f"{path}.content.{index}"
        if not isinstance(part, str) and part.type == "refusal" and message.role.lower() == "assistant":
            parts.append({"type": "text", "text": part.refusal or ""})
        elif not isinstance(part, str) and part.type in _MEDIA:
            parts.append(_media(part, path_of_part, objects))
        elif not isinstance(part, str) and part.type == "input_audio":
            parts.append(_input_audio(part, path_of_part))
        elif isinstance(part, str) or part.type != "text":
            kind = "" if isinstance(part, str) else f' "{part.type[:40]}"'
            raise InvalidRequest(
                f"{path_of_part}.type{kind} is not supported; text, image_url, video_url, audio_url and input_audio "
                "are.",
                param=f"{path_of_part}.type",
            )
        elif part.text is None:
            raise InvalidRequest(f"{path_of_part}.text is required.", param=f"{path_of_part}.text")
        else:
            parts.append({"type": "text", "text": part.text})
    return parts


def _media(part: Part, path: str, objects: Sequence[Any]) -> dict[str, Any]:
    kind = _MEDIA[part.type]
    value, param = getattr(part, f"{kind}_url"), f"{path}.{kind}_url"
    url = value if isinstance(value, str | None) else value.url
    if url is None:
        where = param if value is None else f"{param}.url"
        why = f"; a uuid alone is no {kind}, because identity is decided by content. Send it again" if part.uuid else ""
        raise InvalidRequest(f"{where} is required{why}.", param=where)
    if part.modalities == "video" and kind == "image":
        where = f"{path}.modalities"
        raise InvalidRequest(
            f'{where} "video" is not supported for images. Leave it out to send the frames as images, or send the '
            "video as a video_url.",
            param=where,
        )
    if objects and url.startswith(OBJECT):
        return {"type": kind, "source": native_source(objects[int(url[len(OBJECT) :])], param, kind)}
    return {"type": kind, "source": native_source(url, param, kind)}


def _input_audio(part: Part, path: str) -> dict[str, Any]:
    """Return the message part for OpenAI's `input_audio`, base64 text. The format is detected from the data."""
    if part.input_audio is None:
        raise InvalidRequest(f"{path}.input_audio is required.", param=f"{path}.input_audio")
    return media_part(part.input_audio.data, f"{path}.input_audio.data", "audio")


def _tool_call(call: Any) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments or {}}
    return {"id": call.id, "type": call.type, "function": function}


def _thinking_tokens(body: ChatBody) -> int | None:
    """Return the limit of reasoning tokens from the first field that is set. Penstock's own field comes first."""
    limits = (
        body.max_thinking_tokens,
        body.thinking_token_budget,
        body.reasoning.max_tokens if body.reasoning is not None else None,
        body.thinking.budget_tokens if body.thinking is not None else None,
    )
    return next((each for each in limits if each is not None), None)


def _template_kwargs(body: ChatBody) -> Mapping[str, Any]:
    kwargs = dict(body.chat_template_kwargs)
    reserved = RESERVED_KWARGS & kwargs.keys()
    if reserved:
        param = f"chat_template_kwargs.{min(reserved)}"
        raise InvalidRequest(f"{param} cannot be set here: it is built from the request's own fields.", param=param)
    effort = body.reasoning_effort
    switches = [body.enable_thinking, None if body.thinking is None else body.thinking.type == "enabled"]
    if body.reasoning is not None:
        switches += [body.reasoning.enabled, body.reasoning.enable]
    enabled = next((each for each in switches if each is not None), None)
    if enabled is not None:
        kwargs = thinking_switch(enabled) | kwargs
    if body.reasoning is not None:
        effort = effort or body.reasoning.effort
    return kwargs if effort is None else effort_switch(effort) | kwargs


def _logprobs(body: ChatBody) -> LogprobParams | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs requires logprobs to be true.", param="top_logprobs")
    if not body.logprobs and body.prompt_logprobs is None:
        return None
    start = -1 if body.prompt_logprobs is None else 0
    top = max(body.top_logprobs or 0, body.prompt_logprobs or 0)
    return LogprobParams(start=start, top=top, text=not body.return_tokens_as_token_ids)
