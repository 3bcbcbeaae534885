"""Files of videos."""

from __future__ import annotations

import importlib.util
import io
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from runtime.errors import InvalidRequest
from runtime.media.videos import VideoLimits, decode_video

pytestmark = pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="files of videos need PyAV")
SMALL, LARGE = 16, 64


def growing_file() -> bytes:
    """Return a file whose header and first frame are small, and whose other 7 frames are large."""
    import av

    packets: list[bytes] = []
    for size in (SMALL, *[LARGE] * 7):
        encoder: Any = av.CodecContext.create("mjpeg", "w")
        encoder.width = encoder.height = size
        encoder.pix_fmt, encoder.time_base = "yuvj420p", Fraction(1, 8)
        image = av.VideoFrame.from_ndarray(np.zeros((size, size, 3), np.uint8), format="rgb24")
        packets += [bytes(each) for each in (*encoder.encode(image.reformat(format="yuvj420p")), *encoder.encode(None))]
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream: Any = output.add_stream("mjpeg", rate=8)
        stream.width = stream.height = SMALL
        stream.pix_fmt = "yuvj420p"
        for place, content in enumerate(packets):
            packet: Any = av.Packet(content)
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, place, place, Fraction(1, 8)
            output.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize("chosen", [range(8), range(1, 8)], ids=["all", "large ones"])
def test_frames_that_grow_are_refused(chosen: range) -> None:
    """Limits are computed from the header, so frames that are larger would fill the memory."""
    limits = VideoLimits(64, 2**20, 2 * LARGE * LARGE)
    with pytest.raises(InvalidRequest, match="broken") as caught:
        decode_video(growing_file(), lambda total, fps: chosen, limits, "video_data")
    assert isinstance(caught.value.__cause__, ValueError), caught.value.__cause__


def test_few_frames_that_grow_are_within_the_limit() -> None:
    limits = VideoLimits(64, 2**20, 2 * LARGE * LARGE)
    video = decode_video(growing_file(), lambda total, fps: (1, 7), limits, "video_data")
    assert video.frames.shape == (2, LARGE, LARGE, 3)
    assert (video.total, video.indices) == (8, (1, 7))
