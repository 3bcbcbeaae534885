"""Places images, videos and audio ("items") in a prompt: their tokens, prefix-tree keys and positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidRequest
from runtime.media.encoder_cache import EncodedBlock
from runtime.media_source import PLURALS, Kind, PlacedMedia, PromptMedia

ABOVE_IDS = 1 << 256  # prefix-tree keys of media tokens begin here, above all token ids
TYPES: Mapping[Kind, int] = {"image": 1, "video": 2, "audio": 3}  # token types for transformers; 0: text

# Maps (token ids [T], token types [T], sizes of all images and videos by name) to positions [3, T].
Positions = Callable[[NDArray[np.int64], NDArray[np.int64], Mapping[str, Any]], NDArray[np.int64]]


class NumberMarks(NamedTuple):
    """The texts before and after the number in an image's text. Some models (MiniCPM-V) number a prompt's images."""

    start: str
    end: str

    def numbered(self, text: str, number: int) -> str:
        """Return an image's text with `number` in place of 0."""
        return text.replace(f"{self.start}0{self.end}", f"{self.start}{number}{self.end}", 1)


def expanded(
    text: str,
    placeholders: Mapping[Kind, str],
    items: Sequence[tuple[Kind, str]],
    marks: NumberMarks | None = None,
) -> tuple[str, list[int]]:
    """Return the text with every placeholder replaced by its item's text. Also return the items' order in the prompt.

    The n-th placeholder of a kind belongs to the n-th item of this kind. With `marks`, images are numbered from 0 in
    the order of the prompt. Placeholders of kinds without items are treated as text. Raises `InvalidRequest` unless
    there is one placeholder for each item.
    """
    found: list[tuple[int, Kind]] = []
    kinds: list[Kind] = [kind for kind, _ in items]
    for kind in dict.fromkeys(kinds):
        place, at = placeholders[kind], -1
        # Checked before the loop, because the loop is slow for a text with millions of placeholders.
        _check_count(text.count(place), kind, kinds, placeholders)
        while (at := text.find(place, at + 1)) >= 0:
            found.append((at, kind))
    found.sort()
    order = _order([kind for _, kind in found], kinds)
    pieces, end, numbers = [], 0, count()
    for (at, kind), index in zip(found, order):
        inserted = items[index][1]
        if marks is not None and kind == "image":
            inserted = marks.numbered(inserted, next(numbers))
        pieces += [text[end:at], inserted]
        end = at + len(placeholders[kind])
    return "".join([*pieces, text[end:]]), order


def expanded_ids(
    ids: Sequence[int], placeholders: Mapping[Kind, int], blocks: Sequence[EncodedBlock], names: Mapping[Kind, str]
) -> tuple[tuple[int, ...], list[int]]:
    """Return the ids with every placeholder replaced by its item's tokens. Also return the order, like `expanded`."""
    array = np.asarray(ids, np.int64)
    found: list[tuple[int, Kind]] = []
    kinds: list[Kind] = [block.kind for block in blocks]
    for kind in dict.fromkeys(kinds):
        places = np.flatnonzero(array == placeholders[kind])
        _check_count(len(places), kind, kinds, names)
        found.extend((at, kind) for at in places.tolist())
    found.sort()
    order = _order([kind for _, kind in found], kinds)
    borders = [-1, *(at for at, _ in found), len(array)]
    texts = [array[before + 1 : after] for before, after in pairwise(borders)]
    pieces = [texts[0], *(part for index, text in zip(order, texts[1:]) for part in (blocks[index].token_ids, text))]
    return tuple(np.concatenate(pieces).tolist()), order


def _check_count(found: int, kind: Kind, kinds: Sequence[Kind], placeholders: Mapping[Kind, str]) -> None:
    """Raise `InvalidRequest` unless a prompt has one placeholder for each item of this kind."""
    if found != kinds.count(kind):
        raise InvalidRequest(
            f"The prompt has {found} places for {PLURALS[kind]} ({placeholders[kind]}) and the request has "
            f"{kinds.count(kind)} {PLURALS[kind]}.",
            param=f"{kind}_data",
        )


def _order(found: Sequence[Kind], kinds: Sequence[Kind]) -> list[int]:
    """Return the index in `kinds` (the items' kinds) for each placeholder in `found` (their kinds, in prompt order).

    The n-th placeholder of a kind belongs to the n-th item of this kind.
    """
    queues = {kind: iter([index for index, each in enumerate(kinds) if each == kind]) for kind in kinds}
    return [next(queues[kind]) for kind in found]


def place(
    ids: Sequence[int], blocks: Sequence[EncodedBlock], positions: Positions | None, vocab_size: int, *, mutual: bool
) -> tuple[tuple[int, ...], PromptMedia]:
    """Return the prompt's ids and its media.

    `positions` computes positions with three axes; None: positions have one axis. `blocks` must be in prompt order.
    `mutual` says whether the tokens of one image attend to each other. Media token ids outside of the vocabulary become
    0, because no layer reads them. Raises `InvalidRequest` if the text itself contains media tokens.
    """
    array = np.asarray(ids, np.int64)
    media_ids = np.unique(np.concatenate([block.token_ids[block.is_media] for block in blocks]))
    is_media = np.isin(array, media_ids)
    at, count = np.flatnonzero(is_media), sum(len(block.vectors) for block in blocks)
    if len(at) != count:
        kind = blocks[0].kind
        raise InvalidRequest(
            "The text itself contains tokens that stand for parts of an image, a video or audio.", param=f"{kind}_data"
        )
    keys, spans, first, types = array.tolist(), [], 0, np.zeros(len(array), np.int64)
    for block in blocks:
        mine = at[first : first + len(block.vectors)]
        first += len(mine)
        types[mine] = TYPES[block.kind] if block.types is None else block.types
        base = ABOVE_IDS + int.from_bytes(block.digest, "big")
        for place_in_block, position in enumerate(mine.tolist()):
            keys[position] = base + place_in_block
        cuts = np.flatnonzero(np.diff(mine) != 1) + 1
        for run, vectors in zip(np.split(mine, cuts), np.split(block.vectors, cuts)):
            spans.append(PlacedMedia(int(run[0]), vectors))
    offsets, delta = None, 0
    if positions is not None:
        names = {name for block in blocks for name in block.grids}
        grids = {name: [block.grids[name] for block in blocks if name in block.grids] for name in names}
        axes = positions(array, types, grids)
        offsets = (axes - np.arange(len(array))).astype(np.int32)
        delta = int(axes.max()) + 1 - len(array)
    array[is_media & (array >= vocab_size)] = 0
    media = PromptMedia(tuple(spans), keys, len(blocks), offsets, delta, mutual)
    return tuple(array.tolist()), media
