"""Requests and their results: immutable values that all parts of the engine read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from runtime.constraint import Constraint
from runtime.errors import InvalidRequest
from runtime.grammar_spec import Grammar, ThinkingLimit
from runtime.media_source import MediaSource, PromptMedia
from runtime.sampling_params import MAX_BIASES, SamplingParams, grammars_of

Floats = NDArray[np.float32]
MAX_TOP_LOGPROBS = 128
LOWEST_LOGPROB = -3.4028234663852886e38  # lowest float32; stands for minus infinity, which JSON cannot represent

_request_ids = count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobParams:
    """The log-probabilities to return with the tokens."""

    start: int = -1  # first prompt position to score; -1: score the output only
    top: int = 0  # number of alternatives per position
    token_ids: tuple[int, ...] = ()  # ids whose log-probabilities are returned at every position
    text: bool = False  # whether to return the tokens' text (OpenAI APIs: text in place of ids)

    def __post_init__(self) -> None:
        if not 0 <= self.top <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}], not {self.top}.",
                param="top_logprobs_num",
            )
        if len(self.token_ids) > MAX_BIASES:
            raise InvalidRequest(f"token_ids_logprob may name at most {MAX_BIASES} tokens.", param="token_ids_logprob")
        if self.start < -1:
            raise InvalidRequest("logprob_start_len must be -1 or a prompt position.", param="logprob_start_len")


class Caller(NamedTuple):
    """The sender of a request, as far as the server knows it."""

    labels: tuple[str, ...] = ()  # values of `ObservePlan.request_labels` from a header
    trace: tuple[tuple[str, str], ...] = ()  # W3C trace-context headers, if requests are traced
    prefilled: bool = False  # whether a prefill server computes the prompt; its pages are awaited


ANONYMOUS = Caller()


class Adapter(NamedTuple):
    """A LoRA adapter that the engine serves. An adapter that is loaded again under the same name gets another id."""

    id: int  # unique in the process
    name: str
    path: str  # folder on this machine
    pinned: bool = False  # whether it keeps its device slot and its place in host memory


class Service(NamedTuple):
    """How soon a client needs its answer, and what should stay cached for its next request."""

    timeout_s: float | None = None  # seconds after which the answer is useless; None: no limit
    tier: str | None = None  # OpenAI's service tier; with priorities, it implies a priority
    pin: str | None = None  # name under which the prompt's pages are pinned; None: they are not pinned


USUAL = Service()


class SessionParams(NamedTuple):
    """The session of a request, and the earlier request whose tokens it continues."""

    id: str
    rid: str | None = None  # label of the request to continue; None: start without earlier tokens
    offset: int = 0  # number of its tokens to keep; if negative, number to cut from the end; 0: keep all
    replace: bool = False  # forget the session's requests after `rid`, or all requests if `rid` is None
    drop_previous_output: bool = False  # continue only the prompt of the earlier request


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt with its parameters. `ids` is None until the tokenizer sets it.

    With `wants_embedding`, the engine generates no token, and returns the pooled vector or a classifier's scores
    (`runtime/layers/pooler.py`). `id` is assigned by Penstock and unique in the process. `label` is the client's name
    for the request (`rid`). Two running requests of one owner have different labels. `owner` names the client, which
    may end its own requests by their labels.
    """

    text: str | None = None
    second_text: str | None = None  # second text of a pair for a cross-encoder
    ids: tuple[int, ...] | None = None
    second_start: int | None = None  # index in `ids` of the second text's first token, if the tokenizer marks it
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: LogprobParams | None = None
    returns_ids: bool = False  # whether the first chunk of each choice contains the prompt's ids
    add_special_tokens: bool = True  # False for chats, whose template writes special tokens itself
    truncate: bool = False  # cut a prompt that is too long in place of refusing it
    cut_output: bool = False  # lower `max_new_tokens` to what fits in place of refusing
    # Keep this number of tokens at the end of the prompt; -1: all that fit beside the output; None: keep all.
    keep_last: int | None = None
    wants_embedding: bool = False
    returns_hidden: bool = False  # whether the last chunk of each choice contains the hidden states of its tokens
    num_with_hidden: int = 1  # number of requests with hidden states in the same call; they share one size limit
    # The last chunk of each choice has the routed experts of the tokens from this index on. None: not requested.
    experts_from: int | None = None
    grammar: Grammar | None = None  # grammar of the output, from which the engine creates the constraint
    # (`cache_salt`, `extra_key`). Requests share cached prefixes only within one namespace.
    namespace: tuple[str | None, str | None] | None = None
    # Integers by name that layers read for the request's rows, for example an adapter's index. Default: 0.
    row_values: Mapping[str, int] = field(default_factory=dict)
    lora: str | None = None  # name of an adapter
    adapter: Adapter | None = None  # the adapter with this name, set by the engine
    priority: int | None = None  # None: the priority of the service tier, or after all requests with a priority
    service: Service = USUAL
    session: SessionParams | None = None
    follows: bool = False  # an earlier prompt of the same call was admitted; a full queue admits this one
    shown_special_ids: frozenset[int] = frozenset()  # special tokens that `skip_special_tokens` keeps
    thinking: ThinkingLimit | None = None  # limit of the reasoning block, enforced by the constraint
    # Images in the order of their placeholders in the text. Becomes () when `prompt_media` holds the encoded images.
    media: tuple[MediaSource, ...] = ()
    prompt_media: PromptMedia | None = None
    constraint: Constraint | None = None  # created from a grammar, or by Penstock itself
    on_logits: Callable[[list[int], Any], Any] | None = None  # see `LogitsHook`; set only by callers in this process
    counted: bool = True  # whether request metrics count it; False for health checks
    label: str = field(default_factory=lambda: uuid4().hex)
    owner: str = ""
    caller: Caller = ANONYMOUS
    id: int = field(default_factory=lambda: next(_request_ids))

    @property
    def returns_parts(self) -> bool:
        """Whether the answer has the hidden states or the routed experts of tokens."""
        return self.returns_hidden or self.experts_from is not None

    @property
    def cuts(self) -> bool:
        """Whether the request cuts a prompt that is too long."""
        return self.truncate or self.keep_last is not None


