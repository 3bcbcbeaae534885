"""Videos: tokens equal those of transformers, beside images and text, from frames and from files."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
from collections.abc import Sequence
from functools import cache
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import http_server
import tiny_films
import tiny_seeing
from runtime.errors import InvalidRequest
from runtime.media import containers
from runtime.media_source import MediaSource
from runtime.request import LogprobParams, Request
from runtime.sampling_params import SamplingParams
from serve import Engine
from serve.server.app import build_app
from tiny_seeing import FAMILIES, HAS_TORCHVISION, Answer, picture

pytestmark = [
    pytest.mark.skipif(not HAS_TORCHVISION, reason="transformers' video processors need torchvision"),
    pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="files of videos need PyAV"),
]
PLAIN: dict[str, Any] = {"random_seed": 1, "max_total_tokens": 8192, "dtype": "float32", "served_model_name": "x"}
NUM_NEW = 6
SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW, ignore_eos=True)
# What stands in a prompt: v0, v1, v2 are videos, p is a picture.
ASKED = (("v0",), (), ("v0", "p"), ("p", "v1", "v0"), ("v2",), ("v0", "v1"))


@cache
def video(name: str) -> np.ndarray:
    """Return a video; v0 and v2 have the same size."""
    return {
        "v0": tiny_films.film(4, 32, 24, 1),
        "v1": tiny_films.film(4, 24, 32, 2),
        "v2": tiny_films.film(4, 32, 24, 3),
    }[name]


PICTURE = picture(40, 30, 5)


def text_of(family: str, names: Sequence[str]) -> str:
    made = FAMILIES[family]
    assert made.video is not None
    places = [made.placeholder if name == "p" else made.video[0] for name in names]
    return "Once " + " upon ".join([*places, "a time"])


def metadata(frames: np.ndarray) -> dict[str, Any]:
    return {"total_num_frames": len(frames), "fps": 2.0, "frames_indices": list(range(len(frames))), "duration": 2.0,
            "height": frames.shape[1], "width": frames.shape[2]}  # fmt: skip


@cache
def expected(family: str, names: tuple[str, ...]) -> Answer:
    videos = [video(name) for name in names if name != "p"]
    more: dict[str, Any] = {}
    if videos:
        more = {"videos": videos, "video_metadata": [metadata(each) for each in videos], "do_sample_frames": False}
    images = [PICTURE for name in names if name == "p"]
    path = tiny_seeing.cached(family)
    return tiny_seeing.reference(path, family, text_of(family, names), images, NUM_NEW, **more)


async def answer(engine: Engine, family: str, names: Sequence[str], **fields: Any) -> tuple[Answer, int]:
    media = tuple(
        MediaSource("object", PICTURE)
        if name == "p"
        else MediaSource("object", {"frames": video(name), "fps": 2.0}, kind="video")
        for name in names
    )
    request = Request(text=text_of(family, names), media=media, sampling=SAMPLING, logprobs=LogprobParams(), **fields)
    [chunk] = await engine.core.submit(request).whole()
    assert chunk.logprobs is not None
    return Answer(chunk.ids, [logprob or 0.0 for logprob, _ in chunk.logprobs.chosen]), chunk.usage.cached


FAST = ("qwen2_vl", "qwen3_vl")
WITH_VIDEOS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava_onevision", "internvl")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in WITH_VIDEOS]
)
async def test_tokens_are_those_of_transformers(family: str) -> None:
    wanted = [expected(family, names) for names in ASKED]
    assert len({tuple(each.ids) + tuple(each.logprobs) for each in wanted}) == len(wanted)
    async with Engine(tiny_seeing.cached(family), chunked_prefill_size=32, page_size=4, **PLAIN) as engine:
        together = await asyncio.gather(*(answer(engine, family, names) for names in ASKED))
        for (found, _), same, names in zip(together, wanted, ASKED, strict=True):
            assert found.agrees(same), names
        media = engine.core.media
        assert media is not None
        hits = media.cache.num_hits
        for names, same in zip(ASKED, wanted):
            again, _ = await answer(engine, family, names)
            assert again.agrees(same)
        assert media.cache.num_hits == hits + sum(map(len, ASKED)), "nothing is encoded again"
        engine.core.check()


async def test_another_video_or_another_speed_is_no_hit() -> None:
    family = "qwen3_vl"
    async with Engine(tiny_seeing.cached(family), page_size=1, **PLAIN) as engine:
        media = engine.core.media
        assert media is not None
        await answer(engine, family, ("v0",))
        found, _ = await answer(engine, family, ("v2",))
        assert found.agrees(expected(family, ("v2",)))
        assert media.cache.num_hits == 0
        faster = MediaSource("object", {"frames": video("v0"), "fps": 1.0}, kind="video")
        await engine.core.submit(Request(text=text_of(family, ("v0",)), media=(faster,), sampling=SAMPLING)).whole()
        assert media.cache.num_hits == 0, "the times between frames are different"


def decoded(file: bytes, indices: Sequence[int]) -> np.ndarray:
    """Return frames of a file, decoded without the product's code."""
    import av

    with av.open(io.BytesIO(file), "r") as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack([frames[index] for index in indices])


