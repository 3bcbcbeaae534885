"""Bodies that are parsed in pieces have the value that `orjson.loads` returns, and the same errors."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest

from runtime.errors import InvalidRequest, PayloadTooLarge
from serve.calls import json_pieces
from serve.calls.json_pieces import MAX_CONTAINERS, MAX_STRINGS, PIECE_BYTES, freed_when_refused, loads

TEXTS = ("", "a", 'é€😀 \n"\\,[]{}', "😀é" * 40, "x" * 250, "[{" * 30, "\\" * 9)
BYTES = (b",", b"]", b"[", b"{", b"}", b'"', b":", b"\\", b" ", b"1", b"\xff", b"")


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "PAUSE_S", 0)


def value(depth: int = 0) -> Any:
    """Return a random JSON value with keys of at most 8 bytes."""
    draw = random.random()
    if depth > 5 or draw < 0.4:
        return random.choice((None, True, -5, 0.5, 1e9, 123456, *TEXTS))
    if draw < 0.55:
        return [random.randrange(9 ** random.randrange(1, 8)) for _ in range(random.randrange(60))]
    if draw < 0.75:
        return [value(depth + 1) for _ in range(random.randrange(6))]
    return {random.choice(("a", "k,[", "é", 'z"')) + str(i): value(depth + 1) for i in range(random.randrange(5))}


def broken(body: bytes) -> bytes:
    """Return the text with one or two bytes inserted, replaced or removed, or truncated."""
    found = bytearray(body)
    for _ in range(random.randrange(3)):
        at = random.randrange(len(found) + 1)
        found[at : at + random.randrange(2)] = random.choice(BYTES)
    return bytes(found[: random.randrange(1, len(found) + 2)])


@pytest.mark.parametrize("piece_bytes", [20, 50, 200])
def test_pieces_are_read_as_the_whole(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(json_pieces, "PIECE_BYTES", piece_bytes)
    num_wrong = 0
    for _ in range(350):
        body = json.dumps(value(), ensure_ascii=random.random() < 0.5, indent=random.choice((None, None, 1))).encode()
        assert loads(body) == orjson.loads(body)
        body = broken(body)
        try:
            expected = orjson.loads(body)
        except orjson.JSONDecodeError:
            num_wrong += 1
            with pytest.raises((orjson.JSONDecodeError, PayloadTooLarge)):  # a text that became a long key
                loads(body)
        else:
            assert loads(body) == expected
    assert num_wrong > 100


@pytest.mark.parametrize("wrong", ["1,,2", "1, 2,", ",1", "1 2", "1, --2", "01", "1,\n,2", "1]], [[1", "1}, {"])
def test_what_is_wrong_is_refused_wherever_a_piece_ends(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    for piece_bytes in range(20, 60):
        monkeypatch.setattr(json_pieces, "PIECE_BYTES", piece_bytes)
        with pytest.raises(orjson.JSONDecodeError):
            loads(f'{{"text": "a", "input_ids": [{"7, " * 30}{wrong}{", 7" * 30}]}}'.encode())


def test_a_key_that_occurs_twice_is_the_last_one_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "PIECE_BYTES", 50)
    numbers = list(range(60))
    body = f'{{"a": {numbers}, "b": {numbers}, "a": 5, "c": {numbers}}}'.encode()
    assert loads(body) == {"a": 5, "b": numbers, "c": numbers}
    with pytest.raises(InvalidRequest, match="twice"):
        loads(f'{{"a": 1, "b": 2, "a": {numbers}}}'.encode())


def test_lists_objects_keys_and_texts_are_counted_but_not_brackets_in_texts() -> None:
    lists = b'{"a": [' + b"[]," * (MAX_CONTAINERS - 2) + b"1]}"
    assert len(loads(lists)["a"]) == MAX_CONTAINERS - 1
    with pytest.raises(PayloadTooLarge, match="lists and objects"):
        loads(lists.replace(b"1]", b"[]]"))
    texts = b'{"a": [' + b'"",' * (MAX_STRINGS - 1) + b"1]}"
    assert len(loads(texts)["a"]) == MAX_STRINGS
    with pytest.raises(PayloadTooLarge, match="keys and strings"):
        loads(texts.replace(b"1]", b'""]'))
    with pytest.raises(PayloadTooLarge, match="key is longer"):
        loads(orjson.dumps({"a" * PIECE_BYTES: 1}))
    brackets = '[{\\"' * MAX_CONTAINERS
    assert loads(orjson.dumps({"text": brackets, "b": [brackets]})) == {"text": brackets, "b": [brackets]}


@pytest.mark.parametrize("refuses", [True, False])
def test_what_a_refused_body_held_is_freed_at_once(refuses: bool) -> None:
    found: list[Any] = []
    body = {"ids": list(range(20_000)), "deep": [[{"a": "b" * 300}] * 300], "last": 1}

    def work() -> Any:
        found.append(loads(orjson.dumps(body)))
        if refuses:
            raise InvalidRequest("no")
        return found[0]

    if not refuses:
        assert freed_when_refused(work) == body
        return
    with pytest.raises(InvalidRequest) as caught:
        freed_when_refused(work)
    assert not found[0]
    assert "work" not in [frame.name for frame in caught.traceback]


def test_brackets_without_an_end_are_refused() -> None:
    for opening in (b"[", b'{"a":', b'[{"a":'):
        with pytest.raises((orjson.JSONDecodeError, PayloadTooLarge)):
            loads(opening * 40_000)
