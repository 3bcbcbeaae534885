"""Requests with a common prefix have a common key, and meet at one replica."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from runtime.errors import ConfigurationError
from serve.on_ray.prefix_table import PrefixTable
from serve.on_ray.prompt_key import BLOCK_BYTES, MAX_BLOCKS, prompt_key

LONG = "a" * 3 * BLOCK_BYTES


def key(headers: Any = None, **fields: Any) -> list[int]:
    return prompt_key(orjson.dumps(fields), headers or {})


@pytest.mark.parametrize("field", ["prompt", "text", "input"])
def test_prompts_share_the_blocks_of_their_common_prefix(field: str) -> None:
    first, second = key(**{field: LONG + "b"}), key(**{field: LONG + "c"})
    assert first[:3] == second[:3]
    assert first[3] != second[3]


def test_a_conversation_goes_on_with_the_same_key() -> None:
    question = {"role": "user", "content": LONG}
    first = key(messages=[question])
    later = key(messages=[question, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}])
    assert first[:3] == later[:3]


def test_models_adapters_and_sessions_have_keys_of_their_own() -> None:
    plain = key(prompt=LONG)
    assert not set(plain) & set(key(prompt=LONG, model="sql"))
    assert not set(plain) & set(key(prompt=LONG, lora_path="sql"))
    assert key(prompt="Hello", session_id="s")[0] == key(prompt="Bye", session_id="s")[0]
    assert key({b"x-session-id": b"s"}, prompt="Hello")[0] == key({b"x-session-id": b"s"}, prompt="Bye")[0]


DEEP = b'{"prompt": ' + b"[" * 400 + b"]" * 400 + b"}"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"prompt": ""}', DEEP])
def test_other_bodies_have_no_key(body: bytes) -> None:
    assert prompt_key(body, {}) == []


def test_a_key_has_a_limit() -> None:
    assert len(key(prompt="a" * 10 * MAX_BLOCKS * BLOCK_BYTES)) == MAX_BLOCKS


def test_the_replica_of_the_longest_prefix_is_chosen() -> None:
    table: PrefixTable[str] = PrefixTable()
    table.note([1, 2], "a")
    table.note([1, 2, 3], "b")
    loads = {"a": 0, "b": 2, "c": 0}
    assert table.choose([1, 2, 3, 4], loads) == "b"
    assert table.choose([9], loads) in ("a", "c")
    assert table.choose([1, 2, 3], {}) is None


def test_a_busy_replica_gives_way() -> None:
    table: PrefixTable[str] = PrefixTable(slack=2)
    table.note([1], "a")
    assert table.choose([1], {"a": 2, "b": 0}) == "a"
    assert table.choose([1], {"a": 3, "b": 0}) == "b"


def test_old_blocks_and_gone_replicas_are_forgotten() -> None:
    table: PrefixTable[str] = PrefixTable(max_hashes=2)
    table.note([1, 2, 3], "a")
    assert table.choose([1], {"a": 1, "b": 0}) == "b"
    assert table.choose([3], {"a": 1, "b": 0}) == "a"
    table.keep(["b"])
    assert table.choose([3], {"a": 1, "b": 0}) == "b"


@pytest.mark.parametrize("replicas", ["0", "4..2", "many", "1..", "-1"])
def test_a_wrong_number_of_replicas_is_refused(replicas: str) -> None:
    from serve.on_ray.application import Scaling

    if replicas == "1..":
        assert Scaling.of(replicas)[:2] == (1, 1)
        return
    with pytest.raises(ConfigurationError, match="--replicas"):
        Scaling.of(replicas)
