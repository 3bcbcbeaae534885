from __future__ import annotations

from itertools import pairwise

import pytest

from bench.checkpoints import SHAPES, Shape, parameter_sizes
from bench.cpu.limits import Cost, Limits
from bench.cpu.work import FIGURES

TINY = Shape(hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp=16, vocab=100, tied=True)
BODY, HEAD = 2 * (8 * 16 + 8 * 8 + 3 * 8 * 16), 8 * 100
SLOW_MEMORY, SLOW_MATMUL = Limits(1.0, 1e30), Limits(1e30, 1.0)


def test_a_decode_step_reads_the_weights_once_and_each_rows_cache() -> None:
    cache = 2 * 2 * 1 * 4 * 2 * 10  # keys and values x layers x heads x dimensions x bytes x tokens
    assert Cost(TINY, "bf16", SLOW_MEMORY).step_s(1, 1, 9) == 2 * (BODY + HEAD) + cache
    assert Cost(TINY, "int8", SLOW_MEMORY).step_s(3, 1, 9) == BODY + HEAD + 3 * cache


def test_a_prompt_multiplies_each_token_and_attends_to_all_before() -> None:
    pairs = 1 + 2 + 3
    assert Cost(TINY, "bf16", SLOW_MATMUL).step_s(1, 3, 0) == 3 * 2 * BODY + 2 * HEAD + 4 * 2 * 2 * 4 * pairs


def test_a_prompt_in_two_steps_attends_as_often_as_in_one() -> None:
    cost = Cost(TINY, "bf16", SLOW_MATMUL)
    head = 2 * HEAD
    assert cost.step_s(1, 8, 0) - head == cost.step_s(1, 5, 0) + cost.step_s(1, 3, 5) - 2 * head


@pytest.mark.parametrize("shape", ["S", "Q"])
def test_the_weights_are_those_of_the_checkpoint(shape: str) -> None:
    matrices = [a * b for name, (a, *rest) in parameter_sizes(SHAPES[shape]) for b in rest if name]
    cost = Cost(SHAPES[shape], "bf16", SLOW_MEMORY)
    cache = cost.step_s(2, 1, 0) - cost.step_s(1, 1, 0)
    assert cost.step_s(1, 1, 0) - cache == 2 * sum(matrices)


def test_every_rate_has_a_best_and_other_figures_have_none() -> None:
    cost = Cost(SHAPES["S"], "bf16", Limits(80e9, 1e12))
    known = {name for name in FIGURES if cost.best(name) is not None}
    assert known == {name for name, figure in FIGURES.items() if figure.unit == "tok/s"}


def test_more_at_once_gives_more_at_best_until_multiplying_is_the_bound() -> None:
    cost = Cost(SHAPES["S"], "bf16", Limits(80e9, 1e12))
    rates = [cost.best(name) or 0.0 for name in ("decode, batch 1", "concurrency 8", "concurrency 16")]
    assert all(before < after for before, after in pairwise(rates))
    assert (cost.best("shared prefix, cold") or 0) < (cost.best("shared prefix, warm") or 0)


def test_decoding_alone_is_bound_by_reading() -> None:
    bound = Cost(SHAPES["S"], "bf16", Limits(80e9, 1e12)).best("decode, batch 1") or 0.0
    assert bound == pytest.approx(80e9 / (2 * 134.5e6), rel=0.02)
