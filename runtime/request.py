"""Requests and their results. Their values are immutable, so that all parts of the engine can read them."""

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

    start: int = -1  # index of the first prompt token with log-probabilities; -1: only output tokens have them
    top: int = 0  # number of alternatives (the likeliest tokens) at each position
    token_ids: tuple[int, ...] = ()  # ids whose log-probabilities are returned at every position
    text: bool = False  # whether the answer contains the tokens' texts (OpenAI APIs: texts instead of ids)

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
    """The sender of a request, and what its headers say."""

    labels: tuple[str, ...] = ()  # values of the metric labels in `ObservePlan.request_labels`, from a header
    trace: tuple[tuple[str, str], ...] = ()  # W3C trace-context headers, if requests are traced
    prefilled: bool = False  # whether a prefill server computes the prompt, so that the engine waits for its pages


ANONYMOUS = Caller()


class Adapter(NamedTuple):
    """A LoRA adapter that the engine serves. If another adapter is loaded under the same name, it gets a new id."""

    id: int  # unique in the process
    name: str
    path: str  # folder on this machine
    pinned: bool = False  # whether it keeps its device slot and is not evicted from host memory
    content: str = ""  # digest of its files, equal on all servers; "": no other process may use its KV pages


class Service(NamedTuple):
    """How soon a client needs its answer, and which prefix should stay cached for its next request."""

    timeout_s: float | None = None  # seconds after which the client does not need the answer any more; None: no limit
    tier: str | None = None  # OpenAI's service tier; with priorities, it implies a priority
    pin: str | None = None  # name under which the pages of the prompt are pinned in the cache; None: not pinned


USUAL = Service()


class SessionParams(NamedTuple):
    """The session of a request, and the earlier request whose tokens it continues."""

    id: str
    rid: str | None = None  # label of the request to continue; None: start with no earlier tokens
    offset: int = 0  # how many tokens of that request to keep; negative: how many to cut from its end; 0: keep all
    replace: bool = False  # whether to forget the requests that continue `rid`, or all requests if it is None
    drop_previous_output: bool = False  # whether to continue only the prompt of that request, without its output


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt with its parameters. `ids` is None until the tokenizer sets it.

    With `wants_embedding`, the engine generates no token, and returns the pooled vector or a classifier's scores
    (`runtime/layers/pooler.py`). `id` is assigned by Penstock and unique in the process. `label` is the client's name
    for the request (`rid`). Two running requests of one owner have different labels. `owner` names the client, which
    may abort its own requests by their labels.
    """

    text: str | None = None
    second_text: str | None = None  # second text of a pair for a cross-encoder
    ids: tuple[int, ...] | None = None
    second_start: int | None = None  # index in `ids` where the second text begins, if the tokenizer marks it
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: LogprobParams | None = None
    returns_ids: bool = False  # whether the first chunk of each choice contains the prompt's ids
    add_special_tokens: bool = True  # False for chats, because their template writes special tokens itself
    truncate: bool = False  # whether to cut a prompt that is too long, instead of refusing it
    cut_output: bool = False  # whether to lower `max_new_tokens` to what fits, instead of refusing the request
    # Keep this number of tokens at the end of the prompt; -1: as many as fit with the output; None: keep all.
    keep_last: int | None = None
    wants_embedding: bool = False
    returns_hidden: bool = False  # whether the last chunk of each choice contains the hidden states of all its tokens
    num_with_hidden: int = 1  # number of requests of the same call that return hidden states and share one size limit
    # The last chunk of each choice contains the routed experts of the tokens from this index on. None: not requested.
    experts_from: int | None = None
    grammar: Grammar | None = None  # grammar of the output, from which the engine creates the constraint
    # (`cache_salt`, `extra_key`). Requests share cached prefixes only within one namespace.
    namespace: tuple[str | None, str | None] | None = None
    # Name -> integer that layers read for the request's rows, for example the slot of an adapter. The default is 0.
    row_values: Mapping[str, int] = field(default_factory=dict)
    lora: str | None = None  # name of an adapter, or None
    adapter: Adapter | None = None  # the adapter of this name, set by the engine
    priority: int | None = None  # None: the priority of the service tier, or else below all priorities
    service: Service = USUAL
    session: SessionParams | None = None
    # Whether an earlier prompt of the same call was admitted, so that this one is admitted even to a full queue.
    follows: bool = False
    shown_special_ids: frozenset[int] = frozenset()  # special tokens that are shown even with `skip_special_tokens`
    thinking: ThinkingLimit | None = None  # limit of the reasoning block, enforced by the constraint
    # Media in the order of their placeholders in the text. Becomes () when `prompt_media` has the encoded media.
    media: tuple[MediaSource, ...] = ()
    prompt_media: PromptMedia | None = None
    constraint: Constraint | None = None  # created from the grammar, or by Penstock itself
    on_logits: Callable[[list[int], Any], Any] | None = None  # see `LogitsHook`; set only by callers in this process
    counted: bool = True  # whether metrics count the request; False for health checks
    label: str = field(default_factory=lambda: uuid4().hex)
    batch: str | None = None  # the client's name for a batch of requests; `label` is then this name with a number
    owner: str = ""
    caller: Caller = ANONYMOUS
    id: int = field(default_factory=lambda: next(_request_ids))

    @property
    def returns_parts(self) -> bool:
        """Whether the answer contains hidden states or routed experts of tokens."""
        return self.returns_hidden or self.experts_from is not None

    @property
    def cuts(self) -> bool:
        """Whether the request wants a prompt that is too long to be cut."""
        return self.truncate or self.keep_last is not None


def renewed(request: Request, ids: tuple[int, ...]) -> Request:
    """Return a new request with the same parameters, a new `id` and `label`, and these token ids."""
    return replace(request, ids=ids, label=uuid4().hex, batch=None, id=next(_request_ids))


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
    matched: int | str | None = None  # for "stop": the stop token id or stop string that matched
    length: int | None = None  # for "length": the limit that was reached
    message: str | None = None  # for "abort": the reason


class DraftCounts(NamedTuple):
    """Counts of rows with draft tokens, and of the draft tokens that were proposed and accepted.

    Verifying the draft tokens of one row counts as one verification.
    """

    verified: int = 0  # number of verified rows with draft tokens
    proposed: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()  # [i]: number of rows in which i draft tokens were accepted

    def plus(self, num_proposed: int, num_accepted: int) -> DraftCounts:
        """Return the counts after one more verified row."""
        histogram = [*self.histogram, *[0] * (num_accepted + 1 - len(self.histogram))]
        histogram[num_accepted] += 1
        return DraftCounts(
            self.verified + 1, self.proposed + num_proposed, self.accepted + num_accepted, tuple(histogram)
        )

    @property
    def accept_length(self) -> float:
        """Average number of output tokens of a row with draft tokens: its accepted draft tokens and one sampled token.

        0 if there was no such row.
        """
        return 1 + self.accepted / self.verified if self.verified else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the proposed draft tokens that were accepted. 0 if none was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def as_meta(self) -> dict[str, Any]:
        """Return these counts as fields of `meta_info`, with SGLang's names."""
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
    drafts: DraftCounts | None = None  # None: no draft tokens have been verified


