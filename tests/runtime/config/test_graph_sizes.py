from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config.resolve.graph_sizes import GIB, Buckets, buckets

MANY = 2048


@pytest.mark.parametrize(("gibibytes", "top", "count"), [(24, 8, 4), (80, 160, 23), (139, 256, 35), (178, 512, 51)])
def test_larger_gpus_capture_larger_batches(gibibytes: int, top: int, count: int) -> None:
    sizes = buckets(gibibytes * GIB, MANY).sizes
    assert sizes[:4] == (1, 2, 4, 8)
    assert sizes[-1] == top
    assert len(sizes) == count


def test_a_largest_size_cuts_the_list_or_extends_it_in_steps() -> None:
    assert buckets(139 * GIB, MANY, largest=20).sizes == (1, 2, 4, 8, 16, 20)
    assert buckets(139 * GIB, MANY, largest=300).sizes[-4:] == (256, 272, 288, 300)
    assert buckets(24 * GIB, MANY, largest=32).sizes == (1, 2, 4, 8, 16, 24, 32)


def test_asked_sizes_are_taken_as_they_are() -> None:
    assert buckets(24 * GIB, MANY, sizes=[64, 3, 64, 7]).sizes == (3, 7, 64)


def test_no_size_exceeds_what_may_run_and_that_is_captured() -> None:
    assert buckets(139 * GIB, 20).sizes == (1, 2, 4, 8, 16, 20)
    assert buckets(139 * GIB, 5, sizes=[2, 8]).sizes == (2, 5)
    assert buckets(139 * GIB, 1).sizes == (1,)


def test_without_padding_small_sizes_are_all_there_and_only_they_match() -> None:
    exact = buckets(139 * GIB, MANY, padding=False)
    assert exact.sizes[:32] == tuple(range(1, 33))
    assert exact.sizes[32:] == (48, 64, 80, 96, 112, 128, 144, 160)
    assert exact.take(31) == 31
    assert exact.take(33) is None


@given(
    sizes=st.lists(st.integers(1, 600), min_size=1, max_size=30),
    batch_size=st.integers(-1, 700),
    padding=st.booleans(),
)
def test_a_batch_takes_the_smallest_graph_that_holds_it(sizes: list[int], batch_size: int, padding: bool) -> None:
    taken = buckets(139 * GIB, MANY, sizes=sizes, padding=padding).take(batch_size)
    fitting = [size for size in sizes if size >= batch_size] if batch_size >= 1 else []
    if padding:
        assert taken == min(fitting, default=None)
    else:
        assert taken == (batch_size if batch_size in fitting else None)


def test_no_batch_replays_where_nothing_is_captured() -> None:
    assert Buckets(()).take(1) is None
