"""The rows of the batch that is being built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from runtime.batch import UNKNOWN, Batch, Ints, MediaSpan, PromptLogprobs, StepStats
from runtime.kv_cache.prefix_cache import Duplicates, PrefixCache
from runtime.media_source import PromptMedia
from runtime.scheduler.adapter_slots import AdapterSlots
from runtime.scheduler.draft_rows import DraftRows
from runtime.scheduler.request_tables import RequestTables
from runtime.scheduler.sampling import NO_DRAFT_DATA
from runtime.sequence import Branch, Sequence


class StepRows:
    """The rows of the batch being built.

    Adding a row increases its sequence's `num_computed`, and `num_pending` if the row samples.
    """

    __slots__ = (
        "_counts",
        "_drafts",
        "_embedded",
        "_max_forced",
        "_max_rows",
        "_media",
        "_mutual_spans",
        "_prompt_logprobs",
        "_sampled",
        "_sequences",
        "_starts",
        "_token_ids",
        "_unknown_starts",
        "duplicates",
        "num_cached_tokens",
        "num_decodes",
        "num_drafted",
        "num_forced",
        "num_new",
        "num_prompt_tokens",
        "num_scored",
        "retracted",
        "unfinished",
    )

    def __init__(self, max_rows: int | None, max_forced: int = 0) -> None:
        self._max_rows = max_rows
        self._max_forced = max_forced
        self._sequences: list[Sequence] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []
        self._sampled: list[int] = []
        self._drafts: DraftRows | None = None  # None: no row has draft tokens
        self._unknown_starts: list[int] = []  # rows whose first position only the device knows
        self._embedded: list[int] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._media: list[MediaSpan] = []
        self._mutual_spans: list[tuple[int, int, int]] = []
        self.duplicates: list[tuple[Sequence, Duplicates]] = []
        self.unfinished: list[Sequence] = []  # sequences whose prompt continues in the next step
        self.retracted = False
        self.num_new = 0
        self.num_cached_tokens = 0
        self.num_prompt_tokens = 0
        self.num_scored = 0  # number of prompt tokens whose log-probabilities are computed
        self.num_decodes = 0
        self.num_drafted = 0  # number of proposed tokens in all rows
        self.num_forced = 0  # number of rows that compute forced output tokens, up to `max_forced` each

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequence of each row."""
        return self._sequences

    @property
    def full(self) -> bool:
        return self._max_rows is not None and len(self) >= self._max_rows

    def add_decodes(self, sequences: list[Sequence], *, starts_known: bool = True) -> None:
        """Add a row for each sequence.

        Only the KV of the sequence's last token is missing; this token is known or pending.
        """
        first = len(self._sequences)
        if not starts_known:
            self._unknown_starts += range(first, first + len(sequences))
        starts, token_ids = self._starts, self._token_ids
        for sequence in sequences:
            start = sequence.num_computed
            starts.append(start)
            sequence.num_computed = start + 1
            pending = sequence.num_pending
            token_ids.append(UNKNOWN if pending else sequence.ids[start])
            sequence.num_pending = pending + 1
        self._sequences += sequences
        self._counts += [1] * len(sequences)
        self._sampled += range(first, first + len(sequences))
        self.num_decodes += len(sequences)

    def add_drafts(self, proposed: Mapping[Sequence, list[int]], *, starts_known: bool = True) -> None:
        """Add one row for each sequence. The row computes the only token without KV, then the proposed tokens.

        A sequence's branches follow its row as separate rows.
        """
        drafts = self._drafts = self._drafts or DraftRows()
        for sequence, ids in proposed.items():
            row, start = len(self._sequences), sequence.num_computed
            if not starts_known:
                self._unknown_starts.append(row)
            self._sequences.append(sequence)
            self._starts.append(start)
            self._counts.append(1 + len(ids))
            self._token_ids.append(UNKNOWN if sequence.num_pending else sequence.ids[start])
            self._token_ids += ids
            self._sampled.append(row)
            drafts.add(row, sequence, ids)
            sequence.num_drafted += len(ids)
            sequence.num_computed = start + 1 + len(ids)
            sequence.num_pending += 1 + len(ids)
            self.num_drafted += len(ids)
            for branch in sequence.branches:
                drafts.add_branch(len(self._sequences), row, branch)
                self._add_branch(sequence, start, branch)
        self.num_decodes += len(proposed)

    def _add_branch(self, sequence: Sequence, start: int, branch: Branch) -> None:
        """Add a branch as a row of its own. The row of its sequence begins at position `start`."""
        row, count = len(self._sequences), len(branch.ids)
        self._sequences.append(sequence)
        self._starts.append(start + branch.depth)
        self._counts.append(count)
        self._token_ids += branch.ids
        self._sampled.append(row)
        self.num_drafted += count

    def add_prompt(self, sequence: Sequence, count: int) -> None:
        """Add a row that computes the next `count` known tokens.

        If the row ends with the last known token, it also samples a token or computes an embedding.
        """
        start = sequence.num_computed
        end = start + count
        self._request_prompt_logprobs(sequence, start, end)
        if sequence.media is not None:
            self._add_media(sequence.media, start, end)
        if sequence.request.wants_embedding:
            if end == len(sequence.ids):
                self._embedded.append(len(self._sequences))
        elif end == len(sequence.ids) < sequence.max_tokens:
            self._sampled.append(len(self._sequences))
            sequence.num_pending += 1
        self._sequences.append(sequence)
        self._starts.append(start)
        self._counts.append(count)
        self._token_ids += sequence.ids[start:end]
        if start >= sequence.num_prompt and count <= self._max_forced:
            self.num_forced += 1
        else:
            self.num_prompt_tokens += count
        sequence.num_computed = end

    def _add_media(self, media: PromptMedia, start: int, end: int) -> None:
        """Add the media vectors that a new row with the positions start .. end - 1 needs."""
        row, first = len(self._sequences), len(self._token_ids)
        for span in media.spans:
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                vectors = span.vectors[low - span.start : high - span.start]
                self._media.append(MediaSpan(first + low - start, vectors))
                if media.mutual:
                    self._mutual_spans.append((row, span.start, span.end))

    def _request_prompt_logprobs(self, sequence: Sequence, start: int, end: int) -> None:
        params = sequence.request.logprobs
        first = max(sequence.next_logprob, start)
        last = min(end, sequence.num_prompt - 1)
        if params is None or first >= last:
            return
        targets = np.array(sequence.ids[first + 1 : last + 1], np.int32)
        offset = len(self._token_ids) + first - start
        self._prompt_logprobs.append(PromptLogprobs(len(self._sequences), offset, targets, params))
        self.num_scored += last - first
        sequence.next_logprob = last

    def build(
        self,
        number: int,
        tables: RequestTables,
        cache: PrefixCache,
        adapters: AdapterSlots,
        *,
        read_by_drafter: bool = True,
    ) -> Batch:
        """Return the batch. It shares no memory with the tables."""
        indices = np.array([sequence.sequence_index for sequence in self._sequences], np.int32)
        starts = np.array(self._starts, np.int32)
        counts = np.array(self._counts, np.int32)
        ends = starts + counts
        width = -(-int(ends.max()) // cache.page_size)
        page_table = tables.pages[indices, :width]
        copies, drafts = cache.take_copies(), self._drafts
        if drafts is not None:
            drafts.write_pages(page_table)
            copies = (*copies, *drafts.page_copies(self._sequences, self._starts, cache.page_size))
        sampling = None
        if self._sampled:
            row_of = np.array(self._sampled, np.int32)
            if len(self._token_ids) == len(counts):  # usually every row has one token; this check saves 4 us
                positions, new_positions = row_of, ends.take(row_of)
            else:
                before_last = np.zeros_like(row_of)
                if drafts is not None:
                    row_of, before_last = drafts.spread(row_of, self._counts)
                positions = counts.cumsum(dtype=np.int32)[row_of] - 1 - before_last
                new_positions = ends[row_of] - before_last
            sampling = tables.sampling.gather(
                positions,
                row_of,
                indices.take(row_of),
                new_positions.astype(np.int64),
                ends_known=not self._unknown_starts,
                draft_data=NO_DRAFT_DATA if drafts is None else drafts.data,
            )
        return Batch(
            number=number,
            sequences=tuple(self._sequences),
            starts=starts,
            counts=counts,
            sequence_indices=indices,
            token_ids=np.array(self._token_ids, np.int32),
            page_table=page_table,
            sampling=sampling,
            prompt_logprobs=tuple(self._prompt_logprobs),
            hidden_rows=self._rows_with("hidden") if tables.num_with_parts else (),
            expert_rows=self._rows_with("experts") if tables.num_with_parts else (),
            embedding_rows=np.array(self._embedded, np.int32) if self._embedded else None,
            row_values=tables.values_of(indices),
            position_offsets=self._position_offsets(starts, counts) if tables.num_with_axes else None,
            media=tuple(self._media),
            mutual_spans=np.array(self._mutual_spans, np.int32) if self._mutual_spans else None,
            kinds={
                kind.name: kind.step_arrays(self._sequences, starts, counts, page_table, self._unknown_starts)
                for kind in cache.kinds
            },
            drafts=None if drafts is None else drafts.arrays(),
            read_by_drafter=read_by_drafter,
            unknown_starts=self._flags(self._unknown_starts) if self._unknown_starts else None,
            copies=copies,
            adapters=adapters.take_placements(),
            stats=StepStats(
                self.num_new,
                self.num_cached_tokens,
                self.num_prompt_tokens,
                self.num_decodes + self.num_forced,
                self.num_scored,
            ),
        )

    def _rows_with(self, name: Literal["hidden", "experts"]) -> tuple[int, ...]:
        """Return the rows whose requests want the hidden states or the routed experts; `name` says which of the two."""
        rows = ((row, sequence.parts) for row, sequence in enumerate(self._sequences))
        return tuple(row for row, parts in rows if parts is not None and getattr(parts, name) is not None)

    def _position_offsets(self, starts: Ints, counts: Ints) -> Ints | None:
        """Return the position offsets [3, T] of the tokens, or None if all are 0."""
        offsets, first = np.zeros((3, len(self._token_ids)), np.int32), 0
        for sequence, start, count in zip(self._sequences, starts.tolist(), counts.tolist()):
            media = sequence.media
            if media is not None and media.offsets is not None:
                in_prompt = max(min(sequence.num_prompt - start, count), 0)
                offsets[:, first : first + in_prompt] = media.offsets[:, start : start + in_prompt]
                offsets[:, first + in_prompt : first + count] = media.delta
            first += count
        return offsets if offsets.any() else None

    def _flags(self, rows: list[int]) -> NDArray[np.bool_]:
        flags = np.zeros(len(self._sequences), np.bool_)
        flags[rows] = True
        return flags
