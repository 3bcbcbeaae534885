"""The contract between scheduler and worker: the batch of a step as host arrays, and its output.

`Scheduler.fill` builds a batch, which is then immutable. The runner reads it, in this or a worker process. A batch
refers to no device, and the runner never reads a Sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import DraftData, HostData
from runtime.request import LogprobParams, Logprobs

if TYPE_CHECKING:
    from runtime.sequence import Sequence

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]

SECOND_START = "second_start"  # a row value: position where the second text of a pair begins
ADAPTER = "adapter"  # a row value: slot of the row's LoRA adapter
UNKNOWN = -1  # in Batch.token_ids: the last sampled token of the sequence, known only on the device


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = tuple(np.uint64(shift) for shift in (30, 27, 31, 40))


def uniform_numbers(seeds: NDArray[np.uint64], positions: Longs) -> Floats:
    """Return a number in [0, 1) for each (seed, output position), independent of the batch.

    Applies the SplitMix64 finaliser (Steele, Lea and Flood, 2014) to seed + (position + 1) * golden gamma. The upper
    24 bits fit into a float32 exactly.
    """
    one, two, three, top = _SHIFTS
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    x = (x ^ (x >> one)) * _MIX_1
    x = (x ^ (x >> two)) * _MIX_2
    x ^= x >> three
    return (x >> top).astype(np.float32) * np.float32(2.0**-24)


class MediaSpan(NamedTuple):
    """Tokens of a step whose embeddings are given, for example by an image encoder. No layer reads their ids."""

    offset: int  # index of the first token in [T]
    # [N, W]: embeddings [N, E] and, for models that add vectors after their first layers, those of each such layer.
    vectors: Floats


class StepStats(NamedTuple):
    """Counts of a step, for logs and metrics."""

    num_new: int = 0  # newly admitted sequences
    num_cached_tokens: int = 0  # cached prompt tokens of the newly admitted sequences
    num_prompt_tokens: int = 0
    num_decode_rows: int = 0
    num_scored: int = 0  # prompt tokens whose log-probabilities are computed


NO_STATS = StepStats()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B rows with T tokens in total. Row b computes positions starts[b] .. starts[b] + counts[b] - 1.

    Each layer stores the KV of all rows before any row attends, so rows may share pages that this step writes.
    """

    number: int
    sequences: tuple[Sequence, ...]  # [B], only for the scheduler
    starts: Ints  # [B]
    counts: Ints  # [B], each >= 1
    sequence_indices: Ints  # [B], row of each sequence in device state, which keeps its last token
    # [T], row after row. UNKNOWN: only the device knows the id. `speculative.model_drafts.DRAFT`: an id that the draft
    # model proposes before the model verifies it in the same step.
    token_ids: Ints
    page_table: Ints  # [B, pages of the longest row], padded with 0 after a row's pages
    sampling: Sampling | None  # None: no row yields a token
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    # Rows that compute an embedding instead of a token; None: no such rows.
    embedding_rows: Ints | None = None
    hidden_rows: tuple[int, ...] = ()  # rows that return the hidden states of their tokens, ascending
    # Row values that layers read, by name, [B] each; 0 is the default. A batch has only names that the model's layers
    # declare (`runtime.layers.batch_reads`).
    row_values: Mapping[str, Ints] = field(default_factory=dict)
    # Arrays of cache kinds other than pages (`CacheKind.step_arrays`), by kind and name.
    kinds: Mapping[str, Mapping[str, Ints]] = field(default_factory=dict)
    drafts: Drafts | None = None  # None: no row proposes ids
    # bool [B], rows that follow drafts in flight. Their `starts` are upper bounds, and exact only if all drafts
    # are accepted. The device takes the exact starts from its own array of lengths. None: all starts are exact.
    unknown_starts: NDArray[np.bool_] | None = None
    # [3, T], offset of each token's position on each axis (time, height, width) from its position in the row; None: all
    # are 0. After an image, the three axes of a row have equal offsets.
    position_offsets: Ints | None = None
    media: tuple[MediaSpan, ...] = ()  # tokens whose embeddings are given as vectors
    # [M, 3], (row, first position, end) of spans whose tokens attend to each other, also to later ones. A row that
    # computes the first token of a span computes all of it. None: all attention is causal.
    mutual_spans: Ints | None = None
    # Page copies, performed in this order after all earlier steps and before this step's forward.
    copies: tuple[PageCopy, ...] = ()
    adapters: tuple[AdapterPlacement, ...] = ()  # placed in this order before this step's forward
    stats: StepStats = NO_STATS


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """The D rows that end with proposed ids, each after the row's last token and the proposed ids before it.

    A row with k proposed ids computes 1 + k positions and samples at each of them. An id is accepted if it equals the
    token that the model samples at the position before it and all ids before it are accepted. Random numbers depend
    only on the seed and the output position, so the accepted ids and the token after them are exactly the tokens of
    decoding without drafts, also with random sampling.

    `branches` are further rows with alternatives, so that the drafts are a tree.
    """

    rows: Ints  # [D], row indices, ascending
    counts: Ints  # [D], number of proposed ids of each row, >= 1
    branches: Branches | None = None


