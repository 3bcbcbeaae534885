"""Images: tokens equal those of transformers in every batch, chunk and cache, and another image is never a hit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image

import tiny_seeing
from runtime.errors import CheckpointError, ConfigurationError, EngineFailure, InvalidRequest, Overloaded
from runtime.media import preparation
from runtime.media.images import decode_image
from runtime.media.preparation import MediaPreparer
from runtime.media.processing import Processors
from runtime.media_source import MediaSource
from runtime.models.by_transformers.caches import SequenceCacheDecoder
from runtime.request import LogprobParams, Request
from runtime.sampling_params import SamplingParams
from runtime.scheduler.retraction import Retraction
from runtime.worker import transformers_check
from serve import Engine
from tiny_seeing import FAMILIES, HAS_TORCHVISION, NEEDS_TORCHVISION, Answer, picture, prompt

PLAIN: dict[str, Any] = {"random_seed": 1, "max_total_tokens": 4096, "dtype": "float32"}
NUM_NEW = 16
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


def logprobs_in_transformers(family: str, numbers: tuple[int, ...]) -> list[float]:
    images = [pictures()[number] for number in numbers]
    return tiny_seeing.prompt_logprobs(tiny_seeing.cached(family), family, prompt(family, TEXT, len(numbers)), images)


async def prompt_logprobs(engine: Engine, family: str, numbers: Sequence[int]) -> list[float]:
    """Return the log-probabilities of a prompt's tokens, from the second token on."""
    media = tuple(MediaSource("object", pictures()[number]) for number in numbers)
    request = Request(
        text=prompt(family, TEXT, len(numbers)), media=media, sampling=SAMPLING, logprobs=LogprobParams(start=0)
    )
    [chunk] = await engine.core.submit(request).whole()
    assert chunk.prompt_logprobs is not None
    return [logprob for logprob, _ in chunk.prompt_logprobs.chosen[1:] if logprob is not None]


async def answer(engine: Engine, family: str, numbers: Sequence[int], **fields: Any) -> tuple[Answer, int]:
    """Return an answer, and the number of cached tokens of its prompt."""
    media = tuple(MediaSource("object", pictures()[number]) for number in numbers)
    request = Request(
        text=prompt(family, TEXT, len(numbers)), media=media, sampling=SAMPLING, logprobs=LogprobParams(), **fields
    )
    [chunk] = await engine.core.submit(request).whole()
    assert chunk.logprobs is not None
    return Answer(chunk.ids, [logprob or 0.0 for logprob, _ in chunk.logprobs.chosen]), chunk.usage.cached


