"""Images: tokens equal those of transformers in every batch, chunk and cache, and another image is never a hit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pytest
from PIL import Image

import tiny_seeing
from runtime.errors import EngineFailure, InvalidRequest, Overloaded
from runtime.media import preparation
from runtime.media.images import decode_image
from runtime.media_source import MediaSource
from runtime.request import LogprobParams, Request
from runtime.sampling_params import SamplingParams
from serve import Engine
from tiny_seeing import FAMILIES, HAS_TORCHVISION, NEEDS_TORCHVISION, Answer, picture, prompt

PLAIN: dict[str, Any] = {"random_seed": 1, "max_total_tokens": 4096, "dtype": "float32"}
NUM_NEW = 8
SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW, ignore_eos=True)
TEXT = "Once upon a time"
# Numbers of the pictures that stand in a prompt: none, one, several, and the same ones in another order.
ASKED: tuple[tuple[int, ...], ...] = ((0, 1), (), (0,), (1, 0), (2, 1), (2,))
WITH_TORCHVISION = pytest.mark.skipif(not HAS_TORCHVISION, reason="its processor needs torchvision")
FAST = ("llava", "qwen2_vl", "qwen3_vl", "gemma3")


@cache
def pictures() -> tuple[Image.Image, ...]:
    """Three pictures; the first and the last have the same size."""
    return picture(40, 30, 1), picture(30, 50, 2), picture(40, 30, 3)


@cache
def expected(family: str, numbers: tuple[int, ...]) -> Answer:
    images = [pictures()[number] for number in numbers]
    path = tiny_seeing.cached(family)
    return tiny_seeing.reference(path, family, prompt(family, TEXT, len(numbers)), images, NUM_NEW)


async def answer(engine: Engine, family: str, numbers: Sequence[int], **fields: Any) -> tuple[Answer, int]:
    """Return an answer, and the number of cached tokens of its prompt."""
    media = tuple(MediaSource("object", pictures()[number]) for number in numbers)
    request = Request(
        text=prompt(family, TEXT, len(numbers)), media=media, sampling=SAMPLING, logprobs=LogprobParams(), **fields
    )
    [chunk] = await engine.core.submit(request).whole()
    assert chunk.logprobs is not None
    return Answer(chunk.ids, [logprob or 0.0 for logprob, _ in chunk.logprobs.chosen]), chunk.usage.cached


def agree(found: Iterable[tuple[Answer, int]], wanted: Iterable[Answer]) -> bool:
    return all(answer.agrees(other) for (answer, _), other in zip(found, wanted, strict=True))


def families() -> list[Any]:
    return [
        pytest.param(
            family,
            marks=[
                *([] if family in FAST else [pytest.mark.slow]),
                *([WITH_TORCHVISION] if family in NEEDS_TORCHVISION else []),
            ],
        )
        for family in FAMILIES
    ]  # fmt: skip


@pytest.mark.parametrize("family", families())
async def test_tokens_are_those_of_transformers(family: str) -> None:
    wanted = [expected(family, numbers) for numbers in ASKED]
    assert not wanted[0].agrees(wanted[3]), "the order of images matters"
    async with Engine(tiny_seeing.cached(family), **PLAIN) as engine:
        media = engine.core.media
        assert media is not None
        together = await asyncio.gather(*(answer(engine, family, numbers) for numbers in ASKED))
        assert agree(together, wanted)
        assert media.cache.num_misses >= 3
        assert len(media.cache) == 3
        hits = media.cache.num_hits
        for numbers, same in zip(ASKED, wanted):  # one by one, with cached prefixes
            again, num_cached = await answer(engine, family, numbers)
            assert again.agrees(same)
            assert num_cached or not numbers or family in ("qwen3_5", "gemma3")
        assert media.cache.num_hits == hits + sum(map(len, ASKED)), "no image is encoded again"
        engine.core.check()


SETTINGS = [
    pytest.param({"chunked_prefill_size": 16, "page_size": 4}, id="chunked"),
    pytest.param({"chunked_prefill_size": 16, "page_size": 1, "disable_radix_cache": True}, id="no prefix cache"),
    pytest.param({"disable_overlap_schedule": True, "attention_backend": "torch_native"}, id="torch attention"),
    pytest.param({"mm_cache_gib": 0.0}, id="no encoder cache"),
    pytest.param({"max_total_tokens": 160, "page_size": 4}, id="retracted"),
    pytest.param({"dp_size": 2}, id="dp"),
    pytest.param({"tp_size": 2}, id="tp", marks=pytest.mark.slow),
    pytest.param({"speculative_algorithm": "NGRAM"}, id="drafts"),
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", pytest.param("qwen2_vl", marks=pytest.mark.slow)])
async def test_settings_do_not_change_tokens(family: str, settings: dict[str, Any]) -> None:
    if "tp_size" in settings and family == "qwen2_vl":
        pytest.skip("transformers' modules run on one rank")
    wanted = [expected(family, numbers) for numbers in ASKED]
    async with Engine(tiny_seeing.cached(family), **{**PLAIN, **settings}) as engine:
        for _ in range(2):
            found = await asyncio.gather(*(answer(engine, family, numbers) for numbers in ASKED))
            assert agree(found, wanted)
        engine.core.check()


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_vl",
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("qwen3_5", marks=pytest.mark.slow),
        pytest.param("mistral3", marks=[pytest.mark.slow, WITH_TORCHVISION]),
    ],
)
async def test_two_stages_give_the_same_tokens(family: str) -> None:
    """Qwen3-VL's second stage adds vectors of images too; only Qwen3.5's second stage reads three-axis positions."""
    wanted = [expected(family, numbers) for numbers in ASKED]
    settings = {"pp_size": 2, "chunked_prefill_size": 32 if family == "gemma3" else 16, "page_size": 4}
    async with Engine(tiny_seeing.cached(family), **{**PLAIN, **settings}) as engine:
        assert agree(await asyncio.gather(*(answer(engine, family, numbers) for numbers in ASKED)), wanted)
        again = await asyncio.gather(*(answer(engine, family, numbers) for numbers in ASKED))
        assert agree(again, wanted)
        assert all(num_cached for _, num_cached in again) or family in ("qwen3_5", "gemma3")
        media = engine.core.media
        assert media is not None
        assert media.cache.num_hits >= sum(map(len, ASKED)), "no image is encoded again"
        engine.core.check()


async def test_another_image_of_the_same_size_is_no_hit() -> None:
    family = "llava"
    async with Engine(tiny_seeing.cached(family), page_size=1, **PLAIN) as engine:
        first, _ = await answer(engine, family, (0,))
        second, num_cached = await answer(engine, family, (2,))
        before = prompt(family, TEXT, 1).partition("<image>")[0]
        tokenizer = engine.core.tokenizer
        assert tokenizer is not None
        [ids] = tokenizer.encode_batch([before], add_special_tokens=True)
        assert num_cached == len(ids), "only the text before the image is shared"
        assert first.agrees(expected(family, (0,)))
        assert second.agrees(expected(family, (2,)))


async def test_abort_while_an_image_is_prepared_leaves_nothing() -> None:
    family = "llava"
    async with Engine(tiny_seeing.cached(family), **PLAIN) as engine:
        media = tuple(MediaSource("object", picture(64, 64, seed)) for seed in range(8))
        stream = engine.core.submit(
            Request(text=prompt(family, "a b c d e f g h i", 8), media=media, sampling=SAMPLING)
        )
        stream.close()
        assert (await answer(engine, family, (0,)))[0].agrees(expected(family, (0,)))
        await engine.core.drain()
        engine.core.check()


async def test_a_failure_of_the_models_code_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    family = "llava"

    async def fail(*arguments: Any) -> Any:
        raise TypeError("the model's code")

    async with Engine(tiny_seeing.cached(family), **PLAIN) as engine:
        assert engine.core.media is not None
        with monkeypatch.context() as broken:
            broken.setattr(engine.core.media, "place", fail)
            with pytest.raises(EngineFailure, match="could not be prepared"):
                await answer(engine, family, (0,))
        assert (await answer(engine, family, (0,)))[0].agrees(expected(family, (0,)))
        engine.core.check()


async def test_a_client_with_many_images_does_not_delay_another() -> None:
    family = "llava"
    async with Engine(tiny_seeing.cached(family), mm_threads=1, **PLAIN) as engine:
        media = engine.core.media
        assert media is not None
        many = tuple(MediaSource("object", picture(16, 16, seed)) for seed in range(10, 40))
        text = prompt(family, " ".join("a" * 31), len(many))
        greedy = engine.core.submit(Request(text=text, media=many, sampling=SAMPLING, owner="many"))
        modest = answer(engine, family, (0,), owner="modest")
        assert (await modest)[0].agrees(expected(family, (0,)))
        assert media.cache.num_misses < len(many), "the other client's images took turns with it"
        await greedy.whole()
        engine.core.check()


async def test_an_image_of_a_request_that_failed_holds_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with a good and a broken image cannot pile up decoded images before the encoder."""
    family = "llava"
    async with Engine(tiny_seeing.cached(family), mm_threads=2, **PLAIN) as engine:
        media = engine.core.media
        assert media is not None
        encode, begun, go_on = media._tower.encode, threading.Event(), threading.Event()

        def slow(*arguments: Any) -> Any:
            begun.set()
            assert go_on.wait(60)
            return encode(*arguments)

        def broken_later(content: Any, *arguments: Any) -> Any:
            assert not isinstance(content, bytes) or begun.wait(60)
            return decode_image(content, *arguments)

        monkeypatch.setattr(media._tower, "encode", slow)
        monkeypatch.setattr(preparation, "decode_image", broken_later)
        images = (MediaSource("object", pictures()[0]), MediaSource("bytes", b"broken"))
        with pytest.raises(InvalidRequest):
            await engine.core.submit(Request(text=prompt(family, TEXT, 2), media=images, sampling=SAMPLING)).whole()
        assert media._workers._num_free == 1
        go_on.set()
        assert (await answer(engine, family, (0,)))[0].agrees(expected(family, (0,)))
        assert media._workers._num_free == 2


async def test_waiting_images_are_limited_in_bytes_also_where_tokens_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = "llava"
    file = tiny_seeing.png(pictures()[0])
    monkeypatch.setattr(preparation, "MAX_HELD_BYTES", len(file))
    async with Engine(tiny_seeing.cached(family), **PLAIN) as engine:
        media = engine.core.media
        assert media is not None
        text, source = prompt(family, TEXT, 2), MediaSource("bytes", file)
        with pytest.raises(Overloaded, match="images are waiting"):
            await engine.core.submit(Request(text=text, media=(source, source), sampling=SAMPLING)).whole()
        with pytest.raises(Overloaded, match="images are waiting"):
            await media.expand(text, [source, source], "")
        one = prompt(family, TEXT, 1)
        for _ in range(2):  # what was counted is let go
            assert len(await media.expand(one, [source], "")) > len(one)
            await engine.core.submit(Request(text=one, media=(source,), sampling=SAMPLING)).whole()
