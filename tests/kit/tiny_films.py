"""Short videos and sounds, and their files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiny_seeing import picture


def film(num_frames: int, width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return frames [N, H, W, 3] of random blocks that change from frame to frame."""
    return np.stack([np.asarray(picture(width, height, seed * 1000 + index)) for index in range(num_frames)])


def film_file(frames: NDArray[np.uint8], fps: int, container: str = "mp4", codec: str = "mpeg4") -> bytes:
    """Return a file of a video."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()


def tone(seconds: float, rate: int = 16_000, seed: int = 0) -> NDArray[np.float32]:
    """Return samples [N] of a sound whose pitch changes, as multiples of 1/32768."""
    steps = np.random.default_rng(seed).uniform(0.01, 0.5, 8).repeat(int(seconds * rate / 8) + 1)[: int(seconds * rate)]
    return (np.sin(np.cumsum(steps)) * 20_000).astype(np.int16).astype(np.float32) / np.float32(32768)


def wave_file(samples: NDArray[Any], rate: int = 16_000) -> bytes:
    """Return a WAV file of one channel."""
    import wave

    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setnchannels(1)
        output.setsampwidth(2)
        output.setframerate(rate)
        output.writeframes((samples * 32768).astype(np.int16).tobytes())
    return file.getvalue()
