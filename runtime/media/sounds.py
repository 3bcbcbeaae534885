"""Decodes audio to one channel at the model's sampling rate. PyAV is imported when the first file arrives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidRequest
from runtime.media.containers import Deadline, opened

MARGIN = 1024  # tolerance in samples, because the frames together may be longer than the resampled audio


def decode_audio(content: Any, rate: int, max_s: float, param: str) -> NDArray[np.float32]:
    """Return samples [N] from -1 to 1, at `rate` samples per second. Blocks; call it on a thread.

    `content` is a file's bytes or, from Python, an array [N] of floats at `rate`, or `{"samples": array,
    "sampling_rate": 16000}`. Raises `InvalidRequest` if it is not audio, is empty, or is longer than `max_s` seconds.
    """
    samples = _of_file(content, rate, max_s, param) if isinstance(content, bytes) else _given(content, rate, param)
    if not len(samples):
        raise InvalidRequest(f"{param}: the audio is empty.", param=param)
    if len(samples) > max_s * rate:
        raise _too_long(max_s, param)
    return samples


def _too_long(max_s: float, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: the audio is longer than {max_s:g} s, the most that is accepted.", param=param)


def _of_file(content: bytes, rate: int, max_s: float, param: str) -> NDArray[np.float32]:
    deadline, pieces, count = Deadline("audio", param), [], 0
    with opened(content, "audio", param) as container:
        if not container.streams.audio:
            raise InvalidRequest(f"{param}: the file has no audio.", param=param)
        from av import AudioResampler

        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1
        resampler = AudioResampler(format="flt", layout="mono", rate=rate)
        for frame in container.decode(stream):
            deadline.check()
            # Checked before resampling: at 1 Hz, a small frame becomes gigabytes.
            if count + frame.samples / frame.sample_rate * rate > max_s * rate + MARGIN:
                raise _too_long(max_s, param)
            for resampled in resampler.resample(frame):
                pieces.append(resampled.to_ndarray()[0].copy())
                count += len(pieces[-1])
            if count > max_s * rate:
                raise _too_long(max_s, param)
        pieces += [resampled.to_ndarray()[0].copy() for resampled in resampler.resample(None)]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


def _given(content: Any, rate: int, param: str) -> NDArray[np.float32]:
    if isinstance(content, Mapping):
        if content.keys() != {"samples", "sampling_rate"}:
            raise InvalidRequest(f'{param}: audio from Python is {{"samples", "sampling_rate"}}.', param=param)
        if content["sampling_rate"] != rate:
            raise InvalidRequest(
                f"{param}: the model hears {rate} samples per second, not {content['sampling_rate']}.", param=param
            )
        content = content["samples"]
    if not isinstance(content, np.ndarray) or content.ndim != 1 or content.dtype not in (np.float32, np.float64):
        raise InvalidRequest(f"{param}: audio from Python is an array [N] of floats.", param=param)
    if not np.isfinite(content).all():
        raise InvalidRequest(f"{param}: the audio has values that are not finite.", param=param)
    return content.astype(np.float32)
