"""One step's work as plain host arrays, and what comes back from it.

A batch is made by `Scheduler.fill`, frozen, and read by the runner, in this process or in a worker's. Nothing in
it refers to a device, and the runner never looks inside a Sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import HostData
from runtime.profile import ProfileOptions
from runtime.request import LogprobParams, Logprobs

if TYPE_CHECKING:
    from runtime.sequence import Sequence

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]

UNKNOWN = -1  # in Batch.token_ids: the token that this sequence sampled last, known on the device only


class StepStats(NamedTuple):
    """What a step is made of, for logs and metrics."""

    num_new: int = 0  # sequences that left the queue
    num_cached_tokens: int = 0  # tokens that these found in the prefix tree
    num_prompt_tokens: int = 0
    num_decode_rows: int = 0


NO_STATS = StepStats()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B rows; row b computes positions starts[b] .. starts[b] + counts[b] - 1, T tokens in all.

    KV of every row is stored before any row attends, layer by layer, so rows may share pages that are written
    in this very step.
    """

    number: int
    sequences: tuple[Sequence, ...]  # [B], for the scheduler alone
    starts: Ints  # [B]
    counts: Ints  # [B], each >= 1
    sequence_indices: Ints  # [B], of each row's sequence in device state, which keeps its last token
    token_ids: Ints  # [T], rows one after the other, UNKNOWN where only the device knows
    page_table: Ints  # [B, pages of the longest row], padded with 0 beyond a row's own pages
    sampling: Sampling | None  # None: no row yields a token
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    # Rows of which a vector is wanted instead of a token; None: there are none.
    embedding_rows: Ints | None = None
    # What layers are told of each row, [B] each, by name (`Request.row_values`); no graph was captured with them.
    row_values: Mapping[str, Ints] = field(default_factory=dict)
    # By kind of cache beside the pages, what its layers need to know (`runtime.kv_cache.kinds`): arrays by name.
    kinds: Mapping[str, Mapping[str, Ints]] = field(default_factory=dict)
    second_starts: Ints | None = None  # [B], where the second text of a pair begins; None: there are no pairs
    stats: StepStats = NO_STATS


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """The R rows whose last position yields a token, and how each chooses it. Stateless but for penalties.

    Order on the logits: penalties, bias (with -inf for forbidden tokens), host data (custom processor, grammar
    mask), temperature, then top-k, top-p and min-p on the probabilities, then the row's uniform number picks by
    inverse distribution function.
    """

    rows: Ints  # [R], index into the batch, ascending
    greedy: NDArray[np.bool_]  # [R]
    uniform: Floats  # [R] in [0, 1), from (sequence seed, output position): independent of the batch
    # By name, those of `sampling_params.ROW_ARRAYS` that are not neutral for every row: [R] each.
    params: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    bias: Bias | None = None
    penalties: Penalties | None = None
    logprobs: tuple[LogprobParams | None, ...] | None = None  # [R]; None: nobody asked
    # By index into `rows`, ascending, of rows with a constraint: what they are sampled with once it is there.
    host_data: Mapping[int, HostData] = field(default_factory=dict)


class Bias(NamedTuple):
    """Additive changes to single logits; -inf forbids. N entries over all rows."""

    rows: Longs  # [N], index into Sampling.rows
    token_ids: Longs  # [N]
    values: Floats  # [N]


class Penalties(NamedTuple):
    """The Q sampling rows with penalties. Counts live on the device by sequence index."""

    rows: Longs  # [Q], index into Sampling.rows
    sequence_indices: Longs  # [Q]
    fresh: tuple[FreshSequence, ...]  # whose counts start anew in this step


class FreshSequence(NamedTuple):
    """A sequence gets a row in device state: what must be counted before the first penalty."""

    sequence_index: int
    prompt_ids: Ints
    output_ids: Ints


class PromptLogprobs(NamedTuple):
    """Logprobs of prompt tokens: position `offset + i` of the flat batch predicts `targets[i]`."""

    row: int
    offset: int  # into [T]
    targets: Ints  # [N]
    params: LogprobParams


class StepOutput(NamedTuple):
    """What a step produced, on the host. B rows, as in its batch."""

    # [B], the new ids of each row: none (where host data is late, too), one, or several.
    tokens: list[list[int]]
    failed: list[int]  # rows whose logits were not finite numbers, or whose constraint failed
    logprobs: list[Logprobs | None] | None = None  # [B], of the new ids; None: nobody asked
    prompt_logprobs: list[tuple[int, Logprobs]] = []  # (row, of its wanted prompt positions)  # noqa: RUF012
    embeddings: list[list[float] | None] | None = None  # [B]; None: nobody asked for a vector
    stuck: Collection[int] = ()  # of the failed rows, those whose constraint failed, or left nothing


class Runner(Protocol):
    """Computes batches in order, beside the event loop. The scheduler actor owns, watches and closes it."""

    @property
    def kernels_description(self) -> str:
        """Which implementation of each operation runs, and which arithmetic it uses, in one line."""
        ...

    def launch(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Enqueue the batch and return at once. The future raises what the forward raised.

        Whoever waits shields the future: a cancelled wait must not cancel the step.
        """
        ...

    def finish_oldest(self) -> None:
        """No batch is launched before the oldest step is waited for: a pipeline enqueues that step's end now."""
        ...

    async def start_profile(self, options: ProfileOptions) -> None:
        """Profile the next steps. Raises `InvalidRequest` while that is being done."""
        ...

    async def stop_profile(self) -> Path | None:
        """End the profile, or the last one that ended by itself -> where it was written; None: there is none."""
        ...

    async def watch(self) -> None:
        """Never returns; raises `WorkerFailed` when a process that the runner needs is gone."""
        ...

    def close(self) -> None:
        """Finish what was launched and give everything back. Blocks; `watch` has ended before."""
        ...