async def test_files_through_the_apis(tmp_path: Any) -> None:
    """A file of 5 s at 8 frames per second is seen at 2 frames per second, as many as the option allows."""
    family = "qwen2_vl"
    file = tiny_films.film_file(tiny_films.film(40, 32, 32, 4), 8)
    path = tmp_path / "a.mp4"
    path.write_bytes(file)
    indices = [int(40 * place / 10) for place in range(10)]
    chat = f"<|im_start|>user\n{FAMILIES[family].video[0]}What?<|im_end|>\n<|im_start|>assistant\n"  # type: ignore[index]
    more = {"videos": [decoded(file, indices)], "do_sample_frames": False,
            "video_metadata": [{"total_num_frames": 40, "fps": 8.0, "frames_indices": indices}]}  # fmt: skip
    checkpoint = tiny_seeing.cached(family)
    ids, _ = tiny_seeing.reference(checkpoint, family, chat, [], NUM_NEW, **more)
    wanted = tiny_seeing.processor_of(checkpoint, family).tokenizer.decode(ids, skip_special_tokens=True)
    url = f"data:video/mp4;base64,{base64.b64encode(file).decode()}"
    engine = Engine(checkpoint, allowed_local_media_path=str(tmp_path), **PLAIN)
    async with engine, http_server.serving(build_app(engine.core)) as base:
        async with openai.AsyncOpenAI(api_key="x", base_url=f"{base}/v1") as client:
            for given in (url, path.as_uri()):
                content: Any = [{"type": "video_url", "video_url": {"url": given}}, {"type": "text", "text": "What?"}]
                made = await client.chat.completions.create(
                    model="x", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=NUM_NEW
                )
                assert made.choices[0].message.content == wanted
        async with httpx.AsyncClient(base_url=base, timeout=60) as http:
            for given in (url, base64.b64encode(file).decode(), str(path)):
                body = {
                    "text": chat,
                    "video_data": given,
                    "sampling_params": {"temperature": 0, "max_new_tokens": NUM_NEW},
                }
                assert (await http.post("/generate", json=body)).json()["text"] == wanted
            messages = [{"role": "user", "content": content}]
            counted = (await http.post("/tokenize", json={"model": "x", "messages": messages})).json()
            assert counted["count"] == made.usage.prompt_tokens  # pyright: ignore[reportOptionalMemberAccess]
            assert (await http.get("/model_info")).json()["has_video_understanding"] is True
        sampling = {"temperature": 0.0, "max_new_tokens": NUM_NEW}
        assert (await engine.generate(chat, sampling, video_data=file))["text"] == wanted
        less = await engine.chat(messages, max_tokens=NUM_NEW, temperature=0, mm_processor_kwargs={"num_frames": 4})
        with pytest.raises(InvalidRequest, match="enlarged to more than"):
            await engine.chat(messages, max_tokens=1, mm_processor_kwargs={"num_frames": 40, "min_pixels": 2**21})
        frames = [picture(32, 32, seed) for seed in range(4)]
        with_frames = [{"role": "user", "content": [{"type": "video", "video": frames}, {"type": "text", "text": "?"}]}]
        assert (await engine.chat(with_frames, max_tokens=2)).usage.completion_tokens == 2
    async with Engine(checkpoint, max_video_frames=4, **PLAIN) as engine:
        few = await engine.generate(chat, sampling, video_data=file)
        assert few["meta_info"]["prompt_tokens"] < counted["count"]
        assert less.usage.prompt_tokens == few["meta_info"]["prompt_tokens"], "an option of the request does the same"
        with pytest.raises(InvalidRequest, match="1 to 4 are accepted"):
            await engine.generate(chat, sampling, video_data={"frames": tiny_films.film(5, 32, 32)})
    async with Engine(checkpoint, max_video_pixels=4 * 32 * 32, **PLAIN) as engine:
        assert (await engine.generate(chat, sampling, video_data=file))["text"] == few["text"]


def hostile() -> dict[str, bytes]:
    good = tiny_films.film_file(tiny_films.film(8, 32, 32), 8)
    wide = tiny_films.film_file(np.zeros((2, 64, 4096, 3), np.uint8), 2)
    return {
        "empty": b"x",
        "playlist": b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
        "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
        "cut": good[:200],
        "broken": good[:64] + bytes(len(good) - 64),
        "no video": tiny_films.wave_file(tiny_films.tone(0.1)),
        "too wide": wide,
        "picture": tiny_seeing.png(picture(8, 8)),
    }


async def test_hostile_files_are_refused_and_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    family = "qwen2_vl"
    async with Engine(tiny_seeing.cached(family), max_image_pixels=64 * 1024, **PLAIN) as engine:
        for name, content in hostile().items():
            with pytest.raises(InvalidRequest, match="video_data") as caught:
                await engine.generate(text_of(family, ("v0",)), {"max_new_tokens": 1}, video_data=content)
            assert caught.value.param == "video_data", name
        many = [{"frames": video("v0")}] * 5
        with pytest.raises(InvalidRequest, match="at most 4 are accepted"):
            await engine.generate(text_of(family, ("v0",) * 5), {"max_new_tokens": 1}, video_data=many)
        with monkeypatch.context() as slow:
            slow.setattr(containers, "MAX_DECODE_S", -1.0)
            film = tiny_films.film_file(tiny_films.film(8, 32, 32), 8)
            with pytest.raises(InvalidRequest, match="decoding the video takes more than"):
                await engine.generate(text_of(family, ("v0",)), {"max_new_tokens": 1}, video_data=film)
        found, _ = await answer(engine, family, ("v0",))
        assert found.agrees(expected(family, ("v0",)))
        engine.core.check()
