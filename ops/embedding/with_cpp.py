"""Embedding in C++, from a plain weight (`ops/cpp/source/small.h`), a head's panels or groups (`whole.h` there)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import TYPES, address
from ops.cpp.structures import Embed, EmbedGroups, Step
from ops.embedding import native
from ops.matmul.with_cpp import PackedWeight, PackedWeight4, grouped_operands


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """All of `ops.embedding`; `as_logits` is torch's."""

    def reads(prepared: Tensor) -> bool:
        """A packed weight of its own dtype holds all that there was."""
        return isinstance(prepared, PackedWeight)

    def embed(
        token_ids: Tensor, weight: Tensor, first_id: int | None = None, *, scale: float | None = None
    ) -> Tensor:
        """The vectors of a rank's own ids."""
        packed = isinstance(weight, PackedWeight | PackedWeight4)
        if not packed and not (weight.dtype in TYPES and weight.is_contiguous()):
            return native.embed(token_ids, weight, first_id, scale=scale)

        def rows(indices: Tensor, weight: Tensor) -> Tensor:
            return look_up(indices, weight, 1.0 if scale is None else scale)

        return native.look_up(rows, token_ids, weight, first_id)

    def look_up(indices: Tensor, weight: Tensor, scale: float) -> Tensor:
        indices = indices.contiguous()
        step = Step(num_tokens=len(indices), token_ids=address(indices))
        if isinstance(weight, PackedWeight4):
            x = launcher.empty((len(indices), weight.shape[1]), weight.dtype)
            operands = EmbedGroups(grouped_operands(weight), address(x), scale)
            launcher.launch("embed_groups", x.dtype, operands, step)
            return x
        x = launcher.empty((len(indices), weight.shape[1]), weight.dtype)
        kernel = "embed_packed" if isinstance(weight, PackedWeight) else "embed"
        launcher.launch(
            kernel, weight.dtype, Embed(address(weight), address(x), weight.shape[1], scale), step
        )
        return x

    def embed_placed(
        token_ids: Tensor, words: Tensor, positions: Tensor, places: Tensor | None, type: Tensor | None
    ) -> Tensor:
        """The vectors of words, of their positions and of their type."""
        if words.dtype not in TYPES:
            return native.embed_placed(token_ids, words, positions, places, type)
        token_ids, positions = token_ids.contiguous(), positions.contiguous()
        x = launcher.empty((len(token_ids), words.shape[1]), words.dtype)
        step = Step(num_tokens=len(token_ids), token_ids=address(token_ids), positions=address(positions))
        operands = Embed(address(words), address(x), words.shape[1], 1.0, address(places), address(type))
        launcher.launch("embed_placed", words.dtype, operands, step)
        return x

    return {"embed": embed, "embed_placed": embed_placed, "reads": reads, "as_logits": native.as_logits}
