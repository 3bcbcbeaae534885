"""What a user asks for and what comes back: frozen, read by all parts of the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple
from uuid import uuid4

from runtime.errors import InvalidRequest

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 128
MAX_BIASES = 1024

_request_ids = count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when generation ends. Names are the native API's.

    Raises `InvalidRequest` naming the parameter when a value is out of range.
    """

    max_new_tokens: int | None = 128  # None: until the context ends
    min_new_tokens: int = 0
    temperature: float = 1.0  # below 1e-6 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False  # also ignores stop_token_ids; stop strings still work
    n: int = 1
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-6 or self.top_k == 1

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None:
                continue
            if not math.isfinite(value) or not low <= value <= high:
                raise InvalidRequest(
                    f"{name} must be {_range_text(low, high, value)}, not {value}.", param=name
                )
        if self.top_p <= 0:
            raise InvalidRequest(f"top_p must be in (0, 1], not {self.top_p}.", param="top_p")
        if self.top_k == 0:
            raise InvalidRequest("top_k must be -1 (off) or at least 1, not 0.", param="top_k")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens ({self.min_new_tokens}) must not exceed max_new_tokens "
                f"({self.max_new_tokens}).",
                param="min_new_tokens",
            )
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS or len(self.stop_token_ids) > MAX_STOPS:
            raise InvalidRequest(f"At most {MAX_STOPS} stops are allowed.", param="stop")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"A stop string must have 1 to {MAX_STOP_CHARS} characters.", param="stop"
                )

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequest(f"logit_bias may name at most {MAX_BIASES} tokens.", param="logit_bias")
        for token_id, bias in self.logit_bias.items():
            if math.isnan(bias) or not -1e6 <= bias <= 1e6:
                raise InvalidRequest(
                    f"logit_bias of token {token_id} is not a usable number.", param="logit_bias"
                )


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_new_tokens", 0, 2**31 - 1),
    ("min_new_tokens", 0, 2**31 - 1),
    ("temperature", 0, 1e3),
    ("top_p", 0, 1),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0, 1),
    ("frequency_penalty", -2, 2),
    ("presence_penalty", -2, 2),
    ("repetition_penalty", 1e-3, 2),
    ("n", 1, MAX_CHOICES),
    ("seed", -(2**63), 2**64 - 1),
    ("stream_interval", 1, 2**31 - 1),
)


def _range_text(low: float, high: float, value: float) -> str:
    if high < 2**31 - 1:
        return f"in [{low:g}, {high:g}]"
    return f"at least {low:g}" if value < low else f"at most {high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobParams:
    """Which log-probabilities to return with the tokens."""

    start: int = -1  # first prompt position whose logprob is wanted; -1: of the output only
    top: int = 0  # alternatives per position
    token_ids: tuple[int, ...] = ()  # logprobs of these ids at every position
    text: bool = False  # decode the ids too

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and what to do with it. `ids` is None until the tokenizer filled it in.

    With `wants_embedding` no token is generated: the last hidden state of the prompt's last token comes back, scaled
    to length 1. `id` is ours and unique in the process; `label` is what the client calls it (`rid`) and may repeat.
    """

    text: str | None = None
    ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: LogprobParams | None = None
    add_special_tokens: bool = True  # chat templates write their own
    truncate: bool = False  # cut a too long prompt instead of refusing it
    wants_embedding: bool = False
    label: str = field(default_factory=lambda: uuid4().hex)
    id: int = field(default_factory=lambda: next(_request_ids))


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
    picked: list[list[tuple[float, int]] | None]  # [N], empty when none were asked for


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
