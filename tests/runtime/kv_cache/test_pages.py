from __future__ import annotations

import pytest

from runtime.kv_cache.pages import PagePool


def test_pages_handed_out_are_distinct_and_come_back():
    pool = PagePool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    pool.free(first)
    assert pool.num_free == 2
    assert sorted(pool.allocate(2)) == sorted(first)


def test_allocating_too_many_pages_allocates_none():
    pool = PagePool(3)
    with pytest.raises(ValueError, match="4 pages requested, 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_allocating_no_pages_leaves_all():
    pool = PagePool(3)
    assert pool.allocate(0) == []
    assert pool.num_free == 3


@pytest.mark.parametrize("held", [[0], [0, 1, 1], [0, 1, 2]])
def test_check_finds_lost_doubled_and_foreign_pages(held: list[int]):
    pool = PagePool(4)
    pages = pool.allocate(2)
    assert sorted(pages) == [0, 1]
    pool.check([0, 1])
    with pytest.raises(ValueError, match="do not balance"):
        pool.check(held)


def test_a_pool_without_pages_is_refused():
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)
