"""Lookups in external corpora equal a search through all their positions."""

from __future__ import annotations

from random import Random

import numpy as np

from runtime.speculative.corpus import LENGTHS, SEPARATOR, CorpusIndex, CorpusLookup
from runtime.speculative.ngram import LookupSettings, NgramDrafter


def array(*documents: list[int]) -> np.ndarray:
    return np.array([each for document in documents for each in (*document, SEPARATOR)], np.int32)


def searched(documents: list[list[int]], ids: list[int], above: int, count: int) -> tuple[int, list[int]]:
    """Return the longest match and what follows it, by a search through all positions, the last one first."""
    for length in LENGTHS:
        for document in reversed(documents) if length > above else ():
            for end in range(len(document) - 1, length - 1, -1):
                if document[end - length : end] == ids[-length:]:
                    return length, document[end : end + count]
    return 0, []


def test_lookup_equals_a_search_through_all_positions() -> None:
    random = Random(1)
    num_found: dict[int, int] = dict.fromkeys((0, *LENGTHS), 0)
    for _ in range(200):
        size = random.choice((2, 4, 200_000))
        documents = [[random.randrange(size) for _ in range(random.randrange(40))] for _ in range(8)]
        lookup = CorpusLookup()
        lookup.index = CorpusIndex([array(*documents[:3]), array(*documents[3:])])
        for _ in range(20):
            source = random.choice(documents) or [0]
            end = random.randrange(len(source) + 1)
            ids = [random.randrange(size), *source[max(end - random.randrange(10), 0) : end]]
            above, count = random.choice((0, 3, 4, 5, 8)), random.randrange(1, 6)
            found = lookup.propose(ids, above, 0, count)
            assert found == searched(documents, ids, above, count)
            num_found[found[0]] += 1
    assert min(num_found.values()) > 20


def test_longer_match_is_proposed_and_pending_tokens_are_skipped() -> None:
    lookup = CorpusLookup()
    drafter = NgramDrafter(4, LookupSettings(), corpora=lookup)
    ids = [1, 2, 3, 70, 9, 1, 2, 3]
    assert drafter.propose(ids, 0, 2) == [70, 9]
    lookup.index = CorpusIndex([array([1, 2, 3, 80, 81])])  # as long as the sequence's own match
    assert drafter.propose(ids, 0, 2) == [70, 9]
    lookup.index = CorpusIndex([array([70, 9, 1, 2, 3, 90, 91, 92])])
    assert drafter.propose(ids, 0, 2) == [90, 91]
    assert drafter.alternatives([90, 91]) == []
    assert drafter.propose(ids, 1, 2) == [91, 92]
    lookup.index = CorpusIndex([array([70, 9, 1, 2, 3, 90])])  # nothing is known after the pending token
    assert drafter.propose(ids, 1, 2) == [9, 1]


def test_corpora_without_long_documents_have_no_matches() -> None:
    lookup = CorpusLookup()
    lookup.index = CorpusIndex([array([1], [2, 3], [1, 2, 3])])
    assert lookup.propose([1, 2, 3], 0, 0, 4) == (0, [])


def test_rejected_ids_of_a_corpus_do_not_slow_the_lookup_in_the_sequence() -> None:
    lookup = CorpusLookup()
    lookup.index = CorpusIndex([array([5, 6, 7, 1, 2, 3, 90, 91, 92], [40, 41, 42, 93, 94])])
    drafter = NgramDrafter(4, LookupSettings(max_corpus_drafts=2), corpora=lookup)
    ids = [1, 2, 3, 70, 71, 72, 73, 5, 6, 7, 1, 2, 3]
    for _ in range(3):
        assert drafter.propose(ids, 0, 4) == [90, 91]
        drafter.note(2, 2, len(ids))  # accepted: the next proposal is not longer than `max_corpus_drafts`
    drafter.note(2, 0, len(ids))
    assert drafter.propose(ids, 0, 4) == [70, 71, 72, 73]  # the corpora pause; the sequence has its own pace
    drafter.note(4, 0, len(ids))
    assert drafter.propose(ids, 0, 4) == []  # both pause
    assert drafter.propose([*ids, 40, 41, 42], 0, 4) == [93]  # shorter after the failure
