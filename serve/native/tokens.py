"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest
from serve.body import parse_object, read_body
from serve.core import EngineCore
from serve.decode import Length, decode
from serve.native.schema import MAX_PROMPTS
from serve.openai.chat import render
from serve.openai.schema import ChatBody
from serve.replies import json_response

if TYPE_CHECKING:
    from runtime.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class TokenizeBody:
    prompt: str | Annotated[list[str], Length(1, MAX_PROMPTS)]
    add_special_tokens: bool = True


@dataclass(slots=True, kw_only=True)
class TokenizeChatBody(ChatBody):
    add_special_tokens: bool = False  # the chat template writes its own
    add_generation_prompt: bool = True


@dataclass(slots=True, kw_only=True)
class DetokenizeBody:
    tokens: list[int] | Annotated[list[list[int]], Length(1, MAX_PROMPTS)]
    skip_special_tokens: bool = True


class TokensDoor:
    """Text to token ids and back, without the model."""

    def __init__(self, core: EngineCore, *, max_body_bytes: int) -> None:
        self._core = core
        self._max_body_bytes = max_body_bytes

    async def tokenize(self, http: HttpRequest) -> ASGIApp:
        return json_response(await read_body(http, self._tokenize, limit=self._max_body_bytes))

    async def detokenize(self, http: HttpRequest) -> ASGIApp:
        return json_response(await read_body(http, self._detokenize, limit=self._max_body_bytes))

    def _tokenize(self, raw: bytes) -> dict[str, Any]:
        value = parse_object(raw)
        tokenizer = self._tokenizer()
        if value.get("messages") is not None and value.get("prompt") is None:
            chat = decode(TokenizeChatBody, value)
            texts, is_list, special = [render(self._core, chat)], False, chat.add_special_tokens
        else:
            body = decode(TokenizeBody, value)
            is_list, special = isinstance(body.prompt, list), body.add_special_tokens
            texts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        found = tokenizer.encode_batch(texts, add_special_tokens=special)
        counts = [len(ids) for ids in found]
        return {
            "tokens": found if is_list else found[0],
            "count": counts if is_list else counts[0],
            "max_model_len": self._core.plan.model.context_length,
        }

    def _detokenize(self, raw: bytes) -> dict[str, Any]:
        body = decode(DetokenizeBody, parse_object(raw))
        tokenizer, vocab = self._tokenizer(), self._core.facts.vocab_size
        is_list = bool(body.tokens) and isinstance(body.tokens[0], list)
        lists: Any = body.tokens if is_list else [body.tokens]
        if any(not 0 <= token_id < vocab for ids in lists for token_id in ids):
            raise InvalidRequest(f"tokens must be in [0, {vocab}).", param="tokens")
        texts = [tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in lists]
        return {"text": texts if is_list else texts[0]}

    def _tokenizer(self) -> Tokenizer:
        if self._core.tokenizer is None:
            raise InvalidRequest("This server has no tokenizer.")
        return self._core.tokenizer
