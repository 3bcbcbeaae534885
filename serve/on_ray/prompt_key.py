"""Compute the key by which the router chooses a replica. Prompts with a common prefix have common hashes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from runtime.errors import RequestError
from serve.calls.json_pieces import loads

BLOCK_BYTES = 256  # bytes of the prompt in one hash
MAX_BLOCKS = 256
PROMPTS = ("messages", "prompt", "text", "input_ids", "input", "inputs", "query")  # fields of the APIs' bodies
SESSION_HEADERS = (b"x-session-id", b"session-id")
STORED = ("/v1/files", "/v1/batches")  # routes of files and batches, which are stored on one replica
FORM_MODEL = re.compile(rb'name="model"\r\n\r\n([^\r\n]{1,512})\r\n')  # the field `model` of a multipart/form-data body


class PromptKey(NamedTuple):
    """The hashes of a request's session and of its prompt."""

    pin: int = 0  # hash of the session, whose requests all go to one replica; 0 without a session
    # One hash for each of the first blocks of the prompt, over this block and all earlier blocks. If the request has an
    # adapter or a `prompt_cache_key`, their hashes come first.
    blocks: tuple[int, ...] = ()


class RequestFields(NamedTuple):
    """The fields of a request's body."""

    fields: Mapping[str, Any]
    model: str | None  # the value of `model`, otherwise of `lora_path`, otherwise None

    @classmethod
    def of(cls, body: bytes) -> RequestFields:
        """Return the fields of a JSON body, or only the model of a form. An unreadable body has no fields."""
        try:
            fields = loads(body)
        except RequestError:  # for example too many values: the replica refuses the body
            return cls({}, None)
        except orjson.JSONDecodeError:
            form = FORM_MODEL.search(body)
            return cls({}, form[1].decode(errors="replace") if form else None)
        fields = fields if isinstance(fields, dict) else {}
        model = fields.get("model") or fields.get("lora_path")
        return cls(fields, model if isinstance(model, str) else None)


def prompt_key(
    request: RequestFields, headers: Mapping[bytes, bytes], path: str = "", base_names: Collection[str] = ()
) -> PromptKey:
    """Return the key of a request.

    `base_names` are the names of the model itself. Any other model name is the name of an adapter.
    """
    try:
        return PromptKey(_pin(request.fields, headers, path), _blocks(request, base_names))
    except orjson.JSONEncodeError:
        return PromptKey()


def _pin(fields: Mapping[str, Any], headers: Mapping[bytes, bytes], path: str) -> int:
    """Return the hash of the session, or 0."""
    session = next((headers[name] for name in SESSION_HEADERS if name in headers), b"")
    params = fields.get("session_params")
    named = fields.get("session_id") or (params.get("id") if isinstance(params, dict) else None)
    session = session or (_bytes(named) if named else b"")
    if not session and path.startswith(STORED):
        session = b"\0stored"
    return _hash(b"session" + session) if session else 0


def _blocks(request: RequestFields, base_names: Collection[str]) -> tuple[int, ...]:
    fields = request.fields
    adapter = fields.get("lora_path") or (request.model if request.model not in (*base_names, None) else None)
    digest = blake2b(_bytes([request.model if adapter else None, adapter]), digest_size=8)
    blocks = [_number(digest)] if adapter else []
    if cache_key := fields.get("prompt_cache_key"):
        digest.update(b"cache key" + _bytes(cache_key))
        blocks.append(_number(digest))
    prompt = next((_bytes(fields[name]) for name in PROMPTS if fields.get(name)), b"")
    system = _bytes(fields["system"]) if fields.get("system") else b""
    text = system + prompt
    for start in range(0, min(len(text), BLOCK_BYTES * MAX_BLOCKS), BLOCK_BYTES):
        digest.update(text[start : start + BLOCK_BYTES])
        blocks.append(_number(digest))
    return tuple(blocks)


def _hash(data: bytes) -> int:
    return _number(blake2b(data, digest_size=8))


def _number(digest: blake2b) -> int:
    return int.from_bytes(digest.digest()) or 1


def _bytes(value: Any) -> bytes:
    return value.encode(errors="surrogatepass") if isinstance(value, str) else orjson.dumps(value)
