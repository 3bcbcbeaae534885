"""Transcriptions and translations with the client of OpenAI, compared with transformers' own generation."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx
import openai
import pytest
from transformers import WhisperForConditionalGeneration, WhisperProcessor

import http_server
import tiny_checkpoints
import tiny_films
import tiny_whisper
from runtime.errors import CheckpointError, Overloaded
from runtime.media import transcription
from runtime.media.transcription import Transcription
from serve import Engine
from serve.server.app import build_app

pytestmark = pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="files of audio need PyAV")
PLAIN: dict[str, Any] = {"random_seed": 1, "max_total_tokens": 1024, "dtype": "float32", "skip_tokenizer_init": True}
SHORT, LONG = tiny_films.tone(1.5, seed=1), tiny_films.tone(5.0, seed=2)


@cache
def reference(*, long: bool, times: bool, multilingual: bool = True, prompt: str = "", **options: Any) -> Any:
    """Return the text and the segments (start, end, text) of transformers' generation."""
    path = tiny_whisper.cached(multilingual=multilingual)
    model: Any = WhisperForConditionalGeneration.from_pretrained(path).eval()
    processor: Any = WhisperProcessor.from_pretrained(path)
    more = {"truncation": False, "padding": "longest"} if long else {}
    inputs = processor(
        LONG if long else SHORT, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True, **more
    )
    if prompt:
        options["prompt_ids"] = processor.get_prompt_ids(prompt, return_tensors="pt")
    output = model.generate(**inputs, return_timestamps=times, return_segments=True, do_sample=False, **options)
    decode = processor.tokenizer.decode
    segments = [
        (float(each["start"]), float(each["end"]), decode(each["tokens"].tolist(), skip_special_tokens=True))
        for each in output["segments"][0]
    ]
    return decode(output["sequences"][0].tolist(), skip_special_tokens=True).strip(), segments


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[Engine, str]]:
    options = {"transcription_model": tiny_whisper.cached(), **PLAIN, **options}
    engine = Engine(tiny_checkpoints.cached("llama"), **options)
    async with engine, http_server.serving(build_app(engine.core)) as url:
        yield engine, url


def named(samples: Any) -> tuple[str, bytes]:
    return "speech.wav", tiny_films.wave_file(samples)


async def test_every_format_is_transformers_text() -> None:
    async with served() as (_, url), openai.AsyncOpenAI(api_key="x", base_url=f"{url}/v1") as client:
        audio = client.audio
        german = {"file": named(SHORT), "model": "whisper-1", "language": "de"}
        wanted, _ = reference(long=False, times=False, language="de", task="transcribe")
        assert wanted
        answer = await audio.transcriptions.create(**german)
        assert answer.text == wanted
        assert answer.usage.seconds == 2  # pyright: ignore
        assert await audio.transcriptions.create(**german, response_format="text") == wanted + "\n"
        hinted, _ = reference(long=False, times=False, language="de", task="transcribe", prompt="Hello there")
        assert hinted != wanted
        assert (await audio.transcriptions.create(**german, prompt="Hello there")).text == hinted
        english, _ = reference(long=False, times=False, task="translate", language="de")
        found = reference(long=False, times=False, task="translate")[0]  # the model finds out the language
        assert english != wanted
        translated = await audio.translations.create(file=named(SHORT), model="whisper-1")
        assert translated.text == found

        for samples, is_long in ((SHORT, False), (LONG, True)):
            text, segments = reference(long=is_long, times=True, language="fr", task="transcribe")
            french: Any = {"file": named(samples), "model": "whisper-1", "language": "fr"}
            whole: Any = await audio.transcriptions.create(**french, response_format="verbose_json")
            assert whole.text == text
            assert (whole.language, round(whole.duration, 2)) == ("french", len(samples) / 16_000)
            assert len(segments) > 1
            length = len(samples) / 16_000
            assert [(each.start, each.end, each.text) for each in whole.segments] == [
                (start, min(end, length), words) for start, end, words in segments
            ]
            if is_long:
                assert (await audio.transcriptions.create(**french)).text == text
            lines = (await audio.transcriptions.create(**french, response_format="srt")).split("\n\n")  # type: ignore
            start, end, words = segments[0]
            head = f"1\n00:00:{start:06.3f} --> 00:00:{min(end, length):06.3f}".replace(".", ",")
            assert lines[0].split("\n")[:2] == head.split("\n")
            assert lines[0].split("\n")[2] == " ".join(words.split())
            assert len(lines) == len(segments) + 1
            vtt: Any = await audio.transcriptions.create(**french, response_format="vtt")
            assert vtt.startswith(f"WEBVTT\n\n00:00:{start:06.3f} --> ")


