"""Images, videos and audio of a request: their sources, and the data about them that the scheduler needs."""

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
    """An image, video or audio as the client specified it, before it is read.

    `content` is an http or https URL, a path, base64 text or the bytes of a file. In Python, it may also be an object:
    a Pillow image, an array, video frames or audio samples.
    """

    form: Form
    content: Any = field(repr=False)  # never logged
    param: str = "image_data"  # field of the request, for errors
    kind: Kind = "image"
    options: Mapping[str, Any] = field(default_factory=lambda: NO_OPTIONS)  # options of the model's processor

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the content in the client's request."""
        return len(self.content) if isinstance(self.content, str | bytes) else 0


class PlacedMedia(NamedTuple):
    """Consecutive prompt tokens with given embeddings."""

    start: int  # position of the first token
    # [N, W]: embeddings, followed by vectors that the model adds after its first layers, if any.
    vectors: NDArray[np.float32]

    @property
    def end(self) -> int:
        return self.start + len(self.vectors)


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """The encoded images, videos and audio of a prompt of P tokens."""

    spans: tuple[PlacedMedia, ...]  # ascending, disjoint
    # [P], the values that the prefix tree compares: token ids for text. For media tokens, numbers from
    # `placement.ABOVE_IDS` on, derived from a hash of the content and the processor's options, and from the token's
    # index in the item.
    keys: list[int]
    num_items: int  # number of images, videos and audio inputs
    # [3, P], for each axis and token: its position on the axis minus its index. None: positions have one axis.
    offsets: NDArray[np.int32] | None = None
    delta: int = 0  # offset (see `offsets`) of all tokens after the prompt
    # Whether all tokens of a span attend to each other, so that a span must be computed in one step.
    mutual: bool = False

    def span_around(self, position: int) -> PlacedMedia | None:
        """Return the span that contains the tokens at `position` - 1 and at `position`, or None."""
        return next((span for span in self.spans if span.start < position < span.end), None)


def check_counts(sources: Sequence[MediaSource], limits: Mapping[str, int]) -> None:
    """Raise `InvalidRequest` if a request has more items of any kind than `limits` allows."""
    for kind in KINDS:
        params = [source.param for source in sources if source.kind == kind]
        if len(params) > limits[kind]:
            raise InvalidRequest(
                f"The request has {len(params)} {PLURALS[kind]}; at most {limits[kind]} are accepted "
                "(--limit-mm-per-prompt).",
                param=params[limits[kind]],
            )


def source_of(text: str, param: str, kind: Kind = "image") -> MediaSource:
    """Return the source that a string specifies: a data, http, https or file URL, otherwise base64 text.

    Raises `InvalidRequest` for other URL schemes.
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
