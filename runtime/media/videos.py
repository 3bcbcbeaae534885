"""Decodes videos to a limited number of frames. PyAV is imported when the first file arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidRequest
from runtime.media.containers import Deadline, opened
from runtime.media.images import check_size, decode_image

MAX_PACKETS = 500_000  # maximum number of packets in a file: about 4 hours at 30 frames per second


class Video(NamedTuple):
    """Frames of a video, in RGB."""

    frames: NDArray[np.uint8]  # [N, H, W, 3]
    indices: tuple[int, ...]  # [N], indices of the frames in the file
    total: int  # number of frames in the file
    fps: float | None  # frames per second in the file; None: unknown


class VideoLimits(NamedTuple):
    """Limits on one video."""

    max_frames: int
    frame_pixels: int  # maximum pixels of one frame
    pixels: int  # maximum pixels of all frames together


# Maps (number of frames in the file, frames per second) to the ascending indices of the frames to use.
Choose = Callable[[int, float | None], Sequence[int]]


def decode_video(content: Any, choose: Choose, limits: VideoLimits, param: str) -> Video:
    """Return the chosen frames. Blocks; call it on a thread.

    `content` is a file's bytes or, from Python, a list of Pillow images, a uint8 array [N, H, W, 3], or `{"frames": one
    of these, "fps": 2.0}`. All frames of a Python object are used. If the chosen frames of a file exceed `limits`,
    fewer frames are read, evenly spread. Raises `InvalidRequest` if the content is not a video or exceeds a limit.
    """
    return _of_file(content, choose, limits, param) if isinstance(content, bytes) else _given(content, limits, param)


def _of_file(content: bytes, choose: Choose, limits: VideoLimits, param: str) -> Video:
    deadline = Deadline("video", param)
    with opened(content, "video", param) as container:
        if not container.streams.video:
            raise InvalidRequest(f"{param}: the file has no video.", param=param)
        stream = container.streams.video[0]
        size = (stream.codec_context.width, stream.codec_context.height)
        check_size(size, limits.frame_pixels, param)
        total = _num_frames(container, stream, deadline, param)
        fps = float(stream.average_rate) if stream.average_rate else None
        chosen = _limited(choose(total, fps), min(limits.max_frames, limits.pixels // (size[0] * size[1])))
        container.seek(0, stream=stream)
        stream.codec_context.thread_count = 1
        stream.codec_context.options = {"max_pixels": str(limits.frame_pixels)}
        frames = _decoded(container, stream, chosen, limits.pixels, deadline)
    if not frames:
        raise InvalidRequest(f"{param}: the video is broken and cannot be decoded.", param=param)
    return Video(np.stack(frames), tuple(chosen[: len(frames)]), total, fps)


def _num_frames(container: Any, stream: Any, deadline: Deadline, param: str) -> int:
    """Count the frames without decoding them. The number in the file's header may be missing or wrong."""
    count = 0
    for packet in container.demux(stream):
        count += packet.size > 0
        if count > MAX_PACKETS:
            raise InvalidRequest(f"{param}: the video has more than {MAX_PACKETS} frames.", param=param)
        if count % 1024 == 0:
            deadline.check()
    if not count:
        raise InvalidRequest(f"{param}: the video has no frames.", param=param)
    return count


def _limited(indices: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the indices, evenly spread, and at least one."""
    if len(indices) <= most:
        return [int(index) for index in indices]
    kept = np.linspace(0, len(indices) - 1, max(1, most)).round().astype(int)
    return [int(indices[index]) for index in kept]


def _decoded(
    container: Any, stream: Any, chosen: Sequence[int], max_pixels: int, deadline: Deadline
) -> list[NDArray[np.uint8]]:
    """Return the frames with these ascending indices. Stops at the end of the file.

    Raises ValueError if the frames differ in size, or have more than `max_pixels` pixels in total.
    """
    frames: list[NDArray[np.uint8]] = []
    for index, frame in enumerate(container.decode(stream)):
        deadline.check()
        while len(frames) < len(chosen) and chosen[len(frames)] == index:  # an index may be chosen twice
            pixels = frame.to_ndarray(format="rgb24")
            turned = np.rot90(pixels, k=(getattr(frame, "rotation", 0) // 90) % 4)
            if frames and turned.shape != frames[0].shape:
                raise ValueError("The size of the frames changes.")
            if frames and (len(frames) + 1) * turned.size > 3 * max_pixels:
                raise ValueError("The frames are larger than the header says.")
            frames.append(np.ascontiguousarray(turned))
        if len(frames) == len(chosen):
            break
    return frames


def _given(content: Any, limits: VideoLimits, param: str) -> Video:
    """Return a video from frames given in Python."""
    fps = None
    if isinstance(content, Mapping):
        if not content.keys() <= {"frames", "fps"} or "frames" not in content:
            raise InvalidRequest(f'{param}: a video from Python is {{"frames": ..., "fps": 2.0}}.', param=param)
        content, fps = content["frames"], content.get("fps")
        if fps is not None and not (isinstance(fps, int | float) and fps > 0):
            raise InvalidRequest(f"{param}.fps must be a positive number.", param=f"{param}.fps")
    if isinstance(content, np.ndarray):
        if content.dtype != np.uint8 or content.ndim != 4 or content.shape[3] != 3:
            raise InvalidRequest(
                f"{param}: the array must be uint8 [frames, height, width, 3], not {content.dtype} "
                f"{list(content.shape)}.",
                param=param,
            )
    elif not isinstance(content, list | tuple):
        raise InvalidRequest(f"{param}: {type(content).__name__} is no video.", param=param)
    count = len(content)
    if not 0 < count <= limits.max_frames:
        raise InvalidRequest(
            f"{param}: the video has {count} frames; 1 to {limits.max_frames} are accepted (--max-video-frames).",
            param=param,
        )
    if not isinstance(content, np.ndarray):
        images = [decode_image(each, limits.frame_pixels, f"{param}.{index}") for index, each in enumerate(content)]
        if len({image.size for image in images}) > 1:
            raise InvalidRequest(f"{param}: all frames must have the same size.", param=param)
        content = np.stack([np.asarray(image) for image in images])
    check_size((content.shape[2], content.shape[1]), limits.frame_pixels, param)
    if content.size // 3 > limits.pixels:
        raise InvalidRequest(
            f"{param}: the frames have {content.size // 3} pixels together; at most {limits.pixels} are accepted "
            "(--max-video-pixels).",
            param=param,
        )
    return Video(np.ascontiguousarray(content), tuple(range(count)), count, fps)
