"""The cost model against explicit counting."""

from __future__ import annotations

import pytest

from bench.checkpoints import SHAPES, Shape
from bench.gpu.bench import MODELS
from bench.gpu.limits import Cost, Job, Limits, Work, measure_limits

UNIT = Shape(hidden=1, layers=1, heads=1, kv_heads=1, head_dim=1, mlp=1, vocab=10, tied=True)
# weights: q, k, v, o, gate, up, down; the vocabulary; two norms per layer and the last norm
MATMUL, HEAD, NORMS = 7, 10, 3
KV = 2 * 4  # bytes of a token's KV


def test_a_decode_step_reads_the_weights_once_and_every_rows_keys() -> None:
    work = Cost(UNIT, "float32").decode([5, 7])
    assert work == Work(4 * (MATMUL + HEAD + NORMS) + 12 * KV, 2 * 2 * (MATMUL + HEAD) + 4 * 12)


def test_a_prompt_computes_every_token_and_one_row_of_logits() -> None:
    work = Cost(UNIT, "float32").prompt(3)
    assert work.operations == 2 * MATMUL * 3 + 2 * HEAD + 4 * (1 + 2 + 3)


@pytest.mark.parametrize("jobs", [[Job(3, 4)], [Job(3, 4), Job(2, 1), Job(5, 2)]])
def test_a_whole_workload_is_the_sum_of_its_tokens(jobs: list[Job]) -> None:
    read = computed = logits = attended = 0
    for job in jobs:
        for position in range(job.input + job.output - 1):  # the last token is never computed
            computed += 1
            attended += position + 1
            if position >= job.input:
                read += position + 1  # a separate step, which reads all keys so far
        logits += job.output
    work = Cost(UNIT, "float32").all_at_once(jobs)
    assert work.operations == 2 * MATMUL * computed + 2 * HEAD * logits + 4 * attended
    # A decode step does not read its own key from memory.
    own = sum(job.output - 1 for job in jobs)
    weights = max(job.output for job in jobs) * 4 * (MATMUL + HEAD + NORMS)
    assert weights + (read - own) * KV <= work.bytes <= weights + read * KV


def test_a_shared_prefix_counts_once_for_its_group() -> None:
    cost = Cost(UNIT, "float32")
    alone = cost.all_at_once([Job(6, 3)])
    shared = cost.all_at_once([Job(6, 3, shared=4)], groups=1)
    assert shared == alone
    twice = cost.all_at_once([Job(6, 3, shared=4)] * 2, groups=1)
    both = cost.all_at_once([Job(6, 3)] * 2)
    prefix = Work(2 * 4 * KV, 2 * MATMUL * 4 + 4 * (1 + 2 + 3 + 4))
    assert twice.plus(prefix) == both


def test_the_real_shapes_weigh_what_their_models_weigh() -> None:
    assert Cost(SHAPES["L8"], "bfloat16").held_bytes == pytest.approx(16.06e9, rel=1e-3)
    assert Cost(SHAPES["L8"], "bfloat16").weight_bytes == pytest.approx(15.01e9, rel=1e-3)
    assert Cost(SHAPES["Q8"], "bfloat16").kv_token_bytes == 2 * 36 * 8 * 128 * 2
    small = Cost(MODELS["qwen3-0.6b"].shape, "bfloat16", "fp8_e4m3")
    assert small.weight_bytes == small.held_bytes == pytest.approx(1.192e9, rel=1e-3)
    assert small.kv_token_bytes == 2 * 28 * 8 * 128


def test_the_slower_of_reading_and_computing_is_the_limit() -> None:
    limits = Limits(10.0, 20.0, 100.0, "bfloat16")
    assert (limits.seconds(Work(40, 100)), limits.bound(Work(40, 100))) == (2.0, "bytes")
    assert (limits.seconds(Work(40, 300)), limits.bound(Work(40, 300))) == (3.0, "operations")


def test_the_limits_of_this_processor_are_measured() -> None:
    limits = measure_limits("cpu", "float32", small=True)
    assert min(limits.copied_bytes_per_s, limits.summed_bytes_per_s) > 1e8
    assert limits.operations_per_s > 1e8
