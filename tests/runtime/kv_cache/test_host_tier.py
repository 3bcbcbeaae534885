"""The host tier keeps evicted prefixes, and the fake runner notices every page that is copied at the wrong time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fake_runner import Drive, make_plan, make_sequence
from runtime.batch import Batch, PageCopy
from runtime.kv_cache import host_tier
from runtime.kv_cache.copy_queue import CopyQueue
from runtime.kv_cache.host_tier import POLICIES, HostTier
from runtime.kv_cache.page_keys import is_local, page_keys
from runtime.kv_cache.storage_tier import StorageTier
from runtime.request import Adapter, Caller, Request, Service
from runtime.sequence import Sequence

KEYS_OF_1234 = ["96316269417b", "a243a584d6be"]  # first and last hex digits, of pages of 2 tokens


def tiered(num_pages: int = 8, num_tier_pages: int = 40, *, page_size: int = 4, **options: Any) -> Drive:
    return Drive(
        make_plan(adapter_slots=2), num_pages=num_pages, page_size=page_size, num_tier_pages=num_tier_pages, **options
    )


def tier_of(drive: Drive) -> HostTier:
    assert drive.cache.tier is not None
    return drive.cache.tier


def ask(drive: Drive, prompt: list[int], **options: Any) -> Sequence:
    """Compute a prompt alone, and check its tokens, and how many of them were predicted to be in the cache."""
    sequence = make_sequence(prompt, **options)
    predicted = drive.scheduler.num_cached(sequence)
    drive.add(sequence)
    drive.run()
    assert sequence.num_cached == predicted
    assert drive.output(sequence) == drive.expected(sequence)
    return sequence


def prompts(count: int, length: int = 21) -> list[list[int]]:
    return [[number, *range(1, length)] for number in range(count)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_working_set_of_four_times_the_device_returns(policy: str, depth: int, page_size: int):
    drive = tiered(48 // page_size, 240 // page_size, page_size=page_size, depth=depth, write_policy=policy)
    for _ in range(3):
        cached = [ask(drive, prompt, max_new_tokens=3).num_cached for prompt in prompts(5, 33)]
    assert sum(cached) >= 0.9 * 5 * (32 // page_size * page_size)
    assert tier_of(drive).counts.num_restored > 0


def test_selective_writes_keep_what_a_second_request_uses():
    drive = tiered(16, write_policy="write_through_selective")
    once, twice = prompts(2, 9)
    for prompt in (once, twice, twice):
        ask(drive, prompt)
    for prompt in prompts(12)[2:]:
        ask(drive, prompt)
    assert ask(drive, once).num_cached == 0
    assert ask(drive, twice).num_cached == 8


def test_namespaces_and_adapters_share_nothing_on_the_host():
    drive = tiered(8, 80)
    prompt, adapter = prompts(1)[0], Adapter(7, "seven", "")
    ask(drive, prompt)
    for other in prompts(6)[1:]:
        ask(drive, other)
    assert ask(drive, prompt, namespace="salt").num_cached == 0
    assert ask(drive, prompt, namespace=("x", 7), adapter=adapter).num_cached == 0
    assert ask(drive, prompt).num_cached == 20


def test_a_second_lookup_computes_and_copies_no_keys(monkeypatch: pytest.MonkeyPatch):
    """With copies, lookups of long prompts would take quadratic time. Each replica of a router is asked."""
    drive = tiered(page_size=1, num_pages=64)
    prompt = prompts(1)[0]
    ask(drive, prompt)
    sequence = make_sequence(prompt)
    assert tier_of(drive).num_present(sequence, 0, 21) == 21
    with monkeypatch.context() as patch:
        patch.delattr(host_tier, "page_keys")
        assert tier_of(drive).num_present(sequence, 0, 20) == 20


def test_the_last_pages_of_a_prefix_leave_first():
    drive = tiered(8, 8)
    long, other = prompts(2, 25)
    ask(drive, long, max_new_tokens=1)
    ask(drive, other, max_new_tokens=1)  # takes pages of the tier
    for prompt in prompts(4, 25)[2:]:
        assert drive.scheduler.num_cached(make_sequence(prompt)) == 0
    keys = page_keys(make_sequence(long), 6, 4)
    present = [key in tier_of(drive)._entries for key in keys]
    assert present == sorted(present, reverse=True)


def test_many_waiting_pages_are_spread_over_steps():
    seen: list[Batch] = []
    drive = tiered(64, 64, page_size=1, step_pages=2, watch=seen.append)
    ask(drive, list(range(32)), max_new_tokens=20)
    written = [sum(len(copy.target_pages) for copy in batch.copies) for batch in seen]
    assert written[0] == 0
    assert max(written) == 8  # a quarter of the waiting pages
    assert sum(written) >= 32


def test_pages_that_are_computed_faster_than_copied_stay_on_the_host():
    drive = tiered(8)
    prompt, *others = prompts(6)
    for each in (prompt, *others):
        ask(drive, each)
    tier_of(drive).copy_s, tier_of(drive).compute_s = 2.0, 1.0
    assert ask(drive, prompt).num_cached == 0
    for each in others:
        ask(drive, each)
    tier_of(drive).compute_s = 3.0
    assert ask(drive, prompt).num_cached == 20


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["fail", "give_up_newest", "rebuild"])
def test_recovery_trusts_nothing_in_the_tier(how: str, policy: str):
    drive = tiered(8, write_policy=policy)
    for prompt in prompts(4):
        ask(drive, prompt)
    last = make_sequence(prompts(1)[0], max_new_tokens=8)
    drive.add(last)
    drive.step()
    drive.step()
    batches = drive.runner.drop()
    if how == "rebuild":
        drive.scheduler.rebuild()
    else:
        getattr(drive.scheduler, how)(batches)
    drive.scheduler.check()
    assert tier_of(drive).counts.num_used == 0
    assert not drive.cache.copies
    ask(drive, prompts(2)[1])


def test_pages_of_broken_requests_leave_the_tier():
    drive = tiered(16)
    broken = make_sequence(prompts(1)[0], max_new_tokens=6)
    drive.add(broken)
    for _ in range(3):
        drive.step()
    assert tier_of(drive).counts.num_used
    drive.runner.failed_requests.add(broken.request.id)
    drive.run()
    assert tier_of(drive).counts.num_used == 0


def test_keys_are_equal_in_every_process_and_depend_on_all_tokens_before():
    keys = page_keys(make_sequence([1, 2, 3, 4, 5]), 2, 2)
    assert [key.hex()[:6] + key.hex()[-6:] for key in keys] == KEYS_OF_1234
    assert page_keys(make_sequence([9, 2, 3, 4]), 2, 2)[1] != keys[1]
    assert page_keys(make_sequence([1, 2, 3, 4], namespace="a"), 2, 2)[0] != keys[0]
    own = make_sequence([1, 2, 3, 4], adapter=Adapter(1, "a", ""))
    assert [is_local(key) for key in page_keys(own, 2, 2)] == [True, True]
    assert not any(map(is_local, keys))


def test_copies_are_merged_in_order():
    queue = CopyQueue()
    queue.add("device", "host", [1], [5])
    queue.add("device", "host", [2], [6])
    queue.add("host", "device", [6], [1])
    queue.add("device", "host", [3], [6])
    queue.add("device", "host", [4], [6])
    found = [(c.source, c.source_pages.tolist(), c.target_pages.tolist()) for c in queue.take()]
    assert found == [
        ("device", [1, 2], [5, 6]),
        ("host", [6], [1]),
        ("device", [3], [6]),
        ("device", [4], [6]),
    ]
    assert queue.take() == ()


# Each fault changes one rule of the tier. The machine below must notice it.
def _write_at_once(tier: HostTier, sequence: Sequence, first: int, pages: list[int]) -> None:
    """Copy pages with the batch that computes them."""
    ADDED(tier, sequence, first, pages)
    tier.begin_step()


def _keep_nothing(tier: HostTier, sequence: Sequence, end: int) -> list[int]:
    """Let the pages that are restored leave the tier before their copy."""
    pages = KEEP(tier, sequence, end)
    tier._kept = frozenset()
    return pages


def _forget_the_rest(tier: HostTier, pages: list[int]) -> None:
    """Keep the keys of evicted pages."""
    for page in pages:
        tier._waiting.pop(page, None)


def _same_key(sequence: Sequence, count: int, page_size: int) -> list[bytes]:
    """Leave the namespace out of the key."""
    plain = make_sequence(sequence.ids)
    return page_keys(plain, count, page_size)


def _one_early(queue: CopyQueue) -> tuple[PageCopy, ...]:
    """Copy from the page before."""
    return tuple(copy._replace(source_pages=np.roll(copy.source_pages, 1)) for copy in TAKE(queue))


def _reversed(queue: CopyQueue) -> tuple[PageCopy, ...]:
    return TAKE(queue)[::-1]


def _too_long(tier: HostTier, sequence: Sequence, limit: int) -> int:
    """Restore the last token too, for whose logits it must be computed."""
    return RESTORABLE(tier, sequence, limit + 1)


def _untrusted(tier: HostTier, pages: list[int]) -> None:
    """Keep pages of untrusted KV in the tier."""
    for page in pages:
        tier._waiting.pop(page, None)
        tier._tree.pop(page)


ADDED, KEEP, RESTORABLE, TAKE = HostTier.added, HostTier.keep, HostTier.num_restorable, CopyQueue.take
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "written with their own batch": (HostTier, "added", _write_at_once),
    "restored pages may leave": (HostTier, "keep", _keep_nothing),
    "evicted pages keep their keys": (HostTier, "evicted", _forget_the_rest),
    "keys without namespace": (host_tier, "page_keys", _same_key),
    "wrong source page": (CopyQueue, "take", _one_early),
    "copies out of order": (CopyQueue, "take", _reversed),
    "last token restored": (HostTier, "num_restorable", _too_long),
    "tier kept after a failure": (HostTier, "reset", lambda tier: tier._tree.clear()),
    "untrusted pages kept": (HostTier, "discarded", _untrusted),
}


def exercise(policy: str, num_tier_pages: int, depth: int) -> None:
    """Compute prompts that share prefixes in small pools, with failures in between. Raises if anything is wrong."""
    drive = tiered(14, num_tier_pages, depth=depth, write_policy=policy, step_pages=2)
    for number in range(40):
        shapes = [(number % 4, number % 3), ((number + 1) % 4, number % 2), (number % 5, 2)]
        sequences = [
            make_sequence(
                [first, *range(1, 9), *range(1, 7 + more)],
                max_new_tokens=2 + number % 5,
                namespace=("salt", None) if number % 5 == 4 else None,
            )
            for first, more in shapes
        ]
        drive.add(*sequences[:1])
        drive.add(*sequences[1:2])
        drive.add(*sequences[2:])
        if number % 7 == 6:
            drive.step()
            drive.step()
            drive.scheduler.rebuild()
            drive.runner.drop()
            drive.scheduler.check()
        drive.run()
        for sequence in sequences:
            assert drive.output(sequence) == drive.expected(sequence)
        if number % 11 == 10:
            broken = make_sequence([40, *range(12)], max_new_tokens=8)
            drive.add(broken)
            drive.step()
            drive.step()
            drive.runner.failed_requests.add(broken.request.id)
            drive.run()
            assert not any(key in tier_of(drive)._entries for key in page_keys(broken, 3, 4))


def run_all() -> None:
    for policy in POLICIES:
        for num_tier_pages in (6, 40):
            for depth in (0, 1):
                exercise(policy, num_tier_pages, depth)


def test_the_tier_is_right():
    run_all()


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_the_tier_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch):
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError)):
        run_all()


def test_pages_that_were_being_copied_when_the_store_was_cleared_are_not_saved():
    drive = tiered(8, storage=lambda tier: StorageTier(tier, waits=False))
    storage = drive.cache.storage
    assert storage is not None
    storage.attach()
    ask(drive, prompts(1)[0], max_new_tokens=1)
    assert drive.scheduler.take_copies()  # outside a batch
    new = storage.take_new()
    assert new
    storage.drop_unsaved()
    storage.settle(new)
    assert storage.take_save() is None


def test_decode_servers_look_up_only_prompts_that_prefill_servers_compute():
    drive = tiered(8, storage=lambda tier: StorageTier(tier, waits=True, prefilled_only=True))
    storage = drive.cache.storage
    assert storage is not None
    storage.attach()
    alone = make_sequence(prompts(1)[0])
    routed = make_sequence(prompts(1)[0], request=Request(caller=Caller(prefilled=True)))
    drive.scheduler.add(alone)
    assert not storage.held
    assert storage.take_wanted() is None
    drive.scheduler.add(routed)
    assert storage.held == {routed}
    assert storage.take_wanted() is not None


def test_awaited_pages_are_saved_in_order_after_each_step_of_a_prompt():
    """Also those of a prompt that still runs. Pages of a step that has not succeeded are not saved."""
    drive = Drive(
        make_plan(chunk_tokens=8),
        num_tier_pages=16,
        storage=lambda tier: StorageTier(tier, waits=False, is_awaited=True),
    )
    storage, scheduler = drive.cache.storage, drive.scheduler
    assert storage is not None
    storage.attach()
    scheduler.add(make_sequence(prompts(1)[0]))
    batch = scheduler.fill()
    assert batch is not None
    assert scheduler.num_running == 1
    assert scheduler.take_copies(), "the pages of the first chunk"
    storage.settle(storage.take_new())
    assert storage.take_save() is None
    storage.applied(batch.number)
    save = storage.take_save()
    assert save is not None
    assert [entry.index for entry in save.entries.values()] == [0, 1]


def test_evicted_pages_do_not_count_as_pinned():
    drive = Drive(num_pages=8, page_size=4, num_pinnable=8)
    pinned, *others = prompts(3, 17)
    ask(drive, pinned, service=Service(pin="a"), owner="me", max_new_tokens=1)
    assert drive.cache.pins.num_pages == 4
    ask(drive, [*others[0], *range(30, 40)], max_new_tokens=2)  # needs 7 pages
    assert drive.cache.pins.num_pages == 1
    drive.scheduler.check()
