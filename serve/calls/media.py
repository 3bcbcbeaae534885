"""Images, videos and audio in calls: as parts of messages, or in fields next to the prompt.

Until the prompt is rendered, a message part is `{"type": TYPE, "source": MediaSource}`, where TYPE is "image", "video"
or "audio".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from runtime.errors import InvalidRequest
from runtime.media.precomputed import FORMATS
from runtime.media_source import KINDS, PLURALS, Kind, MediaSource, source_of
from serve.calls.client import CLIENT

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Message = Mapping[str, Any]
FILE_ENDINGS: Mapping[Kind, tuple[str, ...]] = {
    "image": (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"),
    "video": (".mp4", ".mov", ".webm", ".mkv", ".avi", ".gif", ".ts"),
    "audio": (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".mp4", ".webm", ".aac"),
}
ARTICLES: Mapping[Kind, str] = {"image": "an image", "video": "a video", "audio": "audio"}
_SEEN: frozenset[Kind] = frozenset({"image", "video"})
# Processor option that a request may set -> its largest value, and the kinds of media to which the option applies.
# `size` with lengths of edges is left out: its meaning differs between processors, so it cannot be limited.
PROCESSOR_OPTIONS: Mapping[str, tuple[int, frozenset[Kind]]] = {
    "min_pixels": (2**22, _SEEN),
    "max_pixels": (2**24, _SEEN),
    "fps": (60, frozenset({"video"})),
    "num_frames": (4096, frozenset({"video"})),
}
_OBJECT_KEYS: Mapping[Kind, str] = {"video": "frames", "audio": "samples"}
OBJECT = "object:"  # scheme of URLs that stand for Python objects, which JSON cannot hold
MAX_PATH = 1024


def takes_kind(core: EngineCore, kind: Kind) -> bool:
    """Whether the engine accepts images, videos or audio in requests."""
    return core.media is not None and kind in core.media.placeholders


def media_part(url: str, param: str, kind: Kind = "image") -> dict[str, Any]:
    """Return the part of a message for a URL. Raises `InvalidRequest` for an unknown scheme."""
    return {"type": kind, "source": source_of(url, param, kind)}


def media_of(messages: Sequence[Message]) -> tuple[MediaSource, ...]:
    """Return the sources of the images, videos and audio of messages, in order."""
    return tuple(part["source"] for message in messages for part in _media_parts(message))


def for_template(core: EngineCore, messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with placeholders in place of media sources.

    Raises `InvalidRequest` if the engine does not accept media of their kind.
    """
    media = media_of(messages)
    if not media:
        return messages
    if core.media is None:
        plural = PLURALS[media[0].kind]
        raise InvalidRequest(f"No {plural} are accepted: {core.plan.media.refusal}.", param=media[0].param)
    core.media.check(media)
    places = {kind: {"type": kind, "placeholder": text} for kind, text in core.media.placeholders.items()}
    return [
        {**message, "content": [places.get(part.get("type"), part) for part in message["content"]]}
        if next(iter(_media_parts(message)), None)
        else message
        for message in messages
    ]


def with_options(messages: Sequence[Message], options: Mapping[str, Any] | None) -> Sequence[Message]:
    """Return the messages, with these processor options attached to the images and videos to which they apply.

    Raises `InvalidRequest` for an option that is unknown, exceeds its limit, or applies to no media of the messages.
    """
    if not options:
        return messages
    kinds = {part["type"] for message in messages for part in _media_parts(message)}
    for name, value in options.items():
        param = f"mm_processor_kwargs.{name[:40]}"
        if name not in PROCESSOR_OPTIONS:
            raise InvalidRequest(f"{param} is not supported; {', '.join(PROCESSOR_OPTIONS)} are.", param=param)
        most, for_kinds = PROCESSOR_OPTIONS[name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (name == "fps" and isinstance(value, float))) or not 0 < value <= most:
            raise InvalidRequest(f"{param} must be a number above 0 and at most {most}.", param=param)
        if not kinds & for_kinds:
            raise InvalidRequest(f"{param} needs {ARTICLES[min(for_kinds)]} in the messages.", param=param)
    if "fps" in options and "num_frames" in options:
        raise InvalidRequest("fps and num_frames exclude each other.", param="mm_processor_kwargs.fps")

    def chosen(part: Mapping[str, Any]) -> Mapping[str, Any]:
        kind = part.get("type")
        own = {name: value for name, value in options.items() if kind in PROCESSOR_OPTIONS[name][1]}
        return {**part, "source": replace(part["source"], options=own)} if own and kind in KINDS else part

    return [
        {**message, "content": [chosen(part) for part in message["content"]]} if _media_parts(message) else message
        for message in messages
    ]


