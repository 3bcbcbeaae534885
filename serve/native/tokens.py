"""`/tokenize` and `/detokenize`: convert text to token ids and back, without the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.config.template_files import read_json
from runtime.errors import InvalidRequest
from runtime.tokenizer.text_limit import LARGE_TEXT_BYTES, give_back_memory
from serve.calls.body import decode_open, parse_object
from serve.calls.chat.prepare import CountedPrompt, counted_prompt
from serve.calls.chat_completions.messages import chat_of
from serve.calls.chat_completions.schema import ChatBody
from serve.calls.prompts import MAX_CONTEXTS, Ids, Texts, check_counted
from serve.calls.sampling import sampling_fields
from serve.http.endpoint import decodes, json_response, read_body

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.tokenizer.tokenizer import Tokenizer


MIN_DETOKENIZED = 131_072  # a call may have this many tokens even if the context is small


@dataclass(slots=True, kw_only=True)
class TokenizeBody:
    prompt: Texts
    add_special_tokens: bool = True
    return_token_strs: bool = False


@dataclass(slots=True, kw_only=True)
class TokenizeChatBody(ChatBody):
    return_token_strs: bool = False


@dataclass(slots=True, kw_only=True)
class DetokenizeBody:
    tokens: Ids
    skip_special_tokens: bool = True


@decodes(TokenizeBody, TokenizeChatBody)
async def tokenize(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the token ids of `prompt` (a text or a list), or of `messages` rendered with the chat template."""
    answer = await read_body(http, partial(_tokenize, core))
    if isinstance(answer, _CountedChat):
        ids = await answer.prompt.ids(core)
        answer = await anyio.to_thread.run_sync(partial(_tokens, core, [ids], is_list=False, strings=answer.strings))
    return json_response(answer)


@decodes(DetokenizeBody)
async def detokenize(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the text of the token ids in `tokens`, or a list of texts for a list of lists."""
    return json_response(await read_body(http, partial(_detokenize, core)))


async def tokenizer_info(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the tokenizer's configuration in vLLM's format: without paths, and with special tokens as text."""
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


class _CountedChat(NamedTuple):
    """A chat with media, whose tokens can be counted only after the media are loaded."""

    prompt: CountedPrompt
    strings: bool


def _tokenize(core: EngineCore, raw: bytes) -> dict[str, Any] | _CountedChat:
    value = parse_object(raw)
    tokenizer = _tokenizer(core)
    if value.get("messages") is not None and value.get("prompt") is None:
        chat = decode_open(TokenizeChatBody, value, core, "/tokenize", also_known=sampling_fields("chat"))
        chat_request = chat_of(chat)
        prompt = counted_prompt(core, chat_request)
        if prompt.media:
            return _CountedChat(prompt, chat.return_token_strs)
        texts, is_list, special, strings = [prompt.text], False, chat.add_special_tokens, chat.return_token_strs
    else:
        body = decode_open(TokenizeBody, value, core, "/tokenize", also_known={"model"})
        is_list, special = isinstance(body.prompt, list), body.add_special_tokens
        strings = body.return_token_strs
        texts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        for text in texts:
            check_counted(core, [text], param="prompt")
    id_lists = tokenizer.encode_batch(texts, add_special_tokens=special)
    if len(raw) > LARGE_TEXT_BYTES:
        give_back_memory()
    return _tokens(core, id_lists, is_list=is_list, strings=strings)


def _tokens(core: EngineCore, id_lists: Sequence[Sequence[int]], *, is_list: bool, strings: bool) -> dict[str, Any]:
    tokenizer = _tokenizer(core)
    counts = [len(ids) for ids in id_lists]
    pieces = [[tokenizer.backend.token(token_id) for token_id in ids] for ids in id_lists] if strings else [None]
    return {
        "tokens": id_lists if is_list else id_lists[0],
        "count": counts if is_list else counts[0],
        "max_model_len": core.plan.model.context_length,
        "token_strs": pieces if strings and is_list else pieces[0],
    }


def _detokenize(core: EngineCore, raw: bytes) -> dict[str, Any]:
    value = parse_object(raw)
    _check_length(core, value.get("tokens"))
    body = decode_open(DetokenizeBody, value, core, "/detokenize", also_known={"model"})
    tokenizer, vocab = _tokenizer(core), core.facts.vocab_size
    is_list = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: Any = body.tokens if is_list else [body.tokens]
    if any(not 0 <= token_id < vocab for ids in lists for token_id in ids):
        raise InvalidRequest(f"tokens must be in [0, {vocab}).", param="tokens")
    texts = [tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in lists]
    return {"text": texts if is_list else texts[0]}


def _check_length(core: EngineCore, tokens: Any) -> None:
    """Raise `InvalidRequest` if there are so many tokens that decoding them would block the interpreter."""
    most = max(MIN_DETOKENIZED, MAX_CONTEXTS * core.plan.model.context_length)
    lists = tokens if isinstance(tokens, list) else []
    num_tokens = sum(len(each) if isinstance(each, list) else 1 for each in lists)
    if num_tokens > most:
        raise InvalidRequest(f"{num_tokens} tokens exceed the limit of {most} per call.", param="tokens")


def _tokenizer(core: EngineCore) -> Tokenizer:
    if core.tokenizer is None:
        raise InvalidRequest("This server has no tokenizer.")
    return core.tokenizer
