"""A trial of a model that transformers computes, before it serves: over our cache it must give its own numbers."""

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
from runtime.models.by_transformers.caches import WAYS, HoldingDecoder, Way
from runtime.models.by_transformers.model import TransformersDecoder
from runtime.models.by_transformers.whole_texts import WholeTexts
from runtime.models.decoder import Decoder

logger = logging.getLogger("penstock.core")

PAGE = 16
FIRST, SECOND = 5, 3  # tokens of two texts; two of the first come in a second step
SPLIT = 3
# Mean difference as a share of the mean size. In 16 bits routers may choose other experts where two are nearly equal.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


def tried(model: Decoder, facts: ModelFacts, device: torch.device, context_length: int) -> Decoder:
    """The model that gives its own numbers: over our cache or, where it does not, over those of transformers.

    Raises CheckpointError where neither does: the model mixes tokens in ways that no cache remembers.
    """
    if isinstance(model, WholeTexts):
        return model  # nothing of ours takes part
    if not isinstance(model, TransformersDecoder):
        raise TypeError(f"{type(model).__name__} is not computed by transformers.")
    try:
        _check_against_itself(model, facts, device)
    except CheckpointError as error:
        if isinstance(model, HoldingDecoder):
            raise
        logger.info("%s Transformers' own caches are tried, one for each sequence.", error)
        pooler, model = model.pooler, HoldingDecoder(model.model)
        model.model.set_attn_implementation("eager")
        model.pooler = pooler
        try:
            _check_against_itself(model, facts, device)
        except CheckpointError:
            raise error from None
    if isinstance(model, HoldingDecoder):
        with torch.inference_mode():
            model.measure(context_length)
    return model


def _check_against_itself(model: TransformersDecoder, facts: ModelFacts, device: torch.device) -> None:
    """Two short texts in one batch, one of them in two steps, against each as transformers computes it alone.

    Raises CheckpointError where the numbers differ: the model mixes tokens in other ways than through attention, takes
    no positions, or asks of attention what it does not say.
    """
    first, second = (
        torch.tensor([(start + 2 * index) % facts.vocab_size for index in range(count)], device=device)
        for start, count in ((3, FIRST), (4, SECOND))
    )
    ways: list[Way | None] = list(WAYS) if isinstance(model, HoldingDecoder) else [None]
    problems: list[str] = []
    for way in ways:
        if isinstance(model, HoldingDecoder) and way is not None:
            model.way = way
        try:
            with torch.inference_mode():
                found = _in_steps(model, first, second, facts, device)
                wanted = torch.cat([model.by_itself(first), model.by_itself(second)])
        except Exception as error:  # its own code, of which anything may come
            problems.append(f"{error}")
            continue
        difference = float((found - wanted).abs().mean() / wanted.abs().mean())
        if difference <= TOLERANCE[model.dtype]:
            if way is not None and way.whole:
                logger.warning(
                    "%s keeps nothing of a text: each token computes all of it.", facts.architecture
                )
            return
        cache = "a paged cache" if way is None else "caches of its own"
        later = "" if way is None else " (does it attend to later tokens?)"
        problems.append(f"over {cache} its logits differ by {difference:.1%} from its own{later}")
    raise CheckpointError(f"{facts.architecture} cannot be served by transformers' code: {problems[0]}.")


def _in_steps(
    model: TransformersDecoder, first: Tensor, second: Tensor, facts: ModelFacts, device: torch.device
) -> Tensor:
    """float32 logits [T, V] of both texts over our cache."""
    if isinstance(model, HoldingDecoder):
        specs: Any = model.cache_specs
        pool = KVPool(specs, 2, PAGE, model.dtype, device, kinds={KIND: 4})
    else:
        pool = KVPool.uniform(
            facts.num_layers, 2, PAGE, facts.num_kv_heads, facts.head_dim, model.dtype, device
        )
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
    """Hidden states [T, E]; row b has page b, or the states that `spans` name (see `runtime.kv_cache.states`)."""
    device = token_ids.device
    table = np.arange(len(starts), dtype=np.int32)[:, None]
    positions = torch.from_numpy(token_positions(starts, counts)).to(device)
    metadata = AttentionMetadata.build(starts, counts, table, PAGE, device)
    kinds = {KIND: KindInputs({"spans": torch.tensor(spans, dtype=torch.int32)}, metadata)}
    return model(
        ForwardBatch(token_ids=token_ids, positions=positions, attention=metadata, cache=pool, kinds=kinds)
    )
