"""What a user asks for and what comes back: frozen, read by all parts of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal, NamedTuple
from uuid import uuid4

from runtime.constraint import Constraint
from runtime.errors import InvalidRequest
from runtime.grammar_spec import Grammar, ThinkingLimit
from runtime.sampling_params import MAX_BIASES, SamplingParams, grammars_of

MAX_TOP_LOGPROBS = 128
LOWEST_LOGPROB = -3.4028234663852886e38  # of a float32; stands for minus infinity, which JSON cannot say

_request_ids = count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobParams:
    """Which log-probabilities to return with the tokens."""

    start: int = -1  # first prompt position whose logprob is wanted; -1: of the output only
    top: int = 0  # alternatives per position
    token_ids: tuple[int, ...] = ()  # logprobs of these ids at every position
    text: bool = False  # name the tokens by their text too; in OpenAI APIs: by that alone, else by their ids

    def __post_init__(self) -> None:
        if not 0 <= self.top <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}], not {self.top}.",
                param="top_logprobs_num",
            )
        if len(self.token_ids) > MAX_BIASES:
            raise InvalidRequest(
                f"token_ids_logprob may name at most {MAX_BIASES} tokens.", param="token_ids_logprob"
            )
        if self.start < -1:
            raise InvalidRequest(
                "logprob_start_len must be -1 or a prompt position.", param="logprob_start_len"
            )


class Caller(NamedTuple):
    """What is known of the sender beside the request itself."""

    labels: tuple[str, ...] = ()  # values of `ObservePlan.request_labels`, from a header
    trace: tuple[tuple[str, str], ...] = ()  # headers of W3C's trace context, where requests are traced


NOBODY = Caller()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and what to do with it. `ids` is None until the tokenizer filled it in.

    With `wants_embedding` no token is generated: the vector that the model's pooling gives comes back, or a
    classifier's scores (`runtime/layers/pooler.py`). `id` is ours and unique in the process; `label` is what the client
    calls it (`rid`) and may repeat. `owner` names the client, who may end its own requests by their labels.
    """

    text: str | None = None
    second_text: str | None = None  # of a pair, which a cross-encoder compares with the first
    ids: tuple[int, ...] | None = None
    second_start: int | None = None  # in the ids: where the second text begins, if the tokenizer marks it
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: LogprobParams | None = None
    add_special_tokens: bool = True  # chat templates write their own
    truncate: bool = False  # cut a too long prompt instead of refusing it
    cut_output: bool = False  # where all of `max_new_tokens` would not fit, generate as many as do
    # So many tokens of the prompt's end; -1: as many as leave room for the output.
    keep_last: int | None = None
    wants_embedding: bool = False
    grammar: Grammar | None = None  # what the output must match; the engine makes the constraint of it
    # `cache_salt` and `extra_key`: shares prefixes within it.
    namespace: tuple[str | None, str | None] | None = None
    # What layers are told of its rows, 0 where others say nothing: which adapter, say.
    row_values: Mapping[str, int] = field(default_factory=dict)
    priority: int | None = None  # None: after all that have one
    follows: bool = False  # another prompt of its call was let in: the queue takes this one too, full or not
    shown_special_ids: frozenset[int] = frozenset()  # special tokens that stay in the text all the same
    thinking: ThinkingLimit | None = None  # how long the model may think; it becomes part of the constraint
    constraint: Constraint | None = None  # of a grammar, or of our own making
    counted: bool = True  # by the metrics of requests; health checks are not
    label: str = field(default_factory=lambda: uuid4().hex)
    owner: str = ""
    caller: Caller = NOBODY
    id: int = field(default_factory=lambda: next(_request_ids))

    @property
    def cuts(self) -> bool:
        """Whether a prompt that is too long is cut."""
        return self.truncate or self.keep_last is not None


def with_grammar(request: Request) -> Request:
    """The request with the grammar that its sampling parameters name, if they name one.

    Raises `InvalidRequest` for more than one grammar, from wherever they come.
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
    """Why a sequence ended."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None  # stop: the token id or string
    length: int | None = None  # length: the limit that was reached
    message: str | None = None  # abort


class Usage(NamedTuple):
    """Token counts of one choice so far."""

    prompt: int
    output: int
    cached: int


class Logprobs(NamedTuple):
    """Log-probabilities of N consecutive tokens. Pairs are (logprob, token id)."""

    chosen: list[tuple[float | None, int]]  # [N]; None where nothing precedes the token
    top: list[list[tuple[float, int]] | None]  # [N], empty when none were asked for
    requested: list[list[tuple[float, int]] | None]  # [N], empty when none were asked for


class Delta(NamedTuple):
    """What one step added to one choice: from the scheduler to the detokenizer, at most one per step."""

    request_id: int
    index: int
    ids: list[int]  # new token ids; the token that matched a stop id is included
    finish: Finish | None
    usage: Usage
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    embedding: list[float] | None = None  # with the finish, where the request wants one


class Chunk(NamedTuple):
    """A piece of one choice's output, as it leaves the detokenizer."""

    index: int  # which of the request's n choices
    text: str  # new text since the last chunk of this choice
    ids: list[int]  # new token ids
    finish: Finish | None
    usage: Usage
    logprobs: Logprobs | None = None  # of the new ids
    prompt_logprobs: Logprobs | None = None  # once, with the first chunk
    embedding: list[float] | None = None  # with the finish, where the request wants one
