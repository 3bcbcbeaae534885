"""Checks models that transformers computes: with Penstock's caches, logits must equal transformers' own logits."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ops.attention import AttentionMetadata, token_positions
from runtime.config.model_facts import ModelFacts
from runtime.errors import CheckpointError
from runtime.kv_cache.pools import KVPool
from runtime.layers.forward_batch import ForwardBatch, KindInputs
from runtime.layers.recurrent import KIND
from runtime.modeling.decoder import Decoder
from runtime.models.by_transformers.caches import CALL_STYLES, CallStyle, SequenceCacheDecoder
from runtime.models.by_transformers.encoder import TransformersEncoder
from runtime.models.by_transformers.model import TransformersDecoder

logger = logging.getLogger("penstock.core")

PAGE = 16
FIRST, SECOND = 5, 3  # numbers of tokens in the two test texts
SPLIT = 3  # the first step computes this number of tokens of the first text, and a second step the rest
# Maximum mean difference of logits, relative to their mean magnitude. It is larger for 16-bit dtypes, because routers
# may choose other experts at near ties.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


def verified(model: Decoder, facts: ModelFacts, device: torch.device, context_length: int) -> Decoder:
    """Return the model with caches that reproduce its logits: Penstock's if possible, otherwise transformers' own.

    Raises CheckpointError if neither reproduces them, because the model mixes tokens in a way that no cache stores.
    """
    if isinstance(model, TransformersEncoder):
        return model  # needs no cache
    if not isinstance(model, TransformersDecoder):
        raise TypeError(f"{type(model).__name__} is not computed by transformers.")
    try:
        _check_against_itself(model, facts, device)
    except CheckpointError as error:
        if isinstance(model, SequenceCacheDecoder):
            raise
        logger.info("%s Trying transformers' own caches, one for each sequence.", error)
        pooler, model = model.pooler, SequenceCacheDecoder(model.model, planned=False)
        model.model.set_attn_implementation("eager")
        model.pooler = pooler
        try:
            _check_against_itself(model, facts, device)
        except CheckpointError:
            raise error from None
    if isinstance(model, SequenceCacheDecoder):
        with torch.inference_mode():
            model.measure(context_length)
    return model


def _check_against_itself(model: TransformersDecoder, facts: ModelFacts, device: torch.device) -> None:
    """Compare the model's logits of two short texts with transformers' logits of each text.

    The first step computes the beginning of the first text and the whole second text; the second step computes the rest
    of the first text. Raises CheckpointError if the logits differ or if the model's code fails. With Penstock's cache,
    logits differ if the model mixes tokens outside attention, ignores the given positions, or has undeclared attention
    options.
    """
    first, second = (
        torch.tensor([(start + 2 * index) % facts.vocab_size for index in range(count)], device=device)
        for start, count in ((3, FIRST), (4, SECOND))
    )
    ways: list[CallStyle | None] = list(CALL_STYLES) if isinstance(model, SequenceCacheDecoder) else [None]
    problems: list[str] = []
    for way in ways:
        if isinstance(model, SequenceCacheDecoder) and way is not None:
            model.style = way
        try:
            with torch.inference_mode():
                logits = _in_steps(model, first, second, device)
                expected = torch.cat([model.reference_logits(first), model.reference_logits(second)])
        except Exception as error:  # the model's own code may raise anything
            problems.append(f"{error}")
            continue
        difference = float((logits - expected).abs().mean() / expected.abs().mean())
        if difference <= TOLERANCE[model.dtype]:
            if way is not None and way.whole:
                logger.warning("%s has no cache: each token recomputes the whole text.", facts.architecture)
            return
        cache = "a paged cache" if way is None else "caches of its own"
        later = "" if way is None else " (does it attend to later tokens?)"
        problems.append(f"over {cache} its logits differ by {difference:.1%} from its own{later}")
    raise CheckpointError(f"{facts.architecture} cannot be served by transformers' code: {problems[0]}.")


def _in_steps(model: TransformersDecoder, first: Tensor, second: Tensor, device: torch.device) -> Tensor:
    """Return float32 logits [T, V] of both texts, computed with Penstock's cache."""
    if isinstance(model, SequenceCacheDecoder):
        specs: Any = model.cache_specs
        pool = KVPool(specs, 2, PAGE, model.dtype, device, kinds={KIND: 4})
    else:
        pool = KVPool(model.cache_specs, 2, PAGE, model.dtype, device)
    spans = [[0, 1, 0, SPLIT], [0, 2, SPLIT, SECOND]]
    together = _step(model, pool, torch.cat([first[:SPLIT], second]), [0, 0], [SPLIT, SECOND], spans)
    rest = FIRST - SPLIT
    later = _step(model, pool, first[SPLIT:], [SPLIT], [rest], [[1, 3, 0, rest]])
    return model.logits(torch.cat([together[:SPLIT], later, together[SPLIT:]]))


def _step(
    model: TransformersDecoder,
    pool: KVPool,
    token_ids: Tensor,
    starts: list[int],
    counts: list[int],
    spans: list[list[int]],
) -> Tensor:
    """Return hidden states [T, E]. Row b uses page b, or the state slots of `spans` (see `runtime.kv_cache.states`)."""
    device = token_ids.device
    table = np.arange(len(starts), dtype=np.int32)[:, None]
    positions = torch.from_numpy(token_positions(starts, counts)).to(device)
    metadata = AttentionMetadata.build(starts, counts, table, PAGE, device)
    kinds = {KIND: KindInputs({"spans": torch.tensor(spans, dtype=torch.int32)}, metadata)}
    return model(ForwardBatch(token_ids=token_ids, positions=positions, attention=metadata, cache=pool, kinds=kinds))
