"""Low-rank additions in plain torch."""

from __future__ import annotations

import pytest

from kernel_cases.low_rank import CASES, Case, expected, outputs
from kernel_comparison import agree
from ops.low_rank import native


@pytest.mark.parametrize("case", [*CASES.values()], ids=[*CASES])
def test_each_token_gets_the_product_of_its_slot(case: Case) -> None:
    agree(outputs(native, case), expected(case))
