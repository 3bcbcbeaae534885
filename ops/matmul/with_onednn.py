"""Matrix products with oneDNN and weights that are packed once.

On a CPU, `F.linear` packs the weight in each call, which takes half of the time of a product with few rows. In float32
`F.linear` uses MKL, which is slow on processors that are not made by Intel.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.matmul.grouped import GroupedWeight
from ops.matmul.native import row_group as row_group

logger = logging.getLogger(__name__)


def prepare(weight: Tensor, *, bits: int | None = None) -> Tensor:
    """Return the weight in oneDNN's layout, or unchanged if torch cannot pack its dtype (see `ops.matmul`)."""
    if bits is not None:
        raise ValueError(f"The oneDNN backend does not support weights with {bits} bits.")
    if weight.device.type != "cpu" or not packs(weight.dtype):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.detach(), None)


def prepare_grouped(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return the dequantised weight in oneDNN's layout (see `ops.matmul`)."""
    return prepare(weight.dequantised().to(dtype))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias (see `ops.matmul`)."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T (see `ops.matmul`)."""
    return linear(x, weight)


@cache
def packs(dtype: torch.dtype) -> bool:
    """Return whether torch can pack weights in `dtype` on this processor. The first call tries, and logs a failure."""
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight.default(torch.ones(16, 16, dtype=dtype), None)
        linear(torch.ones(1, 16, dtype=dtype), weight)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        logger.warning("oneDNN cannot pack weights in %s. Using unpacked weights: %s", dtype, reason)
        return False
    return True
