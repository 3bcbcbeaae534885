"""A store of pages that fails on demand, and what the storage actor does with it, one event at a time.

Loads and saves read and write host pages at their very end, so a page that is reused too early is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fake_runner import FakeRunner
from runtime.batch import PageCopy
from runtime.kv_cache.host_tier import Entry
from runtime.kv_cache.storage_tier import Save, StorageTier, Wanted
from runtime.page_store.protocol import CHECKSUM_BYTES, CheckedStore
from runtime.scheduler.scheduler import Scheduler

FAULTS = ("missing", "flipped", "short", "broken")


class FaultyStore:
    """Keeps pages in memory. Implements `PageStore`; `fault` names what goes wrong in the next calls."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self.pages: dict[bytes, bytes] = {}

    def exists(self, keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self.pages), len(keys))

    def get(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        page = self.pages.get(key)
        if page is None or self.fault == "missing":
            return False
        if self.fault == "broken":
            raise OSError("broken")
        if self.fault == "flipped":
            page = bytes([page[0] ^ 1, *page[1:]])
        if self.fault == "short":  # the writer was killed, and the store does not notice
            page = page[: -CHECKSUM_BYTES // 2].ljust(len(page), b"\0")
        start = 0
        for part in parts:
            part[:] = page[start : start + len(part)]
            start += len(part)
        return True

    def set(self, key: bytes, parts: Sequence[memoryview | bytes]) -> None:
        if self.fault == "broken":
            raise OSError("full")
        self.pages[key] = b"".join(parts)

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.pages.pop(key, None)

    def clear(self) -> None:
        self.pages.clear()

    def close(self) -> None:
        return


@dataclass(eq=False)
class _Work:
    """A load, a save or a push of page copies. It begins after the steps that were launched before it."""

    wanted: Wanted | None = None
    save: Save | None = None
    new: dict[bytes, Entry] = field(default_factory=dict)
    has_begun: bool = False


class FakeStorage:
    """Moves pages between a runner's host pages and a store, like `actors/storage.py`."""

    def __init__(self, tier: StorageTier, scheduler: Scheduler, runner: FakeRunner, store: FaultyStore) -> None:
        self.tier, self.store = tier, store
        self.num_loaded = 0
        self._checked = CheckedStore(store)
        self._scheduler = scheduler
        self._runner = runner
        self._loads: list[_Work] = []
        self._saves: list[_Work] = []
        self._pushes: list[_Work] = []
        tier.attach()

    def begin_load(self) -> bool:
        """Begin the oldest lookup. Return False if there is none."""
        wanted = self.tier.take_wanted()
        if wanted is None:
            return False
        num_found = self.store.exists(wanted.keys[wanted.first :])
        self._push_copies()
        if self.tier.begin_load(wanted, num_found):
            self._begin(self._loads, _Work(wanted=wanted))
        else:
            self.tier.release(wanted)
        return True

    def begin_save(self) -> bool:
        """Delete distrusted pages, and begin to save the pages that are ready. Return False without either."""
        distrusted = self.tier.take_distrusted()
        self.store.delete(distrusted)
        has_pushed = self._push_copies()
        save = None if self._saves else self.tier.take_save()
        if save is not None:
            self._begin(self._saves, _Work(save=save))
        return bool(distrusted or has_pushed or save is not None)

    def give_up_waiting(self) -> None:
        """Let sequences begin although their pages are still being loaded, as after a timeout."""
        for load in self._loads:
            if load.wanted is not None:
                self.tier.release(load.wanted)

    def end(self, fault: str | None = None) -> bool:
        """End everything that has begun on the device. Return False if there was nothing."""
        self._runner.run_calls()
        self.store.fault = fault
        ended = [work for work in (*self._pushes, *self._loads, *self._saves) if work.has_begun]
        for work in ended:
            if work.wanted is not None:
                self._loads.remove(work)
                self._end_load(work.wanted)
            elif work.save is not None:
                self._saves.remove(work)
                self._end_save(work.save)
            else:
                self._pushes.remove(work)
                self.tier.settle(work.new)
        self.store.fault = None
        return bool(ended)

    def clear(self) -> None:
        """Remove all pages from the store, and those that are still to be saved."""
        self.tier.drop_unsaved()
        if not self._saves:  # otherwise the actor waits for them first
            self.store.clear()

    def pages_in_use(self) -> list[int]:
        """Return the host pages that saves still read."""
        return [entry.page for work in self._saves if work.save is not None for entry in work.save.entries.values()]

    def work(self, fault: str | None = None) -> bool:
        """Do what can be done now. Return False if there was nothing to do."""
        done = [self.end(fault), self.begin_save(), self.begin_load()]
        return any(done)

    def _begin(self, queue: list[_Work], work: _Work) -> None:
        def begin() -> None:
            work.has_begun = True
            if work.wanted is not None:
                self._runner.forget_host(work.wanted.pages)

        queue.append(work)
        self._runner.call(begin)

    def _push_copies(self) -> bool:
        if not self._scheduler.has_copies:
            return False
        copies: tuple[PageCopy, ...] = self._scheduler.take_copies()
        work = _Work(new=self.tier.take_new())

        def begin() -> None:
            work.has_begun = True
            for copy in copies:
                self._runner.copy(copy)

        self._pushes.append(work)
        self._runner.call(begin)
        return True

    def _end_load(self, wanted: Wanted) -> None:
        keys = wanted.keys[wanted.first : wanted.first + len(wanted.pages)]
        count = 0
        for key, page in zip(keys, wanted.pages, strict=True):
            values = np.zeros((2, self._runner.page_size), np.int64)
            try:
                if not self._checked.get(key, values.data.cast("B")):
                    break
            except OSError:
                break
            self._runner.write_host(page, values)
            count += 1
        self.num_loaded += count
        self.tier.end_load(wanted, count, 1.0)
        self.tier.note_corrupt(self._checked.num_corrupt)
        self.tier.release(wanted)

    def _end_save(self, save: Save) -> None:
        failed = 0
        for key, entry in save.entries.items():
            try:
                self._checked.set(key, self._runner.read_host(entry.page).data.cast("B"))
            except OSError:
                failed += 1
        self.tier.end_save(save, failed)
