"""Audio in prompts: tokens equal those of transformers, from samples and from files, through the APIs."""

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
from runtime.media_source import MediaSource
from runtime.request import LogprobParams, Request
from runtime.sampling_params import SamplingParams
from serve import Engine
from serve.server.app import build_app
from tiny_seeing import Answer

FAMILY = "qwen2_audio"
PLAIN: dict[str, Any] = {"random_seed": 1, "max_total_tokens": 4096, "dtype": "float32", "served_model_name": "x"}
NUM_NEW = 6
SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW, ignore_eos=True)
PLACE = "<|audio_bos|><|AUDIO|><|audio_eos|>"
ASKED = ((0,), (), (0, 1), (1, 0), (2,))
needs_av = pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="files of audio need PyAV")


@cache
def sounds() -> tuple[np.ndarray, ...]:
    return tiny_films.tone(0.8, seed=1), tiny_films.tone(1.5, seed=2), tiny_films.tone(0.8, seed=3)


def text_of(numbers: Sequence[int]) -> str:
    return "Once " + " upon ".join([*[PLACE] * len(numbers), "a time"])


@cache
def expected(numbers: tuple[int, ...]) -> Answer:
    audio = {"audio": [sounds()[number] for number in numbers], "sampling_rate": 16_000} if numbers else {}
    return tiny_seeing.reference(tiny_seeing.cached(FAMILY), FAMILY, text_of(numbers), [], NUM_NEW, **audio)


async def answer(engine: Engine, numbers: Sequence[int]) -> Answer:
    media = tuple(MediaSource("object", sounds()[number], kind="audio") for number in numbers)
    request = Request(text=text_of(numbers), media=media, sampling=SAMPLING, logprobs=LogprobParams())
    [chunk] = await engine.core.submit(request).whole()
    assert chunk.logprobs is not None
    return Answer(chunk.ids, [logprob or 0.0 for logprob, _ in chunk.logprobs.chosen])


async def test_tokens_are_those_of_transformers() -> None:
    wanted = [expected(numbers) for numbers in ASKED]
    assert not wanted[2].agrees(wanted[3]), "the order of sounds matters"
    assert not wanted[0].agrees(wanted[4])
    async with Engine(tiny_seeing.cached(FAMILY), chunked_prefill_size=16, page_size=4, **PLAIN) as engine:
        for _ in range(2):
            together = await asyncio.gather(*(answer(engine, numbers) for numbers in ASKED))
            assert all(found.agrees(same) for found, same in zip(together, wanted, strict=True))
        media = engine.core.media
        assert media is not None
        assert len(media.cache) == 3
        engine.core.check()


@needs_av
async def test_files_through_the_apis() -> None:
    file = tiny_films.wave_file(sounds()[0])
    text = base64.b64encode(file).decode()
    chat = f"<|im_start|>user\n{PLACE}What?<|im_end|>\n<|im_start|>assistant\n"
    path = tiny_seeing.cached(FAMILY)
    ids, _ = tiny_seeing.reference(path, FAMILY, chat, [], NUM_NEW, audio=[sounds()[0]], sampling_rate=16_000)
    wanted = tiny_seeing.processor_of(path, FAMILY).tokenizer.decode(ids, skip_special_tokens=True)
    parts: list[Any] = [
        {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{text}"}},
    ]
    engine = Engine(path, **PLAIN)
    async with engine, http_server.serving(build_app(engine.core)) as base:
        async with openai.AsyncOpenAI(api_key="x", base_url=f"{base}/v1") as client:
            for part in parts:
                content: Any = [part, {"type": "text", "text": "What?"}]
                made = await client.chat.completions.create(
                    model="x", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=NUM_NEW
                )
                assert made.choices[0].message.content == wanted
        async with httpx.AsyncClient(base_url=base, timeout=60) as http:
            greedy = {"temperature": 0, "max_new_tokens": NUM_NEW}
            answered = await http.post("/generate", json={"text": chat, "audio_data": text, "sampling_params": greedy})
            assert answered.json()["text"] == wanted
            image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}]
            refused = await http.post(
                "/v1/chat/completions", json={"model": "x", "messages": [{"role": "user", "content": image}]}
            )
            assert refused.status_code == 400
            assert "No images are accepted" in refused.text
        sampling = {"temperature": 0.0, "max_new_tokens": NUM_NEW}
        for given in (file, sounds()[0], {"samples": sounds()[0], "sampling_rate": 16_000}):
            assert (await engine.generate(chat, sampling, audio_data=given))["text"] == wanted
        for given, reason in (
            (b"", "no audio that can be read"),
            (file[:30], "empty|broken"),
            (b"#EXTM3U\nfile:///etc/passwd", "no audio that can be read"),
            (tiny_films.wave_file(tiny_films.tone(2.5)), "longer than 2 s"),
            ({"samples": sounds()[0], "sampling_rate": 8000}, "16000 samples per second"),
            (np.array([0.0, np.nan]), "not finite"),
            (np.zeros((2, 8), np.float32), "array \\[N\\]"),
        ):
            with pytest.raises(InvalidRequest, match=reason):
                await engine.generate(chat, sampling, audio_data=given)
        engine.core.check()


@needs_av
async def test_other_rates_and_channels_are_resampled() -> None:
    """A file of 48,000 samples per second says about the same as one of 16,000."""
    from runtime.media.sounds import decode_audio

    slow: np.ndarray = np.sin(np.arange(16_000, dtype=np.float32) / np.float32(20)) / np.float32(2)
    fast: np.ndarray = np.sin(np.arange(48_000, dtype=np.float32) / np.float32(60)) / np.float32(2)
    found = decode_audio(tiny_films.wave_file(fast, 48_000), 16_000, 10.0, "audio_data")
    assert len(found) == pytest.approx(16_000, abs=64)
    count = min(len(found), len(slow)) - 200
    assert np.abs(found[100:count] - slow[100:count]).max() < 0.02


@needs_av
async def test_audio_that_resampling_makes_too_long_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 40 kB with one sample per second would become 1.3 GB."""
    import av

    from runtime.media.sounds import decode_audio

    class Unused:
        def __init__(self, **_: Any) -> None:
            pass

        def resample(self, frame: Any) -> Any:
            raise AssertionError

    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream: Any = container.add_stream("pcm_s16le", rate=1, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 20_000), np.int16), format="s16", layout="mono")
        frame.sample_rate = 1
        container.mux([*stream.encode(frame), *stream.encode(None)])
    monkeypatch.setattr(av, "AudioResampler", Unused)
    with pytest.raises(InvalidRequest, match="longer than 10 s"):
        decode_audio(file.getvalue(), 16_000, 10.0, "audio_data")
