"""The key of a prompt: hashes of its beginning. Requests with a common prefix have common hashes."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import orjson

BLOCK_BYTES = 256  # bytes of the prompt in one hash
MAX_BLOCKS = 256
PROMPTS = ("messages", "prompt", "text", "input_ids", "input", "inputs", "query")  # fields of the APIs' bodies
SESSIONS = ("session_id", "prompt_cache_key")  # fields that name a conversation
SESSION_HEADERS = (b"x-session-id", b"session-id")


def prompt_key(body: bytes, headers: Mapping[bytes, bytes]) -> list[int]:
    """Return one hash per block of the prompt. A hash covers the model's name and all blocks up to its own.

    If the request names a session, the first block is the session. A body without a prompt, or with a prompt that is
    nested too deeply for JSON, has an empty key.
    """
    try:
        fields = orjson.loads(body)
        return _key(fields, headers) if isinstance(fields, dict) else []
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return []


def _key(fields: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> list[int]:
    session = next((headers[name] for name in SESSION_HEADERS if name in headers), None)
    session = session or next((_bytes(fields[name]) for name in SESSIONS if fields.get(name)), b"")
    prompt = next((_bytes(fields[name]) for name in PROMPTS if fields.get(name)), b"")
    system = _bytes(fields["system"]) if fields.get("system") else b""
    digest = blake2b(_bytes([fields.get("model"), fields.get("lora_path")]), digest_size=8)
    key = []
    if session:
        digest.update(b"session" + session)
        key.append(int.from_bytes(digest.digest()))
    text = system + prompt
    for start in range(0, min(len(text), BLOCK_BYTES * MAX_BLOCKS), BLOCK_BYTES):
        digest.update(text[start : start + BLOCK_BYTES])
        key.append(int.from_bytes(digest.digest()))
    return key


def _bytes(value: Any) -> bytes:
    return value.encode(errors="surrogatepass") if isinstance(value, str) else orjson.dumps(value)
