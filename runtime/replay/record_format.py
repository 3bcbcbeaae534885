"""The format of a record: one JSON value per line.

The first line is an object with the scheduler's settings. Each further line is an array that begins with a letter:

    a  a request was added: microseconds since the start, and its fields
    f  a batch was built: microseconds, digest, rows, tokens, prompt rows as [sequence, start, count], host data
    n  no batch could be built
    t  a step was applied: microseconds, the new tokens of each row, and the other outputs that the scheduler read
    s  the time of the step in microseconds, and its number of new tokens
    i  a measured value that the scheduler uses: its name and value
    x  abort    e  end of a choice    w  withdrawal    b  rebuilt tables    d  failed steps    o  out of memory
    r  recomputation    c  empty cache    h  touched prefix    u  forgotten adapter    !  an exception of the scheduler

A sequence is named by the id of its request; sequences of further choices by [id, index of the choice].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.batch import Batch
from runtime.config.plan import SchedulerPlan
from runtime.constraint import DraftData, HostData, Output
from runtime.kv_cache.kinds import CacheKind
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.kv_cache.states import StateKind
from runtime.kv_cache.windowed import WindowedPages
from runtime.media_source import PlacedMedia, PromptMedia
from runtime.request import Adapter, LogprobParams, Request, Service
from runtime.sampling_params import SamplingParams
from runtime.sequence import Sequence

VERSION = 1
KEY_LIMIT = 2**61 - 1  # keys of media tokens are recorded modulo this number
SAMPLING_DEFAULTS = SamplingParams()
# Parameters that only the detokenizer, grammars and logits processors read, and not the scheduler.
UNRECORDED = frozenset({"stop", "stop_regex", "custom_params", "custom_logit_processor", "bad_words"})


def header(plan: SchedulerPlan, cache: PrefixCache, **settings: Any) -> dict[str, Any]:
    """Return the first line of a record. `settings` are the other arguments of `make_cache` and `Scheduler`."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan) if field.name != "reasons"}
    return {
        "penstock_record": VERSION,
        "scheduler": values,
        "num_pages": cache.num_pages,
        "page_size": cache.page_size,
        "prefix_cache": cache.enabled,
        "kinds": [[kind.name, kind.count, getattr(kind, "window", None)] for kind in cache.kinds],
        "num_pinnable": cache.pins.max_pages,
        "copy_s": None if cache.tier is None else cache.tier.copy_s,
        **settings,
    }


def make_plan(first: Mapping[str, Any]) -> SchedulerPlan:
    """Return the scheduler plan of a record. Raises `TypeError` if another version of Penstock wrote the record."""
    values = dict(first["scheduler"])
    for name in ("draft_windows", "draft_breadths"):
        values[name] = tuple(values[name])
    return SchedulerPlan(**values)


def make_cache(first: Mapping[str, Any]) -> PrefixCache:
    """Create an empty cache with the settings of a record."""
    num_pages, page_size = int(first["num_pages"]), int(first["page_size"])
    kinds: list[CacheKind] = []
    for name, count, window in first["kinds"]:
        if name == WindowedPages.name:
            kinds.append(WindowedPages({0: SimpleNamespace(window=window)}, count, num_pages, page_size))
        else:
            kinds.append(StateKind({}, count, num_pages, page_size, int(first["scheduler"]["max_drafts"])))
    cache = PrefixCache(
        num_pages,
        page_size,
        enabled=first["prefix_cache"],
        kinds=kinds,
        num_host_pages=first["num_host_pages"],
        num_tier_pages=first["num_tier_pages"],
        write_policy=first["write_policy"],
        step_pages=first["step_pages"],
        num_pinnable=first["num_pinnable"],
    )
    if cache.tier is not None:
        cache.tier.copy_s = first["copy_s"]
    return cache


def name_of(sequence: Sequence) -> int | list[int]:
    """Return the name that a record gives to a sequence."""
    return sequence.request.id if not sequence.index else [sequence.request.id, sequence.index]


def digest(batch: Batch) -> str:
    """Return 8 hexadecimal digits that depend on every decision in the batch, to compare two batches."""
    found = blake2b(digest_size=4)
    arrays: list[NDArray[Any]] = [batch.starts, batch.counts, batch.sequence_indices, batch.token_ids, batch.page_table]
    if batch.sampling is not None:
        arrays += [batch.sampling.positions, batch.sampling.row_of, batch.sampling.greedy, batch.sampling.uniform]
    if batch.drafts is not None:
        arrays += [batch.drafts.rows, batch.drafts.counts, *(batch.drafts.branches or ())]
    if batch.unknown_starts is not None:
        arrays.append(batch.unknown_starts)
    for copy in batch.copies:
        found.update(f"{copy.source}>{copy.target}".encode())
        arrays += [copy.source_pages, copy.target_pages]
    for array in arrays:
        found.update(array.tobytes())
    found.update(repr(batch.adapters).encode())
    for kind in batch.kinds.values():
        for array in kind.values():
            found.update(array.tobytes())
    return found.hexdigest()


