"""Decodes images under limits. Pillow is imported when the first image arrives."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from runtime.errors import InvalidRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # formats that Pillow decodes without external programs
MAX_SIDE = 2**16


def decode_image(content: Any, max_pixels: int, param: str) -> Any:
    """Return a Pillow image in RGB, rotated according to its EXIF data. Blocks; call it on a thread.

    `content` is a file's bytes, a Pillow image, or a uint8 array [H, W], [H, W, 3] or [H, W, 4]. For animations, the
    first frame is used. Raises `InvalidRequest` if the content is not an image or has too many pixels.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        if isinstance(content, bytes):
            image: Any = Image.open(io.BytesIO(content), formats=FORMATS)
        elif isinstance(content, np.ndarray):
            image = _of_array(content, param)
        elif isinstance(content, Image.Image):
            image = content
        else:
            raise InvalidRequest(f"{param}: {type(content).__name__} is no image.", param=param)
        check_size(image.size, max_pixels, param)  # before any pixel is decoded
        image.load()
        turned = ImageOps.exif_transpose(image)
        return (turned or image).convert("RGB")
    except InvalidRequest:
        raise
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise InvalidRequest(f"{param} is not an image that can be read ({known}).", param=param) from error
    except Exception as error:  # decoders raise errors of many types for broken files
        raise InvalidRequest(f"{param}: the image is broken and cannot be decoded.", param=param) from error


def _of_array(array: np.ndarray, param: str) -> Any:
    from PIL import Image

    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise InvalidRequest(
            f"{param}: an array must be uint8 [height, width, 3], not {array.dtype} {list(array.shape)}.", param=param
        )
    return Image.fromarray(array)


def check_size(size: tuple[int, int], max_pixels: int, param: str) -> None:
    """Raise `InvalidRequest` if `size` (width, height) has too many pixels, or none."""
    width, height = size
    if not (width and height) or max(width, height) > MAX_SIDE or width * height > max_pixels:
        raise InvalidRequest(
            f"{param}: it has {width} x {height} pixels; at most {max_pixels} are accepted.", param=param
        )
