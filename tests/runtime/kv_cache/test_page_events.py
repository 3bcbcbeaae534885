"""A subscriber that follows the events knows the content of the tree."""

from __future__ import annotations

from random import Random

from fake_runner import make_sequence
from runtime.kv_cache.page_events import Event, PageEvents
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.sequence import Sequence

SIZE = 2


class Follower:
    """The prefixes that a cache holds according to its events, by hash."""

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[int, ...]] = {}

    def hear(self, events: list[Event]) -> None:
        for name, *rest in events:
            if name == "AllBlocksCleared":
                self.prefixes.clear()
            elif name == "BlockRemoved":
                for block in rest[0]:
                    del self.prefixes[block]
            else:
                hashes, parent, ids, size, adapter = rest
                assert (size, adapter, len(ids)) == (SIZE, None, SIZE * len(hashes))
                above = () if parent is None else self.prefixes[parent]
                for number, block in enumerate(hashes):
                    assert block not in self.prefixes
                    above += tuple(ids[number * SIZE : (number + 1) * SIZE])
                    self.prefixes[block] = above


def test_events_follow_whatever_happens():
    random, follower = Random(5), Follower()
    cache = PrefixCache(24, SIZE, events=PageEvents(SIZE))
    assert cache.events is not None
    held: list[Sequence] = []
    for _ in range(1500):
        action = random.random()
        if action < 0.5 and len(held) < 4:
            sequence = make_sequence([random.randrange(2) for _ in range(random.randrange(1, 14))])
            cache.lock(sequence)
            held.append(sequence)
        elif action < 0.7 and held:
            sequence = random.choice(held)
            end = min(len(sequence.ids), sequence.num_computed + random.randrange(1, 7))
            missing = max(0, -(-end // SIZE) - len(sequence.pages))
            if missing <= cache.num_available:
                sequence.pages += cache.allocate(missing)
                sequence.num_computed = end
                if duplicates := cache.insert(sequence):
                    cache.replaced(sequence, duplicates)
        elif action < 0.98 and held:
            sequence = held.pop(random.randrange(len(held)))
            random.choice([cache.release, cache.release, cache.discard])(sequence)
        elif action < 0.99:
            cache.empty()
        elif action < 0.992:
            cache.reset(held)
            held.clear()
        follower.hear(cache.events.take())
        cache.check(held)
        there = [prefix for prefix in follower.prefixes.values() if len(prefix) == SIZE]
        assert len(there) == len(set(there))
        assert len(follower.prefixes) == cache.num_pages - cache.num_free - sum(
            len(each.pages) - each.num_shared // SIZE for each in held
        )
        for prefix in follower.prefixes.values():
            assert cache.match_length(make_sequence([*prefix, 0])) == len(prefix)


def test_hashes_tell_prefixes_and_namespaces_apart():
    events = PageEvents(SIZE)
    events.stored([0, 1], [7, 8, 7, 8], None, None)
    events.stored([2], [7, 8], None, "salt")
    [_, first, second] = events.take()
    assert len({*first[1], *second[1]}) == 3
    again = PageEvents(SIZE)
    again.stored([5], [7, 8], None, None)
    again.stored([9], [7, 8], 5, None)
    # hashes are equal in every process
    assert [each[1] for each in again.take()[1:]] == [[block] for block in first[1]]