async def num_tokens(
    core: EngineCore, text: str, media: Sequence[MediaSource], *, add_special_tokens: bool
) -> list[int]:
    """Return the token ids of a prompt, including the tokens of its media. Media are loaded, but not encoded."""
    if core.tokenizer is None:
        raise InvalidRequest("This server has no tokenizer.")
    if media and core.media is not None:
        text = await core.media.expand(text, media, CLIENT.get().name)
    encode = core.tokenizer.encode_batch
    [ids] = await anyio.to_thread.run_sync(lambda: encode([text], add_special_tokens=add_special_tokens))
    return ids


def native_media(values: Mapping[Kind, Any], count: int, *, is_batch: bool) -> list[tuple[MediaSource, ...]]:
    """Return the media of each of `count` prompts, from SGLang's fields `image_data`, `video_data` and `audio_data`.

    A value is an item or a list of items. For a batch, a value is a list with one of these, or None, per
    prompt. From Python, a video may be a list of frames; it must then be inside a list of videos.
    """
    columns = [_by_prompt(value, kind, count, is_batch=is_batch) for kind, value in values.items() if value is not None]
    return [tuple(chain.from_iterable(row)) for row in zip(*columns, strict=True)] if columns else [()] * count


def _by_prompt(value: Any, kind: Kind, count: int, *, is_batch: bool) -> list[tuple[MediaSource, ...]]:
    name = f"{kind}_data"
    if not is_batch:
        return [_items(value, name, kind)]
    if not isinstance(value, list | tuple) or len(value) != count:
        raise InvalidRequest(f"{name} must be a list with the {PLURALS[kind]} of each of the {count} prompts.",
                             param=name)  # fmt: skip
    return [_items(each, f"{name}.{index}", kind) for index, each in enumerate(value)]


def _items(value: Any, param: str, kind: Kind) -> tuple[MediaSource, ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(native_source(each, f"{param}.{index}", kind) for index, each in enumerate(value))
    return (native_source(value, param, kind),)


def native_source(value: Any, param: str, kind: Kind = "image") -> MediaSource:
    """Return the source of an item: a URL, a path with a known ending, base64 text, bytes or a Python object."""
    if isinstance(value, str):
        if len(value) <= MAX_PATH and "://" not in value and value.lower().endswith(FILE_ENDINGS[kind]):
            return MediaSource("path", value, param, kind)
        return source_of(value, param, kind)
    if isinstance(value, bytes):
        return MediaSource("bytes", value, param, kind)
    if isinstance(value, Mapping):
        if isinstance(value.get("url"), str) and value.keys() <= {"url", "detail"}:
            return source_of(value["url"], param, kind)
        if _OBJECT_KEYS.get(kind, "") in value:  # frames or samples from Python
            return MediaSource("object", value, param, kind)
        if value.get("format") in FORMATS and any(hasattr(each, "dtype") for each in value.values()):
            return MediaSource("object", value, param, kind)
        raise InvalidRequest(
            f"{param}: precomputed features are accepted from Python only, as tensors or arrays; send the {kind}.",
            param=param,
        )
    if value is None or isinstance(value, bool | int | float):
        raise InvalidRequest(f"{param} must be {ARTICLES[kind]}: a URL, a path or base64 text.", param=param)
    return MediaSource("object", value, param, kind)


def with_objects(messages: Any) -> tuple[Any, list[Any]]:
    """Replace Python objects (images, videos, audio) in messages with URLs, because JSON cannot hold objects.

    Return the messages and the list of objects. The URL "object:3" stands for `objects[3]`.
    """
    objects: list[Any] = []

    def plain(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        for kind in KINDS:
            value = part.get(f"{kind}_url", part.get(kind))
            value = value["url"] if isinstance(value, Mapping) and "url" in value else value
            if value is not None and not isinstance(value, str):
                objects.append(value)
                return {"type": f"{kind}_url", f"{kind}_url": {"url": f"{OBJECT}{len(objects) - 1}"}}
        return part

    converted = [
        {**message, "content": [plain(part) for part in message["content"]]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
        else message
        for message in messages
    ]
    return converted, objects


def _media_parts(message: Message) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [part for part in content if part.get("type") in KINDS]
