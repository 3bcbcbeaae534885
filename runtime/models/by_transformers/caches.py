"""Models that attend, recur or convolve by code of their own: transformers keeps what it needs of each sequence.

A state of a sequence is then a whole cache of transformers'. It is handed on and kept behind pages as those of
recurrent layers are (`runtime.kv_cache.states`): a step copies the one it goes on from, so that none is changed which
others read.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.recurrent import KIND
from runtime.models.by_transformers.attention import body
from runtime.models.by_transformers.model import TransformersDecoder

PAST = ("past_key_values", "cache_params", "state", "mems")  # how models call what they go on from
MEASURED = (1, 9)  # tokens of two texts whose caches tell what one takes
LINES_AT_LEAST = 3
ZEROS = 0
GROWING = (DynamicLayer.update, DynamicSlidingWindowLayer.update)  # concatenate


@dataclass(frozen=True, slots=True)
class HeldSpec:
    """The cache of one sequence: its bytes at the longest, and the length of that."""

    num_bytes: int
    tokens_a_line: int
    first_lines: int = LINES_AT_LEAST
    kind: ClassVar[str] = KIND

    def local(self, tp_rank: int, tp_size: int) -> HeldSpec:
        """The whole: such a model is not cut over ranks."""
        return self

    def make(self, num_lines: int, device: torch.device) -> HeldCaches:
        return HeldCaches([None] * num_lines)


class HeldCaches(NamedTuple):
    """The caches of all sequences by the number of their line; None: of no tokens."""

    lines: list[Any]

    @property
    def nbytes(self) -> int:
        return sum(_bytes(line) for line in self.lines)


class Way(NamedTuple):
    """How a model wants to be called to go on from a cache."""

    mask: bool  # with a mask of all tokens, none of which is hidden
    positions: bool  # with the positions of the new ones
    single: bool  # one token at a time, once there is a cache
    # Without any cache: of a sequence its tokens are kept, and all computed again in every step.
    whole: bool = False


WAYS = [
    *(
        Way(mask, positions, single)
        for single in (False, True)
        for mask in (True, False)
        for positions in (True, False)
    ),
    Way(mask=False, positions=False, single=False, whole=True),
]


class HoldingDecoder(TransformersDecoder):
    """Computes row after row, each with a cache of transformers'."""

    def __init__(self, model: Any) -> None:
        nn.Module.__init__(self)
        self._hold(model)
        self.way = WAYS[0]  # the trial before serving looks for the right one
        takes = inspect.signature(body(model).forward).parameters
        self._takes = set(takes)
        if any(each.kind is each.VAR_KEYWORD for each in takes.values()):  # handed on, to a decoder
            self._takes |= {"attention_mask", PAST[0]}
        past = [name for name in PAST if name in takes]
        self._past = past[0] if past else PAST[0]
        self.cache_specs = {0: HeldSpec(0, 1)}

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, E] of the batch's tokens. Writes a cache for every row."""
        if not batch.is_plain:
            raise RuntimeError("A model that transformers computes takes ids at positions of one axis.")
        lines: list[Any] = batch.cache[0].lines  # pyright: ignore[reportAttributeAccessIssue]
        hidden = []
        for read, written, first, count in batch.kinds[KIND].arrays["spans"].tolist():
            past = None if read == ZEROS else _copy(lines[read])
            start = int(batch.positions[first])
            got, lines[written] = self._row(batch.token_ids[first : first + count], start, past)
            hidden.append(got)
        return torch.cat(hidden)

    def by_itself(self, token_ids: Tensor) -> Tensor:
        """float32 logits [T, V] of one text, in one pass."""
        return self.model(input_ids=token_ids[None], use_cache=False).logits[0].float()

    def _row(self, token_ids: Tensor, start: int, past: Any) -> tuple[Tensor, Any]:
        if self.way.whole:
            known = token_ids if past is None else torch.cat([past, token_ids])
            return body(self.model)(input_ids=known[None], use_cache=False).last_hidden_state[
                0, start:
            ], known
        if self.way.single and start and len(token_ids) > 1:
            parts = []
            for place in range(len(token_ids)):
                part, past = self._row(token_ids[place : place + 1], start + place, past)
                parts.append(part)
            return torch.cat(parts), past
        given: dict[str, Any] = {"input_ids": token_ids[None], "use_cache": True, self._past: past}
        end, device = start + len(token_ids), token_ids.device
        if self.way.mask and "attention_mask" in self._takes:
            given["attention_mask"] = torch.ones(1, end, dtype=torch.int64, device=device)
        if self.way.positions and "position_ids" in self._takes:
            given["position_ids"] = torch.arange(start, end, device=device)[None]
        output = body(self.model)(**given)
        return output.last_hidden_state[0], getattr(output, self._past)

    def measure(self, context_length: int) -> None:
        """Find the size of the longest sequence's cache, from those of two short ones."""
        device = next(self.model.parameters()).device
        short, long = (
            _bytes(self._row(torch.full((count,), 3, device=device), 0, None)[1]) for count in MEASURED
        )
        a_token = max(0, long - short) / (MEASURED[1] - MEASURED[0])
        num_bytes = int(short + a_token * (context_length - MEASURED[0]))
        self.cache_specs = {0: HeldSpec(num_bytes, max(1, context_length // LINES_AT_LEAST))}


def _copy(cache: Any) -> Any:
    """What can be changed without changing the original. Shared are configurations, and keys and values to which tokens
    are added by making new tensors: to copy those too would read all of a text for every token.
    """
    memo: dict[int, Any] = {}
    inner = getattr(cache, "self_attention_cache", cache)  # of an encoder's decoder
    for part in (cache, inner, *(getattr(inner, "layers", None) or ())):
        grown = (part.keys, part.values) if getattr(type(part), "update", None) in GROWING else ()
        for shared in (getattr(part, "config", None), *grown):
            if shared is not None:
                memo[id(shared)] = shared
    return copy.deepcopy(cache, memo)


def _bytes(cache: Any, depth: int = 4) -> int:
    """Of all tensors in it."""
    if isinstance(cache, Tensor):
        return cache.nbytes
    if depth == 0 or cache is None:
        return 0
    if isinstance(cache, dict):
        parts = list(cache.values())
    elif isinstance(cache, list | tuple):
        parts = list(cache)
    else:
        parts = list(getattr(cache, "__dict__", {}).values())
    return sum(_bytes(part, depth - 1) for part in parts)
