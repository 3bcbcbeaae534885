"""transformers models that compute attention, recurrence or convolution in their own code.

Each sequence has its own transformers cache. The engine treats this cache like the state of a recurrent layer
(`runtime.kv_cache.states`): a slot stores it, and several sequences may continue from it. Therefore each step works on
a copy and leaves the original unchanged.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from runtime.errors import CheckpointError
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.recurrent import KIND
from runtime.models.by_transformers.attention import body
from runtime.models.by_transformers.model import TransformersDecoder, check_row_values

USUAL_PAST = "past_key_values"
PAST = ("cache", USUAL_PAST, "cache_params", "state", "mems")  # names of the cache argument in transformers' models
MEASURED = (1, 9)  # lengths in tokens of the two texts from which `measure` extrapolates the cache size
MIN_SLOTS = 3
ZEROS = 0  # slot that stands for an empty state
GROWING = (DynamicLayer.update, DynamicSlidingWindowLayer.update)  # methods that concatenate into new tensors


@dataclass(frozen=True, slots=True)
class SequenceCacheSpec:
    """Maximum size of a sequence's cache in bytes. There is one slot per `tokens_per_slot` tokens of the page pool."""

    num_bytes: int
    tokens_per_slot: int
    min_slots: int = MIN_SLOTS
    kind: ClassVar[str] = KIND

    def local(self, tp_rank: int, tp_size: int) -> SequenceCacheSpec:
        """Return self, because such a model does not support tensor parallelism."""
        return self

    def make(self, num_slots: int, device: torch.device) -> SequenceCaches:
        return SequenceCaches([None] * num_slots)


class SequenceCaches(NamedTuple):
    """The caches of all sequences, by state slot. A cache is None if it holds no tokens yet."""

    slots: list[Any]

    @property
    def nbytes(self) -> int:
        return sum(_bytes(cache) for cache in self.slots)


class CallStyle(NamedTuple):
    """The arguments with which a model must be called to continue a text whose earlier tokens are in the cache."""

    mask: bool  # pass an attention mask of ones for all tokens
    positions: bool  # pass the positions of the new tokens
    single: bool  # pass one token per call after the first call
    # use no cache: keep the token ids of a sequence, and recompute all its tokens in every step
    whole: bool = False


CALL_STYLES = [
    *(
        CallStyle(mask, positions, single)
        for single in (False, True)
        for mask in (True, False)
        for positions in (True, False)
    ),
    CallStyle(mask=False, positions=False, single=False, whole=True),
]


