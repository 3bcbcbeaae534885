"""The state of one choice of a request. After admission, only the scheduler changes it."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from runtime.constraint import HostData, SequenceConstraint
from runtime.request import DraftCounts, Finish, Logprobs, Parts, Request
from runtime.sampling_params import SamplingParams
from runtime.speculative.chain import ChainDrafter
from runtime.speculative.model_drafts import ModelDrafter
from runtime.speculative.ngram import NgramDrafter


class Branch(NamedTuple):
    """An alternative to a sequence's draft tokens in the step in flight, computed in an additional row.

    The row with draft tokens is the *trunk*. The branch shares the first draft tokens of the trunk and then has other
    tokens. It has its own pages for the positions that it computes, so attention kernels compute it like any other row,
    and its tokens are the same as without draft tokens.

    If the model samples the branch's first token instead of the trunk's draft token, the output continues in the
    branch. The branch's pages then replace the trunk's pages from the same position on (`Running.take_branch`). A
    sequence with branches is therefore in one step at a time.
    """

    depth: int  # number (from 1) of the draft token that the branch's first token replaces
    ids: list[int]
    first_page: int  # index of the branch's first own page in the page list of the branch's row
    pages: list[int]


class Sequence:
    """One choice of a request: its known tokens, its numbers of pending and computed tokens, and its pages.

    `ids` has the prompt and every output token whose id the host knows. `num_pending` is the number of tokens that
    steps in flight will sample; they have a position but no id yet. `num_computed` is the number of tokens whose KV
    will be in `pages` after all launched steps. A step computes the positions [num_computed, len(ids) + num_pending),
    or the first of them. Prefill, decode and recomputation all follow this rule. While a row with draft tokens is in
    flight, both numbers are upper bounds: they are exact if all draft tokens are accepted.
    """

    __slots__ = (
        "banned_ids",
        "branches",
        "constraint",
        "draft_counts",
        "drafter",
        "finish",
        "ids",
        "index",
        "locked_node",
        "max_tokens",
        "media",
        "namespace",
        "next_logprob",
        "num_cached",
        "num_computed",
        "num_drafted",
        "num_pending",
        "num_prompt",
        "num_retracted",
        "num_shared",
        "num_superseded",
        "num_undelivered",
        "page_keys",
        "pages",
        "parts",
        "prompt_logprobs",
        "request",
        "sampling",
        "seed",
        "sequence_index",
        "stop_ids",
        "urgency",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        ids: Seq[int],
        *,
        max_tokens: int,
        stop_ids: frozenset[int],
        seed: int,
        namespace: Hashable = None,
        banned_ids: frozenset[int] = frozenset(),
        urgency: int = 0,
    ) -> None:
        self.request = request
        self.index = index  # index among the n choices of the request
        self.sampling: SamplingParams = request.sampling
        self.ids: list[int] = list(ids)
        self.num_prompt = len(self.ids)
        self.media = request.prompt_media  # encoded media of the prompt, or None
        # Maximum number of tokens of prompt and output together; at most the context length.
        self.max_tokens = max_tokens
        self.banned_ids = banned_ids  # token ids that are never sampled
        self.stop_ids = stop_ids  # token ids that end the sequence when sampled; empty with ignore_eos
        self.seed = seed  # 64-bit seed; it and the output position determine every random number
        constraint = request.constraint
        self.constraint = None if constraint is None else SequenceConstraint(constraint, index)
        self.num_computed = 0
        self.num_pending = 0
        self.num_drafted = 0  # draft tokens in flight, which `num_pending` includes
        self.drafter: NgramDrafter | ModelDrafter | ChainDrafter | None = (
            None  # None: rows of this sequence never have draft tokens
        )
        self.branches: list[
            Branch
        ] = []  # alternatives to the draft tokens in flight; the sequence also owns their pages
        self.draft_counts: DraftCounts | None = None  # None: no draft tokens of this sequence were verified
        # Number of results in flight to ignore, the oldest first: their tokens were forced after the launch.
        self.num_superseded = 0
        self.num_undelivered = 0  # number of forced tokens at the end of `ids` that are in no Delta yet
        self.num_cached = -1  # number of cached prompt tokens at the first admission; -1 before it
        # Number of computed tokens at the last retraction; 0 after the sequence was admitted again.
        self.num_retracted = 0
        self.num_shared = 0  # number of leading tokens whose pages belong to the prefix tree
        self.pages: list[int] = []
        self.page_keys: list[bytes] = []  # keys of its first full pages, extended on demand (`page_keys.py`)
        self.locked_node: Any = None  # node of the prefix tree where the shared pages end; locked by this sequence
        self.sequence_index = -1  # row in the scheduler's and the device's tables while running; -1 at other times
        self.finish: Finish | None = None
        self.namespace = namespace  # sequences of different namespaces never share pages
        self.urgency = urgency  # with priorities, sequences with a higher urgency run first
        start = request.logprobs.start if request.logprobs is not None else -1
        # Next prompt position whose log-probability is missing.
        self.next_logprob = start if start >= 0 else self.num_prompt
        self.prompt_logprobs: Logprobs | None = None  # collected until the first output, then sent
        self.parts = Parts.of(request)

    def restarted(self) -> Sequence:
        """Return a copy with only the prompt, for another scheduler."""
        return Sequence(
            self.request,
            self.index,
            self.ids[: self.num_prompt],
            max_tokens=self.max_tokens,
            stop_ids=self.stop_ids,
            seed=self.seed,
            namespace=self.namespace,
            banned_ids=self.banned_ids,
            urgency=self.urgency,
        )

    @property
    def keys(self) -> list[int]:
        """The values that the prefix tree compares: the ids of the known tokens, with hash values for media tokens."""
        return self.ids if self.media is None else self.media.keys + self.ids[self.num_prompt :]

    @property
    def output_ids(self) -> list[int]:
        """Known output tokens."""
        return self.ids[self.num_prompt :]

    @property
    def next_host_data(self) -> HostData:
        """Host data for the token after the known ones. Raises `RuntimeError` if the sequence has no constraint."""
        if self.constraint is None:
            raise RuntimeError(f"{self!r} has no constraint.")
        return self.constraint.data_after(len(self.ids) - self.num_prompt, self.ids, self.num_prompt)

    @property
    def num_output(self) -> int:
        """Number of known and pending output tokens."""
        return len(self.ids) + self.num_pending - self.num_prompt

    @property
    def num_tokens(self) -> int:
        """Number of known and pending tokens."""
        return len(self.ids) + self.num_pending

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.id}.{self.index} {self.num_prompt}+{self.num_output} tokens, "
            f"computed {self.num_computed}, row {self.sequence_index}, {self.finish})"
        )
