"""A trial of a model that transformers computes, before it serves: over our cache it must give its own numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ops.attention import AttentionMetadata, token_positions
from runtime.config.model_facts import ModelFacts
from runtime.errors import CheckpointError
from runtime.kv_cache.pools import KVPool
from runtime.layers.forward_batch import ForwardBatch
from runtime.models.by_transformers.model import TransformersDecoder
from runtime.models.decoder import Decoder

PAGE = 16
FIRST, SECOND = 5, 3  # tokens of two texts; two of the first come in a second step
SPLIT = 3
# Mean difference as a share of the mean size. In 16 bits routers may choose other experts where two are nearly equal.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


def check_against_itself(model: Decoder, facts: ModelFacts, device: torch.device) -> None:
    """Two short texts in one batch, one of them in two steps, against each as transformers computes it alone.

    Raises CheckpointError where the numbers differ: the model mixes tokens in other ways than through attention, takes
    no positions, or asks of attention what it does not say.
    """
    if not isinstance(model, TransformersDecoder):
        raise TypeError(f"{type(model).__name__} is not computed by transformers.")
    pool = KVPool.uniform(facts.num_layers, 2, PAGE, facts.num_kv_heads, facts.head_dim, model.dtype, device)
    first, second = (
        torch.tensor([(start + 2 * index) % facts.vocab_size for index in range(count)], device=device)
        for start, count in ((3, FIRST), (4, SECOND))
    )
    try:
        with torch.inference_mode():
            together = _step(model, pool, torch.cat([first[:SPLIT], second]), [0, 0], [SPLIT, SECOND], device)
            later = _step(model, pool, first[SPLIT:], [SPLIT], [FIRST - SPLIT], device)
            found = model.logits(torch.cat([together[:SPLIT], later, together[SPLIT:]]))
            wanted = torch.cat([model.by_itself(first), model.by_itself(second)])
    except (
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        IndexError,
    ) as error:  # its own code
        raise CheckpointError(
            f"{facts.architecture} cannot be served by transformers' code: {error}"
        ) from error
    difference = float((found - wanted).abs().mean() / wanted.abs().mean())
    if not difference <= TOLERANCE[model.dtype]:
        raise CheckpointError(
            f"{facts.architecture} cannot be served by transformers' code: over a paged cache its logits differ "
            f"by {difference:.1%} from its own."
        )


def _step(
    model: TransformersDecoder,
    pool: KVPool,
    token_ids: Tensor,
    starts: list[int],
    counts: list[int],
    device: torch.device,
) -> Tensor:
    """Hidden states [T, E]; row b has page b."""
    table = np.arange(len(starts), dtype=np.int32)[:, None]
    positions = torch.from_numpy(token_positions(starts, counts)).to(device)
    metadata = AttentionMetadata.build(starts, counts, table, PAGE, device)
    return model(ForwardBatch(token_ids=token_ids, positions=positions, attention=metadata, cache=pool))
