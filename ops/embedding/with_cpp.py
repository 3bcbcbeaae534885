"""Embedding from a head's panels in C++ (`ops/cpp/source/whole.h`); from a plain weight torch's own is as fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ops.cpp import whole
from ops.cpp.executor import Executor
from ops.cpp.library import Step, address
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
        return native.look_up(rows, token_ids, weight, first_id)

    def rows(places: Tensor, panels: Tensor) -> Tensor:
        places = places.contiguous()
        step = Step(num_tokens=len(places), token_ids=address(places))
        return whole.embed(executor, panels, len(places), step)

    return {"embed": embed, "reads": reads, "as_logits": native.as_logits}
