"""`/tokenize` and `/detokenize`: text to token ids and back, without the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.config.template_files import read_json
from runtime.errors import InvalidRequest
from runtime.tokenizer.text_limit import LARGE_TEXT_BYTES, give_back_memory
from serve.chat.request import render
from serve.decode import Length
from serve.endpoint import decode_open, json_response, parse_object, read_body
from serve.openai.messages import chat_of
from serve.openai.schema import ChatBody
from serve.prompts import MAX_CONTEXTS, MAX_PROMPTS, check_counted
from serve.sampling import sampling_fields

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.tokenizer.tokenizer import Tokenizer


MIN_DETOKENIZED = 131_072  # tokens of all texts of a call; more, where that is less than so many contexts


@dataclass(slots=True, kw_only=True)
class TokenizeBody:
    prompt: str | Annotated[list[str], Length(1, MAX_PROMPTS)]
    add_special_tokens: bool = True
    return_token_strs: bool = False


@dataclass(slots=True, kw_only=True)
class TokenizeChatBody(ChatBody):
    return_token_strs: bool = False


@dataclass(slots=True, kw_only=True)
class DetokenizeBody:
    tokens: list[int] | Annotated[list[list[int]], Length(1, MAX_PROMPTS)]
    skip_special_tokens: bool = True


async def tokenize(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Token ids of `prompt` (a text or a list of texts), or of `messages` through the chat template."""
    return json_response(await read_body(http, partial(_tokenize, core)))


async def detokenize(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The text of `tokens`, or the texts of a list of them."""
    return json_response(await read_body(http, partial(_detokenize, core)))


async def tokenizer_info(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The tokenizer's configuration as vLLM answers it: its file without paths, special tokens as text."""
    return json_response(await anyio.to_thread.run_sync(_tokenizer_info, core))


def _tokenizer_info(core: EngineCore) -> dict[str, Any]:
    tokenizer, path = _tokenizer(core), core.plan.tokenizer.tokenizer_path
    config = read_json(Path(path) / "tokenizer_config.json") if path else {}
    return {
        "tokenizer_class": None,
        **{name: value for name, value in config.items() if not name.endswith(("_file", "_or_path"))},
        **tokenizer.special,
        "vocab_size": tokenizer.vocab_size,
        "max_model_len": core.plan.model.context_length,
        "chat_template": None if tokenizer.template is None else tokenizer.template.source,
    }


def _tokenize(core: EngineCore, raw: bytes) -> dict[str, Any]:
    value = parse_object(raw)
    tokenizer = _tokenizer(core)
    if value.get("messages") is not None and value.get("prompt") is None:
        chat = decode_open(TokenizeChatBody, value, core, "/tokenize", beside=sampling_fields("chat"))
        asked = chat_of(chat)
        text = render(core, asked, check=partial(check_counted, core, param="messages"))
        texts, is_list, special, strings = [text], False, chat.add_special_tokens, chat.return_token_strs
    else:
        body = decode_open(TokenizeBody, value, core, "/tokenize", beside={"model"})
        is_list, special = isinstance(body.prompt, list), body.add_special_tokens
        strings = body.return_token_strs
        texts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        for text in texts:
            check_counted(core, [text], param="prompt")
    found = tokenizer.encode_batch(texts, add_special_tokens=special)
    if len(raw) > LARGE_TEXT_BYTES:
        give_back_memory()
    counts = [len(ids) for ids in found]
    pieces = [[tokenizer.backend.token(token_id) for token_id in ids] for ids in found] if strings else [None]
    return {
        "tokens": found if is_list else found[0],
        "count": counts if is_list else counts[0],
        "max_model_len": core.plan.model.context_length,
        "token_strs": pieces if strings and is_list else pieces[0],
    }


def _detokenize(core: EngineCore, raw: bytes) -> dict[str, Any]:
    value = parse_object(raw)
    _check_length(core, value.get("tokens"))
    body = decode_open(DetokenizeBody, value, core, "/detokenize", beside={"model"})
    tokenizer, vocab = _tokenizer(core), core.facts.vocab_size
    is_list = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: Any = body.tokens if is_list else [body.tokens]
    if any(not 0 <= token_id < vocab for ids in lists for token_id in ids):
        raise InvalidRequest(f"tokens must be in [0, {vocab}).", param="tokens")
    texts = [tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in lists]
    return {"text": texts if is_list else texts[0]}


def _check_length(core: EngineCore, tokens: Any) -> None:
    """Decoding holds the interpreter: raises `InvalidRequest` for more tokens than a few contexts hold."""
    most = max(MIN_DETOKENIZED, MAX_CONTEXTS * core.plan.model.context_length)
    lists = tokens if isinstance(tokens, list) else []
    num_tokens = sum(len(each) if isinstance(each, list) else 1 for each in lists)
    if num_tokens > most:
        raise InvalidRequest(
            f"{num_tokens} tokens are more than the {most} that are decoded at once.", param="tokens"
        )


def _tokenizer(core: EngineCore) -> Tokenizer:
    if core.tokenizer is None:
        raise InvalidRequest("This server has no tokenizer.")
    return core.tokenizer