async def test_a_model_of_one_language() -> None:
    path = tiny_whisper.cached(multilingual=False)
    async with served(transcription_model=path) as (_, url), httpx.AsyncClient(base_url=url, timeout=60) as http:
        wanted, _ = reference(long=False, times=False, multilingual=False)
        form = {"model": path, "language": "en"}
        files = {"file": named(SHORT)}
        answer = await http.post("/v1/audio/transcriptions", data=form, files=files)
        assert answer.json()["text"] == wanted
        answer = await http.post("/v1/audio/translations", data={"model": path}, files=files)
        assert answer.status_code == 400
        answer = await http.post("/v1/audio/transcriptions", data={**form, "language": "de"}, files=files)
        assert answer.status_code == 400


async def test_wrong_forms_are_refused_by_name() -> None:
    async with served(max_audio_seconds=6.0) as (_, url), httpx.AsyncClient(base_url=url, timeout=60) as http:
        good = {"model": "whisper-1"}
        for form, content, param in (
            ({}, None, "model"),
            ({**good, "response_format": "yaml"}, None, "response_format"),
            ({**good, "stream": "true"}, None, "stream"),
            ({**good, "temperature": "2"}, None, "temperature"),
            ({**good, "temperature": "nan"}, None, "temperature"),
            ({**good, "language": "xx"}, None, "language"),
            ({**good, "timestamp_granularities[]": "word"}, None, "timestamp_granularities[]"),
            ({**good, "include[]": "logprobs"}, None, "include[]"),
            ({**good, "prompt": "<|en|> x"}, None, "prompt"),
            (good, b"no audio", "file"),
            (good, b"#EXTM3U\nfile:///etc/passwd", "file"),
            (good, tiny_films.wave_file(tiny_films.tone(7.0)), "file"),
        ):
            files = {"file": ("a.wav", content or tiny_films.wave_file(SHORT))}
            answer = await http.post("/v1/audio/transcriptions", data=form, files=files)
            assert answer.status_code == 400, (form, answer.text)
            assert answer.json()["error"]["param"] == param, (form, answer.text)
            if param == "prompt":
                assert answer.json()["error"]["message"] == "prompt must not contain special tokens."
        files = {"file": named(SHORT)}
        assert (await http.post("/v1/audio/transcriptions", data={"model": "gpt"}, files=files)).status_code == 404
        assert (await http.post("/v1/audio/transcriptions", json=good)).status_code == 400
    async with served(transcription_model=None) as (_, url), httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await http.post("/v1/audio/transcriptions", data=good, files=files)
        assert answer.status_code == 501
        assert "--transcription-model" in answer.text


async def test_another_model_than_whisper_is_a_refused_start() -> None:
    with pytest.raises(CheckpointError, match="must be a Whisper model, not llama"):
        async with served(transcription_model=tiny_checkpoints.cached("llama")):
            pass
    with pytest.raises(CheckpointError, match="name this one with --transcription-model"):
        await Engine(tiny_whisper.cached(), **PLAIN).start()


async def test_a_client_that_leaves_ends_its_work_and_few_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (engine, _):
        transcriber = engine.core.transcriber
        assert transcriber is not None
        began, ended = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def endless(features: Any, *, stopping_criteria: Any, **_: Any) -> None:
            loop.call_soon_threadsafe(began.set)
            while not bool(stopping_criteria[0](features, None).any()):
                pass
            time.sleep(0.2)  # the last token takes some time
            ended.set()

        request = Transcription(tiny_films.wave_file(SHORT), language="de")
        with monkeypatch.context() as slow:
            slow.setattr(transcriber._model, "generate", endless)
            slow.setattr(transcription, "MAX_WAITING", 1)
            leaving = asyncio.ensure_future(transcriber.transcribe(request, ""))
            await began.wait()
            with pytest.raises(Overloaded):
                await transcriber.transcribe(request, "")
            slow.setattr(transcription, "MAX_WAITING", 4)
            waiting = [asyncio.ensure_future(transcriber.transcribe(request, name)) for name in ("a", "a", "b")]
            await asyncio.sleep(0)  # all three wait now
            with pytest.raises(Overloaded, match="Too many transcriptions"):
                await transcriber.transcribe(request, "b")
            waiting.pop().cancel()
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="of your transcriptions"):
                await transcriber.transcribe(request, "a")
            for each in (*waiting, leaving):
                each.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert ended.is_set(), "the next request waits for the thread of this one"
        wanted, _ = reference(long=False, times=False, language="de", task="transcribe")
        assert (await transcriber.transcribe(request, "")).text == wanted
