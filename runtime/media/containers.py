"""Opens video and audio files with PyAV. Accepts only formats without references to other files."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from runtime.errors import InvalidRequest

MAX_FRAME_PIXELS = 2**26  # limit for any frame, regardless of the options
MAX_DECODE_S = 60.0  # a file that takes longer is refused; even a tiny file may contain hours of video or audio
# FFmpeg's name of a format -> function that tells whether a file's first bytes belong to it. FFmpeg must not guess the
# format, because it would also accept playlists, which name other files and hosts.
FORMATS: dict[str, Callable[[bytes], bool]] = {
    "mp4": lambda head: head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"),
    "matroska": lambda head: head.startswith(b"\x1a\x45\xdf\xa3"),
    "avi": lambda head: head.startswith(b"RIFF") and head[8:12] == b"AVI ",
    "wav": lambda head: head.startswith((b"RIFF", b"RIFX")) and head[8:12] == b"WAVE",
    "gif": lambda head: head.startswith(b"GIF8"),
    "flac": lambda head: head.startswith(b"fLaC"),
    "ogg": lambda head: head.startswith(b"OggS"),
    "mpegts": lambda head: len(head) > 188 and head[0] == head[188] == 0x47,
    "aac": lambda head: head[:1] == b"\xff" and head[1:2] in (b"\xf1", b"\xf9"),
    "mp3": lambda head: head.startswith(b"ID3") or (head[:1] == b"\xff" and head[1:2] >= b"\xe2"),
}
NEEDS_AV = "PyAV is not installed on the server (pip install 'penstock[media]')"


def has_av() -> bool:
    """Return whether files can be decoded."""
    return find_spec("av") is not None


@contextmanager
def opened(content: bytes, kind: str, param: str) -> Iterator[Any]:
    """Yield PyAV's container of a file. `kind` is a word for errors, for example "video".

    Raises `InvalidRequest` if the format is unknown, and for all errors of the decoder inside the block.
    """
    if not has_av():
        raise InvalidRequest(f"{param}: files of {kind} are not accepted: {NEEDS_AV}.", param=param)
    import av

    name = next((name for name, fits in FORMATS.items() if fits(content[:189])), None)
    if name is None:
        known = ", ".join(FORMATS)
        raise InvalidRequest(f"{param} is no {kind} that can be read ({known}).", param=param)
    try:
        # The limit on pixels also applies while FFmpeg looks for the streams, because it may decode frames then.
        options = {"max_pixels": str(MAX_FRAME_PIXELS)}
        file = io.BytesIO(content)
        with av.open(file, "r", format=name, options=options, io_open=_refuse, metadata_errors="ignore") as container:
            yield container
    except InvalidRequest:
        raise
    except Exception as error:  # decoders raise errors of many types for broken files
        raise InvalidRequest(f"{param}: the {kind} is broken and cannot be decoded.", param=param) from error


def _refuse(*_: Any) -> Any:
    """Refuse to open another file that the file refers to."""
    raise PermissionError("Files must not refer to other files.")


class Deadline:
    """Limits the time to decode one file."""

    def __init__(self, kind: str, param: str) -> None:
        self._ends = time.monotonic() + MAX_DECODE_S
        self._kind, self._param = kind, param

    def check(self) -> None:
        """Raise `InvalidRequest` if `MAX_DECODE_S` seconds have passed."""
        if time.monotonic() > self._ends:
            raise InvalidRequest(
                f"{self._param}: decoding the {self._kind} takes more than {MAX_DECODE_S:g} s.", param=self._param
            )


__all__ = ["NEEDS_AV", "Deadline", "has_av", "opened"]
