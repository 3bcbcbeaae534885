"""Images in calls: parts of messages that hold an image, and images beside a prompt.

A part is `{"type": "image", "source": MediaSource}` until the prompt is rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from runtime.errors import InvalidRequest
from runtime.media_source import MediaSource, source_of
from serve.calls.client import CLIENT

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Message = Mapping[str, Any]
FILE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
OBJECT = "object:"  # scheme of URLs that stand for Python objects, which JSON cannot hold
MAX_PATH = 1024


def image_part(url: str, param: str) -> dict[str, Any]:
    """Return the part of a message for an image URL. Raises `InvalidRequest` for an unknown scheme."""
    return {"type": "image", "source": source_of(url, param)}


def media_of(messages: Sequence[Message]) -> tuple[MediaSource, ...]:
    """Return the images of messages, in order."""
    return tuple(part["source"] for message in messages for part in _image_parts(message))


def for_template(core: EngineCore, messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with the placeholder of an image in place of its source.

    Raises `InvalidRequest` if the engine takes no images.
    """
    media = media_of(messages)
    if not media:
        return messages
    if core.media is None:
        raise InvalidRequest(f"No images are accepted: {core.plan.media.refusal}.", param=media[0].param)
    core.media.check(media)
    place = {"type": "image", "placeholder": core.media.placeholder}
    return [
        {**message, "content": [place if part.get("type") == "image" else part for part in message["content"]]}
        if next(iter(_image_parts(message)), None)
        else message
        for message in messages
    ]


async def num_tokens(
    core: EngineCore, text: str, media: Sequence[MediaSource], *, add_special_tokens: bool
) -> list[int]:
    """Return the ids of a prompt, with all tokens of its images. The images are read, but not encoded."""
    if core.tokenizer is None:
        raise InvalidRequest("This server has no tokenizer.")
    if media and core.media is not None:
        text = await core.media.expand(text, media, CLIENT.get().name)
    encode = core.tokenizer.encode_batch
    [ids] = await anyio.to_thread.run_sync(lambda: encode([text], add_special_tokens=add_special_tokens))
    return ids


def images_of(value: Any, count: int, *, is_batch: bool) -> list[tuple[MediaSource, ...]]:
    """Return the images of each of `count` prompts, from SGLang's field `image_data`.

    It is an image or a list of images; for a batch a list with one of these, or None, for each prompt.
    """
    if value is None:
        return [()] * count
    if not is_batch:
        return [_images(value, "image_data")]
    if not isinstance(value, list | tuple) or len(value) != count:
        raise InvalidRequest(f"image_data must be a list with the images of each of the {count} prompts.",
                             param="image_data")  # fmt: skip
    return [_images(each, f"image_data.{index}") for index, each in enumerate(value)]


def _images(value: Any, param: str) -> tuple[MediaSource, ...]:
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(native_source(each, f"{param}.{index}") for index, each in enumerate(value))
    return (native_source(value, param),)


def native_source(value: Any, param: str) -> MediaSource:
    """Return the source of an image: URL, path with an image's ending, base64 text, bytes or a Python object."""
    if isinstance(value, str):
        if len(value) <= MAX_PATH and "://" not in value and value.lower().endswith(FILE_ENDINGS):
            return MediaSource("path", value, param)
        return source_of(value, param)
    if isinstance(value, bytes):
        return MediaSource("bytes", value, param)
    if isinstance(value, Mapping):
        if isinstance(value.get("url"), str) and value.keys() <= {"url", "detail"}:
            return source_of(value["url"], param)
        raise InvalidRequest(f"{param}: precomputed features are not accepted; send the image.", param=param)
    if value is None or isinstance(value, bool | int | float):
        raise InvalidRequest(f"{param} must be an image: a URL, a path or base64 text.", param=param)
    return MediaSource("object", value, param)


def with_objects(messages: Any) -> tuple[Any, list[Any]]:
    """Replace Python's images in messages by URLs that JSON can hold. Return the messages and the images."""
    objects: list[Any] = []

    def plain(part: Any) -> Any:
        image = part.get("image_url", part.get("image")) if isinstance(part, Mapping) else None
        image = image.get("url") if isinstance(image, Mapping) else image
        if image is None or isinstance(image, str):
            return part
        objects.append(image)
        return {"type": "image_url", "image_url": {"url": f"{OBJECT}{len(objects) - 1}"}}

    converted = [
        {**message, "content": [plain(part) for part in message["content"]]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
        else message
        for message in messages
    ]
    return converted, objects


def _image_parts(message: Message) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [part for part in content if part.get("type") == "image"]
