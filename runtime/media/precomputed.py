"""Images, videos and audio ("items") that a Python caller has processed or encoded, in SGLang's formats.

`{"format": "processor_output", ...}` has the tensors that the model's processor returned for the whole prompt.
`{"format": "precomputed_embedding", "feature": vectors, ...}` has the output of the model's encoder for one item: a
vector per token. It also has the item's size (`image_grid_thw`) if positions depend on it. In both formats the prompt
consists of token ids, with the placeholder tokens of every item. This module does not import torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidRequest
from runtime.media.placement import ABOVE_IDS, TYPES, Positions
from runtime.media_source import PLURALS, Kind, MediaSource, PlacedMedia, PromptMedia

PROCESSED, ENCODED = "processor_output", "precomputed_embedding"
FORMATS = (PROCESSED, ENCODED)


class MediaTokens(NamedTuple):
    """The token ids and the vector size that the model uses for items of a kind, found by encoding a trial item."""

    ids: NDArray[np.int64]  # ids of the tokens whose embeddings are vectors of the encoder
    width: int  # size W of each vector


class EncodedPrompt(NamedTuple):
    """The media of a prompt of T tokens."""

    is_media: NDArray[np.bool_]  # [T], marks the N tokens whose embeddings are `vectors`
    vectors: NDArray[np.float32]  # [N, W]
    types: NDArray[np.int64]  # [T], token types for positions; 0: text
    grids: Mapping[str, Any]  # sizes of the images and videos, by argument name of `Positions`


def format_of(source: MediaSource) -> str | None:
    """Return the format of a precomputed item, or None for an image, video or audio."""
    return source.content.get("format") if isinstance(source.content, Mapping) else None


def is_precomputed(sources: Sequence[MediaSource], *, has_ids: bool) -> bool:
    """Return whether the media are precomputed.

    Raises `InvalidRequest` if precomputed media have different formats or come with a text prompt.
    """
    formats = [format_of(source) for source in sources]
    if not any(formats):
        return False
    param = sources[0].param
    if len({*formats}) > 1:
        raise InvalidRequest(f"{param}: all media of a request must have the same format.", param=param)
    if not has_ids:
        raise InvalidRequest(f"{param}: media in the format {formats[0]} need input_ids instead of text.", param=param)
    if formats[0] == PROCESSED and len(sources) > 1:
        raise InvalidRequest(
            f"{param}: a request takes one {PROCESSED}, which has all images and videos of the prompt.", param=param
        )
    return True


def encoded_prompt(
    ids: NDArray[np.int64], sources: Sequence[MediaSource], tokens: Mapping[Kind, MediaTokens], names: Sequence[str]
) -> EncodedPrompt:
    """Return the media of a prompt from the vectors of its items.

    `names` are the fields with sizes that positions depend on. Raises `InvalidRequest` if the vectors do not match the
    model or the prompt.
    """
    is_media, types = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.int64)
    by_kind: dict[Kind, list[MediaSource]] = {}
    for source in sources:
        by_kind.setdefault(source.kind, []).append(source)
    vectors = np.zeros((len(ids), max(tokens[kind].width for kind in by_kind)), np.float32)
    for kind, items in by_kind.items():
        param, mine = items[0].param, np.isin(ids, tokens[kind].ids)
        if (is_media & mine).any():
            raise InvalidRequest(f"{param}: this model has the same tokens for items of another kind.", param=param)
        if not mine.any():
            raise without_tokens(items[0])
        features = np.concatenate([_feature(item, tokens[kind].width) for item in items])
        if len(features) != mine.sum():
            raise InvalidRequest(
                f"{param}: the prompt has {mine.sum()} tokens for vectors, and there are {len(features)} vectors.",
                param=param,
            )
        is_media |= mine
        types[mine] = TYPES[kind]
        vectors[mine] = features
    return EncodedPrompt(is_media, vectors[is_media], types, _grids(sources, names))


def without_tokens(source: MediaSource) -> InvalidRequest:
    """Return the error for a prompt without any token of the item's kind."""
    return InvalidRequest(
        f"{source.param}: the prompt has no tokens of {PLURALS[source.kind]}, whose embeddings the vectors would "
        "replace. Send input_ids as the model's processor returns them, with all tokens of each item.",
        param="input_ids",
    )


