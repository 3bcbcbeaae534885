"""The record of one choice of one request. Mutable; once it is admitted, only the scheduler changes it."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import Any

from runtime.constraint import HostData, SequenceConstraint
from runtime.request import Finish, Logprobs, Request
from runtime.sampling_params import SamplingParams


class Sequence:
    """Tokens known, tokens computed, pages held.

    `ids` holds the prompt and every output token known on the host. `num_pending` counts tokens that steps
    in flight will still sample; they have a position but no value here yet. `num_computed` counts the
    tokens whose KV is, or will be once the launched steps are done, in `pages`. So a step computes positions
    [num_computed, len(ids) + num_pending) or a part of them: one rule for prefill, decode and recomputation.
    """

    __slots__ = (
        "banned_ids",
        "constraint",
        "finish",
        "ids",
        "index",
        "locked_node",
        "max_tokens",
        "namespace",
        "next_logprob",
        "num_cached",
        "num_computed",
        "num_pending",
        "num_prompt",
        "num_shared",
        "num_unsent",
        "num_void",
        "pages",
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
        self.index = index  # which of the request's n choices
        self.sampling: SamplingParams = request.sampling
        self.ids: list[int] = list(ids)
        self.num_prompt = len(self.ids)
        self.max_tokens = max_tokens  # prompt and output together, never more than the context
        self.banned_ids = banned_ids  # never sampled
        self.stop_ids = stop_ids  # ends the sequence when sampled (empty with ignore_eos)
        self.seed = seed  # 64 bits; with the output position it fixes every random choice
        constraint = request.constraint
        self.constraint = None if constraint is None else SequenceConstraint(constraint, index)
        self.num_computed = 0
        self.num_pending = 0
        self.num_void = 0  # results in flight, the oldest, whose tokens were forced and are known by now
        self.num_unsent = 0  # known tokens, the last ones, that were forced and that no Delta has brought yet
        self.num_cached = -1  # prompt tokens found in the prefix tree at first admission; -1 before it
        self.num_shared = 0  # leading tokens whose pages the prefix tree owns
        self.pages: list[int] = []
        self.locked_node: Any = None  # of the prefix tree, where the shared pages end
        self.sequence_index = -1  # row in the request tables and in device state while running
        self.finish: Finish | None = None
        self.namespace = namespace  # sequences of different namespaces never share pages
        self.urgency = urgency  # larger ones go first, where requests have priorities
        wanted = request.logprobs.start if request.logprobs is not None else -1
        self.next_logprob = wanted if wanted >= 0 else self.num_prompt  # first position still to be asked for
        self.prompt_logprobs: Logprobs | None = None  # gathered until the first output

    def restarted(self) -> Sequence:
        """The same work from the start, for another scheduler."""
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
    def output_ids(self) -> list[int]:
        """The output tokens that are known."""
        return self.ids[self.num_prompt :]

    @property
    def next_host_data(self) -> HostData:
        """What the token behind the known ones waits for. Raises `RuntimeError` without a constraint."""
        if self.constraint is None:
            raise RuntimeError(f"{self!r} has no constraint.")
        return self.constraint.data_after(len(self.ids) - self.num_prompt, self.ids, self.num_prompt)

    @property
    def num_output(self) -> int:
        """Output tokens so far, the pending ones included."""
        return len(self.ids) + self.num_pending - self.num_prompt

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return len(self.ids) + self.num_pending

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.id}.{self.index} {self.num_prompt}+{self.num_output} tokens, "
            f"computed {self.num_computed}, row {self.sequence_index}, {self.finish})"
        )