def request_fields(sequences: tuple[Sequence, ...]) -> dict[str, Any]:
    """Return the fields of a request that a replay needs. They include the ids of the prompt, but no texts."""
    first = sequences[0]
    request, media = first.request, first.media
    values: dict[str, Any] = {
        "id": request.id,
        "ids": first.ids[: first.num_prompt],
        "choices": [[each.index, each.max_tokens, each.seed] for each in sequences],
        "stop": sorted(first.stop_ids),
        "sampling": _sampling_fields(first.sampling),
    }
    optional = {
        "output": len(first.ids) - first.num_prompt and first.ids[first.num_prompt :],
        "banned": sorted(first.banned_ids),
        "urgency": first.urgency,
        "namespace": None if first.namespace is None else repr(first.namespace),
        "logprobs": None if request.logprobs is None else asdict(request.logprobs),
        "embedding": request.wants_embedding,
        "adapter": None if request.adapter is None else request.adapter.id,
        "values": dict(request.row_values),
        "follows": request.follows,
        "owner": request.owner and blake2b(request.owner.encode(), digest_size=6).hexdigest(),
        "pin": request.service.pin and blake2b(request.service.pin.encode(), digest_size=6).hexdigest(),
        "constrained": first.constraint is not None,
        "drafted": first.constraint is not None and first.constraint.takes_drafts,
        "hidden": request.returns_hidden,
        "experts": None if request.experts_from is None else [request.experts_from],
        "media": None if media is None else _media_fields(media, first.ids),
    }
    return {**values, **{name: value for name, value in optional.items() if value}}


def make_sequences(values: Mapping[str, Any]) -> list[Sequence]:
    """Create the sequences of a recorded request."""
    adapter, logprobs = values.get("adapter"), values.get("logprobs")
    if logprobs is not None:
        logprobs = LogprobParams(**{**logprobs, "token_ids": tuple(logprobs["token_ids"])})
    request = Request(
        id=values["id"],
        label="",
        ids=tuple(values["ids"]),
        sampling=_sampling(values["sampling"]),
        logprobs=logprobs,
        wants_embedding=values.get("embedding", False),
        adapter=None if adapter is None else Adapter(adapter, str(adapter), ""),
        row_values=values.get("values", {}),
        follows=values.get("follows", False),
        owner=values.get("owner", ""),
        service=Service(pin=values.get("pin")),
        constraint=RecordedConstraint(values.get("drafted", False)) if values.get("constrained") else None,
        returns_hidden=values.get("hidden", False),
        experts_from=values["experts"][0] if "experts" in values else None,
        prompt_media=_media(values["media"], values["ids"]) if "media" in values else None,
    )
    sequences = []
    for index, max_tokens, seed in values["choices"]:
        sequence = Sequence(
            request,
            index,
            request.ids or (),
            max_tokens=max_tokens,
            stop_ids=frozenset(values["stop"]),
            seed=seed,
            namespace=values.get("namespace"),
            banned_ids=frozenset(values.get("banned", ())),
            urgency=values.get("urgency", 0),
        )
        sequence.ids += values.get("output", ())
        sequences.append(sequence)
    return sequences


class RecordedConstraint:
    """A `DraftedConstraint` for replays, which set its host data as in the recorded run."""

    def __init__(self, takes_drafts: bool) -> None:
        self.takes_drafts = takes_drafts

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        """Do nothing, because the player sets the data."""

    def draft_data_after(self, choice: int, output: Output, first: HostData, drafts: DraftData) -> None:
        """Do nothing, because the record contains the accepted draft tokens."""


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that differ from their defaults, as JSON values."""
    found: dict[str, Any] = {}
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name in UNRECORDED or value == getattr(SAMPLING_DEFAULTS, field.name):
            continue
        if isinstance(value, frozenset):
            value = sorted(value)
        elif isinstance(value, Mapping):
            value = [[key, each] for key, each in value.items()]
        found[field.name] = value
    return found


def _sampling(values: Mapping[str, Any]) -> SamplingParams:
    made: dict[str, Any] = dict(values)
    for name, value in values.items():
        default = getattr(SAMPLING_DEFAULTS, name)
        if isinstance(default, frozenset) or name == "allowed_token_ids":
            made[name] = frozenset(value)
        elif isinstance(default, Mapping):
            made[name] = dict(value)
        elif isinstance(value, list):
            made[name] = tuple(value)
    return SamplingParams(**made)


def _media_fields(media: PromptMedia, ids: list[int]) -> dict[str, Any]:
    keys = [[at, key % KEY_LIMIT] for at, (key, token_id) in enumerate(zip(media.keys, ids)) if key != token_id]
    spans = [[span.start, span.end] for span in media.spans]
    return {"spans": spans, "keys": keys, "mutual": media.mutual, "images": media.num_items}


def _media(values: Mapping[str, Any], ids: list[int]) -> PromptMedia:
    keys = list(ids)
    for at, key in values["keys"]:
        keys[at] = key
    spans = [PlacedMedia(start, np.zeros((end - start, 0), np.float32)) for start, end in values["spans"]]
    return PromptMedia(tuple(spans), keys, values["images"], mutual=values["mutual"])