class Logprobs(NamedTuple):
    """Log-probabilities of N consecutive tokens. A pair is (log-probability, token id)."""

    chosen: list[tuple[float | None, int]]  # [N]; the log-probability is None for the first token of a text
    top: list[list[tuple[float, int]] | None]  # [N], or empty if not requested
    requested: list[list[tuple[float, int]] | None]  # [N], or empty if not requested


def joined(first: Logprobs | None, second: Logprobs | None) -> Logprobs | None:
    """Return the log-probabilities of both parts, in order, or None if both are None."""
    if first is None or second is None:
        return first or second
    return Logprobs(first.chosen + second.chosen, first.top + second.top, first.requested + second.requested)


class TokenParts:
    """The hidden states or the routed experts of a choice's computed tokens, from index `start` on.

    Each token has an array: its hidden state, float32 [E], or its routed experts, int16 [L, k]. The scheduler adds the
    arrays after each step, and other threads may read them at the same time.
    """

    __slots__ = ("_parts", "end", "start")

    def __init__(self, start: int = 0) -> None:
        self._parts: list[tuple[int, NDArray[Any]]] = []
        self.start = start
        self.end = start  # index after the last token whose array was added

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
        """Return the array of the last token before index `count`, or None if it was not computed."""
        index = min(count, self.end) - 1
        parts = ((start, values) for start, values in reversed(self._parts) if start <= index < start + len(values))
        start, values = next(parts, (0, None))
        return None if values is None else values[index - start]


class Parts(NamedTuple):
    """The hidden states and the routed experts of a choice's tokens. A field is None if it was not requested."""

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
    ids: list[int]  # new token ids, including a stop token that ended the choice
    finish: Finish | None
    usage: Usage
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    embedding: list[float] | None = None  # with the finish, if the request wants an embedding
    parts: Parts | None = None  # parts of all tokens computed so far, if requested


class Chunk(NamedTuple):
    """A piece of one choice's output, produced by the detokenizer."""

    index: int  # index of the choice
    text: str  # text since the last chunk of this choice
    ids: list[int]  # token ids since the last chunk of this choice
    finish: Finish | None
    usage: Usage
    logprobs: Logprobs | None = None  # log-probabilities of the new ids
    prompt_logprobs: Logprobs | None = None  # only in the first chunk
    embedding: list[float] | None = None  # with the finish, if the request wants an embedding
    prompt_ids: tuple[int, ...] | None = None  # only in the first chunk, if the request returns ids
    parts: Parts | None = None  # with the finish, if requested; may also contain arrays of later tokens
