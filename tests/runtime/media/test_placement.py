"""Where images stand in a prompt, their keys, and the cache of their vectors."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from runtime.errors import InvalidRequest
from runtime.kv_cache.page_keys import page_keys
from runtime.media.encoder_cache import EncodedBlock, EncoderCache
from runtime.media.placement import NumberMarks, expanded, expanded_ids, place
from runtime.media_source import Kind
from runtime.request import Request
from runtime.sequence import Sequence

PLACES: dict[Kind, str] = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
IMAGE, ROW = 9, 8  # ids of a token of an image, and of a text between its rows


def block(name: str, rows: int = 2) -> EncodedBlock:
    """Return an image of rows of two tokens, each followed by a token of text."""
    ids = np.array([IMAGE, IMAGE, ROW] * rows, np.int64)
    vectors = np.arange(rows * 2 * 3, dtype=np.float32).reshape(-1, 3)
    return EncodedBlock(sha256(name.encode()).digest(), "<iir>" * rows, ids, ids == IMAGE, vectors, {})


def sequence(ids: tuple[int, ...], blocks: list[EncodedBlock]) -> Sequence:
    placed, media = place(ids, blocks, None, 100, mutual=False)
    return Sequence(Request(ids=placed, prompt_media=media), 0, placed, max_tokens=64, stop_ids=frozenset(), seed=0)


def test_images_are_numbered_in_the_order_of_the_prompt() -> None:
    items: list[tuple[Kind, str]] = [("image", "<i>0</i>0"), ("video", "<i>0</i>"), ("image", "<i>0</i>y")]
    text, _ = expanded("a<image>b<video><image>", PLACES, items, NumberMarks("<i>", "</i>"))
    assert text == "a<i>0</i>0b<i>0</i><i>1</i>y"


def test_images_stand_in_order_and_have_keys_of_their_own() -> None:
    first, second = block("a"), block("b", 1)
    ids, order = expanded_ids([1, 7, 2, 7], {"image": 7}, [first, second], PLACES)
    assert order == [0, 1]
    assert ids == (1, 9, 9, 8, 9, 9, 8, 2, 9, 9, 8)
    placed, media = place(ids, [first, second], None, 100, mutual=False)
    assert placed == ids
    assert [(span.start, span.end) for span in media.spans] == [(1, 3), (4, 6), (8, 10)]
    assert np.array_equal(np.concatenate([s.vectors for s in media.spans[:2]]), first.vectors)
    keys = media.keys
    assert [key for key in keys if key < 2**31] == [1, 8, 8, 2, 8]
    assert len({*keys}) == 3 + 6, "every token of an image has another key"
    assert expanded("x<image>y<image>", PLACES, [("image", "A"), ("image", "BC")]) == ("xAyBC", [0, 1])


def test_items_of_several_kinds_stand_where_their_placeholders_are() -> None:
    items: list[tuple[Kind, str]] = [("video", "V"), ("image", "A"), ("audio", "S"), ("image", "B")]
    text, order = expanded("<image>, <audio> <video><image>.", PLACES, items)
    assert text == "A, S VB."
    assert order == [1, 2, 0, 3]
    assert expanded("<image> <video>", PLACES, [("image", "A")]) == ("A <video>", [0]), "a kind without items is text"
    film = block("v")._replace(kind="video")
    ids, order = expanded_ids([5, 1, 7], {"image": 7, "video": 5}, [block("a", 1), film], PLACES)
    assert ids == (9, 9, 8, 9, 9, 8, 1, 9, 9, 8)
    assert order == [1, 0]
    seen: list[list[int]] = []

    def positions(ids: Any, types: Any, grids: Any) -> Any:
        seen.append(types.tolist())
        return np.arange(3 * len(ids)).reshape(3, -1)

    place(ids, [film, block("a", 1)], positions, 100, mutual=False)
    assert seen == [[2, 2, 0, 2, 2, 0, 0, 1, 1, 0]]


def test_wrong_numbers_of_places_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="1 places for images"):
        expanded("x<image>", PLACES, [("image", "A"), ("image", "B")])
    with pytest.raises(InvalidRequest, match="0 places for videos"):
        expanded("x<image>", PLACES, [("image", "A"), ("video", "B")])
    with pytest.raises(InvalidRequest, match="stand for parts of an image"):
        place((1, 9, 9, 8, 9), [block("a", 1)], None, 100, mutual=False)


def test_places_are_counted_before_they_are_listed() -> None:
    """A text of millions of placeholders does not delay the event loop."""

    class Long(str):
        def find(self, *_: Any) -> int:
            raise AssertionError("too many places are searched for")

    with pytest.raises(InvalidRequest, match="3 places for images"):
        expanded(Long("<image>" * 3), PLACES, [("image", "A")])


def test_keys_of_pages_depend_on_the_image() -> None:
    ids = (1, 2, 3, 4, 9, 9, 8, 9, 9, 8, 5, 6)
    pages = {name: page_keys(sequence(ids, [block(name)]), 3, 4) for name in ("a", "b")}
    assert pages["a"][0] == pages["b"][0], "the text before the image is shared"
    assert pages["a"][1] != pages["b"][1]
    assert pages["a"][2] != pages["b"][2]
    assert page_keys(sequence(ids, [block("a")]), 3, 4) == pages["a"]
    text = Sequence(Request(ids=ids), 0, ids, max_tokens=64, stop_ids=frozenset(), seed=0)
    assert page_keys(text, 1, 4) == pages["a"][:1]


def test_cache_keeps_its_limit_and_drops_the_least_recently_used() -> None:
    blocks = [block(name) for name in "abc"]
    cache = EncoderCache(2 * blocks[0].nbytes)
    for each in blocks[:2]:
        cache.put(each)
    assert cache.get(blocks[0].digest) is blocks[0]
    cache.put(blocks[2])
    assert cache.get(blocks[1].digest) is None
    assert cache.get(blocks[0].digest) is blocks[0]
    assert cache.num_bytes == 2 * blocks[0].nbytes
    cache.put(replace_vectors(blocks[1], 1000))
    assert len(cache) == 2, "a block above the limit is not kept"


def replace_vectors(old: EncodedBlock, count: int) -> EncodedBlock:
    return old._replace(vectors=np.zeros((count, 3), np.float32))
