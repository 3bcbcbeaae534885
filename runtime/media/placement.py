"""Where the images of a prompt stand: their tokens, their keys in the prefix tree and their positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidRequest
from runtime.media.encoder_cache import EncodedBlock
from runtime.media_source import PlacedMedia, PromptMedia

ABOVE_IDS = 1 << 256  # prefix-cache keys of image tokens begin here, above all token ids

# (token ids [T], tokens of images [T], sizes of all images by name) -> positions [3, T]
Positions = Callable[[NDArray[np.int64], NDArray[np.bool_], Mapping[str, Any]], NDArray[np.int64]]


def expanded(text: str, placeholder: str, blocks: Sequence[str]) -> str:
    """Return the text with every placeholder replaced by the text of its image.

    Raises `InvalidRequest` unless there is one placeholder for each image.
    """
    pieces = text.split(placeholder)
    _check_count(len(pieces) - 1, len(blocks), placeholder)
    return "".join([pieces[0], *(part for pair in zip(blocks, pieces[1:], strict=True) for part in pair)])


def expanded_ids(ids: Sequence[int], placeholder: int, blocks: Sequence[EncodedBlock], name: str) -> tuple[int, ...]:
    """Return the ids with every placeholder replaced by the tokens of its image, like `expanded`."""
    array = np.asarray(ids, np.int64)
    at = np.flatnonzero(array == placeholder)
    _check_count(len(at), len(blocks), name)
    pieces = np.split(array, np.sort(np.concatenate([at, at + 1])))
    pieces[1::2] = [block.token_ids for block in blocks]
    return tuple(np.concatenate(pieces).tolist())


def _check_count(num_placeholders: int, num_images: int, placeholder: str) -> None:
    if num_placeholders != num_images:
        raise InvalidRequest(
            f"The prompt has {num_placeholders} places for images ({placeholder}) and the request has {num_images} "
            "images.",
            param="image_data",
        )


def place(
    ids: Sequence[int], blocks: Sequence[EncodedBlock], positions: Positions | None, vocab_size: int, *, mutual: bool
) -> tuple[tuple[int, ...], PromptMedia]:
    """Return the prompt's ids and its media. `positions` computes positions of three axes; None: there is one axis.

    Ids of image tokens that are beyond the vocabulary become 0; no layer reads them. Raises `InvalidRequest` if the
    text itself has tokens that stand for images.
    """
    array = np.asarray(ids, np.int64)
    media_ids = np.unique(np.concatenate([block.token_ids[block.is_media] for block in blocks]))
    is_media = np.isin(array, media_ids)
    at, count = np.flatnonzero(is_media), sum(len(block.vectors) for block in blocks)
    if len(at) != count:
        raise InvalidRequest("The text itself contains tokens that stand for parts of an image.", param="image_data")
    keys, spans, first = array.tolist(), [], 0
    for block in blocks:
        mine = at[first : first + len(block.vectors)]
        first += len(mine)
        base = ABOVE_IDS + int.from_bytes(block.digest, "big")
        for place_in_image, position in enumerate(mine.tolist()):
            keys[position] = base + place_in_image
        cuts = np.flatnonzero(np.diff(mine) != 1) + 1
        for run, vectors in zip(np.split(mine, cuts), np.split(block.vectors, cuts)):
            spans.append(PlacedMedia(int(run[0]), vectors))
    offsets, delta = None, 0
    if positions is not None:
        names = {name for block in blocks for name in block.grids}
        axes = positions(array, is_media, {name: [block.grids[name] for block in blocks] for name in names})
        offsets = (axes - np.arange(len(array))).astype(np.int32)
        delta = int(axes.max()) + 1 - len(array)
    array[is_media & (array >= vocab_size)] = 0
    media = PromptMedia(tuple(spans), keys, len(blocks), offsets, delta, mutual)
    return tuple(array.tolist()), media
