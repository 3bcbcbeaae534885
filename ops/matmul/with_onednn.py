"""Matrix products by oneDNN with weights that are packed once.

`F.linear` on a CPU packs the weight at every call, which costs as much as reading it: half of the time of a
product with few rows. In float32 it asks MKL, which is slow on processors that are not Intel's.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.matmul.grouped import GroupedWeight

logger = logging.getLogger(__name__)


def prepare(weight: Tensor, *, bits: int | None = None) -> Tensor:
    """The weight in oneDNN's own layout (see `ops.matmul`); as it is where this torch cannot pack its dtype."""
    if bits is not None:
        raise ValueError(f"These products take no weights of {bits} bits.")
    if weight.device.type != "cpu" or not packs(weight.dtype):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.detach(), None)


def prepare_grouped(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """The weight as a plain one in oneDNN's layout (see `ops.matmul`)."""
    return prepare(weight.dequantised().to(dtype))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias (see `ops.matmul`)."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T (see `ops.matmul`)."""
    return linear(x, weight)


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether this torch, on this processor, packs weights of `dtype`: tried once, and logged where it fails."""
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight.default(torch.ones(16, 16, dtype=dtype), None)
        linear(torch.ones(1, 16, dtype=dtype), weight)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        logger.warning("oneDNN cannot pack weights in %s, they stay as they are: %s", dtype, reason)
        return False
    return True