@pytest.mark.parametrize("asked", [None, True], ids=["automatic", "asked"])
async def test_texts_are_served_if_the_language_model_has_no_cache_for_images(
    asked: bool | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check, failed = transformers_check._check_against_itself, []

    def fails_over_pages(model: Any, *arguments: Any) -> None:
        if not isinstance(model, SequenceCacheDecoder):
            failed.append(model)
            raise CheckpointError("Logits differ.")
        check(model, *arguments)

    monkeypatch.setattr(transformers_check, "_check_against_itself", fails_over_pages)
    path, options = tiny_seeing.cached("llava"), {**PLAIN, "model_impl": "transformers"}
    if asked:
        with pytest.raises(CheckpointError, match="no cache of this language model can begin with them"):
            await Engine(path, **options, enable_multimodal=True).start()
        return
    async with Engine(path, **options) as engine:
        assert failed
        assert [each.getMessage() for each in caplog.records if "Images are refused" in each.getMessage()]
        found, _ = await answer(engine, "llava", ())
        assert found.agrees(expected("llava", ()))
        with pytest.raises(InvalidRequest, match="No images are accepted: .* no cache of this language model"):
            await answer(engine, "llava", (0,))
        assert not engine.core.plan.media.enabled


def agree(found: Iterable[tuple[Answer, int]], wanted: Iterable[Answer]) -> bool:
    return all(answer.agrees(other) for (answer, _), other in zip(found, wanted, strict=True))


def families(among: Iterable[str] = FAMILIES, fast: Sequence[str] = FAST) -> list[Any]:
    return [
        pytest.param(
            family,
            marks=[
                *([] if family in fast else [pytest.mark.slow]),
                *([WITH_TORCHVISION] if family in NEEDS_TORCHVISION else []),
            ],
        )
        for family in among
    ]  # fmt: skip


def tight(family: str) -> dict[str, Any]:
    """Return options with which chunks end inside images, and one or two prompts of `ASKED` fill the pool."""
    processor = tiny_seeing.processor_of(tiny_seeing.cached(family), family)
    asked = max(ASKED, key=len)
    text, images = prompt(family, TEXT, len(asked)), [pictures()[number] for number in asked]
    longest = len(processor(text=[text], images=images)["input_ids"][0])
    return {
        "chunked_prefill_size": 32 if family == "gemma3" else 16,  # Gemma 3's images are not split
        "page_size": 4,
        "schedule_conservativeness": 0.0,
        "max_total_tokens": longest + NUM_NEW + 64,
    }


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
        scored = await asyncio.gather(*(prompt_logprobs(engine, family, numbers) for numbers in ASKED))
        for found, numbers in zip(scored, ASKED, strict=True):
            assert np.allclose(found, logprobs_in_transformers(family, numbers), atol=1e-3), numbers
        engine.core.check()


SETTINGS = [
    pytest.param({"chunked_prefill_size": 16, "page_size": 4}, id="chunked"),
    pytest.param({"chunked_prefill_size": 16, "page_size": 1, "disable_radix_cache": True}, id="no prefix cache"),
    pytest.param({"disable_overlap_schedule": True, "attention_backend": "torch_native"}, id="torch attention"),
    pytest.param({"mm_cache_gib": 0.0}, id="no encoder cache"),
    pytest.param({"dp_size": 2}, id="dp"),
    pytest.param({"speculative_algorithm": "NGRAM"}, id="drafts"),
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", pytest.param("qwen2_vl", marks=pytest.mark.slow)])
async def test_settings_do_not_change_tokens(family: str, settings: dict[str, Any]) -> None:
    wanted = [expected(family, numbers) for numbers in ASKED]
    async with Engine(tiny_seeing.cached(family), **{**PLAIN, **settings}) as engine:
        for _ in range(2):
            found = await asyncio.gather(*(answer(engine, family, numbers) for numbers in ASKED))
            assert agree(found, wanted)
        engine.core.check()


NATIVE = ("qwen3_vl", "gemma3", "qwen3_5", "mistral3", "llama4")  # families whose language models are Penstock's


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *(pytest.param(*each.values, {}, marks=each.marks) for each in families(fast=("qwen3_vl",))),
        *(pytest.param(*each.values, {"tp_size": 2}, marks=each.marks) for each in families(NATIVE, fast=())),
        *(
            pytest.param(*each.values, {"pp_size": 2}, marks=each.marks)
            for each in families(NATIVE, fast=("qwen3_vl",))
        ),
    ],
)
async def test_chunks_inside_images_and_retraction_do_not_change_tokens(
    family: str, ranks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-VL's second stage adds vectors of images too; only Qwen3.5's second stage reads three-axis positions."""
    wanted = [expected(family, numbers) for numbers in ASKED]
    text, long = prompt(family, TEXT, 0), replace(SAMPLING, max_new_tokens=64)
    with_images: list[bool] = []  # whether each retracted sequence has images
    retract = Retraction.retract

    def noting(retraction: Retraction, victim: Any) -> None:
        with_images.append(victim.media is not None)
        retract(retraction, victim)

    monkeypatch.setattr(Retraction, "retract", noting)
    async with Engine(tiny_seeing.cached(family), **{**PLAIN, **tight(family), **ranks}) as engine:
        for _ in range(2):
            beside = [engine.core.submit(Request(text=text, sampling=long)) for _ in range(3)]
            found = await asyncio.gather(*(answer(engine, family, numbers) for numbers in ASKED))
            assert agree(found, wanted)
            for stream in beside:
                await stream.whole()
        assert any(with_images), "an image's sequence was retracted"
        media = engine.core.media
        assert media is not None
        assert media.cache.num_hits >= sum(map(len, ASKED)), "no image is encoded again"
        engine.core.check()


@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"pp_size": 2}])
async def test_language_models_of_transformers_use_one_device(ranks: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="they use one device only"):
        async with Engine(tiny_seeing.cached("qwen2_vl"), **PLAIN, **ranks):
            pass


def reversed_order(patch: pytest.MonkeyPatch) -> None:
    """Reverse the order of a prompt's media blocks."""
    real = MediaPreparer.expanded
    patch.setattr(MediaPreparer, "expanded", lambda self, text, blocks: real(self, text, blocks[::-1]))


def lost_axis(patch: pytest.MonkeyPatch) -> None:
    """Use the positions of the height axis for the width axis too."""
    real = MediaPreparer._positions
    patch.setattr(MediaPreparer, "_positions", lambda self, *arguments: real(self, *arguments)[[0, 1, 1]])


def swapped_pixels(patch: pytest.MonkeyPatch) -> None:
    """Swap red and blue."""

    def swapped(content: Any, *arguments: Any) -> Any:
        return Image.fromarray(np.asarray(decode_image(content, *arguments))[:, :, ::-1].copy())

    patch.setattr(preparation, "decode_image", swapped)


def key_without_pixels(patch: pytest.MonkeyPatch) -> None:
    """Identify an image by its size alone."""
    patch.setattr(Processors, "digest", lambda self, kind, content, options: repr(content.size).encode().ljust(32))


@pytest.mark.parametrize("mutate", [reversed_order, lost_axis, swapped_pixels, key_without_pixels])
async def test_a_mutation_is_noticed(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: Any) -> None:
    family = "qwen3_vl"
    wanted = [expected(family, numbers) for numbers in ASKED]
    mutate(monkeypatch)
    async with Engine(tiny_seeing.cached(family), **PLAIN) as engine:
        found = await asyncio.gather(*(answer(engine, family, numbers) for numbers in ASKED))
    text = ASKED.index(())
    assert found[text][0].agrees(wanted[text]), "a text has no images to confuse"
    assert not agree(found, wanted)


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
