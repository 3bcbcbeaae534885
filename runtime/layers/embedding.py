"""Token embedding, and the vocabulary weight that it shares with the LM head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ops.select import Kernels
from runtime.layers.build import Build
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.quantization import LinearLayout, QuantizationMethod, Unquantized
from runtime.layers.sharding import ShardRange, TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, SubLayer, Weighted, frozen, parameter, whole

ROWS_AT_ONCE = 4096  # vocabulary rows loaded and packed at a time; must be a multiple of the kernels' packing block


class VocabularyChange(NamedTuple):
    """An adapter's change of the weight W [V', E] of an embedding or LM head.

    W becomes W + b @ a; then `rows` replace the rows of W at `ids`. For an LM head, `b` and `rows` cover only this
    rank's part of the vocabulary.
    """

    a: Tensor  # [r, E]; r may be 0
    b: Tensor  # [V', r]; either `a` or `b` already contains the adapter's scale
    ids: Tensor  # int64 [n], indices of the replaced rows
    rows: Tensor  # [n, E]

    def to(self, device: torch.device) -> VocabularyChange:
        """Copy to a device."""
        return VocabularyChange(*(each.to(device, non_blocking=True) for each in self))


class VocabularyWeight(Weighted):
    """Base class of layers with a weight [V', E] for the V' tokens of this rank's part of the vocabulary.

    If the weight stays quantised as in the checkpoint, it is loaded and packed in blocks of ROWS_AT_ONCE rows.
    """

    kernels: Kernels
    method: QuantizationMethod

    def __init__(self) -> None:
        super().__init__()
        self.changes: dict[int, VocabularyChange] = {}  # adapter's slot -> its change

    def make_weight(self, name: str, ids: ShardRange, size: int) -> nn.Parameter:
        """Return the parameter for `weight`. It has no rows if the weight is packed from the blocks in `kept`."""
        layout = LinearLayout((SubLayer(name, ids.full, "vocab"),), (ids,), whole_range(size), None)
        keeps = self.method.keeps(layout)
        starts = range(0, ids.size if keeps else 0, ROWS_AT_ONCE)
        self.kept = nn.ModuleList(KeptRows(self, layout, start) for start in starts)
        return parameter(0 if keeps else ids.size, size)


class KeptRows(Weighted):
    """A block of vocabulary rows, quantised as in the checkpoint. `prepare` packs the block into the owner's weight."""

    by_itself = True

    def __init__(self, owner: VocabularyWeight, layout: LinearLayout, first: int) -> None:
        super().__init__()
        [ids] = layout.rows
        size = min(ROWS_AT_ONCE, ids.size - first)
        self._owner = [owner]  # a list, so that the owner does not become a submodule
        self._first, self._num_ids = first, ids.size
        self._layout = layout._replace(rows=(ShardRange(ids.start + first, size, ids.full),))
        owner.method.allocate(self, self._layout)

    def shards(self) -> Iterator[Shard]:
        return self._owner[0].method.shards(self, self._layout)

    def prepare(self) -> None:
        owner, first = self._owner[0], self._first
        weight = owner.get_parameter("weight")
        target = {"into": weight, "first": first} if first else {"out_size": self._num_ids}
        packed = owner.kernels.prepare_grouped(owner.method.take(self), weight.dtype, **target)
        owner.weight = frozen(packed)


class Embedding(VocabularyWeight):
    """Looks up token vectors [T, E] and multiplies them by `scale`.

    `scale` is rounded to the model's dtype, as in transformers.

    With tensor parallelism each rank looks up the ids of its part of the vocabulary, and an all-reduce adds the
    results. If the LM head is `tied`, `prepare` converts the weight to the head's layout. If the lookup can read this
    layout, lookup and head share one tensor; otherwise the head gets a converted copy.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        size: int,
        build: Build,
        *,
        scale: float | None = None,
        quantized: bool = True,
    ) -> None:
        super().__init__()
        self.name = name
        self.kernels = build.kernels
        self.method = build.quantization if quantized else Unquantized()
        self.scale = scale
        self.tied = False
        self.takes_media = False  # whether image, audio or user-given vectors may replace token embeddings
        self.size = size
        self.ids = whole_range(vocab_size)
        self.allocate()
        self._group: TensorParallelGroup | None = None

    def allocate(self) -> None:
        self.weight = self.make_weight(self.name, self.ids, self.size)
        # Copy of the weight in the layout of a tied LM head. None: no tied head, or the lookup can read its layout.
        self.head_weight: nn.Parameter | None = None

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part of the vocabulary."""
        self.ids = shard_range("vocab", self.ids.full, 1, group.rank, group.size)
        self.allocate()
        self._group = group

    def shards(self) -> Iterator[Shard]:
        if not self.kept:
            yield whole(f"{self.name}.weight", self.weight, ("vocab", None), self.ids)

    def prepare(self) -> None:
        if self.scale is not None:
            self.scale = torch.tensor(self.scale, dtype=self.weight.dtype, device="cpu").item()
        if self.kept or not self.tied:
            return
        prepared = self.method.prepare_weight(self.weight, self.kernels)
        if prepared is self.weight:
            return
        if self.kernels.reads(prepared):
            self.weight = frozen(prepared)
        else:
            self.head_weight = frozen(prepared)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the vectors of the batch's tokens. Vectors in `batch.input_embeds` replace looked-up vectors."""
        embed, media = self.kernels.embed, batch.media
        if media is not None:
            media = media[0].to(self.weight.dtype), media[1]
        if self._group is None:
            vectors = embed(batch.token_ids, self.weight, scale=self.scale, media=media)
            return self._changed(vectors, batch) if batch.adapted else vectors
        looked_up = embed(batch.token_ids, self.weight, self.ids.start, scale=self.scale)
        vectors = self._changed(self._group.all_reduce(looked_up), batch)
        return vectors if media is None else torch.where(media[1].unsqueeze(1), media[0], vectors)

    def _changed(self, vectors: Tensor, batch: ForwardBatch) -> Tensor:
        """Apply the adapters' changes to the vectors of their tokens."""
        for slot, tokens in batch.adapted.items():
            change = self.changes.get(slot)
            if change is None:
                continue
            if batch.embeds_mask is not None:
                tokens = tokens[~batch.embeds_mask[tokens]]
            ids, scale = batch.token_ids[tokens], self.scale or 1.0
            changed = vectors[tokens].float() + scale * (change.b[ids].float() @ change.a.float())
            is_new = ids.unsqueeze(1) == change.ids  # [n, new rows]
            rows = change.rows[is_new.int().argmax(1)] if len(change.rows) else changed
            vectors[tokens] = torch.where(is_new.any(1, keepdim=True), scale * rows.float(), changed).to(vectors.dtype)
        return vectors
