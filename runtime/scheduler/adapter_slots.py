"""Assigns adapters to the slots of the device, and decides which sequences may run with the adapters in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from runtime.batch import AdapterPlacement
from runtime.request import Adapter
from runtime.sequence import Sequence


@dataclass(slots=True)
class _Slot:
    adapter: Adapter | None = None  # None: the slot is empty
    num_users: int = 0  # running sequences
    placed: int = 0  # logical time at which the adapter was placed
    used: int = 0  # logical time at which a sequence that uses the slot last started


class AdapterSlots:
    """The adapter slots of the device, numbered from 1, and the adapters of the running sequences.

    A sequence whose adapter is in no slot waits until a slot has no users. Meanwhile the slot with the fewest users is
    closed: no further sequence may use it. The slot is therefore free as soon as its current users have ended.
    """

    def __init__(self, num_slots: int, *, first_in_first_out: bool = False) -> None:
        self.num_evictions = 0  # number of adapters evicted from a slot, since the start
        self._slots = [_Slot() for _ in range(num_slots)]
        self._first_in_first_out = first_in_first_out
        self._clock = count(1)
        self._placements: list[AdapterPlacement] = []
        # The slot that accepts no further sequences, so that it becomes free for a waiting adapter.
        self._closing: _Slot | None = None

    def begin_admission(self) -> None:
        """Reopen the closing slot. Called before waiting sequences are admitted.

        During the admission, the first sequence whose adapter cannot be placed selects the slot that is closed next.
        """
        self._closing = None

    def can_enter(self, sequence: Sequence) -> bool:
        """Return whether the sequence's adapter is in a slot or can be placed in one now.

        If not, a slot is closed for it, unless another slot is closing already.
        """
        adapter = sequence.request.adapter
        if adapter is None:
            return True
        slot = self._slot_of(adapter)
        if slot is not None:
            return slot is not self._closing
        if self._free_slot() is not None:
            return True
        if self._closing is None:
            unpinned = [each for each in self._slots if each.adapter is not None and not each.adapter.pinned]
            self._closing = min(unpinned, key=lambda each: (each.num_users, each.used), default=None)
        return False

    def must_leave(self, sequence: Sequence, victims: Iterable[Sequence]) -> list[Sequence] | None:
        """Return the fewest of `victims` whose retraction frees a slot for the sequence's adapter, or None.

        `victims` are the running sequences that may be retracted. Returns [] if a slot is available already, and None
        if the retraction of all victims frees no slot.
        """
        adapter = sequence.request.adapter
        if adapter is None or self._slot_of(adapter) is not None or self._free_slot() is not None:
            return []
        users: dict[int, list[Sequence]] = {}
        for victim in victims:
            if victim.request.adapter is not None:
                users.setdefault(victim.request.adapter.id, []).append(victim)
        all_leave = [
            users[slot.adapter.id]
            for slot in self._slots
            if slot.adapter is not None
            and not slot.adapter.pinned
            and len(users.get(slot.adapter.id, ())) == slot.num_users
        ]
        return min(all_leave, key=len, default=None)

    def enter(self, sequence: Sequence) -> int:
        """Return the slot number of a sequence that starts to run: 0 without an adapter.

        Places the adapter in a slot if necessary.
        """
        adapter = sequence.request.adapter
        if adapter is None:
            return 0
        now = next(self._clock)
        slot = self._slot_of(adapter)
        if slot is None:
            slot = self._free_slot()
            if slot is None:
                raise RuntimeError(f"No slot is free for the adapter of {sequence!r}.")
            self.num_evictions += slot.adapter is not None
            slot.adapter, slot.placed = adapter, now
            self._placements.append(AdapterPlacement(self._slots.index(slot) + 1, adapter.id))
        slot.num_users += 1
        slot.used = now
        return self._slots.index(slot) + 1

    def leave(self, sequence: Sequence) -> None:
        """Note that a sequence no longer runs."""
        adapter = sequence.request.adapter
        slot = None if adapter is None else self._slot_of(adapter)
        if slot is not None:
            slot.num_users -= 1

    def take_placements(self) -> tuple[AdapterPlacement, ...]:
        """Return and clear the adapters that the device must copy into slots before the next forward pass."""
        if not self._placements:
            return ()
        placements, self._placements = tuple(self._placements), []
        return placements

    def forget(self, adapter_id: int) -> None:
        """Empty the slot of an adapter, unless a sequence uses it."""
        for slot in self._slots:
            if slot.adapter is not None and slot.adapter.id == adapter_id and not slot.num_users:
                slot.adapter = None

    def reset(self) -> None:
        """Empty all slots. Called when no sequence runs and the device may have lost the contents of the slots."""
        self._slots = [_Slot() for _ in self._slots]
        self._placements.clear()
        self._closing = None

    @property
    def num_used(self) -> int:
        """Number of slots whose adapter is used by running sequences."""
        return sum(slot.num_users > 0 for slot in self._slots)

    def check(self, running: list[Sequence]) -> None:
        """Raise `ValueError` unless each slot counts exactly the running sequences that use it."""
        wanted: dict[int, int] = {}
        for sequence in running:
            if sequence.request.adapter is not None:
                wanted[sequence.request.adapter.id] = wanted.get(sequence.request.adapter.id, 0) + 1
        found = {slot.adapter.id: slot.num_users for slot in self._slots if slot.adapter is not None and slot.num_users}
        if wanted != found or len({slot.adapter.id for slot in self._slots if slot.adapter}) != sum(
            slot.adapter is not None for slot in self._slots
        ):
            raise ValueError(f"The slots of adapters count {found}, but {wanted} run.")

    def _slot_of(self, adapter: Adapter) -> _Slot | None:
        return next((slot for slot in self._slots if slot.adapter is not None and slot.adapter.id == adapter.id), None)

    def _free_slot(self) -> _Slot | None:
        """Return an empty slot, or an unpinned slot without users whose adapter can be evicted, or None."""
        idle = [slot for slot in self._slots if not slot.num_users and not (slot.adapter and slot.adapter.pinned)]
        age = (lambda slot: slot.placed) if self._first_in_first_out else (lambda slot: slot.used)
        return min(idle, key=lambda slot: (slot.adapter is not None, age(slot)), default=None)
