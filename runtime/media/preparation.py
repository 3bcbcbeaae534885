"""Turns images, videos and audio of requests into vectors. Reads, decodes and encodes them outside of the event loop.

In this module, "image" also stands for a video or audio.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread
import numpy as np

from runtime.config.model_facts import ModelFacts
from runtime.config.plan import MediaPlan, Plan
from runtime.errors import CheckpointError, ContextOverflow, EngineFailure, InvalidRequest, Overloaded
from runtime.media.encoder_cache import EncodedBlock, EncoderCache
from runtime.media.fair_slots import Asker, FairSlots
from runtime.media.fetch import Fetcher
from runtime.media.images import decode_image
from runtime.media.placement import TYPES, expanded, expanded_ids, place
from runtime.media.precomputed import (
    PROCESSED,
    EncodedPrompt,
    MediaTokens,
    encoded_prompt,
    format_of,
    place_encoded,
    without_tokens,
)
from runtime.media.sounds import decode_audio
from runtime.media.videos import VideoLimits, decode_video
from runtime.media_source import KINDS, PLURALS, Kind, MediaSource, PromptMedia, check_counts

if TYPE_CHECKING:
    from runtime.media.processing import Processors
    from runtime.models.by_transformers.tower import MediaTower

logger = logging.getLogger("penstock.media")

MAX_HELD_BYTES = 512 * 2**20  # maximum bytes of images in memory, received in requests or fetched
MAX_FETCHES = 16  # maximum number of images that are being fetched, or are fetched and wait to be decoded
MAX_COUNTED = 256  # maximum number of concurrent calls that only count tokens


class MediaPreparer:
    """Prepares media for one engine. Must be used on the event loop; threads do the work.

    At most `plan.num_threads` images are decoded or processed at a time, which bounds the memory. One image is encoded
    at a time. Clients take turns, and so do the requests of one client. Images whose vectors are cached are only
    decoded and hashed.
    """

    def __init__(
        self, plan: MediaPlan, facts: ModelFacts, processors: Processors, tower: MediaTower, context_length: int
    ) -> None:
        self.plan = plan
        self._context_length = context_length
        self.cache = EncoderCache(plan.cache_bytes)
        self.num_images = 0  # number of images, videos and audio files of all admitted requests
        self.encode_s = 0.0  # seconds spent in the encoder
        self._facts = facts
        self._processors = processors
        self._tower = tower
        self._fetcher = Fetcher(plan)
        self._workers = FairSlots(plan.num_threads)
        # A slot is held until the fetched image is decoded, which bounds the fetched bytes in memory.
        self._fetches = FairSlots(max(1, min(MAX_FETCHES, MAX_HELD_BYTES // plan.max_bytes)))
        self._held_bytes = 0  # bytes of images in requests that are not encoded yet
        self._num_counted = 0  # number of calls that are counting tokens
        self._calls = itertools.count(1)  # numbers these calls, so that they take turns
        self._media_tokens: dict[Kind, MediaTokens] = {}
        self._encoder = anyio.CapacityLimiter(1)
        self._threads = anyio.CapacityLimiter(plan.num_threads)
        self._placer = anyio.CapacityLimiter(1)  # more threads would only compete for the GIL
        self._pending: dict[bytes, asyncio.Future[EncodedBlock]] = {}  # images that are being encoded
        self._video_limits = VideoLimits(plan.max_frames, plan.max_pixels, plan.max_video_pixels)
        self._audio_s = min(plan.max_audio_s, processors.audio_s or plan.max_audio_s)

    @classmethod
    def load(cls, plan: Plan, facts: ModelFacts) -> Self:
        """Load the processor and the encoder, and try them on an item of each kind. Blocks.

        Raises CheckpointError if they accept no kind.
        """
        import torch

        from runtime.media.processing import Processors, trial
        from runtime.models.by_transformers.facts import auto_class, config_of
        from runtime.models.by_transformers.tower import load_tower

        media = plan.media
        loader = auto_class(facts.architecture)
        if loader is None:
            raise CheckpointError(f"transformers has no image encoder for {facts.architecture}.")
        config = config_of(facts.config, with_media=True)
        processors = Processors(facts.path, str(facts.config.get("model_type")), media.num_threads, fast=media.fast)
        tower = load_tower(
            facts.path, loader, config, getattr(torch, plan.model.dtype), torch.device(plan.model.device)
        )
        mutual: dict[Kind, bool] = {}
        for kind in list(processors.placeholders):
            try:
                item = processors.process(kind, trial(kind, processors.sampling_rate), {}, kind)
                mutual[kind] = tower.try_out(item.inputs, facts.architecture, PLURALS[kind])
                if len({*mutual.values()}) > 1:
                    raise CheckpointError(
                        f"{facts.architecture}: {PLURALS[kind]} are not supported: their tokens attend to each other "
                        "in another way than those of images."
                    )
            except (CheckpointError, InvalidRequest) as error:
                mutual.pop(kind, None)
                processors.refusals[kind] = str(error)
                del processors.placeholders[kind]
        if not mutual:
            raise CheckpointError(" ".join(processors.refusals[kind] for kind in KINDS if kind in processors.refusals))
        tower.mutual = any(mutual.values())
        if tower.mutual and facts.by_transformers and facts.recurrent:
            raise CheckpointError(
                f"{facts.architecture}: images are not supported: their tokens attend to each other, and its language "
                "model runs over transformers' caches."
            )
        logger.info(
            "%s: %s and an encoder of %.2f GiB%s.",
            ", ".join(PLURALS[kind] for kind in mutual).capitalize(),
            processors.name,
            sum(each.nbytes for each in tower.parameters()) / 2**30,
            ", whose images are not split between steps" if tower.mutual else "",
        )
        return cls(media, facts, processors, tower, plan.model.context_length)

    @property
    def placeholders(self) -> Mapping[Kind, str]:
        """The placeholder texts of the accepted kinds."""
        return self._processors.placeholders

    def check(self, sources: Sequence[MediaSource]) -> None:
        """Raise `InvalidRequest` if a request has too many items of a kind, or items of a kind that is not accepted."""
        for source in sources:
            if source.kind not in self._processors.placeholders:
                raise InvalidRequest(
                    f"No {PLURALS[source.kind]} are accepted: {self._processors.refusals[source.kind]}",
                    param=source.param,
                )
            for name in self._processors.unknown_options(source.kind, source.options):
                raise InvalidRequest(
                    f"mm_processor_kwargs.{name}: the processor of this model has no such option for {source.kind}s.",
                    param=f"mm_processor_kwargs.{name}",
                )
        check_counts(sources, self.plan.limits)

    def check_space(self, num_bytes: int, retry_after_s: int = 1) -> None:
        """Raise `Overloaded` if these bytes and those of all waiting images together exceed `MAX_HELD_BYTES`."""
        if num_bytes and self._held_bytes + num_bytes > MAX_HELD_BYTES:
            raise Overloaded("Too many images are waiting.", retry_after_s=retry_after_s)

    def hold(self, num_bytes: int) -> None:
        """Count the bytes of a request's images as waiting, until `let_go` is called with this number of bytes."""
        self._held_bytes += num_bytes

    def let_go(self, num_bytes: int) -> None:
        """Stop counting these bytes as waiting."""
        self._held_bytes -= num_bytes

    async def encode(
        self, sources: Sequence[MediaSource], wanted: Callable[[], bool], asker: Asker
    ) -> list[EncodedBlock]:
        """Return the images' blocks, in order. Once `wanted` returns False, work that has not begun is skipped.

        Raises `InvalidRequest` for the first image that cannot be used, and `EngineFailure` if the request is no longer
        wanted.
        """
        blocks: list[EncodedBlock | None] = [None] * len(sources)

        async def encode_one(index: int) -> None:
            blocks[index] = await self._encoded(sources[index], wanted, asker)

        try:
            async with anyio.create_task_group() as group:
                for index in range(len(sources)):
                    group.start_soon(encode_one, index)
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        return [block for block in blocks if block is not None]

    async def expand(self, text: str, sources: Sequence[MediaSource], client: str) -> str:
        """Return the text with each placeholder replaced by its image's text, for a caller that counts tokens.

        The images are not encoded. Raises `Overloaded` if too many images or calls wait.
        """
        self.check(sources)
        num_bytes = sum(source.num_bytes for source in sources)
        self.check_space(num_bytes)
        if self._num_counted >= MAX_COUNTED:
            raise Overloaded("Too many calls count the tokens of images.")
        self.hold(num_bytes)
        self._num_counted += 1
        try:
            asker = Asker(client, -next(self._calls))
            texts: list[tuple[Kind, str]] = []
            for source in sources:
                texts.append((source.kind, await self._counted(source, asker)))
        finally:
            self._num_counted -= 1
            self.let_go(num_bytes)
        return expanded(text, self.placeholders, texts, self._processors.marks)[0]

    def expanded(self, text: str, blocks: Sequence[EncodedBlock]) -> tuple[str, list[EncodedBlock]]:
        """Return the text with each placeholder replaced by its block's text, and the blocks in prompt order."""
        items: list[tuple[Kind, str]] = [(block.kind, block.text) for block in blocks]
        text, order = expanded(text, self.placeholders, items, self._processors.marks)
        return text, [blocks[index] for index in order]

    def expanded_ids(
        self, ids: Sequence[int], placeholders: Mapping[Kind, int | None], blocks: Sequence[EncodedBlock]
    ) -> tuple[tuple[int, ...], list[EncodedBlock]]:
        """Return the ids with each placeholder replaced by its block's tokens, and the blocks in prompt order."""
        if self._processors.marks is not None and len(blocks) > 1:
            raise InvalidRequest(
                "This model numbers the images of a prompt; send text instead of input_ids.", param="input_ids"
            )
        known: dict[Kind, int] = {}
        kinds: set[Kind] = {block.kind for block in blocks}
        for kind in kinds:
            placeholder = placeholders.get(kind)
            if placeholder is None:
                raise InvalidRequest(
                    f"The placeholder of this model's {PLURALS[kind]} is no single token; send text instead of "
                    "input_ids.",
                    param="input_ids",
                )
            known[kind] = placeholder
        expanded, order = expanded_ids(ids, known, blocks, self.placeholders)
        return expanded, [blocks[index] for index in order]

    async def place(self, ids: Sequence[int], blocks: Sequence[EncodedBlock]) -> tuple[tuple[int, ...], PromptMedia]:
        """Return the prompt's ids and media. Raises `InvalidRequest` if the text itself contains image tokens."""
        positions = self._positions if self._tower.has_axes else None
        placed = await anyio.to_thread.run_sync(
            lambda: place(ids, blocks, positions, self._facts.vocab_size, mutual=self._tower.mutual),
            limiter=self._placer,
        )
        self.num_images += len(blocks)
        return placed

    async def place_precomputed(
        self, ids: Sequence[int], sources: Sequence[MediaSource], wanted: Callable[[], bool], asker: Asker
    ) -> tuple[tuple[int, ...], PromptMedia]:
        """Return the ids and media of a prompt whose media the caller has processed or encoded.

        Raises `InvalidRequest` if the media do not match the model or the prompt, and `EngineFailure` if `wanted`
        returns false.
        """
        array = np.asarray(ids, np.int64)
        if len(array) > self._context_length:
            raise ContextOverflow.of_input(len(array), self._context_length, "input_ids")
        async with self._workers.slot(asker):
            if not wanted():
                raise EngineFailure("The request has ended.")
            positions = self._positions if self._tower.has_axes else None
            if format_of(sources[0]) == PROCESSED:
                media = await self._thread_of_encoder(self._encode_processed, array, sources[0])
            else:
                kinds: set[Kind] = {each.kind for each in sources}
                tokens = {kind: await self._tokens_of(kind) for kind in kinds}
                media = await self._thread(encoded_prompt, array, sources, tokens, self._tower.grid_names)
            place_all = partial(place_encoded, mutual=self._tower.mutual)
            placed = await self._thread(place_all, array, media, positions, self._facts.vocab_size)
        self.num_images += len(sources)
        return placed

    def _encode_processed(self, ids: Any, source: MediaSource) -> EncodedPrompt:
        """Encode a prompt's media. `source` has the tensors that the model's processor returned for the prompt."""
        import torch

        values = source.content
        inputs = {name: torch.as_tensor(value) for name, value in values.items() if hasattr(value, "dtype")}
        inputs["input_ids"] = torch.from_numpy(ids)[None]
        given = values.get("input_ids")
        if given is not None and not np.array_equal(np.asarray(_host(given)).reshape(-1), ids):
            raise InvalidRequest(
                f"{source.param}.input_ids differ from the prompt's.", param=f"{source.param}.input_ids"
            )
        try:
            encoded = self._tower.encode(inputs)
        except Exception as error:  # model code may raise any exception, and the tensors are the caller's
            logger.info("The encoder refused the output of a processor: %s", error)
            raise InvalidRequest(
                f"{source.param}: the model cannot encode these tensors; are they the output of its own processor for "
                "this prompt?",
                param=source.param,
            ) from error
        if not encoded.is_media.any():
            raise without_tokens(source)
        if not np.isfinite(encoded.vectors).all():
            raise InvalidRequest(f"{source.param} has values that are not finite.", param=source.param)
        types = inputs.get("mm_token_type_ids")
        marked = np.where(encoded.is_media, TYPES[source.kind], 0) if types is None else types[0].numpy()
        grids = {name: inputs[name] for name in self._tower.grid_names if name in inputs}
        return EncodedPrompt(encoded.is_media, encoded.vectors, marked.astype(np.int64), grids)

    async def _tokens_of(self, kind: Kind) -> MediaTokens:
        """Return the token ids and the vector size of a kind. The first call for a kind encodes a trial item."""
        if kind not in self._media_tokens:
            from runtime.media.processing import trial

            item = trial(kind, self._processors.sampling_rate)
            processed = await self._thread(self._processors.process, kind, item, {}, kind)
            encoded = await self._thread_of_encoder(self._tower.encode, processed.inputs)
            ids = processed.inputs["input_ids"][0].numpy()[encoded.is_media]
            self._media_tokens[kind] = MediaTokens(np.unique(ids), encoded.vectors.shape[1])
        return self._media_tokens[kind]

    async def reload(self, path: str, plan: Plan) -> None:
        """Read the encoder's weights from a checkpoint that replaced the model's. Forgets all cached vectors."""
        import torch

        from runtime.models.by_transformers.facts import auto_class, config_of
        from runtime.models.by_transformers.tower import load_tower

        config, loader = config_of(self._facts.config, with_media=True), auto_class(self._facts.architecture)
        dtype, device = getattr(torch, plan.model.dtype), torch.device(plan.model.device)
        tower = await anyio.to_thread.run_sync(load_tower, path, loader, config, dtype, device)
        tower.mutual = self._tower.mutual
        self._tower = tower
        self.cache.clear()
        self._pending.clear()

    async def close(self) -> None:
        """Close all connections."""
        await self._fetcher.close()

    @asynccontextmanager
    async def _decoded(
        self, source: MediaSource, asker: Asker, wanted: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[tuple[Any, bytes]]:
        """Yield a decoded image and its digest. A worker slot is held until the context ends."""
        fetched = source.form == "url"
        async with self._fetches.slot(asker) if fetched else nullcontext():
            content = await self._fetcher.read(source) if fetched else None
            async with self._workers.slot(asker):
                if not wanted():
                    raise EngineFailure("The request has ended.")
                yield await self._thread(self._read, content if fetched else await self._fetcher.read(source), source)

    async def _encoded(self, source: MediaSource, wanted: Callable[[], bool], asker: Asker) -> EncodedBlock:
        async with AsyncExitStack() as slot:
            image, digest = await slot.enter_async_context(self._decoded(source, asker, wanted))
            known = self.cache.get(digest)
            if known is not None:
                return known
            pending = self._pending.get(digest)
            if pending is None:
                # A separate task encodes the image, because other requests may wait for the same image. The task holds
                # the worker slot until it ends, even if this request is cancelled before.
                pending = asyncio.ensure_future(self._computed(image, digest, source, slot.pop_all()))
                self._pending[digest] = pending
                pending.add_done_callback(lambda done: self._forget(digest, done))
            return await asyncio.shield(pending)

    def _forget(self, digest: bytes, done: asyncio.Future[EncodedBlock]) -> None:
        if self._pending.get(digest) is done:
            del self._pending[digest]
        if not done.cancelled():
            done.exception()  # marks the error as handled; the waiting requests raise it

    async def _computed(self, image: Any, digest: bytes, source: MediaSource, slot: AsyncExitStack) -> EncodedBlock:
        async with slot:
            return await self._compute(image, digest, source)

    async def _compute(self, image: Any, digest: bytes, source: MediaSource) -> EncodedBlock:
        tower = self._tower
        process = self._processors.process
        processed = await self._thread(process, source.kind, image, source.options, source.param)
        num_tokens = processed.inputs["input_ids"].shape[1]
        if num_tokens > self._context_length:  # checked before the encoder does the work
            raise ContextOverflow.of_input(num_tokens, self._context_length, source.param)
        began = time.monotonic()
        try:
            encoded = await anyio.to_thread.run_sync(tower.encode, processed.inputs, limiter=self._encoder)
        except Exception as error:  # model code may raise any exception
            logger.exception("encoding an item of kind %s failed", source.kind)
            raise EngineFailure(f"The {source.kind} could not be encoded.") from error
        self.encode_s += time.monotonic() - began
        types = processed.inputs.get("mm_token_type_ids")
        block = EncodedBlock(
            digest,
            processed.text,
            processed.inputs["input_ids"][0].numpy().astype(np.int64),
            encoded.is_media,
            encoded.vectors,
            {name: processed.inputs[name] for name in tower.grid_names if name in processed.inputs},
            source.kind,
            None if types is None else types[0].numpy().astype(np.int64)[encoded.is_media],
        )
        if tower is self._tower:  # not the case if `reload` has replaced the weights meanwhile
            self.cache.put(block)
        return block

    async def _counted(self, source: MediaSource, asker: Asker) -> str:
        async with self._decoded(source, asker) as (image, digest):
            known = self.cache.peek(digest)
            if known is not None:
                return known.text
            process = self._processors.process
            return (await self._thread(process, source.kind, image, source.options, source.param)).text

    def _read(self, content: Any, source: MediaSource) -> tuple[Any, bytes]:
        """Return the decoded item and its digest."""
        param, options = source.param, source.options
        if source.kind == "image":
            item: Any = decode_image(content, self.plan.max_pixels, param)
            _check_enlarged(options, 1, self.plan.max_pixels)
        elif source.kind == "video":
            choose = partial(self._processors.frames, options=options)
            item = decode_video(content, choose, self._video_limits, param)
            _check_enlarged(options, len(item.frames), self.plan.max_video_pixels)
        else:
            item = decode_audio(content, self._processors.sampling_rate, self._audio_s, param)
        return item, self._processors.digest(source.kind, item, options)

    async def _thread_of_encoder(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._encoder)

    async def _thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads)

    def _positions(self, ids: Any, types: Any, grids: Mapping[str, Any]) -> Any:
        import torch

        joined = {name: torch.cat([torch.as_tensor(part) for part in parts]) for name, parts in grids.items()}
        return self._tower.positions(ids, types, joined)


def _host(value: Any) -> Any:
    return value.cpu() if hasattr(value, "cpu") else value


def _check_enlarged(options: Mapping[str, Any], num_frames: int, most: int) -> None:
    """Raise `InvalidRequest` if the processor would enlarge an item to more pixels than are accepted."""
    if options.get("min_pixels", 0) * num_frames > most:
        param = "mm_processor_kwargs.min_pixels"
        raise InvalidRequest(f"{param}: it would be enlarged to more than {most} pixels.", param=param)


def _first(failures: BaseExceptionGroup) -> BaseException:
    """Return the first failure that is an `InvalidRequest`, or else the first failure."""
    flat: list[BaseException] = []
    stack: list[BaseException] = [failures]
    while stack:
        each = stack.pop()
        if isinstance(each, BaseExceptionGroup):
            stack += reversed(each.exceptions)
        else:
            flat.append(each)
    return next((each for each in flat if isinstance(each, InvalidRequest)), flat[0])
