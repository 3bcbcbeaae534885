from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernel_cases.attention import CASES, Case, options, step
from ops.attention import AttentionOptions, native
from ops.attention.hybrid import hybrid, part_of


@pytest.mark.parametrize("name", ["mixed rows", "single tokens", "one long row", "sinks, window and soft cap"])
def test_two_backends_together_equal_one(name: str) -> None:
    both = hybrid(native.attend, native.attend)
    given, asked = step(CASES[name]), options(CASES[name])
    torch.testing.assert_close(both(*given, asked), native.attend(*given, asked))


def test_each_backend_gets_its_rows() -> None:
    seen: dict[str, list[int]] = {}

    def noting(name: str) -> Any:
        def attend(q: torch.Tensor, k_pool: Any, v_pool: Any, inputs: Any, options: Any) -> torch.Tensor:
            seen[name] = list(inputs.counts_host)
            return q

        return attend

    given = step(Case(((40, 1), (0, 21), (3, 1), (30, 18))))
    for draft_rows, by_prefill, single in (((), False, [1, 1]), ((3,), False, [1, 1, 18]), ((3,), True, [1, 1])):
        drafted = given._replace(inputs=replace(given.inputs, draft_rows=draft_rows, plan_cache={}))
        attend = hybrid(noting("single"), noting("longer"), drafts_by_prefill=by_prefill)
        out = attend(*drafted, AttentionOptions(1.0))
        assert seen == {"single": single, "longer": [21] if 18 in single else [21, 18]}
        assert torch.equal(out, given.q)


def test_a_part_of_a_step_has_its_draft_rows() -> None:
    """A backend may divide the part again, for example latent attention, which computes long rows separately."""
    given = step(Case(((40, 1), (0, 21), (3, 1), (30, 18)))).inputs
    assert part_of(replace(given, draft_rows=(0, 3)), [2, 3]).metadata.draft_rows == {1}
