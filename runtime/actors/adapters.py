"""The LoRA adapters that the engine serves: their names, their requests, and which of them are in host memory."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.actors.adapter_folder import AdapterFolder
from runtime.config import buckets
from runtime.config.plan import LoraPlan
from runtime.errors import CheckpointError, EngineClosed, InvalidRequest, Overloaded
from runtime.loading.digest import adapter_digest, adapter_stamps
from runtime.metrics.series import Histogram
from runtime.request import Adapter

if TYPE_CHECKING:
    from runtime.actors.live_requests import LiveRequest
    from runtime.actors.scheduler import SchedulerActor
    from runtime.batch import Runner
    from runtime.errors import PenstockError

logger = logging.getLogger("penstock.core")
T = TypeVar("T")

UNLOAD_TIMEOUT_S = 60.0  # longest wait of `unload` for the requests that use the adapter
MAX_NAME = 256  # characters
MAX_LISTED = 100  # maximum number of adapters in metrics; each adds a line to every scrape
CHANGED = (
    "The files of the adapter {name} changed after it was loaded. To use the new files, unload it and load it again."
)
OFF = "LoRA adapters are off on this server; start it with --enable-lora."


@dataclass(slots=True, eq=False)
class _Entry:
    """An adapter that requests can name. An unloaded or replaced adapter keeps its entry while requests use it."""

    adapter: Adapter
    num_users: int = 0  # requests in the engine that use it
    used: int = 0  # logical time at which a request last named it
    resident: bool = False  # whether all ranks have it in host memory
    num_requests: int = 0
    load_s: float = 0.0
    digest: str = ""  # digest of its files at the first load; "" if unknown
    measured: bool = False  # whether its weights in host memory were computed from the model's weights (DoRA)
    temporary: bool = False  # whether its folder is removed when the adapter is freed
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    fetching: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the adapter is copied from a store


class AdapterRegistry:
    """Loads, names and frees adapters on all ranks of all replicas. Observes requests to count each adapter's users.

    The name of an adapter is resolved once, when the request is accepted. If the adapter is then unloaded or replaced,
    the request finishes with the old weights. The old weights are freed when no request uses them.
    """

    def __init__(
        self, plan: LoraPlan, alive: Callable[[], Sequence[SchedulerActor]], *, shares_pages: bool = False
    ) -> None:
        """Create the registry of the schedulers that `alive` returns.

        With `shares_pages`, KV pages may go to other processes, with the digest of the adapter's files.
        """
        self._plan = plan
        self._shares_pages = shares_pages
        self._alive = alive
        self._names: dict[str, _Entry] = {}
        self._retired: set[_Entry] = set()  # unloaded or replaced adapters, freed when no request uses them
        self._ids, self._clock = count(1), count(1)
        self._lock = asyncio.Lock()  # held while ranks load or free adapters
        self._tasks: set[asyncio.Task[Any]] = set()
        self._freed = asyncio.Event()  # set when an adapter loses its last user
        self._folders: TemporaryDirectory[str] | None = None  # folders of adapters that were sent in requests
        self._on_demand = None if plan.folder is None else AdapterFolder(plan.folder, plan.download_dir)
        self.num_evictions = 0  # adapters evicted from host memory, since the start
        self.load_s = Histogram(buckets.SHORT)

    @property
    def enabled(self) -> bool:
        return self._plan.enabled

    @property
    def adapters(self) -> list[Adapter]:
        """The adapters that requests may name, in the order in which their names were first loaded."""
        return [entry.adapter for entry in self._names.values()]

    @property
    def num_resident(self) -> int:
        """Number of adapters in host memory."""
        return sum(entry.resident for entry in (*self._names.values(), *self._retired))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def knows(self, name: str) -> bool:
        """Return whether requests may name this adapter: it is loaded, or it is in the folder of --lora-dir."""
        return name in self._names or self._path_on_demand(name) is not None

    async def start(self) -> None:
        """Load the adapters of the plan. Raises CheckpointError if an adapter does not fit the model."""
        if self._on_demand is not None:
            await self._on_demand.start()
        for source in self._plan.sources:
            try:
                await self.load(source.name, source.path, pinned=source.pinned)
            except InvalidRequest as error:
                raise CheckpointError(f"--lora-paths: {error.message}") from error

    def new_folder(self, name: str) -> Path:
        """Return the path of a new folder for an adapter whose files are sent in a request."""
        self._check_on()
        _check_name(name)
        if self._folders is None:
            self._folders = TemporaryDirectory(prefix="penstock-adapters-")
        return Path(self._folders.name, str(next(self._ids)))

    def close(self) -> None:
        """Remove the folders of adapters that were sent in requests. Blocks."""
        if self._folders is not None:
            self._folders.cleanup()

    async def load(
        self, name: str, path: str, *, pinned: bool = False, replace: bool = False, temporary: bool = False
    ) -> Adapter:
        """Load an adapter from a local folder and give it a name.

        A `temporary` folder is removed when the adapter is freed. With `replace`, the name may already be in use; new
        requests with this name then get the new adapter. Raises `InvalidRequest` if the name is invalid or if there is
        no room, and `CheckpointError` if the adapter does not fit.
        """
        self._check_on()
        _check_name(name)
        entry = _Entry(Adapter(next(self._ids), name, path, pinned), used=next(self._clock), temporary=temporary)
        return await self._alone(partial(self._load_named, entry, replace=replace))

    async def _load_named(self, entry: _Entry, *, replace: bool) -> Adapter:
        try:
            return await self._load_as(entry, replace=replace)
        except BaseException:
            await self._remove_folder(entry)
            raise

    async def _load_as(self, entry: _Entry, *, replace: bool) -> Adapter:
        name = entry.adapter.name
        known = self._names.get(name)
        if known is not None and not replace:
            raise InvalidRequest(f"An adapter named {name} is already loaded.", param="lora_name")
        if entry.adapter.pinned:
            self._check_pins(known)
        await self._make_room(entry)
        await self._load(entry)
        self._names[name] = entry
        if known is not None:
            self._retire(known)
        logger.info("Loaded the adapter %s from %s in %.2f s.", name, entry.adapter.path, entry.load_s)
        return entry.adapter

    async def unload(self, name: str, *, timeout_s: float = UNLOAD_TIMEOUT_S) -> bool:
        """Refuse new requests for an adapter, wait until its requests have ended, and free it.

        Returns False if requests still use the adapter after `timeout_s`. The adapter is then freed when they end.
        Raises `InvalidRequest` if no adapter has this name.
        """
        self._check_on()
        entry = self._names.pop(name, None)
        if entry is None:
            raise InvalidRequest(f"The adapter {name} is not loaded.", param="lora_name")
        freeing = self._retire(entry)
        done, _ = await asyncio.wait({freeing}, timeout=timeout_s)
        return bool(done)

    def acquire(self, name: str) -> Adapter:
        """Return the adapter with this name for a new request. Raises `InvalidRequest` if there is none."""
        self._check_on()
        entry = self._names.get(name) or self._found(name)
        if entry is None:
            raise InvalidRequest(f"The adapter {name} is not loaded; see GET /v1/models.", param="lora_path")
        entry.used = next(self._clock)
        return entry.adapter

    def _found(self, name: str) -> _Entry | None:
        """Register an adapter from the folder of --lora-dir without loading it.

        Return None if the folder does not have it.
        """
        path = self._path_on_demand(name)
        if path is None:
            return None
        entry = self._names[name] = _Entry(Adapter(next(self._ids), name, path))
        return entry

    def _path_on_demand(self, name: str) -> str | None:
        return None if self._on_demand is None else self._on_demand.find(name)

    def is_ready(self, adapter: Adapter) -> bool:
        """Return whether the weights of this adapter are in host memory."""
        entry = self._entry(adapter)
        return entry is not None and entry.resident

    async def ready(self, adapter: Adapter) -> None:
        """Load an adapter into host memory, if it is not there.

        If there is no room, waits until requests no longer use one of the loaded adapters. Raises `InvalidRequest` if
        the adapter's files do not fit the model.
        """
        if not self.is_ready(adapter):
            await self._fetch(adapter)
        while not self.is_ready(adapter):
            self._freed.clear()
            if not await self._alone(partial(self._bring_back, adapter)):
                await self._freed.wait()

    def current(self, adapter: Adapter) -> Adapter:
        """Return the registered adapter, with facts known only after loading, such as the digest of its files."""
        entry = self._entry(adapter)
        return adapter if entry is None else entry.adapter

    async def _fetch(self, adapter: Adapter) -> None:
        """Copy an adapter from an object store to this machine. Raises `Overloaded` if this fails."""
        entry = self._entry(adapter)
        if entry is None or self._on_demand is None:
            return
        async with entry.fetching:
            try:
                path = await self._on_demand.fetched(entry.adapter.path)
            except CheckpointError as error:
                logger.error("The adapter %s cannot be copied: %s", adapter.name, error)
                raise Overloaded(f"The adapter {adapter.name} cannot be copied now; retry later.") from error
            entry.adapter = entry.adapter._replace(path=path)

    async def _bring_back(self, adapter: Adapter) -> bool:
        """Load an adapter into host memory. Return False if there is no room for it."""
        entry = self._entry(adapter)
        if entry is None or entry.resident:
            return True
        try:
            await self._make_room(entry)
        except InvalidRequest:
            return False
        try:
            await self._load(entry)
        except CheckpointError as error:
            raise InvalidRequest(str(error), param="lora_path") from error
        return True

    async def restore(self, runner: Runner) -> None:
        """Load all resident adapters on a restarted replica.

        An adapter that cannot be loaded again, for example because its files changed, is unloaded. Requests that use it
        on other replicas go on.
        """
        async with self._lock:
            for entry in [entry for entry in (*self._names.values(), *self._retired) if entry.resident]:
                name = entry.adapter.name
                try:
                    await _read(entry, runner.call)
                except CheckpointError as error:
                    logger.error("The adapter %s is unloaded, because a replica cannot load it again: %s", name, error)
                    await runner.call("drop_adapter", {"id": entry.adapter.id})  # some ranks may have loaded it
                    if self._names.get(name) is entry:
                        del self._names[name]
                        self._retire(entry)

    @property
    def measured(self) -> list[str]:
        """Names of adapters in host memory that were computed from the model's weights (DoRA), at most `MAX_LISTED`."""
        entries = (*self._names.values(), *self._retired)
        return [entry.adapter.name for entry in entries if entry.resident and entry.measured][:MAX_LISTED]

    @property
    def in_use(self) -> list[str]:
        """Names of the adapters that requests use; at most `MAX_LISTED`."""
        return [name for name, entry in self._names.items() if entry.num_users][:MAX_LISTED]

    @property
    def num_requests(self) -> dict[str, int]:
        """Number of requests since the start, by adapter name.

        Only the `MAX_LISTED` adapters with the most requests are included.
        """
        counts = {name: entry.num_requests for name, entry in self._names.items() if entry.num_requests}
        return dict(sorted(counts.items(), key=lambda item: -item[1])[:MAX_LISTED])

    def describe(self) -> list[Mapping[str, Any]]:
        """Return a description of each named adapter: name, path, users and load time."""
        return [
            {
                "name": name,
                "path": entry.adapter.path,
                "pinned": entry.adapter.pinned,
                "resident": entry.resident,
                "num_running": entry.num_users,
                "num_requests": entry.num_requests,
                "load_s": entry.load_s,
            }
            for name, entry in self._names.items()
        ]

    # --- observer of requests ---

    def began(self, live: LiveRequest) -> None:
        entry = self._entry(live.request.adapter)
        if entry is not None:
            entry.num_users += 1
            entry.num_requests += 1
            entry.unused.clear()

    def ended(self, live: LiveRequest, error: PenstockError | None) -> None:
        entry = self._entry(live.request.adapter)
        if entry is not None:
            entry.num_users -= 1
            if not entry.num_users:
                entry.unused.set()
                self._freed.set()

    # --- private methods ---

    def _check_on(self) -> None:
        if not self._plan.enabled:
            raise InvalidRequest(OFF, param="lora_path")

    def _check_pins(self, replaced: _Entry | None) -> None:
        entries = [entry for entry in (*self._names.values(), *self._retired) if entry is not replaced]
        if sum(entry.adapter.pinned for entry in entries) >= self._plan.max_slots - 1:
            raise InvalidRequest(
                f"At most {self._plan.max_slots - 1} adapters can be pinned: one of the {self._plan.max_slots} slots "
                "(--max-loras-per-batch) stays free for others.",
                param="pinned",
            )

    def _entry(self, adapter: Adapter | None) -> _Entry | None:
        if adapter is None:
            return None
        named = self._names.get(adapter.name)
        if named is not None and named.adapter.id == adapter.id:
            return named
        return next((entry for entry in self._retired if entry.adapter.id == adapter.id), None)

    async def _make_room(self, new: _Entry) -> None:
        """Evict adapters from host memory until `new` fits.

        Raises `InvalidRequest` if all adapters are pinned or in use.
        """
        limit = self._plan.max_loaded
        while limit is not None and self.num_resident >= limit:
            idle = [
                entry
                for entry in self._names.values()
                if entry.resident and not entry.num_users and not entry.adapter.pinned and entry is not new
            ]
            if not idle:
                raise InvalidRequest(
                    f"All {limit} adapters in host memory (--max-loaded-loras) are pinned or in use.", param="lora_name"
                )
            self.num_evictions += 1
            await self._free(min(idle, key=lambda entry: entry.used))

    async def _load(self, entry: _Entry) -> None:
        began_s = time.monotonic()
        try:
            entry.measured = await _read(entry, self._call)
        except BaseException:
            with suppress(Exception):  # the first error is more informative
                await self._call("drop_adapter", {"id": entry.adapter.id})  # some ranks may have loaded their shards
            raise
        if self._shares_pages:
            entry.adapter = entry.adapter._replace(content=entry.digest)
        entry.resident, entry.load_s = True, time.monotonic() - began_s
        self.load_s.observe(entry.load_s)

    async def _alone(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` while holding the lock that excludes other loads.

        Cancelling the caller does not interrupt `work`.
        """

        async def run() -> T:
            async with self._lock:
                return await work()

        return await asyncio.shield(self._kept(asyncio.create_task(run())))

    def _kept(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Keep a reference to a task until it is done, so that it is not garbage-collected.

        Its exception counts as retrieved, so that asyncio does not log it.
        """
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_retrieve)
        return task

    async def _free(self, entry: _Entry) -> None:
        entry.resident = False
        for actor in self._alive():
            actor.scheduler.forget_adapter(entry.adapter.id)
        await self._call("drop_adapter", {"id": entry.adapter.id})

    async def _remove_folder(self, entry: _Entry) -> None:
        if entry.temporary:
            await asyncio.to_thread(shutil.rmtree, entry.adapter.path, ignore_errors=True)

    async def _call(self, verb: str, payload: Mapping[str, Any]) -> list[Any]:
        """Run a command (see `runtime.worker.verbs`) on all ranks of all replicas, and return their answers."""
        actors = self._alive()
        if not actors:
            raise EngineClosed("No replica is alive.")
        answers = await asyncio.gather(
            *(asyncio.shield(actor.runner.call(verb, payload)) for actor in actors), return_exceptions=True
        )
        found: list[Any] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            found += answer
        return found

    def _retire(self, entry: _Entry) -> asyncio.Task[None]:
        """Start a task that frees an unloaded or replaced adapter as soon as no request uses it. Return the task."""
        self._retired.add(entry)

        async def free() -> None:
            if entry.num_users:
                await entry.unused.wait()
            async with self._lock:
                if entry.resident:
                    await self._free(entry)
                self._retired.discard(entry)
                await self._remove_folder(entry)

        return self._kept(asyncio.create_task(free()))


async def _read(entry: _Entry, call: Callable[[str, Mapping[str, Any]], Awaitable[list[Any]]]) -> bool:
    """Load the files of an adapter with the commands that `call` runs. Return whether a command measured its weights.

    Raises CheckpointError if the files are not those that were loaded first.
    """
    stamps = await asyncio.to_thread(_stamps, entry.adapter)
    payload = {"id": entry.adapter.id, "path": entry.adapter.path}
    hashing = asyncio.create_task(asyncio.to_thread(_digest, entry.adapter))
    try:
        is_measured = is_left = any(await call("load_adapter", payload))
        while is_left:  # one layer at a time, so that steps can run in between
            is_left = any(await call("measure_adapter", payload))
    finally:
        digest = await hashing
    if await asyncio.to_thread(_stamps, entry.adapter) != stamps:
        logger.warning("The files of the adapter %s were replaced while they were loaded.", entry.adapter.name)
        digest = ""
    if entry.digest and digest != entry.digest:
        raise CheckpointError(CHANGED.format(name=entry.adapter.name))
    entry.digest = digest
    return is_measured


def _stamps(adapter: Adapter) -> list[tuple[str, int, int, int]]:
    with suppress(OSError):  # loading then fails with a better message
        return adapter_stamps(Path(adapter.path))
    return []


def _digest(adapter: Adapter) -> str:
    """Return the digest of the adapter's files, or "" if they cannot be read."""
    with suppress(OSError):
        return adapter_digest(Path(adapter.path))
    return ""


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Mark a task's exception as retrieved, so that asyncio does not log it if no caller waits for the task."""
    if not task.cancelled():
        task.exception()


def _check_name(name: str) -> None:
    if not name or len(name) > MAX_NAME or ":" in name or "\0" in name:
        raise InvalidRequest(f"An adapter's name must have 1 to {MAX_NAME} characters and no colon.", param="lora_name")