def renewed(request: Request, ids: tuple[int, ...]) -> Request:
    """Return a new request for other token ids, with the same parameters. Its `id` and `label` are new."""
    return replace(request, ids=ids, label=uuid4().hex, id=next(_request_ids))


def with_grammar(request: Request) -> Request:
    """Return the request with the grammar that its sampling parameters specify, if any.

    Raises `InvalidRequest` if more than one grammar is specified.
    """
    named = grammars_of(request.sampling)
    if request.grammar is not None:
        named = [request.grammar, *named]
    if len(named) > 1:
        first, second = (grammar.param or grammar.kind for grammar in named[:2])
        raise InvalidRequest(f"{second} and {first} exclude each other.", param=second)
    if not named or named[0] is request.grammar:
        return request
    return replace(request, grammar=named[0])


class Finish(NamedTuple):
    """The reason why a sequence ended."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None  # for "stop": the token id or string that matched
    length: int | None = None  # for "length": the limit that was reached
    message: str | None = None  # for "abort": the reason


class DraftCounts(NamedTuple):
    """How many draft tokens were proposed and accepted, and in how many rows.

    One row with draft tokens is one verification.
    """

    verified: int = 0  # rows with draft tokens
    proposed: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()  # number of rows by number of accepted draft tokens, starting at 0

    def plus(self, num_proposed: int, num_accepted: int) -> DraftCounts:
        """Return the counts with one more verified row."""
        histogram = [*self.histogram, *[0] * (num_accepted + 1 - len(self.histogram))]
        histogram[num_accepted] += 1
        return DraftCounts(
            self.verified + 1, self.proposed + num_proposed, self.accepted + num_accepted, tuple(histogram)
        )

    @property
    def accept_length(self) -> float:
        """Average number of tokens from a row with draft tokens: the accepted draft tokens and one sampled token.

        0 without such rows.
        """
        return 1 + self.accepted / self.verified if self.verified else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the proposed draft tokens that were accepted. 0 if none was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def as_meta(self) -> dict[str, Any]:
        """Return the fields of `meta_info`, with the names of SGLang."""
        return {
            "spec_verify_ct": self.verified,
            "spec_accept_length": self.accept_length,
            "spec_accept_rate": self.accept_rate,
            "spec_num_proposed_drafts": self.proposed,
            "spec_num_correct_drafts": self.accepted,
            "spec_correct_drafts_histogram": self.histogram,
        }


class Usage(NamedTuple):
    """Token counts of one choice so far."""

    prompt: int
    output: int
    cached: int
    drafts: DraftCounts | None = None  # None: no draft tokens were verified


class Logprobs(NamedTuple):
    """Log-probabilities of N consecutive tokens. Pairs are (log-probability, token id)."""

    chosen: list[tuple[float | None, int]]  # [N]; None for the first token of a text
    top: list[list[tuple[float, int]] | None]  # [N], or empty if not requested
    requested: list[list[tuple[float, int]] | None]  # [N], or empty if not requested


def joined(first: Logprobs | None, second: Logprobs | None) -> Logprobs | None:
    """Return the log-probabilities of both parts, in order. None: there are no tokens."""
    if first is None or second is None:
        return first or second
    return Logprobs(first.chosen + second.chosen, first.top + second.top, first.requested + second.requested)


class TokenParts:
    """The hidden states or the routed experts of a choice's computed tokens, from index `start` on.

    Each token has an array: its hidden state, float32 [E], or its routed experts, int16 [L, k]. The scheduler adds the
    arrays of each step. Other threads may read meanwhile.
    """

    __slots__ = ("_parts", "end", "start")

    def __init__(self, start: int = 0) -> None:
        self._parts: list[tuple[int, NDArray[Any]]] = []
        self.start = start
        self.end = start  # index after the last token that has an array

    def add(self, start: int, values: NDArray[Any]) -> None:
        """Add the arrays [N, ...] of the tokens from index `start` on. Earlier arrays of these tokens are replaced."""
        if start < self.start:
            start, values = self.start, values[self.start - start :]
        if len(values):
            self._parts.append((start, values))
        if start <= self.end:
            self.end = max(self.end, start + len(values))

    def first(self, count: int) -> NDArray[Any] | None:
        """Return a copy of the arrays [N, ...] of the tokens before index `count`, or None if there are none.

        The copy takes up to 30 ms.
        """
        count = min(count, self.end) - self.start
        if count <= 0:
            return None
        parts = list(self._parts)
        whole = np.empty((count, *parts[0][1].shape[1:]), parts[0][1].dtype)
        for index, values in parts:
            start = index - self.start
            whole[start : start + len(values)] = values[: max(count - start, 0)]
        return whole

    def last(self, count: int) -> NDArray[Any] | None:
        """Return the array of the last computed token before index `count`, or None."""
        index = min(count, self.end) - 1
        parts = ((start, values) for start, values in reversed(self._parts) if start <= index < start + len(values))
        start, values = next(parts, (0, None))
        return None if values is None else values[index - start]


class Parts(NamedTuple):
    """The hidden states and the routed experts of a choice's computed tokens. None: not requested."""

    hidden: TokenParts | None
    experts: TokenParts | None

    @classmethod
    def of(cls, request: Request) -> Parts | None:
        """Return empty parts for a choice of the request, or None if the request wants neither."""
        if not request.returns_parts:
            return None
        return cls(
            TokenParts() if request.returns_hidden else None,
            None if request.experts_from is None else TokenParts(request.experts_from),
        )


class Delta(NamedTuple):
    """The output that one step added to one choice. The scheduler sends it to the detokenizer."""

    request_id: int
    index: int
    ids: list[int]  # new token ids, including a token that matched a stop id
    finish: Finish | None
    usage: Usage
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    embedding: list[float] | None = None  # with the finish, if the request wants an embedding
    parts: Parts | None = None  # of the tokens computed so far, if requested


class Chunk(NamedTuple):
    """A piece of one choice's output, produced by the detokenizer."""

    index: int  # index of the choice
    text: str  # new text since the last chunk of this choice
    ids: list[int]  # new token ids
    finish: Finish | None
    usage: Usage
    logprobs: Logprobs | None = None  # log-probabilities of the new ids
    prompt_logprobs: Logprobs | None = None  # only in the first chunk
    embedding: list[float] | None = None  # with the finish, if the request wants an embedding
    prompt_ids: tuple[int, ...] | None = None  # only in the first chunk, if the request returns ids
    parts: Parts | None = None  # with the finish, if requested; may have arrays of further tokens
