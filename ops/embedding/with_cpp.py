"""Embedding from a head's panels in C++ (`ops/cpp/source/whole.h`); from a plain weight torch's own is as fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ops.cpp.executor import Executor
from ops.cpp.library import Embed, Step, address
from ops.embedding import native
from ops.matmul.with_cpp import Panels


def make(executor: Executor) -> Mapping[str, Callable[..., Any]]:
    """`embed`, `reads` and `as_logits` (see `ops.embedding`)."""

    def reads(prepared: Tensor) -> bool:
        """Panels of the weight's own dtype hold all that there was."""
        return isinstance(prepared, Panels)

    def embed(token_ids: Tensor, weight: Tensor, first_id: int | None = None) -> Tensor:
        """The vectors of a rank's own ids."""
        if not isinstance(weight, Panels):
            return native.embed(token_ids, weight, first_id)
        if first_id is None:
            return gathered(token_ids, weight)
        places = token_ids - first_id
        elsewhere = (places < 0) | (places >= len(weight))
        return gathered(places.masked_fill(elsewhere, 0), weight).masked_fill_(elsewhere.unsqueeze(1), 0)

    def gathered(token_ids: Tensor, panels: Panels) -> Tensor:
        token_ids, size = token_ids.contiguous(), panels.shape[1]
        out = executor.empty((len(token_ids), size), panels.dtype)
        step = Step(num_tokens=len(token_ids), token_ids=address(token_ids))
        executor.launch("embed_panels", panels.dtype, Embed(address(panels), address(out), size), step)
        return out

    return {"embed": embed, "reads": reads, "as_logits": native.as_logits}
