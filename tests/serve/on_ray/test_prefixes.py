"""Requests with a common prefix have a common key, and meet at one replica."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.errors import ConfigurationError
from serve.on_ray.joined_metrics import joined_metrics
from serve.on_ray.prefix_table import PrefixTable
from serve.on_ray.prompt_key import BLOCK_BYTES, MAX_BLOCKS, PromptKey, RequestFields, prompt_key

LONG = "a" * 3 * BLOCK_BYTES


def key(headers: Any = None, path: str = "", **fields: Any) -> PromptKey:
    return prompt_key(RequestFields.of(orjson.dumps(fields)), headers or {}, path, ("base", "default"))


def blocks(*hashes: int, pin: int = 0) -> PromptKey:
    return PromptKey(pin, hashes)


@pytest.mark.parametrize("field", ["prompt", "text", "input"])
def test_prompts_share_the_blocks_of_their_common_prefix(field: str) -> None:
    first, second = key(**{field: LONG + "b"}).blocks, key(**{field: LONG + "c"}, model="base").blocks
    assert first[:3] == second[:3]
    assert first[3] != second[3]


def test_a_conversation_goes_on_with_the_same_key() -> None:
    question = {"role": "user", "content": LONG}
    first = key(messages=[question])
    later = key(messages=[question, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}])
    assert first.blocks[:3] == later.blocks[:3]


@pytest.mark.parametrize("name", ["model", "lora_path"])
def test_requests_of_an_adapter_share_a_block_of_their_own(name: str) -> None:
    plain, first, second = key(prompt=LONG), key(prompt=LONG, **{name: "sql"}), key(prompt="Hello", **{name: "sql"})
    assert not set(plain.blocks) & set(first.blocks)
    assert first.blocks[0] == second.blocks[0]
    assert set(first.blocks[1:]).isdisjoint(second.blocks[1:])
    assert key(prompt="a", prompt_cache_key="k").blocks[0] == key(prompt="b", prompt_cache_key="k").blocks[0]


def test_a_session_has_a_pin() -> None:
    pins = [
        key(prompt="Hello", session_id="s").pin,
        key(text="Bye", session_params={"id": "s"}).pin,
        key({b"x-session-id": b"s"}, prompt="Why?").pin,
    ]
    assert pins[0]
    assert len(set(pins)) == 1
    assert key(prompt="Hello").pin == 0
    assert key(path="/v1/files").pin == key(path="/v1/files/file-1/content").pin != 0


def test_a_form_names_its_model() -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x--\r\n'
    assert RequestFields.of(form).model == "whisper"


DEEP = b'{"prompt": ' + b"[" * 400 + b"]" * 400 + b"}"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"prompt": ""}', b'{"model": 3}', DEEP])
def test_other_bodies_have_no_key(body: bytes) -> None:
    assert prompt_key(RequestFields.of(body), {}) == PromptKey()


def test_a_key_has_a_limit() -> None:
    assert len(key(prompt="a" * 10 * MAX_BLOCKS * BLOCK_BYTES).blocks) == MAX_BLOCKS


def test_the_replica_of_the_longest_prefix_is_chosen() -> None:
    table: PrefixTable[str] = PrefixTable()
    table.note(blocks(1, 2), "a")
    table.note(blocks(1, 2, 3), "b")
    loads = {"a": 0, "b": 2, "c": 0}
    assert table.choose(blocks(1, 2, 3, 4), loads) == "b"
    assert table.choose(blocks(9), loads) in ("a", "c")
    assert table.choose(blocks(1, 2, 3), {}) is None


def test_a_busy_replica_gives_way_except_to_its_sessions() -> None:
    table: PrefixTable[str] = PrefixTable(slack=2)
    table.note(blocks(1, pin=7), "a")
    assert table.choose(blocks(1), {"a": 2, "b": 0}) == "a"
    assert table.choose(blocks(1), {"a": 3, "b": 0}) == "b"
    assert table.choose(blocks(5, pin=7), {"a": 9, "b": 0}) == "a"
    assert table.choose(blocks(5, pin=7), {"b": 0}) == "b"


def test_old_blocks_and_gone_replicas_are_forgotten() -> None:
    table: PrefixTable[str] = PrefixTable(max_hashes=2)
    table.note(blocks(1, 2, 3), "a")
    assert table.choose(blocks(1), {"a": 1, "b": 0}) == "b"
    assert table.choose(blocks(3), {"a": 1, "b": 0}) == "a"
    table.keep(["b"])
    assert table.choose(blocks(3), {"a": 1, "b": 0}) == "b"


FIRST = """# HELP sglang:num_requests_total Requests.
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{model_name="m"} 3.0
# HELP process_cpu Seconds.
# TYPE process_cpu counter
process_cpu 1.5
"""


def test_joined_metrics_are_read_by_prometheus() -> None:
    text = joined_metrics({"r1": FIRST, "r2": FIRST.replace("3.0", "4.0")})
    families = {each.name: each for each in text_string_to_metric_families(text)}
    counts = {each.labels["replica"]: each.value for each in families["sglang:num_requests"].samples}
    assert counts == {"r1": 3.0, "r2": 4.0}
    assert {each.labels["replica"] for each in families["process_cpu"].samples} == {"r1", "r2"}
    assert text.count("# TYPE") == 2


@pytest.mark.parametrize("replicas", ["0", "4..2", "many", "1..", "-1"])
def test_a_wrong_number_of_replicas_is_refused(replicas: str) -> None:
    from serve.on_ray.application import Scaling

    if replicas == "1..":
        assert Scaling.of(replicas)[:2] == (1, 1)
        return
    with pytest.raises(ConfigurationError, match="--replicas"):
        Scaling.of(replicas)


def test_a_large_body_is_read_in_pieces_and_one_with_too_many_values_has_no_fields() -> None:
    fields = {"model": "base", "prompt": "word " * 20_000}
    assert RequestFields.of(orjson.dumps(fields)) == (fields, "base")
    assert RequestFields.of(orjson.dumps({"model": "base", "input_ids": [[]] * 60_000})) == ({}, None)
