"""Moves KV pages between a replica's host tier and a page store, while steps run.

`kv_cache/storage_tier.py` decides which pages move. This module makes every rank move its shard of each page, and
limits how long requests wait for their pages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import anyio
import anyio.to_thread
import numpy as np

from ops.machine import cache_folder
from runtime.actors.prompt_notes import PromptNotes, prompt_keys
from runtime.batch import Runner
from runtime.config.plan import Plan
from runtime.errors import ConfigurationError, EngineClosed, InvalidRequest, NotSupported, PenstockError
from runtime.kv_cache.storage_tier import StorageTier, Wanted
from runtime.loading.digest import model_digest
from runtime.page_store.offered_pages import LocalPages
from runtime.page_store.opening import open_store
from runtime.page_store.prompt_watch import PromptWatch
from runtime.page_store.protocol import PageStore, StoreSpace, check_config
from runtime.page_store.transfer_protocol import PromptState
from runtime.scheduler.scheduler import Scheduler
from runtime.sequence import Sequence as TokenSequence

if TYPE_CHECKING:
    from runtime.kv_cache.host_tier import Entry

logger = logging.getLogger("penstock.core")

MAX_LOADS = 4  # maximum number of concurrent loads
MAX_LOOKUPS = 4  # maximum number of threads that look up pages, so that a slow store holds up no other work
# Maximum number of concurrent loads on a decode server, where most of them wait for prompts of prefill servers.
MAX_WATCHES = 64
FIRST_WAIT_S = 1.0  # longest wait for pages while the prefill speed is unknown
STALL_S = 5.0  # longest wait until a prompt arrives at the prefill server
# While a CPU computes steps, saves take at most this share of the time, and move at most this number of pages at once.
SAVE_SHARE, SAVED_AT_ONCE = 0.02, 8
BACKENDS = ("file",)  # backends that a client may attach without naming a folder or class
LAYOUT = "1"  # version of the page layout; change it whenever the bytes of a page change

NO_TIER = "Storage needs --enable-hierarchical-cache, and --hicache-mem-layout page_first if it is attached later."


@runtime_checkable
class WatchedStore(Protocol):
    """A store whose pages are computed by prefill servers (see `PeerPages.watch`)."""

    def watch(self, prompt: bytes, keys: Sequence[bytes]) -> PromptWatch: ...


class Attachment(NamedTuple):
    """A store as the user or a client specified it."""

    backend: str
    config: Mapping[str, Any]


class Storage:
    """The storage of one replica. Belongs to its scheduler actor, which calls `run` and `notify`."""

    def __init__(
        self,
        plan: Plan,
        path: str,
        layout: str,
        tier: StorageTier,
        scheduler: Scheduler,
        runner: Runner,
        local_pages: LocalPages | None = None,
    ) -> None:
        """Create the storage of a replica.

        `path` is the checkpoint's path, and `layout` identifies the page layout of all ranks. `local_pages` are those
        that prefill replicas of the engine offer in this process.
        """
        self.attachment: Attachment | None = None
        # Called when waiting sequences may be admitted because their pages have arrived.
        self.wake: Callable[[], None] = lambda: None
        self.path: str | None = path  # path of the checkpoint; None if the weights do not come from a checkpoint
        self._plan = plan
        self._layout = layout
        self._tier = tier
        self._scheduler = scheduler
        self._runner = runner
        self._local_pages = local_pages
        self._store: PageStore | None = None  # rank 0's store, used for lookups
        # Changes in the prompts of a prefill server, to be told to decode servers. None with other stores.
        self._prompts = PromptNotes(tier, scheduler, plan.cache.page_size) if plan.cache.storage == "prefill" else None
        self._prompt_work = asyncio.Event()
        self._stored: list[bytes] = []  # keys of pages that all ranks have saved since decode servers were last told
        self._watches: set[PromptWatch] = set()  # prompts on prefill servers, one for each lookup that waits
        self._work = asyncio.Event()
        self._save_work = asyncio.Event()
        self._rested = asyncio.Event()  # set when saves need not pause for steps
        self._attaching = anyio.Lock()
        self._saving = anyio.Lock()  # held while pages are being saved
        self._looking_up = anyio.CapacityLimiter(MAX_LOOKUPS)
        self._num_moving = 0
        self._quiet = asyncio.Event()  # set while no pages are being moved
        self._quiet.set()

    @property
    def is_blocks(self) -> bool:
        """Whether each host page is one contiguous block of memory. A store can be attached only then."""
        return self._plan.cache.host_layout != "layer_first"

    async def run(self) -> None:
        """Move pages until cancelled. If the plan's store cannot be attached, log the reason."""
        cache = self._plan.cache
        if cache.storage is not None:
            try:
                await self.attach(Attachment(cache.storage, cache.storage_config))
            except PenstockError as error:
                logger.error("Storage is off: %s", error)
        limit = asyncio.Semaphore(MAX_WATCHES if cache.storage == "decode" else MAX_LOADS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._save)
            if self._prompts is not None:
                tasks.start_soon(self._tell_prompts, self._prompts)
            while True:
                await self._work.wait()
                self._work.clear()
                while (wanted := self._tier.take_wanted()) is not None:
                    await limit.acquire()
                    tasks.start_soon(self._load, wanted, limit)

    def notify(self) -> None:
        """Check for pages to move. Called after steps, when the launched batches contain all pending copies."""
        if self._tier.is_awaited and self._tier.attached:
            self._push_copies()  # before the next step is launched, so that they run before it
        if self._tier.attached and (self._tier.has_work or self._scheduler.has_copies):
            self._work.set()
            self._save_work.set()
        if not self._slows_steps or self._tier.is_distrusting:
            self._rested.set()
        if self._prompts is not None:
            self._prompt_work.set()

    def note_arrival(self, sequences: Sequence[TokenSequence]) -> None:
        """Record the sequences of a new request for the decode servers. Also called if the request is then refused."""
        if self._prompts is not None and self._tier.attached:
            self._prompts.begin(sequences)
            self._prompt_work.set()

    # --- attach and detach ---

    async def attach(self, attachment: Attachment) -> None:
        """Start to use this store. Raises `InvalidRequest` or `ConfigurationError` if that is impossible."""
        if not self.is_blocks:
            raise InvalidRequest(NO_TIER)
        async with self._attaching:
            await self._quiet.wait()
            if self._tier.attached:
                raise InvalidRequest("A storage backend is attached already; detach it first.")
            check_config(attachment.backend, dict(attachment.config))
            if self._plan.model.custom_loaders:
                raise ConfigurationError(
                    "Storage cannot be used with custom weight loaders, whose weights are unknown."
                )
            name = await anyio.to_thread.run_sync(self._space_name)
            parallel, same = self._plan.parallel, self._plan.cache.same_pages
            space = StoreSpace(name, 0, 1 if same else parallel.attention_ranks * parallel.pp_size, 0)
            config = dict(attachment.config)
            self._store = await anyio.to_thread.run_sync(
                open_store, attachment.backend, space, config, self._local_pages
            )
            payload = {"backend": attachment.backend, "name": name, "config": config, "same": same}
            await asyncio.shield(self._runner.call("attach_storage", payload))
            self._tier.attach()
            self.attachment = attachment
            logger.info("Storage is attached: %s, pages of model %s.", attachment.backend, name[:12])

    async def detach(self) -> None:
        """Stop using the store, after pages that are being moved have arrived. The store keeps its pages."""
        async with self._attaching:
            self.forsake()
            await self._quiet.wait()
            if self._store is not None:
                await asyncio.shield(self._runner.call("detach_storage", {}))
                self._store = None

    def weights_changed(self, path: str | None = None) -> None:
        """Stop using the store, because its pages were computed with the old weights.

        `path` is the path of the new checkpoint, or None if unknown.
        """
        if self._tier.attached:
            logger.warning("Storage is off, because the weights changed; attach it again.")
        self.path = path
        self.forsake()

    def forsake(self) -> None:
        """Stop using the store at once, and start no further transfers."""
        if self._tier.attached:
            self._tier.detach()
            self._rested.set()
            for watch in self._watches:
                watch.wake()
            self.attachment = None
            self.wake()

    async def clear(self) -> None:
        """Remove all pages of this model and layout from the store, and cancel pending saves.

        Raises `InvalidRequest` if no store is attached.
        """
        if not self._tier.attached:
            raise InvalidRequest("No storage backend is attached.")
        self._tier.drop_unsaved()
        async with self._saving:
            await asyncio.shield(self._runner.call("clear_storage", {}))

    def _space_name(self) -> str:
        if self.path is None:
            raise InvalidRequest("The weights were replaced by another process, so storage needs a restart.")
        try:
            digest = model_digest(self._plan.model, Path(self.path), cache_folder("pages") / "digests.json")
        except OSError as error:
            raise ConfigurationError(f"The checkpoint cannot be read again: {error}.") from error
        return blake2b(f"{LAYOUT} {digest} {self._layout}".encode(), digest_size=16).hexdigest()

    # --- move pages ---

    async def _load(self, wanted: Wanted, limit: asyncio.Semaphore) -> None:
        """Load the pages of one lookup. Then let the sequences that wait for them be admitted."""
        self._begin_move()
        done = asyncio.ensure_future(self._fetch(wanted))
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(done), self._patience_s(wanted))
            self._tier.release(wanted)
            self.wake()
            await done
        except (InvalidRequest, EngineClosed) as error:
            logger.warning("Storage failed: %s", error.message)
        finally:
            done.cancel()
            self._tier.release(wanted)
            self.wake()
            self._end_move()
            limit.release()

    def _patience_s(self, wanted: Wanted) -> float | None:
        """Longest time in seconds that a request waits for these pages, or None if there is no limit."""
        if self._plan.cache.prefetch_policy != "timeout":
            return None
        page_s = self._tier.compute_s
        return FIRST_WAIT_S if page_s is None else page_s * (len(wanted.keys) - wanted.first)

    async def _fetch(self, wanted: Wanted) -> None:
        """Load the wanted pages that the store has. If they arrive in parts, load each part at once."""
        store = self._store
        if store is None or not self._tier.attached:
            return
        async with aclosing(self._arrivals(store, wanted)) as arrivals:
            while True:
                try:
                    num_found, num_awaited = await anext(arrivals)
                except Exception as error:  # the store may be the user's own class
                    logger.warning("Storage failed: %s: %s", type(error).__name__, error)
                    num_found = num_awaited = 0
                if not self._tier.attached:
                    return
                arrived = await self._load_found(wanted, num_found, num_awaited)
                if not (arrived and num_awaited):
                    self._tier.note_missed(num_awaited)
                    return

    async def _load_found(self, wanted: Wanted, num_found: int, num_awaited: int) -> bool:
        """Load the next `num_found` pages. Return whether the host tier has all of them."""
        copied, end = self._push_copies(), wanted.first + num_found
        if self._tier.begin_load(wanted, num_found, num_awaited):
            began_s, count = time.monotonic(), 0
            keys = wanted.keys[wanted.first : wanted.first + len(wanted.pages)]
            try:
                answers = await self._move("load_pages", keys, wanted.pages)
                count = min(answer["count"] for answer in answers)
                self._tier.note_corrupt(sum(answer["corrupt"] for answer in answers))
            finally:
                self._tier.end_load(wanted, count, time.monotonic() - began_s)
        await _end_of(copied)
        return wanted.is_current and wanted.first == end

    async def _arrivals(self, store: PageStore, wanted: Wanted) -> AsyncGenerator[tuple[int, int]]:
        """Yield (number of next wanted pages that the store has, number of later pages that may still arrive).

        If a prefill server computes the prompt, continue until all its pages are there, the server stops working on the
        prompt, or no request waits for it.
        """
        keys = wanted.keys[wanted.first :]
        if self._plan.cache.storage != "decode" or not isinstance(store, WatchedStore):
            yield await anyio.to_thread.run_sync(store.exists, keys, limiter=self._looking_up), 0
            return
        prompt = prompt_keys(wanted.sequences[0], self._plan.cache.page_size)[-1]
        told, changed_s = 0, time.monotonic()
        watch = store.watch(prompt, keys)
        self._watches.add(watch)
        try:
            while self._tier.attached and self._is_prefilled(wanted):
                number, state = watch.progress
                if number > told or state == PromptState.PENDING:
                    changed_s = time.monotonic()
                if state == PromptState.ENDED or time.monotonic() - changed_s > STALL_S:
                    if number < len(keys):
                        logger.warning("A prefill server sent %d of %d pages; the rest is computed.", number, len(keys))
                    yield number - told, 0
                    return
                if number > told:
                    yield number - told, len(keys) - number
                    told = number
                else:
                    await watch.wait()
            yield 0, 0
        finally:
            self._watches.discard(watch)
            watch.close()

    def _is_prefilled(self, wanted: Wanted) -> bool:
        """Return whether a waiting request expects these pages from a prefill server."""
        return any(each.request.caller.prefilled and each in self._scheduler for each in wanted.sequences)

    async def _tell_prompts(self, prompts: PromptNotes) -> None:
        """Tell the store which prompts began and ended. Goes on even after this server stops offering pages."""
        while True:
            await self._prompt_work.wait()
            self._prompt_work.clear()
            begun, ended = prompts.take()
            stored, self._stored = self._stored, []
            if begun or ended or stored:
                keys = {"begun": begun, "ended": ended, "stored": stored}
                payload = {name: [key.hex() for key in part] for name, part in keys.items()}
                try:
                    await asyncio.shield(self._runner.call("note_prompts", payload))
                except (InvalidRequest, EngineClosed) as error:
                    logger.warning("Storage failed: %s", error.message)

    async def _save(self) -> None:
        """Save pages of the host tier, and delete stored pages whose KV may be wrong."""
        while True:
            await self._save_work.wait()
            self._save_work.clear()
            self._begin_move()
            try:
                while self._tier.attached:
                    if keys := self._tier.take_distrusted():
                        await self._move("delete_pages", keys, None)
                    copied = self._push_copies()
                    async with self._saving:
                        saving_s = await self._save_some()
                    await _end_of(copied)
                    if saving_s is None and copied is None:
                        break
                    await self._rest(saving_s or 0.0)
            except (InvalidRequest, EngineClosed) as error:
                logger.warning("Storage failed: %s", error.message)
            finally:
                self._end_move()

    @property
    def _slows_steps(self) -> bool:
        """Whether saves would take CPU time from steps.

        False if another server waits for the pages: they are saved at once.
        """
        on_cpu = self._plan.model.device == "cpu" and self._plan.cache.storage not in ("prefill", "decode")
        return on_cpu and self._scheduler.num_running > 0

    async def _rest(self, seconds: float) -> None:
        """Pause after a save that took `seconds`, so that the steps get the CPU. Returns early when no step runs."""
        if self._slows_steps and self._tier.attached and not self._tier.is_distrusting:
            self._rested.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._rested.wait(), seconds * (1 / SAVE_SHARE - 1))

    async def _save_some(self) -> float | None:
        """Save the next pages to the store.

        Return the seconds that this took, or None if no page is waiting to be saved.
        """
        save = self._tier.take_save(SAVED_AT_ONCE) if self._slows_steps else self._tier.take_save()
        if save is None:
            self._prompt_work.set()  # the host tier may have dropped pages that waited to be saved
            return None
        num_failed = len(save.entries)
        try:
            pages = [entry.page for entry in save.entries.values()]
            answers = await self._move("save_pages", list(save.entries), pages)
            num_failed = max(answer["failed"] for answer in answers)
        finally:
            self._tier.end_save(save, num_failed)
            if self._prompts is not None and not num_failed:
                self._stored += save.entries
            self._prompt_work.set()
        return max(answer["us"] for answer in answers) / 1e6

    async def _move(self, verb: str, keys: Sequence[bytes], pages: Sequence[int] | None) -> list[Any]:
        payload: dict[str, Any] = {"keys": [key.hex() for key in keys]}
        if pages is not None:
            payload["pages"] = np.array(pages, np.int32)
        return await asyncio.shield(self._runner.call(verb, payload))

    def _push_copies(self) -> asyncio.Future[list[Any]] | None:
        """Enqueue pending page copies on the ranks now, before the next batch. Later work on the ranks runs after them.

        Returns their future, or None if there are no copies. When the future ends, the copied pages are marked as
        valid, even if no caller awaits it.
        """
        if not self._scheduler.has_copies:
            return None
        copies = self._scheduler.take_copies()
        payload: dict[str, Any] = {"pools": [[copy.source, copy.target] for copy in copies]}
        for number, copy in enumerate(copies):
            payload |= {f"from_{number}": copy.source_pages, f"to_{number}": copy.target_pages}
        copied = self._runner.call("copy_pages", payload)
        copied.add_done_callback(partial(self._settle, self._tier.take_new()))
        return copied

    def _settle(self, new: dict[bytes, Entry], copied: asyncio.Future[list[Any]]) -> None:
        succeeded = not copied.cancelled() and copied.exception() is None
        self._tier.settle(new, succeeded=succeeded)
        self._prompt_work.set()
        if succeeded:
            self._save_work.set()

    def _begin_move(self) -> None:
        self._num_moving += 1
        self._quiet.clear()

    def _end_move(self) -> None:
        self._num_moving -= 1
        if not self._num_moving:
            self._quiet.set()


async def _end_of(copied: asyncio.Future[list[Any]] | None) -> None:
    """Wait until the copies have ended. Raises their error."""
    if copied is not None:
        await asyncio.shield(copied)


def refuse_unsafe(attachment: Attachment, plan: Plan) -> None:
    """Raise `NotSupported` if a client names a folder or class that differs from the command line's settings.

    Raises `InvalidRequest` if the backend does not exist.
    """
    if plan.cache.storage is not None and attachment == Attachment(plan.cache.storage, plan.cache.storage_config):
        return
    if attachment.backend not in (*BACKENDS, "dynamic"):
        raise InvalidRequest(
            f"The storage backend {attachment.backend[:40]!r} is unknown; use one of {', '.join(BACKENDS)}.",
            param="hicache_storage_backend",
        )
    if attachment.backend != "file" or attachment.config.keys() & {"path", "module_path", "class_name"}:
        raise NotSupported("A folder or a class for storage can only be named when the server starts.")
