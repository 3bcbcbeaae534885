"""`/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest, NotFound, NotSupported, PayloadTooLarge
from runtime.media.transcription import Segment, Transcript, Transcription
from serve.calls.client import CLIENT
from serve.http.endpoint import json_response, or_disconnect
from serve.openai.files import Uploads, boundary_of, form_fields

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Task = Literal["transcribe", "translate"]
FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
FORM_BYTES = 65_536  # maximum size of a form in addition to its file
FIELDS = frozenset(
    {"file", "model", "language", "prompt", "response_format", "temperature", "timestamp_granularities[]", "stream",
     "chunking_strategy"}
)  # fmt: skip


class _Form(NamedTuple):
    """A decoded form: the transcription request, the model's name and the response format."""

    request: Transcription
    model: str
    format: str


async def transcribe(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return a transcript of an audio file."""
    return await _answer(http, core, "transcribe")


async def translate(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return an English translation of the speech in an audio file."""
    return await _answer(http, core, "translate")


async def _answer(http: HttpRequest, core: EngineCore, task: Task) -> ASGIApp:
    if core.transcriber is None:
        raise NotSupported(
            "Audio: this server has no model for transcription; start it with --transcription-model PATH_OF_WHISPER."
        )
    boundary = boundary_of(http.headers.get("content-type", ""))
    uploads: Uploads = http.app.state.uploads
    client = CLIENT.get().name
    with uploads.one(client) as body:
        async for part in http.stream():
            if len(body) + len(part) > core.plan.media.max_bytes + FORM_BYTES:
                raise PayloadTooLarge(f"A file may have at most {core.plan.media.max_bytes} bytes.")
            uploads.grow(body, part, client)
        form = await anyio.to_thread.run_sync(_read, body, boundary, task)
        if form.model not in (*core.transcriber.names, "whisper-1"):
            raise NotFound(f"The model {form.model[:200]!r} does not exist; it is {core.transcriber.names[-1]!r}.",
                           param="model")  # fmt: skip
        work = core.transcriber.transcribe(form.request, client)
        transcript = await or_disconnect(work, http.receive)
    return _shown(transcript, form)


def _read(body: bytearray, boundary: bytes, task: Task) -> _Form:
    parts = form_fields(body, boundary)
    for name in parts.keys() - FIELDS:
        raise InvalidRequest(f"{name[:80]} is not supported here; leave it out.", param=name[:80])
    texts = {name: _text(name, value) for name, (_, value) in parts.items() if name != "file"}
    for name in ("file", "model"):
        if name not in parts:
            raise InvalidRequest(f"The form has no {name}.", param=name)
    format_ = texts.get("response_format", "json")
    if format_ not in FORMATS:
        raise InvalidRequest(f"response_format must be one of {', '.join(FORMATS)}.", param="response_format")
    if texts.get("stream", "false").lower() not in ("false", "0"):
        raise InvalidRequest("stream is not supported: the text comes when it is complete.", param="stream")
    if texts.get("timestamp_granularities[]", "segment") != "segment":
        raise InvalidRequest("timestamp_granularities may be segment only.", param="timestamp_granularities[]")
    if texts.get("chunking_strategy", "auto") != "auto":
        raise InvalidRequest("chunking_strategy may be auto only.", param="chunking_strategy")
    if task == "translate" and "language" in texts:
        raise InvalidRequest("language is not supported here: the model finds it out.", param="language")
    request = Transcription(
        bytes(parts["file"][1]), task, texts.get("language") or None, texts.get("prompt", ""),
        _temperature(texts.get("temperature", "0")), format_ in ("srt", "vtt", "verbose_json"),
    )  # fmt: skip
    return _Form(request, texts["model"], format_)


def _text(name: str, value: memoryview) -> str:
    try:
        if len(value) <= FORM_BYTES:
            return bytes(value).decode("utf-8")
    except UnicodeDecodeError:
        pass
    raise InvalidRequest(f"{name} must be a short text in UTF-8.", param=name)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise InvalidRequest("temperature must be a number from 0 to 1.", param="temperature")
    return value


def _shown(transcript: Transcript, form: _Form) -> ASGIApp:
    """Return the answer in the requested format."""
    if form.format == "text":
        return PlainTextResponse(transcript.text + "\n")
    if form.format == "srt":
        return PlainTextResponse("".join(_srt(index, each) for index, each in enumerate(transcript.segments, 1)))
    if form.format == "vtt":
        return PlainTextResponse("WEBVTT\n\n" + "".join(_vtt(each) for each in transcript.segments))
    usage = {"type": "duration", "seconds": math.ceil(transcript.duration_s)}
    if form.format == "json":
        return json_response({"text": transcript.text, "usage": usage})
    whole: dict[str, Any] = {
        "task": form.request.task,
        "language": transcript.language,
        "duration": transcript.duration_s,
        "text": transcript.text,
        "segments": [
            {"id": index, "start": each.start_s, "end": each.end_s, "text": each.text, "tokens": each.token_ids,
             "temperature": form.request.temperature}
            for index, each in enumerate(transcript.segments)
        ],
        "usage": usage,
    }  # fmt: skip
    return json_response(whole)


def _srt(index: int, segment: Segment) -> str:
    times = f"{_clock(segment.start_s, ',')} --> {_clock(segment.end_s, ',')}"
    return f"{index}\n{times}\n{_line(segment.text)}\n\n"


def _vtt(segment: Segment) -> str:
    return f"{_clock(segment.start_s, '.')} --> {_clock(segment.end_s, '.')}\n{_line(segment.text)}\n\n"


def _line(text: str) -> str:
    """Return the text on one line and without "-->": line breaks and arrows would end a subtitle cue."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, mark: str) -> str:
    thousandths = round(seconds * 1000)
    minutes, thousandths = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{thousandths // 1000:02}{mark}{thousandths % 1000:03}"
