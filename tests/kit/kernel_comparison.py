"""Compare two implementations of an operation, each value within the precision of its dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.matmul.rounded_rows import RoundedRows, round_rows

# Tolerance by dtype of the results. Sums are always float32, so only a few roundings of the result differ.
TOLERANCE = {torch.float32: 5e-6, torch.float64: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def agree(found: Sequence[Tensor], wanted: Sequence[Tensor], slack: float = 1.0) -> None:
    """Raise AssertionError unless all values of `found` are close to `wanted`, with equal shapes and dtypes."""
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


def assert_rounded(rows: RoundedRows, group: int) -> None:
    """Raise AssertionError unless the float8 numbers and scales equal those that torch computes from the same rows."""
    wanted = round_rows(torch.Tensor(rows), group)
    assert torch.equal(rows.scales, wanted.scales)
    assert torch.equal(rows.numbers.float(), wanted.numbers.float())
