"""The storage tier saves pages of the host tier to a page store, for later use and for other servers.

This module decides which pages are loaded and saved. It is synchronous. `actors/storage.py` fetches the loads and saves
to do, makes the ranks perform them while steps run, and reports the results. Meanwhile nothing else uses their host
pages:

- A page is saved after the step that copied it to the host has succeeded. It is not evicted from the host tier before
  the save has ended.
- A page is loaded into an unused host page. It enters the host tier after it has arrived and its checksum is right.

`reserved` lists the host pages of running loads and saves that are not in the host tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.kv_cache.host_tier import Entry, HostTier
from runtime.kv_cache.page_keys import is_local, is_portable, page_keys
from runtime.sequence import Sequence

SAVED_AT_ONCE = 64  # maximum number of pages in one save
MAX_READY = 65_536  # maximum number of pages that wait to be saved; then the oldest ones are dropped
LOADED_SHARE = 0.5  # one load may take at most this share of the host tier's pages
GAIN = 0.8  # pages are loaded if this takes at most this share of the time to compute their tokens
PROBE_EVERY = 16  # if loads seem too slow, every 16th one is still performed, to measure the speed again
WEIGHT = 0.3  # weight of the newest measurement in the moving average


class StorageCounts(NamedTuple):
    """Counters of the storage tier since the start, in pages."""

    num_saved: int = 0
    num_loaded: int = 0
    num_missed: int = 0  # pages that were looked up and that the store does not have
    num_corrupt: int = 0  # pages whose checksum was wrong, summed over all ranks
    num_failed: int = 0  # pages that the store did not accept
    num_too_slow: int = 0  # pages that were computed because loading them seemed slower


@dataclass(slots=True, eq=False)
class Wanted:
    """One lookup: pages of waiting sequences that are neither on the device nor on the host."""

    keys: list[bytes]  # keys of all pages of the prefix
    first: int  # index of the first missing page
    sequences: list[Sequence] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)  # host pages into which the pages are loaded
    is_current: bool = True  # False if the host tier was emptied since the load began


@dataclass(slots=True, eq=False)
class Save:
    """Pages of the host tier that are being written to the store."""

    entries: dict[bytes, Entry]


class StorageTier:
    """Decides which pages move between a host tier and a page store."""

    def __init__(
        self,
        host: HostTier,
        *,
        waits: bool,
        min_pages: int = 1,
        saves: bool = True,
        loads: bool = True,
        prefilled_only: bool = False,
        is_awaited: bool = False,
    ) -> None:
        """Create the tier of `host`. With `waits`, a sequence is not admitted while its pages are loaded.

        A prefix is looked up only if it has at least `min_pages` missing pages. `saves` and `loads` say whether pages
        are written to the store and read from it. With `prefilled_only`, only pages of prompts that a prefill server
        computes are looked up, and they are loaded even if computing them seems faster. With `is_awaited`, other
        servers wait for the saved pages, so pages are saved after each step.
        """
        self.is_awaited = is_awaited
        self._saves, self._loads, self._prefilled_only = saves, loads, prefilled_only
        self.attached = False
        self.saving: dict[bytes, Entry] = {}  # pages that running saves read, by key
        self.held: set[Sequence] = set()  # waiting sequences that must not be admitted before their load has ended
        self.load_s: float | None = None  # measured seconds to load one page; None: unknown
        self._host = host
        self._waits = waits
        self._min_pages = min_pages
        self._new: dict[bytes, Entry] = {}  # pages that the batch being built copies to the host
        # Pages that copies outside a batch write to the host: (number of the last step before the copies, entries).
        self._pushed: list[tuple[int, dict[bytes, Entry]]] = []
        self._last_filled = self._last_applied = -1  # step numbers
        # Pages that the steps in flight copy to the host: (step number, entries).
        self._copied: deque[tuple[int, dict[bytes, Entry]]] = deque()
        self._ready: dict[bytes, Entry] = {}  # pages that wait to be saved
        self._orphans: set[int] = set()  # host pages that left the host tier while a save still reads them
        self._wanted: dict[bytes, Wanted] = {}  # lookups that have not started, by their last key
        self._loading: list[Wanted] = []
        self._distrusted: list[bytes] = []
        self._num_slow = 0
        self._counts = StorageCounts()
        host.storage = self

    @property
    def counts(self) -> StorageCounts:
        return self._counts

    @property
    def compute_s(self) -> float | None:
        """Measured seconds to compute the tokens of one page; None: unknown."""
        return self._host.compute_s

    @property
    def reserved(self) -> list[int]:
        """Host pages of running loads and saves that are not in the host tier."""
        return [*self._orphans, *(page for wanted in self._loading for page in wanted.pages)]

    @property
    def has_work(self) -> bool:
        return bool(self._ready or self._wanted or self._distrusted)

    @property
    def is_distrusting(self) -> bool:
        """Whether some pages must still be removed from the store, because their KV may be wrong."""
        return bool(self._distrusted)

    # --- called by the host tier and the scheduler ---

    def written(self, key: bytes, entry: Entry) -> None:
        """Record that the batch being built copies a page to the host."""
        if self.attached and self._saves and not is_local(key):
            self._new[key] = entry

    def take_new(self) -> dict[bytes, Entry]:
        """Return and clear the pages whose copies are in no batch yet. Call `settle` when these copies have ended."""
        new, self._new = self._new, {}
        self._pushed.append((self._last_filled, new))
        return new

    def settle(self, new: dict[bytes, Entry], *, succeeded: bool = True) -> None:
        """Record the end of copies that ran outside a batch (see `take_new`). They are saved only if they succeeded.

        They are saved after the steps before the copies have succeeded, because these steps computed the pages.
        """
        number = next((number for number, each in self._pushed if each is new), -1)
        self._pushed = [pushed for pushed in self._pushed if pushed[1] is not new]
        if succeeded and number <= self._last_applied:
            self._ready.update(_in_order(new))
        elif succeeded:
            self._copied.append((number, new))

    def filled(self, number: int) -> None:
        """Record that all copies since the last call are part of batch `number`."""
        self._last_filled = number
        if self._new:
            self._copied.append((number, self._new))
            self._new = {}

    def applied(self, number: int) -> None:
        """Record that step `number` and all steps before it have succeeded. The pages that they copied can be saved."""
        self._last_applied = number
        while self._copied and self._copied[0][0] <= number:
            self._ready.update(_in_order(self._copied.popleft()[1]))
        while len(self._ready) > MAX_READY:
            del self._ready[next(iter(self._ready))]

    def detained(self, key: bytes, entry: Entry) -> bool:
        """Return whether the page of `entry`, which leaves the host tier, is still being saved.

        If so, mark the page to be freed after the save.
        """
        if self.saving.get(key) is not entry:
            return False
        self._orphans.add(entry.page)
        return True

    def distrust(self, key: bytes) -> None:
        """Request the removal of a page from the store, because its KV may be wrong."""
        if self.attached and not is_local(key):
            self._ready.pop(key, None)
            self._distrusted.append(key)

    def clear(self) -> Collection[int]:
        """Forget all pages, because the host tier becomes empty. Return the host pages of running loads and saves."""
        self.drop_unsaved()
        for wanted in self._loading:
            wanted.is_current = False
        self._orphans |= {entry.page for entry in self.saving.values()}
        return set(self.reserved)

    def drop_unsaved(self) -> None:
        """Forget all pages that wait to be saved."""
        for pages in (self._new, self._copied, self._ready, *(each for _, each in self._pushed)):
            pages.clear()

    def want(self, sequence: Sequence, num_pages: int, limit: int) -> None:
        """Request a lookup of the pages after the first `num_pages` (which the sequence has), up to token `limit`."""
        size = self._host.page_size
        end = limit // size
        if not (self.attached and self._loads) or end - num_pages < self._min_pages or not is_portable(sequence):
            return
        if self._prefilled_only and not sequence.request.caller.prefilled:
            return
        keys = page_keys(sequence, end, size)
        first = num_pages
        while first < end and keys[first] in self._host:
            first += 1
        if end - first < self._min_pages:
            return
        wanted = self._wanted.setdefault(keys[-1], Wanted(list(keys), first))
        wanted.sequences.append(sequence)
        if self._waits:
            self.held.add(sequence)

    # --- called by the actor ---

    def has_leaving(self, keys: Set[bytes]) -> bool:
        """Return whether one of these pages will be saved to the store or is being saved."""
        steps = (entries for _, entries in self._copied)
        moving = (self._ready, self.saving, self._new, *(each for _, each in self._pushed), *steps)
        if not all(entries.keys().isdisjoint(keys) for entries in moving):
            return True
        return self.attached and self._saves and self._host.has_waiting(keys)

    def take_distrusted(self) -> list[bytes]:
        """Return and clear the keys to remove from the store."""
        keys, self._distrusted = self._distrusted, []
        return keys

    def take_wanted(self) -> Wanted | None:
        """Return and remove the oldest lookup, or return None."""
        return self._wanted.pop(next(iter(self._wanted))) if self._wanted else None

    def begin_load(self, wanted: Wanted, num_found: int, num_awaited: int = 0) -> bool:
        """Reserve host pages for the next `num_found` pages, which the store has. Return False if nothing is loaded.

        The last `num_awaited` pages of the prefix may come later, so they do not count as missed. Sets `wanted.pages`.
        Call it only while no copy of host pages is pending.
        """
        host = self._host
        while num_found and wanted.keys[wanted.first] in host:  # the page was computed or loaded meanwhile
            wanted.first += 1
            num_found -= 1
        self._note(num_missed=len(wanted.keys) - wanted.first - num_found - num_awaited)
        count = min(num_found, int(host.counts.num_pages * LOADED_SHARE))
        if not count or not self._pays(count):
            return False
        wanted.pages = host.take_pages(count)
        if not wanted.pages:
            return False
        if wanted.first:
            host.touch(wanted.keys[wanted.first - 1])
        self._loading.append(wanted)
        return True

    def end_load(self, wanted: Wanted, count: int, seconds: float) -> None:
        """Add the first `count` pages of a load to the host tier, and free its other pages.

        `seconds` is the duration of the load.
        """
        host = self._host
        self._loading.remove(wanted)
        pages, wanted.pages = wanted.pages, []
        if not wanted.is_current:
            count = 0
        elif count == len(pages):
            newest = seconds / count
            self.load_s = newest if self.load_s is None else self.load_s + WEIGHT * (newest - self.load_s)
        for number in reversed(range(count)):  # from last to first, as `loaded` requires
            index = wanted.first + number
            if wanted.keys[index] in host:
                host.free_pages([pages[number]])
            else:
                host.loaded(wanted.keys[index], pages[number], wanted.keys[index - 1] if index else None, index)
        host.free_pages(pages[count:])
        if count:
            host.touch(wanted.keys[wanted.first + count - 1])
        wanted.first += count
        self._note(num_loaded=count, num_missed=len(pages) - count)

    def note_missed(self, num_missed: int) -> None:
        """Count pages that were expected from the store, but are not loaded any more."""
        self._note(num_missed=num_missed)

    def release(self, wanted: Wanted) -> None:
        """Let the sequences that wait for a lookup be admitted."""
        self.held.difference_update(wanted.sequences)

    def take_save(self, limit: int = SAVED_AT_ONCE) -> Save | None:
        """Return up to `limit` pages to save, or None. Call it only while no page copy is pending.

        The pages stay allocated until `end_save`.
        """
        entries: dict[bytes, Entry] = {}
        while self._ready and len(entries) < limit:
            key = next(iter(self._ready))
            entry = self._ready.pop(key)
            if self._host.entry(key) is entry and key not in self.saving:
                entries[key] = entry
        if not entries:
            return None
        self.saving.update(entries)
        return Save(entries)

    def end_save(self, save: Save, num_failed: int) -> None:
        """Record that a save has ended, and that the store did not accept `num_failed` of its pages."""
        for key, entry in save.entries.items():
            del self.saving[key]
            if entry.page in self._orphans:
                self._orphans.discard(entry.page)
                self._host.free_pages([entry.page])
        self._note(num_saved=len(save.entries) - num_failed, num_failed=num_failed)

    def note_corrupt(self, num_corrupt: int) -> None:
        """Set the number of pages with a wrong checksum to `num_corrupt`, if this is larger than before."""
        self._counts = self._counts._replace(num_corrupt=max(num_corrupt, self._counts.num_corrupt))

    def attach(self) -> None:
        """Start to use a store."""
        self.attached = True
        self.load_s = None

    def detach(self) -> None:
        """Stop using the store. No load or save may be in progress."""
        self.attached = False
        self.held.clear()
        self.drop_unsaved()
        self._wanted.clear()
        self._distrusted.clear()

    def _pays(self, count: int) -> bool:
        """Return whether to load `count` pages.

        Pages are loaded if this seems faster than computing their tokens, or if the speed of loads must be measured
        (again).
        """
        compute_s = self._host.compute_s
        if self._prefilled_only or self.load_s is None or compute_s is None or self.load_s <= GAIN * compute_s:
            return True
        self._num_slow += 1
        if self._num_slow % PROBE_EVERY == 0:
            return True
        self._note(num_too_slow=count)
        return False

    def _note(self, **more: int) -> None:
        values = self._counts._asdict()
        self._counts = self._counts._replace(**{name: values[name] + value for name, value in more.items()})


def _in_order(entries: dict[bytes, Entry]) -> list[tuple[bytes, Entry]]:
    """Return entries from the start of their prefixes on. The host tier writes the last page of a prefix first."""
    return sorted(entries.items(), key=lambda item: item[1].index)
