"""Weights and memory of all replicas, for trainers: update and check weights, release and resume memory."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from runtime.actors.generation_pause import GenerationPause
from runtime.actors.scheduler import SchedulerActor
from runtime.actors.weight_update import LOST, ask, first_error
from runtime.errors import CheckpointError, EngineClosed, EngineFailure, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from runtime.config.plan import ParallelPlan

logger = logging.getLogger("penstock.core")

TAGS = ("weights", "kv_cache")
DROPPED = "The old weights stay."
MAX_NAMED = 20
UNEVEN = 8  # with pipeline parallelism, the stage with the embedding may be this many times as large as another stage
NO_WEIGHTS = "The memory of the weights is released; resume it first."


class WeightControl:
    """Replaces, checks and releases the weights of all replicas. All methods must be called on the engine's event loop.

    An update has two phases. Tensors are first *staged*: prepared in memory beside the current weights. They are then
    *committed*: all ranks switch to them between two steps. After an error, all staged tensors are dropped.
    """

    def __init__(
        self,
        actors: Callable[[], list[SchedulerActor]],
        lock: anyio.Lock,
        pause: GenerationPause,
        parallel: ParallelPlan,
        set_version: Callable[[str], None],
        check_adapters: Callable[[], None],
    ) -> None:
        """Create the control.

        `lock` is held during any change of weights, and `set_version` records the label of new weights.
        `check_adapters` raises `InvalidRequest` if adapters were computed from the current weights.
        """
        self._alive = actors
        self._lock = lock
        self._pause = pause
        self._parallel = parallel
        self._set_version = set_version
        self._check_adapters = check_adapters
        self._released: set[str] = set()
        self._asleep = AsyncExitStack()  # keeps the replicas paused while their memory is released
        self._discarded = False  # whether the weights were released without being kept
        self.updating = False  # whether an update is open that consists of several calls
        self.waiting: list[str] = []  # names of missing tensors, without which received tensors cannot be staged

    # --- process groups with trainers and new servers ---

    async def open_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        """Let all ranks join a process group. Rank r of replica i gets the rank rank_offset + i * ranks + r.

        Raises `InvalidRequest` with the reason if a rank cannot join.
        """
        # With data-parallel attention, ranks are numbered across all groups.
        ranks = 0 if self._parallel.dp_attention else self._parallel.ranks
        payload = {"address": address, "port": port, "world_size": world_size, "name": name, "backend": backend}
        payload["timeout_s"] = self._parallel.join_timeout_s
        answers = await ask(
            self._actors, "open_transfer", payload, lambda index: {"first_rank": rank_offset + index * ranks}
        )
        if (error := first_error(answers)) is not None:
            await ask(self._actors, "close_transfer", {"name": name})
            raise InvalidRequest(error, param="group_name")

    async def close_group(self, name: str) -> bool:
        """Let all ranks leave a process group. Return False if the group did not exist."""
        answers = await ask(self._actors, "close_transfer", {"name": name})
        return any(isinstance(each, list) and any(each) for each in answers)

    async def open_sending(self, *, address: str, ports: Sequence[int], name: str) -> None:
        """Make the ranks of the first replica listen for a new server, each on its port.

        Raises `InvalidRequest` if a rank cannot listen.
        """
        if len(ports) != self._parallel.ranks:
            raise InvalidRequest(f"ports must name {self._parallel.ranks} ports, one per rank.", param="ports")
        payload = {"address": address, "ports": list(ports), "name": name, "timeout_s": self._parallel.join_timeout_s}
        answers = await ask(self._actors[:1], "open_sending", payload)
        if (error := first_error(answers)) is not None:
            await ask(self._actors[:1], "close_transfer", {"name": name})
            raise InvalidRequest(error, param="group_name")

    async def send(self, name: str) -> None:
        """Send all weights to the new server that `open_sending` waits for. No update can run meanwhile.

        Raises `InvalidRequest` if this fails.
        """
        async with self._changing():
            answers = await ask(self._actors[:1], "send_weights", {"name": name})
        if (error := first_error(answers)) is not None:
            raise InvalidRequest(error, param="group_name")

    # --- updates ---

    async def update_from_group(
        self,
        transfer: Mapping[str, Any],
        *,
        flush: bool,
        version: str | None = None,
    ) -> None:
        """Receive tensors over a process group. Commit them, or only stage them if an update is open.

        The keys of `transfer` are name, names, dtypes, shapes, packing, packed_bytes and source. Raises
        `CheckpointError` if the tensors do not fit; the old weights then stay.
        """
        async with self._changing():
            failed, num_parts, left = None, 0, 1
            while left:
                part = {"first": not num_parts, "discard": failed is not None, "share": self._share}
                receiving = asyncio.ensure_future(ask(self._actors, "receive_weights", {**transfer, **part}))
                try:
                    # A part is staged while the next one arrives. After a failure, the remaining parts are still
                    # received, because the trainer sends them anyway.
                    if num_parts and failed is None:
                        failed = await self._prepare({}, merge=False)
                finally:
                    answers = await receiving
                if (error := first_error(answers)) is not None:
                    await self._drop(error)
                left, num_parts = answers[0][0]["left"], num_parts + 1
            if failed is not None:
                await self._drop(failed)
            await self._stage({}, flush=flush, version=version)

    async def update_from_tensors(self, tensors: Mapping[str, Any], *, flush: bool, version: str | None = None) -> None:
        """Commit tensors of this process, or only stage them if an update is open.

        Raises CheckpointError if they do not fit. If a replica has several ranks, its ranks read the tensors from a
        temporary file.
        """
        async with self._changing():
            if self._parallel.ranks == 1:
                await self._stage({"tensors": tensors}, flush=flush, version=version)
                return
            if self._parallel.nnodes > 1:
                raise CheckpointError(
                    "Tensors of this process cannot be passed to other machines. Use init_weights_update_group."
                )
            folder = await anyio.to_thread.run_sync(_write, tensors)
            try:
                await self._stage({"file": str(folder / "tensors.safetensors")}, flush=flush, version=version)
            finally:
                await anyio.to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))

    async def begin(self) -> None:
        """Open an update that consists of several calls. Raises `InvalidRequest` if one is already open."""
        async with self._changing():
            if self.updating:
                raise InvalidRequest("An update of the weights is open already. Finish it first.")
            await self._ask_all("drop_weights", {})
            self.waiting = []
            self.updating = True

    async def finish(self, *, flush: bool = True, version: str | None = None, whole: bool = False) -> None:
        """Commit everything that was staged since `begin`.

        With `whole`, every tensor of the model must be present. Raises `CheckpointError`; the old weights then stay.
        """
        async with self._changing():
            if not self.updating:
                raise InvalidRequest("No update of the weights is open. Start one first.")
            await self._stage({"tensors": {}, "final": True}, flush=flush, version=version)
            self.updating = False
            if self.waiting:
                await self._drop(f"Tensors are missing: {_names(self.waiting)}.")
            if whole:
                missing = await self._ask_all("missing_weights", {})
                names = sorted({name for replica in missing for rank in replica for name in rank})
                if names:
                    await self._drop(f"Tensors are missing: {_names(names)}.")
            await self._commit(flush=flush, version=version)

    async def cancel(self) -> None:
        """Drop everything that was staged since `begin`. The old weights stay."""
        async with self._changing():
            self.updating, self.waiting = False, []
            await self._ask_all("drop_weights", {})

    async def drop_waiting(self) -> None:
        """Drop received tensors of layers that are incomplete.

        Raises `CheckpointError` with the names of the missing tensors if there are such layers.
        """
        if self.waiting and not self.updating:
            async with self._changing():
                await self._drop(
                    f"Some layers kept their old weights, because tensors are missing: {_names(self.waiting)}."
                )

    # --- reading and checking ---

    async def read(self, name: str, num_rows: int) -> list[dict[str, Any]]:
        """Return the shards of a tensor that the ranks of the first replica hold.

        Raises CheckpointError if the ranks keep only a converted form of the tensor.
        """
        self._check_weights()
        [parts, *_] = await ask(self._actors[:1], "read_weight", {"name": name, "num_rows": num_rows})
        if isinstance(parts, BaseException):
            raise parts
        return [part for part in parts if part is not None]

    async def check(self, action: str) -> list[dict[str, Any]]:
        """Run an action of the weight checker on all ranks. Return their answers."""
        async with self._changing():
            if action != "reset_tensors":
                answers = await self._ask_all("check_sums", {"action": action})
            else:
                async with self._paused() as pauses:
                    answers = await self._ask_all("check_sums", {"action": action})
                    for pause in pauses:
                        pause.recompute = True
        return [rank for replica in answers for rank in replica]

    # --- memory ---

    @property
    def released(self) -> frozenset[str]:
        """The kinds of memory that are currently released: "weights" and "kv_cache"."""
        return frozenset(self._released)

    async def release(self, tags: Sequence[str], *, keep: bool = True) -> int:
        """Give memory back to the system, and return the number of bytes.

        Steps are paused until `resume` has allocated all released memory again. Running requests are then recomputed.
        With `keep`, `resume` restores the weights. Weights that are not in unchanged checkpoint files are first written
        to a temporary file. Without `keep`, such weights are lost.
        """
        with anyio.CancelScope(shield=True):
            async with self._lock:
                actors = self._actors
                tags = [tag for tag in tags if tag not in self._released]
                if not tags:
                    return 0
                async with AsyncExitStack() as stack:
                    for actor in actors:
                        await stack.enter_async_context(actor.paused())
                    answers = await self._ask_all("release_memory", {"tags": tags, "keep": keep})
                    if "kv_cache" in tags:
                        self._pause.retract()
                    if not self._released:
                        self._asleep = stack.pop_all()
                self._released |= set(tags)
                self._discarded = self._discarded or ("weights" in tags and not keep)
        return sum(rank["bytes"] for replica in answers for rank in replica)

    async def resume(self, tags: Sequence[str]) -> None:
        """Allocate released memory again.

        When nothing is released any more, requests continue. Raises `EngineFailure` if weights are lost.
        """
        with anyio.CancelScope(shield=True):
            async with self._lock:
                tags = [tag for tag in tags if tag in self._released]
                answers = await ask(self._actors, "resume_memory", {"tags": tags}) if tags else []
                failed = next((each for each in answers if isinstance(each, BaseException)), None)
                if failed is not None:
                    raise EngineFailure(LOST) from failed
                self._released -= set(tags)
                if "weights" in tags:
                    self._discarded = not all(rank["restored"] for replica in answers for rank in replica)
                await self._wake()

    @property
    def lacks_weights(self) -> bool:
        """Whether the weights were discarded and not received again, so that no request can run."""
        return self._discarded and "weights" not in self._released

    async def _wake(self) -> None:
        if not self._released and not self._discarded:
            asleep, self._asleep = self._asleep, AsyncExitStack()
            await asleep.aclose()

    # --- private methods ---

    @property
    def _share(self) -> int:
        """Upper bound on the bytes of the whole model, as a multiple of the bytes on any rank.

        With pipeline parallelism, each rank holds only the layers of its stage.
        """
        stages = self._parallel.pp_size
        return 1 if stages == 1 else UNEVEN * stages

    @property
    def _actors(self) -> list[SchedulerActor]:
        actors = self._alive()
        if not actors:
            raise EngineClosed("No replica is alive.")
        return actors

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Run the block while no other change of the weights runs, and protect it from cancellation."""
        with anyio.CancelScope(shield=True):
            async with self._lock:
                self._check_weights()
                yield

    def _check_weights(self) -> None:
        if "weights" in self._released:
            raise InvalidRequest(NO_WEIGHTS)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[list[Any]]:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(actor.paused()) for actor in self._actors]

    async def _stage(self, source: Mapping[str, Any], *, flush: bool, version: str | None) -> None:
        if (error := await self._prepare(source, merge=not self.updating)) is not None:
            await self._drop(error)
        if not self.updating:
            await self._commit(flush=flush, version=version)

    async def _prepare(self, source: Mapping[str, Any], *, merge: bool) -> str | None:
        """Stage layers from tensors on all ranks. Return None, or the reason of a failure.

        After a failure, the caller must drop all staged tensors.
        """
        try:
            self._check_adapters()
        except InvalidRequest as error:
            return error.message
        answers = await ask(self._actors, "stage_weights", {"final": False, **source, "merge": merge})
        if (error := first_error(answers)) is not None:
            return error
        ranks = [rank for replica in answers for rank in replica]
        unknown = set.intersection(*(set(rank["unknown"]) for rank in ranks))
        if unknown:
            return f"The model has no tensors {_names(sorted(unknown))}."
        self.waiting = sorted({name for rank in ranks for name in rank["waiting"]})
        return None

    async def _commit(self, *, flush: bool, version: str | None) -> None:
        async with self._paused() as pauses:
            answers = await ask(self._actors, "commit_weights", {})
            failed = next((each for each in answers if isinstance(each, BaseException)), None)
            if failed is not None:  # after a failed commit, some layers may hold parts of both versions
                for pause in pauses:
                    pause.failure = EngineFailure(LOST)
                raise EngineFailure(LOST) from failed
            for pause in pauses:
                pause.weights_changed, pause.recompute = True, flush
            self._discarded = not all(rank["restored"] for replica in answers for rank in replica)
        if version is not None:
            self._set_version(version)
        await self._wake()

    async def _drop(self, error: str) -> None:
        """Drop all staged tensors, and raise CheckpointError with the reason `error`."""
        self.waiting, self.updating = [], False
        with suppress(EngineClosed):
            await ask(self._actors, "drop_weights", {})
        raise CheckpointError(f"{error} {DROPPED}")

    async def _ask_all(self, verb: str, payload: Mapping[str, Any]) -> list[Any]:
        """Return the answers of all ranks. If a rank raised an exception, raise the first one."""
        answers = await ask(self._actors, verb, payload)
        for each in answers:
            if isinstance(each, BaseException):
                raise each
        return answers


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(name[:200] for name in names[:MAX_NAMED])}{more}"


def _write(tensors: Mapping[str, Any]) -> Path:
    """Write the tensors to a file in a new private folder, in /dev/shm (memory) if it exists. Return its path."""
    from safetensors.torch import save_file  # here, because it imports torch

    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="penstock-", dir=memory if memory.is_dir() else None))
    try:
        whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(whole, folder / "tensors.safetensors")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
