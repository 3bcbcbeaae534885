"""Outputs with drafts equal those of plain decoding: families and methods, each in all ways to compute a request.

The ways are: alone, cached, at once, in chunks, retracted, with grammars, with an adapter, on two ranks. `just study
drafts` runs all families and methods, and thousands of prompts of the demo model.
"""

from __future__ import annotations

from typing import Any

import pytest

import draft_matrix

GROUPS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method", "ranks"),
    [
        ("llama", "NGRAM,EAGLE3", {}),
        ("llama", "STANDALONE tree", {}),
        ("qwen2", "EAGLE", {}),
        ("deepseek_v3", "NEXTN", {}),
        ("deepseek_v3", "EAGLE3 tree", {}),
        ("gemma2", "NGRAM,STANDALONE", {}),
        ("gpt_oss", "EAGLE3 tree", {}),
        ("qwen3_next", "NEXTN", {}),
        ("granitemoehybrid", "NGRAM", {}),
        ("llama", "EAGLE3 tree", {"tp_size": 2}),
        pytest.param("llama", "NGRAM tree", GROUPS, marks=pytest.mark.long),
        pytest.param("llama", "NGRAM,STANDALONE", {"pp_size": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_tokens_are_those_of_plain_decoding(family: str, method: str, ranks: dict[str, Any]) -> None:
    found = draft_matrix.compare(family, method, **ranks)
    assert found is not None
    assert found.different == []
    assert found.accepted > 100
    assert found.in_graph or ranks  # as for real models: the default path, not operation by operation