def _feature(source: MediaSource, width: int) -> NDArray[np.float32]:
    """Return the vectors of an item, float32 [N, W]."""
    feature = source.content.get("feature")
    if hasattr(feature, "detach"):  # a PyTorch tensor
        feature = feature.detach().float().cpu().numpy()
    if not isinstance(feature, np.ndarray) or feature.dtype.kind != "f" or feature.shape[-1:] != (width,):
        raise InvalidRequest(
            f"{source.param}.feature must be a tensor or an array of floats, [number of tokens, {width}].",
            param=f"{source.param}.feature",
        )
    feature = feature.reshape(-1, width).astype(np.float32)
    if not np.isfinite(feature).all():
        raise InvalidRequest(f"{source.param}.feature has values that are not finite.", param=f"{source.param}.feature")
    return feature


def _grids(sources: Sequence[MediaSource], names: Sequence[str]) -> dict[str, Any]:
    """Return the sizes of all items, concatenated by name. Raises `InvalidRequest` if a required size is missing."""
    grids: dict[str, Any] = {}
    for name in names:
        given = [source.content[name] for source in sources if source.content.get(name) is not None]
        if given:
            grids[name] = np.concatenate([np.asarray(_on_host(each)).reshape(-1, *_shape(each)[1:]) for each in given])
    kinds = {source.kind for source in sources}
    for kind, needed in (("image", "image_grid_thw"), ("video", "video_grid_thw")):
        if needed in names and needed not in grids and kind in kinds:
            param = f"{sources[0].param}.{needed}"
            raise InvalidRequest(
                f"{param} is required: the positions of this model's tokens depend on it.", param=param
            )
    return grids


def _on_host(value: Any) -> Any:
    return value.cpu() if hasattr(value, "cpu") else value


def _shape(value: Any) -> tuple[int, ...]:
    return np.asarray(_on_host(value)).shape


def place_encoded(
    ids: NDArray[np.int64], media: EncodedPrompt, positions: Positions | None, vocab_size: int, *, mutual: bool
) -> tuple[tuple[int, ...], PromptMedia]:
    """Return the prompt's ids and its media, like `place`.

    In the prefix tree, the keys of adjacent media tokens are derived from a hash of their vectors and positions.
    """
    at = np.flatnonzero(media.is_media)
    offsets, delta = None, 0
    if positions is not None:
        axes = positions(ids, media.types, {name: [value] for name, value in media.grids.items()})
        offsets = (axes - np.arange(len(ids))).astype(np.int32)
        delta = int(axes.max()) + 1 - len(ids)
    keys, spans = ids.tolist(), []
    cuts = np.flatnonzero(np.diff(at) != 1) + 1
    for run, vectors in zip(np.split(at, cuts), np.split(media.vectors, cuts)):
        hashed = hashlib.sha256(f"precomputed {vectors.shape}\n".encode())
        hashed.update(np.ascontiguousarray(vectors).data)
        if offsets is not None:
            hashed.update(np.ascontiguousarray(offsets[:, run]).data)
        base = ABOVE_IDS + int.from_bytes(hashed.digest(), "big")
        for place_in_run, position in enumerate(run.tolist()):
            keys[position] = base + place_in_run
        spans.append(PlacedMedia(int(run[0]), vectors))
    plain = np.where(media.is_media & (ids >= vocab_size), 0, ids)
    return tuple(plain.tolist()), PromptMedia(tuple(spans), keys, len(spans), offsets, delta, mutual)
