"""Whether two implementations of an operation agree, each value to what its dtype can hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# By the dtype of the results: sums are in float32 everywhere, so a few roundings of the result remain.
TOLERANCE = {torch.float32: 5e-6, torch.float64: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def agree(found: Sequence[Tensor], wanted: Sequence[Tensor], slack: float = 1.0) -> None:
    """Raise AssertionError unless all of `found` is close to `wanted`, in shape, dtype and value."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        tolerance = slack * TOLERANCE[one.dtype]
        torch.testing.assert_close(one.double(), other.double(), atol=tolerance, rtol=tolerance)


def differ(found: Sequence[Tensor], wanted: Sequence[Tensor], slack: float = 1.0) -> bool:
    """Whether `agree` would raise."""
    try:
        agree(found, wanted, slack)
    except AssertionError:
        return True
    return False
