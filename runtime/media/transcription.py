"""Transcribes and translates audio with Whisper, outside of the engine: transformers' own model generates.

Penstock's engine has no cross-attention between a decoder and an encoder. Therefore a Whisper checkpoint runs beside
the main model, one request at a time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import anyio
import anyio.to_thread

from runtime.config.plan import Plan
from runtime.errors import CheckpointError, EngineFailure, InvalidRequest, Overloaded
from runtime.media.fair_slots import Asker, FairSlots
from runtime.media.sounds import decode_audio

logger = logging.getLogger("penstock.media")

MAX_WAITING = 64
WINDOW_S = 30  # default length of the model's window; in longer audio, the model finds its position by timestamps


class Segment(NamedTuple):
    """Consecutive words of a transcript."""

    start_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]


class Transcript(NamedTuple):
    """The transcript of an audio file."""

    text: str
    language: str  # in English, for example "german"; "" if the model knows only one language
    duration_s: float
    segments: tuple[Segment, ...]  # () unless requested


class Transcription(NamedTuple):
    """A request to transcribe or translate audio."""

    audio: bytes
    task: Literal["transcribe", "translate"] = "transcribe"
    language: str | None = None  # language code, for example "de"; None: the model detects it
    prompt: str = ""  # text that may precede the audio
    temperature: float = 0.0
    segments: bool = False


class Transcriber:
    """A Whisper model. Must be used on the event loop; a thread does the work."""

    def __init__(self, path: str, model: Any, processor: Any, max_s: float) -> None:
        self.names = (path, Path(path).name)  # names by which clients may call the model
        self._model, self._processor, self._max_s = model, processor, max_s
        self._rate = int(processor.feature_extractor.sampling_rate)
        self._window_s = float(getattr(processor.feature_extractor, "chunk_length", WINDOW_S))
        self._slots, self._thread = FairSlots(1), anyio.CapacityLimiter(1)
        self._waiting: Counter[str] = Counter()  # requests that wait or run, by client

    @classmethod
    def load(cls, path: str, plan: Plan) -> Self:
        """Load a checkpoint. Blocks.

        Raises CheckpointError if it is not a Whisper model, or if a library is missing.
        """
        import torch
        from transformers import AutoConfig, WhisperForConditionalGeneration, WhisperProcessor

        try:
            config = AutoConfig.from_pretrained(path)
            if config.model_type != "whisper":
                raise CheckpointError(f"--transcription-model must be a Whisper model, not {config.model_type}.")
            processor = WhisperProcessor.from_pretrained(path)
            model: Any = WhisperForConditionalGeneration.from_pretrained(path, dtype=getattr(torch, plan.model.dtype))
        except CheckpointError:
            raise
        except Exception as error:  # transformers raises errors of many types
            raise CheckpointError(f"--transcription-model: transformers cannot load {path}: {error}") from error
        model.eval().requires_grad_(False).to(plan.model.device)
        logger.info("Transcription: %s, one request at a time.", path)
        return cls(path, model, processor, plan.media.max_audio_s)

    @property
    def is_multilingual(self) -> bool:
        """Whether the model knows several languages and can translate."""
        return bool(getattr(self._model.generation_config, "is_multilingual", False))

    async def transcribe(self, request: Transcription, client: str) -> Transcript:
        """Return the transcript. Cancellation stops the work at the model's next token.

        `client` is the name of the API key, or "" without a key. At most half of the waiting requests may be from one
        key. Raises `InvalidRequest` for invalid audio or parameters, and `Overloaded` if too many requests wait.
        """
        self._check(request)
        if self._waiting.total() >= MAX_WAITING:
            raise Overloaded("Too many transcriptions are waiting.", retry_after_s=5)
        if client and self._waiting[client] >= MAX_WAITING // 2:
            raise Overloaded("Too many of your transcriptions are waiting.", retry_after_s=5)
        self._waiting[client] += 1
        ended = threading.Event()
        try:
            async with self._slots.slot(Asker(client)):
                work = asyncio.ensure_future(anyio.to_thread.run_sync(self._run, request, ended, limiter=self._thread))
                work.add_done_callback(lambda done: done.cancelled() or done.exception())
                try:
                    return await asyncio.shield(work)
                finally:
                    ended.set()
                    with anyio.CancelScope(shield=True):  # the slot is kept until the thread has ended
                        await asyncio.wait([work])
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]

    def _check(self, request: Transcription) -> None:
        known = getattr(self._model.generation_config, "lang_to_id", None) or {}
        if request.task == "translate" and not self.is_multilingual:
            raise InvalidRequest("This model knows one language only and cannot translate.", param="model")
        if request.language is not None and f"<|{request.language.lower()}|>" not in (known or {"<|en|>": 0}):
            codes = ", ".join(sorted(name.strip("<|>") for name in known)) or "en"
            raise InvalidRequest(f"language must be one of {codes}.", param="language")

    def _run(self, request: Transcription, ended: threading.Event) -> Transcript:
        import torch

        samples = decode_audio(request.audio, self._rate, self._max_s, "file")
        if ended.is_set():
            raise EngineFailure("The request has ended.")
        duration_s = len(samples) / self._rate
        is_long = duration_s > self._window_s
        inputs = self._processor(
            samples, sampling_rate=self._rate, return_tensors="pt", return_attention_mask=True,
            **({"truncation": False, "padding": "longest"} if is_long else {}),
        )  # fmt: skip
        features = inputs.input_features.to(self._model.device, self._model.dtype)
        try:
            with torch.inference_mode():
                code = self._language(request, features)
                output = self._model.generate(
                    features,
                    attention_mask=inputs.attention_mask.to(self._model.device),
                    return_timestamps=request.segments or is_long,
                    return_segments=True,
                    stopping_criteria=[_Ended(ended)],
                    **self._options(request, code),
                )
        except InvalidRequest:
            raise
        except Exception as error:  # model code may raise any exception
            logger.exception("transcribing failed")
            raise EngineFailure("The audio could not be transcribed.") from error
        return self._transcript(output, duration_s, code, request)

    def _language(self, request: Transcription, features: Any) -> str | None:
        """Return the code of the spoken language, or None if the model knows only one language."""
        if not self.is_multilingual:
            return None
        if request.language is not None:
            return request.language.lower()
        frames = 2 * self._model.config.max_source_positions
        [token] = self._model.detect_language(features, num_segment_frames=frames).tolist()
        codes = {number: name for name, number in self._model.generation_config.lang_to_id.items()}
        return codes[token].strip("<|>")

    def _options(self, request: Transcription, code: str | None) -> dict[str, Any]:
        """Return the remaining arguments of the model's `generate`."""
        options: dict[str, Any] = {"temperature": request.temperature, "do_sample": request.temperature > 0}
        if code is not None:
            options |= {"task": request.task, "language": code}
        if request.prompt:
            try:
                ids = self._processor.get_prompt_ids(request.prompt, return_tensors="pt")
            except ValueError as error:
                raise InvalidRequest("prompt must not contain special tokens.", param="prompt") from error
            # As in OpenAI's Whisper, only the end of a long prompt is used.
            most = self._model.config.max_target_positions // 2 - 1
            if len(ids) > most:
                ids = ids[[0, *range(len(ids) - most + 1, len(ids))]]  # the first id marks the beginning of a prompt
            options["prompt_ids"] = ids.to(self._model.device)
        return options

    def _transcript(self, output: Any, duration_s: float, code: str | None, request: Transcription) -> Transcript:
        from transformers.models.whisper.tokenization_whisper import LANGUAGES

        decode = self._processor.tokenizer.decode
        [ids] = output["sequences"].tolist()
        segments = []
        if request.segments:
            for segment in output["segments"][0]:
                tokens = segment["tokens"].tolist()
                text = decode(tokens, skip_special_tokens=True)
                start_s, end_s = float(segment["start"]), float(segment["end"])
                segments.append(Segment(start_s, min(end_s, duration_s), text, tuple(tokens)))
        text = decode(ids, skip_special_tokens=True).strip()
        return Transcript(text, LANGUAGES.get(code or "", code or ""), duration_s, tuple(segments))


class _Ended:
    """A stopping criterion for transformers: stop when the client is gone."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        import torch

        return torch.full((len(input_ids),), self._ended.is_set(), dtype=torch.bool, device=input_ids.device)
