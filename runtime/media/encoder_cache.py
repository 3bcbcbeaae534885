"""A cache for the vectors of images, videos and audio, limited by bytes. Does not import torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.media_source import Kind


class EncodedBlock(NamedTuple):
    """The result of processing and encoding an image, video or audio: its tokens and its vectors."""

    digest: bytes  # 256-bit hash of the pixels or samples and of the processor's parameters
    text: str  # replaces the placeholder in a prompt
    token_ids: NDArray[np.int64]  # tokens of `text`, [T]
    is_media: NDArray[np.bool_]  # [T], marks the tokens whose embeddings are `vectors`
    vectors: NDArray[np.float32]  # [N, W], one vector for each token that `is_media` marks
    grids: Mapping[str, Any]  # tensors with the size of the image or video, from which positions are computed
    kind: Kind = "image"
    types: NDArray[np.int64] | None = None  # [N], token types for positions; None: `placement.TYPES[kind]` for all

    @property
    def nbytes(self) -> int:
        return self.vectors.nbytes + self.token_ids.nbytes + len(self.text)


class EncoderCache:
    """Keeps the most recently used blocks. Vectors of running requests may live longer than in this cache."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = self.num_hits = self.num_misses = 0
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, EncodedBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, digest: bytes) -> EncodedBlock | None:
        """Return a block and mark it as used, or return None. Counts a hit or a miss."""
        block = self._blocks.get(digest)
        if block is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._blocks.move_to_end(digest)
        return block

    def peek(self, digest: bytes) -> EncodedBlock | None:
        """Return a block, or None, without counting a hit or a miss."""
        return self._blocks.get(digest)

    def put(self, block: EncodedBlock) -> None:
        """Add a block, unless it alone exceeds the limit."""
        if block.nbytes > self._max_bytes or block.digest in self._blocks:
            return
        self._blocks[block.digest] = block
        self.num_bytes += block.nbytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.num_bytes -= oldest.nbytes

    def clear(self) -> None:
        """Remove all blocks, for example because the encoder has new weights."""
        self._blocks.clear()
        self.num_bytes = 0
