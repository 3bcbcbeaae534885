"""Images of a request: where they come from, and what the scheduler needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidRequest

Form = Literal["url", "path", "base64", "bytes", "object"]


@dataclass(frozen=True, slots=True, eq=False)
class MediaSource:
    """An image as the client named it, not read yet.

    `content` is a URL of http or https, a path, base64 text, the bytes of a file, or (from Python only) an image of
    Pillow or an array.
    """

    form: Form
    content: Any = field(repr=False)  # never logged
    param: str = "image_data"  # the request's field, for errors

    @property
    def num_bytes(self) -> int:
        """Bytes that the client sent for the image."""
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
    """The images of a prompt of P tokens, after the encoder."""

    spans: tuple[PlacedMedia, ...]  # ascending, disjoint
    # [P], what the prefix tree compares: token ids and, for tokens of images, numbers above 2**31 that are derived
    # from the pixels, the processor's parameters and the token's place in the image.
    keys: list[int]
    num_images: int
    # [3, P], offset of each token's position on each axis from its index; None: positions have one axis.
    offsets: NDArray[np.int32] | None = None
    delta: int = 0  # the offset of all tokens after the prompt
    mutual: bool = False  # whether tokens of one span attend to each other, so that a step must compute a whole span

    def span_around(self, position: int) -> PlacedMedia | None:
        """Return the span with tokens on both sides of the border before `position`, or None."""
        return next((span for span in self.spans if span.start < position < span.end), None)


def source_of(text: str, param: str) -> MediaSource:
    """Return the source that a string names: data, http, https or file URL, else base64 text.

    Raises `InvalidRequest` for other schemes.
    """
    head, _, rest = text[:16].partition(":")
    scheme = head.lower() if rest or text[:16].endswith(":") else ""
    if scheme == "data":
        kind, comma, content = text.partition(",")
        if not comma or not kind.lower().endswith(";base64"):
            raise InvalidRequest(f"{param}: a data URL must be data:image/png;base64,...", param=param)
        return MediaSource("base64", content, param)
    if scheme in ("http", "https"):
        return MediaSource("url", text, param)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise InvalidRequest(f"{param}: a file URL must name a file of the server: file:///path.", param=param)
        return MediaSource("path", unquote(parts.path), param)
    if scheme:
        raise InvalidRequest(f"{param}: the URL must begin with data:, https:, http: or file:.", param=param)
    return MediaSource("base64", text, param)
