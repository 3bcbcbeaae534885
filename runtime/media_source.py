"""Images, videos and audio of a request: where they come from, and what the scheduler needs to know of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidRequest

Form = Literal["url", "path", "base64", "bytes", "object"]
Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
PLURALS: Mapping[Kind, str] = {"image": "images", "video": "videos", "audio": "audio inputs"}
EXAMPLES: Mapping[Kind, str] = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
NO_OPTIONS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, eq=False)
class MediaSource:
    """An image, a video or audio as the client named it, not read yet.

    `content` is a URL of http or https, a path, base64 text, the bytes of a file, or (from Python only) an object:
    an image of Pillow, an array, frames or samples.
    """

    form: Form
    content: Any = field(repr=False)  # never logged
    param: str = "image_data"  # the request's field, for errors
    kind: Kind = "image"
    options: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)  # for the model's processor

    @property
    def num_bytes(self) -> int:
        """Bytes that the client sent for it."""
        return len(self.content) if isinstance(self.content, str | bytes) else 0


class PlacedMedia(NamedTuple):
    """Consecutive tokens of a prompt whose embeddings are given."""

    start: int  # position of the first token
    vectors: NDArray[np.float32]  # [N, W]: embeddings, and vectors that are added after the first layers, if any

    @property
    def end(self) -> int:
        return self.start + len(self.vectors)


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """The images, videos and audio of a prompt of P tokens, after the encoder."""

    spans: tuple[PlacedMedia, ...]  # ascending, disjoint
    # [P], what the prefix tree compares: token ids and, for tokens of images, numbers above 2**31 that are derived
    # from the pixels, the processor's parameters and the token's place in the image.
    keys: list[int]
    num_items: int  # images, videos and audio
    # [3, P], offset of each token's position on each axis from its index; None: positions have one axis.
    offsets: NDArray[np.int32] | None = None
    delta: int = 0  # the offset of all tokens after the prompt
    mutual: bool = False  # whether tokens of one span attend to each other, so that a step must compute a whole span

    def span_around(self, position: int) -> PlacedMedia | None:
        """Return the span with tokens on both sides of the border before `position`, or None."""
        return next((span for span in self.spans if span.start < position < span.end), None)


def check_counts(sources: Sequence[MediaSource], limits: Mapping[str, int]) -> None:
    """Raise `InvalidRequest` if a request has more items of a kind than `limits` allows."""
    for kind in KINDS:
        params = [source.param for source in sources if source.kind == kind]
        if len(params) > limits[kind]:
            raise InvalidRequest(
                f"The request has {len(params)} {PLURALS[kind]}; at most {limits[kind]} are accepted "
                "(--limit-mm-per-prompt).",
                param=params[limits[kind]],
            )


def source_of(text: str, param: str, kind: Kind = "image") -> MediaSource:
    """Return the source that a string names: data, http, https or file URL, else base64 text.

    Raises `InvalidRequest` for other schemes.
    """
    head, _, rest = text[:16].partition(":")
    scheme = head.lower() if rest or text[:16].endswith(":") else ""
    if scheme == "data":
        media_type, comma, content = text.partition(",")
        if not comma or not media_type.lower().endswith(";base64"):
            raise InvalidRequest(f"{param}: a data URL must be data:{EXAMPLES[kind]};base64,...", param=param)
        return MediaSource("base64", content, param, kind)
    if scheme in ("http", "https"):
        return MediaSource("url", text, param, kind)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise InvalidRequest(f"{param}: a file URL must name a file of the server: file:///path.", param=param)
        return MediaSource("path", unquote(parts.path), param, kind)
    if scheme:
        raise InvalidRequest(f"{param}: the URL must begin with data:, https:, http: or file:.", param=param)
    return MediaSource("base64", text, param, kind)
