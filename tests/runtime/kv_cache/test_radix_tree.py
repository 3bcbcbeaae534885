from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kv_cache.radix_tree import Node, RadixTree


def insert(tree: RadixTree, ids: list[int], pages: list[int], namespace: str | None = None) -> list[int]:
    """Insert ids like a finished sequence. Return the pages that the tree did not take over."""
    node, known = tree.lock(ids, len(ids), namespace)
    start = len(known)
    node, more = tree.insert(node, ids[start * tree.page_size :], pages[start:])
    tree.unlock(node)
    return pages[: start + len(more)]


def find(tree: RadixTree, ids: list[int], *, limit: int = 99, namespace: str | None = None) -> list[int]:
    node, pages = tree.lock(ids, min(limit, len(ids)), namespace)
    tree.unlock(node)
    return pages


def test_the_longest_prefix_is_found_in_whole_pages():
    tree = RadixTree(2)
    insert(tree, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert find(tree, [1, 2, 3, 4, 5, 6, 7]) == [10, 11, 12]
    assert find(tree, [1, 2, 3, 4, 5, 9]) == [10, 11]
    assert find(tree, [1, 2, 3]) == [10]
    assert find(tree, [2, 1]) == []


def test_a_match_goes_no_further_than_its_limit():
    tree = RadixTree(2)
    insert(tree, [1, 2, 3, 4], [10, 11])
    assert find(tree, [1, 2, 3, 4], limit=3) == [10]
    assert tree.match_length([1, 2, 3, 4], 3) == 2
    assert tree.match_length([1, 2, 3, 4], 4) == 4


def test_runs_split_where_sequences_part():
    tree = RadixTree(1)
    insert(tree, [1, 2, 3, 4], [10, 11, 12, 13])
    assert insert(tree, [1, 2, 8, 9], [20, 21, 22, 23]) == [20, 21]
    assert find(tree, [1, 2, 3, 4]) == [10, 11, 12, 13]
    assert find(tree, [1, 2, 8, 9]) == [10, 11, 22, 23]
    assert tree.num_pages == 6
    tree.check([])


def test_two_tokens_of_difference_in_one_page_share_nothing():
    tree = RadixTree(4)
    insert(tree, [1, 2, 3, 4], [10])
    assert insert(tree, [1, 2, 3, 5], [11]) == []
    assert find(tree, [1, 2, 3, 5]) == [11]


def test_a_lock_stays_on_the_end_of_its_run_when_others_split_it():
    tree = RadixTree(1)
    insert(tree, [1, 2, 3, 4], [10, 11, 12, 13])
    held, _ = tree.lock([1, 2, 3, 4], 4)
    insert(tree, [1, 9], [20, 21])
    tree.check([held])
    assert tree.evict(9) == [21]  # all other pages are on the path to the lock
    tree.unlock(held)
    tree.check([])
    assert sorted(tree.evict(9)) == [10, 11, 12, 13]


def test_namespaces_never_share():
    tree = RadixTree(1)
    insert(tree, [1, 2], [10, 11], "a")
    insert(tree, [1, 2], [20, 21], "b")
    assert find(tree, [1, 2], namespace="a") == [10, 11]
    assert find(tree, [1, 2], namespace="b") == [20, 21]
    assert find(tree, [1, 2]) == []


def test_the_least_recently_used_leaf_goes_first():
    tree = RadixTree(1)
    insert(tree, [1, 2], [10, 11])
    insert(tree, [3, 4], [20, 21])
    find(tree, [1, 2])
    assert sorted(tree.evict(2)) == [20, 21]
    assert sorted(tree.evict(2)) == [10, 11]


def test_eviction_takes_the_end_of_a_run_and_no_more_than_needed():
    tree = RadixTree(2)
    insert(tree, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert tree.evict(1) == [12]
    tree.check([])
    assert find(tree, [1, 2, 3, 4, 5, 6]) == [10, 11]


def test_a_parent_becomes_evictable_after_its_children():
    tree = RadixTree(1)
    insert(tree, [1, 2], [10, 11])
    insert(tree, [1, 3], [20, 21])
    assert tree.evict(3) == [11, 21, 10]
    assert (tree.num_pages, tree.num_evictable) == (0, 0)
    tree.check([])


def test_locked_pages_are_not_evictable():
    tree = RadixTree(1)
    insert(tree, [1, 2, 3], [10, 11, 12])
    node, _ = tree.lock([1, 2], 2)
    assert tree.num_evictable == 1
    assert tree.evict(3) == [12]
    tree.unlock(node)
    assert tree.num_evictable == 2


def test_insert_returns_what_the_tree_already_had():
    tree = RadixTree(1)
    insert(tree, [1, 2, 3], [10, 11, 12])
    node, _ = tree.lock([1], 1)
    node, known = tree.insert(node, [2, 3, 4], [21, 22, 23])
    assert known == [11, 12]
    tree.check([node])
    assert find(tree, [1, 2, 3, 4]) == [10, 11, 12, 23]


def test_a_removed_end_leaves_what_others_need():
    tree = RadixTree(1)
    insert(tree, [1, 2, 8], [10, 11, 18])
    node, _ = tree.lock([1, 2], 2)
    node, _ = tree.insert(node, [3, 4], [12, 13])
    assert sorted(tree.remove(node)) == [12, 13]
    tree.check([])
    assert find(tree, [1, 2, 8]) == [10, 11, 18]


def test_many_uses_do_not_grow_the_eviction_order():
    tree = RadixTree(1)
    insert(tree, [1, 2], [10, 11])
    for _ in range(1000):
        find(tree, [1, 2])
    assert len(tree._leaves) < 100
    assert sorted(tree.evict(2)) == [10, 11]


def test_an_empty_namespace_leaves_nothing_behind():
    tree = RadixTree(1)
    for name in range(50):
        insert(tree, [1, 2], [10 * name, 10 * name + 1], str(name))
        find(tree, [7], namespace=f"unused {name}")
        tree.evict(2)
    assert not tree._roots


def test_check_finds_a_lock_without_holder():
    tree = RadixTree(1)
    insert(tree, [1], [10])
    tree.lock([1], 1)
    with pytest.raises(ValueError, match="locks"):
        tree.check([])


@settings(max_examples=100)
@given(
    page_size=st.sampled_from([1, 2, 3]),
    entries=st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=14), st.booleans(), st.integers(0, 4)), max_size=25
    ),
)
def test_the_tree_agrees_with_a_dictionary_of_prefixes(page_size: int, entries: list[tuple[list[int], bool, int]]):
    tree = RadixTree(page_size)
    known: dict[tuple[int, ...], int] = {}  # prefix of whole pages -> its last page
    held: list[Node] = []
    next_page = 0
    for ids, keep, num_evicted in entries:
        prefixes = [tuple(ids[:end]) for end in range(page_size, len(ids) + 1, page_size)]
        node, found = tree.lock(ids, len(ids))
        expected = [known[prefix] for prefix in prefixes if prefix in known]
        assert found == expected
        pages = list(range(next_page, next_page + len(prefixes) - len(found)))
        next_page += len(pages)
        end = len(prefixes) * page_size
        node, _ = tree.insert(node, ids[len(found) * page_size : end], pages)
        known |= dict(zip(prefixes[len(found) :], pages))
        held.append(node)
        if not keep:
            tree.unlock(held.pop(0))
        freed = set(tree.evict(num_evicted))
        known = {prefix: page for prefix, page in known.items() if page not in freed}
        assert sorted(tree.check(held)) == sorted(known.values())
    for node in held:
        tree.unlock(node)
    assert sorted(tree.evict(next_page + 1)) == sorted(known.values())