class SequenceCacheDecoder(TransformersDecoder):
    """Computes rows one by one, each with its own transformers cache."""

    def __init__(self, model: Any, *, planned: bool = True) -> None:
        """Create the decoder. Images are accepted only if the engine's plan has such caches (`planned`)."""
        nn.Module.__init__(self)
        self._set_model(model)
        self._planned = planned
        self.style = CALL_STYLES[0]  # runtime/worker/transformers_check.py selects the final style
        takes = inspect.signature(body(model).forward).parameters
        self._takes = set(takes)
        # Arbitrary keyword arguments are passed on to an inner decoder.
        if any(each.kind is each.VAR_KEYWORD for each in takes.values()):
            self._takes |= {"attention_mask", USUAL_PAST}
        past = [name for name in PAST if name in takes]
        self._past = past[0] if past else USUAL_PAST
        self.cache_specs = {0: SequenceCacheSpec(0, 1)}

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, E] of the batch's tokens, and store a cache for every row."""
        check_row_values(batch)
        slot_of = {token: slot for slot, tokens in batch.adapted.items() for token in tokens.tolist()}
        slots: list[Any] = batch.cache[0].slots  # pyright: ignore[reportAttributeAccessIssue]
        hidden = []
        for read, written, first, count in batch.kinds[KIND].arrays["spans"].tolist():
            past = None if read == ZEROS else _copy(slots[read])
            start = int(batch.positions[first])
            # A call of the model computes one row only, so all its tokens have the row's adapter.
            with self.with_adapters({slot_of[first]: slice(None)} if first in slot_of else {}):
                tokens = slice(first, first + count)
                if _is_text(batch, tokens):
                    states, slots[written] = self._row(batch.token_ids[tokens], start, past)
                else:
                    states, slots[written] = self._embedded_row(self._embedded(batch, tokens), start, past)
            hidden.append(states)
        return torch.cat(hidden)

    def accept_media(self) -> None:
        if self.style.whole or not self._planned:
            raise CheckpointError(
                "Images are not supported, because no cache of this language model can begin with them."
            )
        super().accept_media()

    def reference_logits(self, token_ids: Tensor) -> Tensor:
        """Return float32 logits [T, V] of one text, computed in one pass."""
        return self.model(input_ids=token_ids[None], use_cache=False).logits[0].float()

    def _row(self, token_ids: Tensor, start: int, past: Any) -> tuple[Tensor, Any]:
        if self.style.whole:
            all_ids = token_ids if past is None else torch.cat([past, token_ids])
            return body(self.model)(input_ids=all_ids[None], use_cache=False).last_hidden_state[0, start:], all_ids
        if self.style.single and start and len(token_ids) > 1:
            parts = []
            for offset in range(len(token_ids)):
                part, past = self._row(token_ids[offset : offset + 1], start + offset, past)
                parts.append(part)
            return torch.cat(parts), past
        arguments: dict[str, Any] = {"input_ids": token_ids[None], "use_cache": True, self._past: past}
        end, device = start + len(token_ids), token_ids.device
        if self.style.mask and "attention_mask" in self._takes:
            arguments["attention_mask"] = torch.ones(1, end, dtype=torch.int64, device=device)
        if self.style.positions and "position_ids" in self._takes:
            arguments["position_ids"] = torch.arange(start, end, device=device)[None]
        output = body(self.model)(**arguments)
        return output.last_hidden_state[0], getattr(output, self._past)

    def _embedded_row(self, inputs: dict[str, Any], start: int, past: Any) -> tuple[Tensor, Any]:
        """Compute a row with the language model alone, from the result of `_embedded`, after `start` earlier tokens."""
        count = inputs["inputs_embeds"].shape[1]
        if self.style.single and start and count > 1:
            parts = []
            for offset in range(count):
                part, past = self._embedded_row(_one_token(inputs, offset), start + offset, past)
                parts.append(part)
            return torch.cat(parts), past
        model = self._language_model()
        takes = inspect.signature(model.forward).parameters
        name = next((each for each in PAST if each in takes), USUAL_PAST)
        arguments = {**inputs, "use_cache": True, name: past}
        if not self.style.positions and inputs["position_ids"].dim() == 2:
            del arguments["position_ids"]  # the model counts positions itself
        if self.style.mask:
            device = inputs["inputs_embeds"].device
            arguments["attention_mask"] = torch.ones(1, start + count, dtype=torch.int64, device=device)
        if not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
            arguments = {key: value for key, value in arguments.items() if key in takes}
        output = model(**arguments)
        return output.last_hidden_state[0], getattr(output, name)

    def measure(self, context_length: int) -> None:
        """Extrapolate the cache size of a sequence of `context_length` tokens from two short texts."""
        device = next(self.model.parameters()).device
        short, long = (_bytes(self._row(torch.full((count,), 3, device=device), 0, None)[1]) for count in MEASURED)
        bytes_per_token = max(0, long - short) / (MEASURED[1] - MEASURED[0])
        num_bytes = int(short + bytes_per_token * (context_length - MEASURED[0]))
        self.cache_specs = {0: SequenceCacheSpec(num_bytes, max(1, context_length // MIN_SLOTS))}


def _is_text(batch: ForwardBatch, tokens: slice) -> bool:
    """Return whether consecutive tokens of a batch have no embeddings of media and no three-axis positions."""
    if batch.embeds_mask is not None and bool(batch.embeds_mask[tokens].any()):
        return False
    axes = batch.position_axes
    return axes is None or bool((axes[:, tokens] == batch.positions[tokens]).all())


def _one_token(inputs: Mapping[str, Any], offset: int) -> dict[str, Any]:
    """Return the result of `_embedded` for one of its tokens."""
    one: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, list):  # vectors that the first layers add (DeepStack); only tokens of media have them
            mask = inputs["visual_pos_masks"][0]
            first = int(mask[:offset].sum())
            one[name] = [level[first : first + int(mask[offset])] for level in value]
        elif name in ("inputs_embeds", "per_layer_inputs"):
            one[name] = value[:, offset : offset + 1]
        else:
            one[name] = value[..., offset : offset + 1]
    return one


def _copy(cache: Any) -> Any:
    """Return a copy of a cache, so that the model can update it without changing the original.

    The copy shares configurations, and keys and values that grow by concatenation into new tensors. Copying these
    tensors would read the keys and values of the whole text for every new token.
    """
    memo: dict[int, Any] = {}
    inner = getattr(cache, "self_attention_cache", cache)  # exists in caches of encoder-decoder models
    for part in (cache, inner, *(getattr(inner, "layers", None) or ())):
        grown = (part.keys, part.values) if getattr(type(part), "update", None) in GROWING else ()
        for shared in (getattr(part, "config", None), *grown):
            if shared is not None:
                memo[id(shared)] = shared
    return copy.deepcopy(cache, memo)


def _bytes(cache: Any, depth: int = 4) -> int:
    """Return the size of all tensors in the cache in bytes."""
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
