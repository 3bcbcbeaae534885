"""Embedding in C++: from plain weights (`ops/cpp/source/small.h`) or packed weights of an LM head (`whole.h`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import TYPES, address
from ops.cpp.structures import Embed, EmbedGroups, Media, Step
from ops.embedding import native
from ops.matmul.with_cpp import PackedWeight, PackedWeight4, grouped_operands


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """Return all operations of `ops.embedding`. torch computes `as_logits`."""

    def reads(prepared: Tensor) -> bool:
        """Return whether the weight is packed without quantisation."""
        return isinstance(prepared, PackedWeight)

    def embed(
        token_ids: Tensor,
        weight: Tensor,
        first_id: int | None = None,
        *,
        scale: float | None = None,
        media: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the vectors of the ids in a rank's part of the vocabulary."""
        packed = isinstance(weight, PackedWeight | PackedWeight4)
        if not packed and not (weight.dtype in TYPES and weight.is_contiguous()):
            return native.embed(token_ids, weight, first_id, scale=scale, media=media)

        def rows(indices: Tensor, weight: Tensor) -> Tensor:
            return look_up(indices, weight, 1.0 if scale is None else scale, media)

        return native.look_up(rows, token_ids, weight, first_id)

    def look_up(indices: Tensor, weight: Tensor, scale: float, media: tuple[Tensor, Tensor] | None) -> Tensor:
        indices = indices.contiguous()
        step = Step(num_tokens=len(indices), token_ids=address(indices))
        x = launcher.empty((len(indices), weight.shape[1]), weight.dtype)
        contiguous = () if media is None else tuple(each.contiguous() for each in media)
        pointers = Media(vectors=address(contiguous[0]), given=address(contiguous[1])) if contiguous else Media()
        if isinstance(weight, PackedWeight4):
            operands = EmbedGroups(weight=grouped_operands(weight), out=address(x), scale=scale, media=pointers)
            launcher.launch("embed_groups", x.dtype, operands, step)
            return x
        kernel = "embed_packed" if isinstance(weight, PackedWeight) else "embed"
        operands = Embed(weight=address(weight), out=address(x), size=weight.shape[1], scale=scale, media=pointers)
        launcher.launch(kernel, weight.dtype, operands, step)
        return x

    def embed_with_positions(
        token_ids: Tensor,
        weight: Tensor,
        positions: Tensor,
        position_weight: Tensor | None,
        type_weight: Tensor | None,
        second_starts: Tensor | None,
    ) -> Tensor:
        """Return the sum of the tokens', positions' and types' vectors."""
        if weight.dtype not in TYPES:
            return native.embed_with_positions(
                token_ids, weight, positions, position_weight, type_weight, second_starts
            )
        token_ids, positions = token_ids.contiguous(), positions.contiguous()
        x = launcher.empty((len(token_ids), weight.shape[1]), weight.dtype)
        step = Step(num_tokens=len(token_ids), token_ids=address(token_ids), positions=address(positions))
        operands = Embed(
            weight=address(weight),
            out=address(x),
            size=weight.shape[1],
            scale=1.0,
            position_weight=address(position_weight),
            type_weight=address(type_weight),
            second_starts=address(second_starts),
        )
        launcher.launch("embed_with_positions", weight.dtype, operands, step)
        return x

    return {
        "embed": embed,
        "embed_with_positions": embed_with_positions,
        "reads": reads,
        "as_logits": native.as_logits,
    }