class Branches(NamedTuple):
    """The M rows with alternatives to drafts (`scheduler/branches.py`). They have no tokens of their own in the output.

    Row rows[i] begins at the position of the draft with number depths[i] of row owners[i], whose ids it replaces, and
    samples at each of its positions. It has pages of its own from this position on. If all drafts before are accepted
    and the model samples the row's first id in place of the draft, the row's ids are the drafts that go on.
    """

    rows: Ints  # [M], row indices, ascending
    owners: Ints  # [M], row indices of rows with drafts
    depths: Ints  # [M], from 1 on


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """The N sampled positions of a step and their parameters. Stateless except for penalties.

    A row samples at its last position; a row with drafts samples at each of its positions.

    Order of operations: penalties, bias (-inf for forbidden tokens), host data (custom processor, grammar mask) and
    temperature on the logits, then top-k, top-p and min-p on the probabilities, then the position's uniform number
    selects a token by the inverse cumulative distribution.
    """

    positions: Ints  # [N], index into the flat batch [T], ascending
    row_of: Ints  # [N], the row of each position
    greedy: NDArray[np.bool_]  # [N]
    uniform: Floats  # [N] in [0, 1), from (sequence seed, output position): independent of the batch
    # Arrays of `sampling_params.ROW_ARRAYS`, [N] each, by name. Arrays with only neutral values are omitted.
    params: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    bias: Bias | None = None
    penalties: Penalties | None = None
    logprobs: tuple[LogprobParams | None, ...] | None = None  # [N]; None: no row requested log-probabilities
    # Host data of positions with a constraint, by index into [N], ascending. Sampling waits for it.
    host_data: Mapping[int, HostData] = field(default_factory=dict)
    # The host data after drafts, by row; `host_data` has it too. The worker sets the ids that a draft model proposes.
    draft_data: Mapping[int, DraftData] = field(default_factory=dict)
    draws: Draws | None = None  # for rows with unknown starts, whose `uniform` is not final. None: all are final


class Draws(NamedTuple):
    """What `uniform` is computed from, for rows with unknown starts."""

    seeds: NDArray[np.uint64]  # [N]
    output_positions: Longs  # [N], an upper bound like the row's start


class Bias(NamedTuple):
    """M values to add to single logits; -inf forbids a token."""

    rows: Longs  # [M], index into the N sampled positions
    token_ids: Longs  # [M]
    values: Floats  # [M]


class Penalties(NamedTuple):
    """The Q sampled positions with penalties. Token counts are on the device, by sequence index."""

    rows: Longs  # [Q], index into the N sampled positions
    sequence_indices: Longs  # [Q]
    fresh: tuple[FreshSequence, ...]  # sequences whose counts this step initialises


