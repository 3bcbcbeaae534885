"""The interface between scheduler and worker: the batch of a step as host arrays, and the output of the step.

`Scheduler.fill` builds a batch, which is immutable afterwards. The runner reads it, in this process or in a worker
process. A batch contains no device tensors, and the runner does not read its `Sequence` objects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import DraftData, HostData
from runtime.read_only import read_only
from runtime.request import LogprobParams, Logprobs
from runtime.speculative.model_drafts import DRAFT

if TYPE_CHECKING:
    from runtime.sequence import Sequence

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]

SECOND_START = "second_start"  # name of the row value with the position where the second text of a pair begins
ADAPTER = "adapter"  # name of the row value with the slot of the row's LoRA adapter
UNKNOWN = -1  # in Batch.token_ids: the last sampled token of the sequence, whose id only the device knows


# Constants of `uniform_numbers`, as arrays without dimensions: operations with them take two thirds of the time of
# operations with NumPy scalars.
_GOLDEN, _MIX_1, _MIX_2, _SHIFT_1, _SHIFT_2, _SHIFT_3, _TOP, _ONE = (
    np.array(value, np.uint64)
    for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 30, 27, 31, 40, 1)
)
_UNIT = np.array(2.0**-24, np.float32)


def uniform_numbers(seeds: NDArray[np.uint64], positions: Longs) -> Floats:
    """Return a pseudo-random number in [0, 1) for each (seed, output position). It does not depend on the batch.

    Applies the SplitMix64 finaliser (Steele, Lea and Flood, 2014) to seed + (position + 1) * golden gamma. A float32
    represents the upper 24 bits exactly.
    """
    x = seeds + (positions.astype(np.uint64) + _ONE) * _GOLDEN
    x = (x ^ (x >> _SHIFT_1)) * _MIX_1
    x = (x ^ (x >> _SHIFT_2)) * _MIX_2
    x ^= x >> _SHIFT_3
    return (x >> _TOP).astype(np.float32) * _UNIT


class MediaSpan(NamedTuple):
    """Tokens of a step with given embeddings, for example from an image encoder. Layers do not read their ids."""

    offset: int  # index of the first token in [T]
    # [N, W]: the embeddings [N, E]. If the model adds further vectors after its first layers, these vectors follow,
    # layer by layer.
    vectors: Floats


class StepStats(NamedTuple):
    """Counts of a step, for logs and metrics."""

    num_new: int = 0  # newly admitted sequences
    num_cached_tokens: int = 0  # cached prompt tokens of the newly admitted sequences
    num_prompt_tokens: int = 0
    num_decode_rows: int = 0
    num_scored: int = 0  # prompt tokens whose log-probabilities the step computes


NO_STATS = StepStats()


@read_only
class Batch:
    """B rows with T tokens in total. Row b computes positions starts[b] .. starts[b] + counts[b] - 1.

    Each layer stores the KV of all rows before any row attends. A row may therefore read pages that another row of the
    same step writes.
    """

    number: int
    sequences: tuple[Sequence, ...]  # [B]; read only by the scheduler
    starts: Ints  # [B]
    counts: Ints  # [B], each >= 1
    sequence_indices: Ints  # [B], index of each sequence in tables of device state, for example of last tokens
    # [T], row after row. UNKNOWN: only the device knows the id. `speculative.model_drafts.DRAFT`: the draft model
    # proposes the id, and the target verifies it in the same step.
    token_ids: Ints
    page_table: Ints  # [B, number of pages of the longest row], padded with 0
    sampling: Sampling | None  # None: no row yields a token
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    # Rows that compute an embedding instead of a token. None: no such rows.
    embedding_rows: Ints | None = None
    hidden_rows: tuple[int, ...] = ()  # rows that return the hidden states of their tokens, ascending
    expert_rows: tuple[int, ...] = ()  # rows that return the experts that were chosen for their tokens, ascending
    # Name -> value of each row [B], for layers that read it. The default is 0. A batch contains only names that the
    # model's layers declare (`runtime.layers.batch_reads`).
    row_values: Mapping[str, Ints] = field(default_factory=dict)
    # Arrays of cache kinds other than pages (`CacheKind.step_arrays`), by kind and name.
    kinds: Mapping[str, Mapping[str, Ints]] = field(default_factory=dict)
    drafts: Drafts | None = None  # None: no row has draft tokens
    read_by_drafter: bool = True  # whether the draft model or head, if there is one, takes part in this step
    # bool [B], rows that follow draft tokens which are not verified yet. Their `starts` are upper bounds: they are
    # exact if all draft tokens are accepted. The device reads the exact starts from its own table of lengths. None: all
    # starts are exact.
    unknown_starts: NDArray[np.bool_] | None = None
    # [3, T], for each token and axis (time, height, width): its position on the axis minus its position in the row. For
    # tokens after an image, the three offsets are equal. None: all offsets are 0.
    position_offsets: Ints | None = None
    media: tuple[MediaSpan, ...] = ()  # tokens whose embeddings are given as vectors
    # [M, 3], (row, first position, end) of each span in which every token attends to all tokens, including later ones.
    # The row that computes the first token of a span computes the whole span. None: all attention is causal.
    mutual_spans: Ints | None = None
    # Page copies. They run in this order, after all earlier steps and before this step's forward pass.
    copies: tuple[PageCopy, ...] = ()
    adapters: tuple[AdapterPlacement, ...] = ()  # copied into slots in this order, before this step's forward pass
    stats: StepStats = NO_STATS


@read_only
class Drafts:
    """The D rows with draft tokens. The draft tokens of a row follow the sequence's last token.

    A row with k draft tokens computes 1 + k positions, and samples at each of them. A draft token is accepted if it
    equals the token that the model samples at the position before it, and all earlier draft tokens are accepted. The
    random numbers of sampling depend only on the seed and the output position. The output therefore has exactly the
    same tokens as without draft tokens, also with random sampling.

    `branches` are additional rows with alternatives, so that the draft tokens form a tree.
    """

    rows: Ints  # [D], row indices, ascending
    counts: Ints  # [D], number of draft tokens in each row, >= 1
    branches: Branches | None = None

    @property
    def all_rows(self) -> frozenset[int]:
        """All rows with draft tokens, and all branches."""
        return frozenset([*self.rows.tolist(), *(() if self.branches is None else self.branches.rows.tolist())])


class Branches(NamedTuple):
    """The M rows with alternatives to draft tokens (`sequence.Branch`). They have no output of their own.

    Row rows[i] begins at the position of draft token depths[i] of row owners[i]. From this position on, the branch has
    its own ids instead of the draft tokens, and its own pages. It samples at each of its positions. If all
    earlier draft tokens are accepted and the model then samples the branch's first id, verification continues with the
    branch's ids.
    """

    rows: Ints  # [M], row indices, ascending
    owners: Ints  # [M], row indices of the rows with draft tokens
    depths: Ints  # [M], numbers of draft tokens, from 1


@read_only
class Sampling:
    """The N sampled positions of a step and their parameters. Only penalties need state: token counts on the device.

    A row samples at its last position. A row with draft tokens samples at each of its positions.

    Order of operations:
    1. On the logits: penalties, bias (-inf for forbidden tokens), host data (custom processor, grammar mask) and
       temperature.
    2. On the probabilities: top-k, top-p and min-p.
    3. The position's uniform number selects a token by the inverse cumulative distribution.
    """

    positions: Ints  # [N], index into the flat batch [T], ascending
    row_of: Ints  # [N], the row of each position
    greedy: NDArray[np.bool_]  # [N]
    uniform: Floats  # [N] in [0, 1), `uniform_numbers` of the sequence's seed and the output position
    # Arrays of `sampling_params.ROW_ARRAYS` by name, [N] each. Arrays with only neutral values are omitted.
    params: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    bias: Bias | None = None
    penalties: Penalties | None = None
    logprobs: tuple[LogprobParams | None, ...] | None = None  # [N]; None: no row requested log-probabilities
    # Index into [N] -> host data, for positions with a constraint, ascending. Sampling waits for this data.
    host_data: Mapping[int, HostData] = field(default_factory=dict)
    # Row -> host data after its draft tokens. `host_data` contains this data too. If a draft model proposes the ids,
    # the worker sets them here.
    draft_data: Mapping[int, DraftData] = field(default_factory=dict)
    # Inputs of `uniform` for rows with unknown starts, whose `uniform` is provisional; None: all values are final.
    draws: Draws | None = None


class Draws(NamedTuple):
    """The inputs from which the device computes the final `uniform`, when it knows the starts of all rows."""

    seeds: NDArray[np.uint64]  # [N]
    output_positions: Longs  # [N], upper bounds, like the starts of the rows


class Bias(NamedTuple):
    """M values that are added to single logits; -inf forbids a token."""

    rows: Longs  # [M], index into the N sampled positions
    token_ids: Longs  # [M]
    values: Floats  # [M]


class Penalties(NamedTuple):
    """The Q sampled positions with penalties. Token counts are on the device, by sequence index."""

    rows: Longs  # [Q], index into the N sampled positions
    sequence_indices: Longs  # [Q]
    fresh: tuple[FreshSequence, ...]  # sequences whose token counts this step initialises


class FreshSequence(NamedTuple):
    """A sequence with penalties, and the tokens that initialise its token counts on the device."""

    sequence_index: int
    prompt_ids: Ints
    output_ids: Ints


class PageCopy(NamedTuple):
    """Copies of the pages `source_pages[i]` to `target_pages[i]` in all layers, between two pools or within one.

    The pools are "device" (the pages of `Batch.page_table`) and "host". Every rank copies its shard of each page.
    """

    source: str
    target: str
    source_pages: Ints  # [N]
    target_pages: Ints  # [N], distinct; in copies within one pool, no page is both source and target


class AdapterPlacement(NamedTuple):
    """A copy of a loaded adapter from host memory into a slot. Rows name the slot in the row value `ADAPTER`."""

    slot: int  # numbered from 1
    adapter_id: int


class PromptLogprobs(NamedTuple):
    """Requested prompt log-probabilities: position `offset + i` of the flat batch predicts `targets[i]`."""

    row: int
    offset: int  # index into [T]
    targets: Ints  # [N]
    params: LogprobParams


class StepShare(NamedTuple):
    """The counts of a batch that the other attention groups must know in a common step (data-parallel attention)."""

    tokens: int = 0
    sampled: int = 0
    embedded: int = 0  # number of rows that compute an embedding
    scored: int = 0  # number of prompt positions whose log-probabilities are computed
    drafted: int = 0  # number of ids that the group's draft model or head proposes

    @classmethod
    def of(cls, batch: Batch | None) -> StepShare:
        """Return the share of a batch. For None (an idle group), all counts are 0."""
        if batch is None:
            return cls()
        return cls(
            len(batch.token_ids),
            0 if batch.sampling is None else len(batch.sampling.positions),
            0 if batch.embedding_rows is None else len(batch.embedding_rows),
            sum(len(each.targets) for each in batch.prompt_logprobs),
            0 if batch.drafts is None else int(np.count_nonzero(batch.token_ids == DRAFT)),
        )


class StepOutput(NamedTuple):
    """The results of a step on the host, for the B rows of its batch."""

    # [B], new ids of each row: one sampled id, or the accepted draft tokens followed by the id sampled after them.
    # Empty if the row does not sample, or if its host data was late.
    tokens: list[list[int]]
    failed: list[int]  # rows whose logits were not finite, or whose constraint failed
    logprobs: list[Logprobs | None] | None = None  # [B], log-probabilities of the new ids; None: not requested
    prompt_logprobs: list[tuple[int, Logprobs]] = []  # (row, requested logprobs)  # noqa: RUF012
    embeddings: list[list[float] | None] | None = None  # [B]; None: not requested
    stuck: Collection[int] = ()  # failed rows whose constraint failed or allowed no token
    hidden: Collection[tuple[int, Floats]] = ()  # (row, hidden states of its tokens [N, E]) for `Batch.hidden_rows`
    experts: Collection[
        tuple[int, NDArray[np.int16]]
    ] = ()  # (row, experts chosen for its tokens [N, L, k]) for `Batch.expert_rows`
    # Row with draft tokens -> index, among the row's branches, of the branch in which its output continues.
    taken: Mapping[int, int] = MappingProxyType({})


class Runner(Protocol):
    """Computes batches in order, outside the event loop. The scheduler actor owns, watches and closes it."""

    @property
    def kernels_description(self) -> str:
        """One line with the implementation and arithmetic of each operation."""
        ...

    def launch(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Enqueue the batch and return immediately. The future raises the exception of the forward pass.

        Callers must shield the future, so that a cancelled caller does not cancel the step.
        """
        ...

    def finish_oldest(self) -> None:
        """Must be called before waiting for the oldest step.

        With pipeline parallelism, it enqueues the end of this step.
        """
        ...

    def call(self, verb: str, payload: Mapping[str, Any]) -> asyncio.Future[list[Any]]:
        """Run a verb (a command of `runtime/worker/verbs.py`) on every rank, after the steps launched so far.

        The result has the answer of each rank, in the order of ranks. `payload` has JSON values and int32 arrays, by
        name. If a rank refuses the call, the future raises `InvalidRequest` or `CheckpointError`. This rank is then
        unchanged, and steps continue. If a runner has several ranks, any other failure ends it, as a failed step would.
        Callers must shield the future.
        """
        ...

    async def watch(self) -> None:
        """Wait until a process that the runner needs has ended, and raise `WorkerFailed`. Never returns."""
        ...

    def close(self) -> None:
        """Finish launched steps and release everything. Blocks. Call it only after `watch` has ended."""
        ...
