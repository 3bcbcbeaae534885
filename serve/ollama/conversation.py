"""Convert bodies of Ollama's routes to chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from runtime.errors import InvalidRequest
from runtime.media_source import MediaSource
from runtime.request import LogprobParams
from serve.calls.chat.request import ChatRequest, thinking_switch
from serve.calls.response_format import grammar_of
from serve.ollama.schema import ChatBody, GenerateBody, Message, OllamaBody


def chat_of(body: ChatBody) -> ChatRequest:
    """Convert a body of /api/chat to a `ChatRequest`. Raises `InvalidRequest`, whose `param` is the invalid field."""
    messages = [_message(message, f"messages.{index}") for index, message in enumerate(body.messages)]
    return _chat(body, messages, tools=body.tools or None)


def chat_of_prompt(body: GenerateBody) -> ChatRequest:
    """Convert a body of /api/generate to a `ChatRequest` with one user message."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    return _chat(body, [*system, {"role": "user", "content": _content(body.prompt, body.images, "images")}])


def logprobs_of(body: OllamaBody) -> LogprobParams | None:
    if body.logprobs:
        return LogprobParams(top=body.top_logprobs, text=True)
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs requires logprobs to be true.", param="top_logprobs")
    return None


def _chat(
    body: OllamaBody, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> ChatRequest:
    kwargs: dict[str, Any] = {}
    if body.think is not None:
        kwargs = thinking_switch(body.think is not False)
        if isinstance(body.think, str):
            kwargs["reasoning_effort"] = body.think
    return ChatRequest(
        messages=messages,
        sampling=body.options.sampling(),
        tools=tools,
        grammar=grammar_of(body.response_format()),
        template_kwargs=kwargs,
        continue_final_message=messages[-1]["role"] == "assistant",
        logprobs=logprobs_of(body),
        cut_output=True,
        label=uuid4().hex,
    )


def _content(text: str, images: Sequence[str] | None, path: str) -> str | list[dict[str, Any]]:
    """Return the text, or, if there are images, a list of parts with the images first, as in Ollama."""
    if not images:
        return text
    sources = [MediaSource("base64", image, f"{path}.{index}") for index, image in enumerate(images)]
    return [*({"type": "image", "source": source} for source in sources), {"type": "text", "text": text}]


def _message(message: Message, path: str) -> dict[str, Any]:
    content = _content(message.content, message.images, f"{path}.images")
    converted: dict[str, Any] = {"role": message.role, "content": content}
    if message.thinking:
        converted["reasoning_content"] = message.thinking
    if message.tool_calls:
        converted["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_name:
        converted["name"] = message.tool_name
    if message.tool_call_id:
        converted["tool_call_id"] = message.tool_call_id
    return converted