class FreshSequence(NamedTuple):
    """A sequence with penalties, and the tokens from which its token counts on the device are initialised."""

    sequence_index: int
    prompt_ids: Ints
    output_ids: Ints


class PageCopy(NamedTuple):
    """Copy pages of all layers between pools or within one pool: `source_pages[i]` to `target_pages[i]`.

    Pools are "device" (the pages of `Batch.page_table`) and "host". Every rank copies its shard of each page.
    """

    source: str
    target: str
    source_pages: Ints  # [N]
    target_pages: Ints  # [N], distinct; within one pool, none of them is also a source


class AdapterPlacement(NamedTuple):
    """Copy a loaded adapter from host memory into a slot. Rows refer to the slot by their row value "adapter"."""

    slot: int  # from 1 on
    adapter_id: int


class PromptLogprobs(NamedTuple):
    """Requested logprobs of prompt tokens: position `offset + i` of the flat batch predicts `targets[i]`."""

    row: int
    offset: int  # index into [T]
    targets: Ints  # [N]
    params: LogprobParams


class StepShare(NamedTuple):
    """Numbers of positions of a batch that other attention groups must know in a common step."""

    tokens: int = 0
    sampled: int = 0
    embedded: int = 0  # rows
    scored: int = 0  # positions of prompts whose log-probabilities are computed

    @classmethod
    def of(cls, batch: Batch | None) -> StepShare:
        """Return the share of a batch; zeros for None."""
        if batch is None:
            return cls()
        return cls(
            len(batch.token_ids),
            0 if batch.sampling is None else len(batch.sampling.positions),
            0 if batch.embedding_rows is None else len(batch.embedding_rows),
            sum(len(each.targets) for each in batch.prompt_logprobs),
        )


class StepOutput(NamedTuple):
    """The results of a step on the host, for the B rows of its batch."""

    # [B], new ids of each row: one, or the accepted drafts and one more. Empty if the row samples no token or waits
    # for host data.
    tokens: list[list[int]]
    failed: list[int]  # rows whose logits were not finite, or whose constraint failed
    logprobs: list[Logprobs | None] | None = None  # [B], of the new ids; None: not requested
    prompt_logprobs: list[tuple[int, Logprobs]] = []  # (row, requested logprobs)  # noqa: RUF012
    embeddings: list[list[float] | None] | None = None  # [B]; None: not requested
    stuck: Collection[int] = ()  # failed rows whose constraint failed or allowed no token
    hidden: Collection[tuple[int, Floats]] = ()  # (row, states of its tokens [N, E]) of `Batch.hidden_rows`


class Runner(Protocol):
    """Computes batches in order, outside the event loop. The scheduler actor owns, watches and closes it."""

    @property
    def kernels_description(self) -> str:
        """One line with the implementation and arithmetic of each operation."""
        ...

    def launch(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Enqueue the batch and return immediately. The future raises the exception of the forward.

        Callers must shield the future while they wait: a cancelled wait must not cancel the step.
        """
        ...

    def finish_oldest(self) -> None:
        """Called when the caller is about to wait for the oldest step. A pipeline enqueues the end of this step."""
        ...

    def call(self, verb: str, payload: Mapping[str, Any]) -> asyncio.Future[list[Any]]:
        """Run a verb of `runtime/worker/verbs.py` on every rank, after the steps launched so far and before later ones.

        The result holds the answer of each rank, rank 0 first. `payload` holds JSON values and int32 arrays by name.
        The future raises `InvalidRequest` or `CheckpointError` if a rank refused the call; that rank is unchanged, and
        steps continue. Any other failure ends a runner of several ranks, like a failed step. Shield the future.
        """
        ...

    async def watch(self) -> None:
        """Never return; raise `WorkerFailed` when a process that the runner needs has ended."""
        ...

    def close(self) -> None:
        """Finish launched steps and release everything. Blocks. `watch` must have ended."""
        ...
