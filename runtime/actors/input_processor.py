"""Checks requests against the model and creates their sequences."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.constraint import AllowedTokens, LogitsHook
from runtime.errors import ContextOverflow, InvalidRequest
from runtime.grammar.matching.position import Ends
from runtime.logits_processors import ProcessedLogits, check_name, load_processors
from runtime.media_source import PLURALS, check_counts
from runtime.repetition import Breakers, DryPenalties
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from runtime.sequence import Sequence
from runtime.tokenizer.tokenizer import Tokenizer

SEED_MASK = 2**64 - 1
NO_IDS: frozenset[int] = frozenset()  # one shared object, because each call of `frozenset()` would create a new one
NO_PRIORITY = -(2**31) - 1  # urgency of a request without a priority: below all priorities
# Maximum number of hidden-state values that one HTTP call or Python request may ask for: 64 MiB, or 170 MB of JSON.
MAX_HIDDEN_NUMBERS = 2**24
MAX_EXPERT_NUMBERS = 2**25  # maximum number of expert ids in one response: 64 MiB, or 180 MB of base64
DEFAULT_TIER = "default"  # priority tier of requests that name no tier or an unknown one
IDS_AT_ONCE = 16_384  # number of ids per C call that checks them; a call holds the GIL for 0.2 ms
CHOICE_STRIDE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: seeds of neighbouring choices are far apart


class InputProcessor:
    """Checks requests against the vocabulary and the context length, and sets stop tokens and seeds."""

    def __init__(self, plan: Plan, facts: ModelFacts, tokenizer: Tokenizer | None) -> None:
        self.context_length = plan.model.context_length
        self._vocab_size = facts.vocab_size
        self._eos_ids = facts.eos_ids | (tokenizer.eos_ids if tokenizer else frozenset())
        self._tokenizer = tokenizer
        self._is_embedding = plan.model.is_embedding
        # Why results may depend on other requests in the batch; None if they do not.
        self.dependence = plan.model.dependence
        self._hidden_size = facts.hidden_size
        self._returns_hidden, self._returns_experts = plan.serve.returns_hidden, plan.experts.returned
        self._experts_of_token = facts.num_layers * facts.num_experts_per_token
        self._priorities = plan.scheduler.priorities
        self._tiers = plan.scheduler.tiers
        self._low_first = plan.scheduler.low_priority_first
        self._text_limit = tokenizer.text_limit if tokenizer else None
        self._suffix = _suffix(tokenizer) if tokenizer and self._is_embedding else ()
        self._breakers = _breakers(tokenizer)
        self._processors = load_processors(plan.serve.logits_processors or ())
        self._prefills = plan.cache.storage == "prefill"
        self._media = plan.media
        self._random = random.Random(plan.model.random_seed)
        self.on_logits: Callable[[list[int], Any], Any] | None = (
            None  # the `LogitsHook` function for all new requests, or None
        )

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest` if a field of the request is invalid, before the prompt is encoded."""
        if request.text is None and request.ids is None:
            raise InvalidRequest("Either text or input_ids is required.", param="text")
        if request.ids is not None:
            if not request.ids:
                raise InvalidRequest("The prompt is empty.", param="input_ids")
            # The length is checked before the ids, because a body can hold millions of ids, and `check_ids` reads all
            # of them.
            if not request.cuts and len(request.ids) > self.context_length:
                raise self._too_long(request, len(request.ids))
            self.check_ids(request.ids)
        elif self._text_limit is not None:
            for text in _uncut_texts(request):
                self._text_limit.check_length(text, self.context_length)
        if request.media:
            self._check_media(request)
        if request.priority and not self._priorities:
            raise InvalidRequest(
                "Priorities are off on this server; start it with --enable-priority-scheduling.",
                param="priority",
            )
        sampling = request.sampling
        ids_of_param = {
            "stop_token_ids": sampling.stop_token_ids,
            "logit_bias": sampling.logit_bias,
            "allowed_token_ids": sampling.allowed_token_ids,
        }
        if request.logprobs is not None:
            ids_of_param["token_ids_logprob"] = request.logprobs.token_ids
        for param, token_ids in ids_of_param.items():
            invalid = next((i for i in token_ids or () if not 0 <= i < self._vocab_size), None)
            if invalid is not None:
                raise InvalidRequest(
                    f"Token ids in {param} must be in [0, {self._vocab_size}), not {invalid}.", param=param
                )
        if sampling.allowed_token_ids is not None and request.grammar is not None:
            raise InvalidRequest(
                "allowed_token_ids and a grammar for the output exclude each other; send one of them.",
                param="allowed_token_ids",
            )
        self._banned_ids(sampling)
        if request.returns_hidden and not self._returns_hidden:
            raise InvalidRequest(
                "Hidden states are off on this server; start it with --enable-return-hidden-states.",
                param="return_hidden_states",
            )
        if request.experts_from is not None and not self._returns_experts:
            raise InvalidRequest(
                "The chosen experts are not recorded on this server; start it with --enable-return-routed-experts.",
                param="return_routed_experts",
            )
        if sampling.deterministic and self.dependence is not None:
            raise InvalidRequest(f"deterministic cannot be promised: {self.dependence}.", param="deterministic")
        name = sampling.custom_logit_processor
        if name is not None:
            check_name(name, self._processors)
        if sampling.custom_params and name is None:
            raise InvalidRequest("custom_params requires custom_logit_processor.", param="custom_params")
        if self._tokenizer is None and (sampling.stop or sampling.stop_regex):
            raise InvalidRequest("Stop strings need a tokenizer; this engine has none.", param="stop")
        if request.grammar is not None and request.wants_embedding:
            raise InvalidRequest("Embeddings cannot be constrained by a grammar.", param=request.grammar.kind)
        if request.wants_embedding:
            _check_embedding(request)
        elif self._is_embedding:
            raise InvalidRequest(
                "This engine only computes embeddings (--is-embedding, or an embedding model); it cannot generate text."
            )

    def breaker_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Return the ids of all tokens that contain a sequence breaker of the DRY penalty.

        Takes 0.1 s for new breakers, so call it on a thread.
        """
        if not sampling.dry_multiplier or not sampling.dry_sequence_breakers:
            return NO_IDS
        if self._breakers is None:
            raise InvalidRequest(
                "This model's tokenizer has no table of its tokens' texts: send an empty dry_sequence_breakers.",
                param="dry_sequence_breakers",
            )
        return self._breakers.ids(sampling.dry_sequence_breakers)

    def _check_media(self, request: Request) -> None:
        """Raise `InvalidRequest` if the engine does not support this kind of media, or if the request has too many."""
        param = request.media[0].param
        plural = PLURALS[request.media[0].kind]
        if not self._media.enabled:
            raise InvalidRequest(f"No {plural} are accepted: {self._media.refusal}.", param=param)
        check_counts(request.media, self._media.limits)
        if request.cuts:
            raise InvalidRequest(f"A prompt with {plural} cannot be truncated; leave out truncation.",
                                 param="truncation")  # fmt: skip
        if request.wants_embedding:
            raise InvalidRequest(f"{plural.capitalize()} cannot be embedded yet; send text.", param=param)

    def check_texts(self, request: Request) -> None:
        """Raise `ContextOverflow` if a text is too long for the context even before encoding.

        Call it on a thread for long texts.
        """
        if self._text_limit is not None:
            for text in _uncut_texts(request):
                self._text_limit.check([text], self.context_length)

    def check_ids(self, ids: Seq[int]) -> None:
        """Raise `InvalidRequest` if an id is outside the vocabulary. Takes milliseconds for 100,000 ids."""
        for start in range(0, len(ids), IDS_AT_ONCE):
            chunk = ids[start : start + IDS_AT_ONCE]
            if min(chunk) < 0 or max(chunk) >= self._vocab_size:
                raise InvalidRequest(f"Token ids must be in [0, {self._vocab_size}).", param="input_ids")

    def check_pair(self, second: int) -> None:
        """Raise `ContextOverflow` if the first text of a pair leaves no tokens for the second.

        Only the second text may be truncated. `second` is the position of its first token.
        """
        if second + len(self._suffix) >= self.context_length:
            raise ContextOverflow(
                f"The first text of a pair is too long: its {second} tokens leave none for the second text within "
                f"the model's context length ({self.context_length} tokens).",
                param="query",
            )

    def prepare(
        self, request: Request, ids: tuple[int, ...], breaker_ids: frozenset[int] = NO_IDS
    ) -> tuple[Request, list[Sequence]]:
        """Create the request's sequences. Return the request with its final ids, and the sequences.

        Truncates the ids if the request allows it. `breaker_ids` is the result of the method `breaker_ids`, which the
        caller ran on a thread. Raises `ContextOverflow` if the prompt does not fit, and `InvalidRequest` if the request
        needs something that the engine lacks.
        """
        if request.sampling.allowed_token_ids is not None:
            allowed = AllowedTokens(request.sampling.allowed_token_ids, self._vocab_size)
            request = replace(request, constraint=allowed)
        if request.sampling.custom_logit_processor is not None:
            function, params = self._processors[request.sampling.custom_logit_processor], request.sampling.custom_params
            request = replace(request, constraint=ProcessedLogits(function, params or {}, request.constraint))
        if request.sampling.dry_multiplier:
            request = replace(request, constraint=DryPenalties(request.sampling, breaker_ids, request.constraint))
        if request.on_logits is not None:
            request = replace(request, constraint=LogitsHook(request.on_logits, request.constraint))
        # Outermost, so that this function runs before all other logits processors.
        if self.on_logits is not None and not request.wants_embedding:
            request = replace(request, constraint=LogitsHook(self.on_logits, request.constraint))
        request = self._fit(request, ids)
        banned_ids = self._banned_ids(request.sampling)
        sampling, ids = request.sampling, request.ids or ()
        # With a grammar, stop tokens end the output even with ignore_eos, because the grammar allows no further text.
        ends_anyway = request.grammar is not None
        stop_ids = frozenset() if sampling.ignore_eos and not ends_anyway else self._stop_ids(request)
        new = self.context_length if sampling.max_new_tokens is None else sampling.max_new_tokens
        if request.returns_hidden:
            self._check_hidden(min(len(ids) + new, self.context_length) * sampling.n, request.num_with_hidden)
        if request.experts_from is not None:
            self._check_experts(request.experts_from, len(ids), min(len(ids) + new, self.context_length), sampling.n)
        seed = self._random.getrandbits(64) if sampling.seed is None else sampling.seed
        return request, [
            Sequence(
                request,
                index,
                ids,
                max_tokens=min(len(ids) + new, self.context_length),
                stop_ids=stop_ids,
                seed=(seed + index * CHOICE_STRIDE) & SEED_MASK,
                namespace=namespace_of(request),
                banned_ids=banned_ids,
                urgency=self.urgency(request),
            )
            for index in range(sampling.n)
        ]

    def urgency(self, request: Request) -> int:
        """Return a request's urgency (see `Sequence.urgency`). Requests with a higher urgency are scheduled first."""
        if not self._priorities:
            return 0
        priority = request.priority
        if priority is None and self._tiers:
            priority = self._tiers.get(request.service.tier or DEFAULT_TIER, self._tiers.get(DEFAULT_TIER))
        if priority is None:
            return NO_PRIORITY
        return -priority if self._low_first else priority

    def grammar_ends(self, request: Request) -> Ends:
        """Return when an output under a grammar may end."""
        sampling = request.sampling
        return Ends(self._eos_ids, self._stop_ids(request), sampling.min_new_tokens, sampling.ignore_eos)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end an output by default (end of sequence)."""
        return self._eos_ids

    def _stop_ids(self, request: Request) -> frozenset[int]:
        more = request.sampling.stop_token_ids
        return self._eos_ids | more if more else self._eos_ids

    def _banned_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Return the token ids of `bad_words`. As in vLLM, each word is banned with and without a preceding space."""
        if not sampling.bad_words:
            return NO_IDS
        if self._tokenizer is None:
            raise InvalidRequest("bad_words needs a tokenizer; this engine has none.", param="bad_words")
        words = [word.lstrip() or word for word in sampling.bad_words]
        with_space = self._tokenizer.encode_batch([f" {word}" for word in words], add_special_tokens=False)
        without_space = self._tokenizer.encode_batch(words, add_special_tokens=False)
        for word, ids in zip(sampling.bad_words, without_space):
            if len(ids) != 1:
                raise InvalidRequest(
                    f"bad_words: {word[:40]!r} is {len(ids)} tokens of this model; only words of a single token can "
                    "be banned.",
                    param="bad_words",
                )
        return frozenset(ids[0] for ids in (*without_space, *with_space) if len(ids) == 1)

    def _truncated(self, request: Request, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the last `keep_last` ids.

        With -1, return as many as fit into the context with the output; with None, all.
        """
        keep = request.keep_last
        if keep is None:
            return ids
        if keep == -1:
            new = request.sampling.max_new_tokens
            keep = max(1, self.context_length - (1 if new is None else new))
        return ids[-keep:]

    def _check_hidden(self, num_tokens: int, num_requests: int) -> None:
        """Raise `InvalidRequest` if the hidden states of `num_tokens` tokens exceed a request's share of the limit.

        The `num_requests` requests of an HTTP call share one limit.
        """
        most = MAX_HIDDEN_NUMBERS // self._hidden_size // num_requests
        if num_tokens > most:
            of_call = f" in a call with {num_requests} prompts" if num_requests > 1 else ""
            raise InvalidRequest(
                f"A request with hidden states may have at most {most} tokens of prompt and output{of_call}, not "
                f"{num_tokens}; set a lower max_new_tokens.",
                param="return_hidden_states",
            )

    def _check_experts(self, first: int, num_prompt: int, end: int, num_choices: int) -> None:
        """Raise `InvalidRequest` if position `first` is not in the prompt, or if the response has too many experts."""
        if first > num_prompt:
            raise InvalidRequest(
                f"routed_experts_start_len must be at most {num_prompt}, the number of prompt tokens, not {first}.",
                param="routed_experts_start_len",
            )
        most, num_tokens = MAX_EXPERT_NUMBERS // self._experts_of_token, (end - first) * num_choices
        if num_tokens > most:
            raise InvalidRequest(
                f"A request may have routed experts of at most {most} tokens of prompt and output, not {num_tokens}; "
                "set a lower max_new_tokens or a higher routed_experts_start_len.",
                param="return_routed_experts",
            )

    def _fit(self, request: Request, ids: tuple[int, ...]) -> Request:
        context, sampling, ids = self.context_length, request.sampling, self._truncated(request, ids)
        if not ids:
            raise InvalidRequest("The prompt is empty.", param="text")
        if request.wants_embedding and (sampling.max_new_tokens != 0 or sampling.min_new_tokens):
            sampling = replace(sampling, max_new_tokens=0, min_new_tokens=0)
        elif self._prefills and sampling.max_new_tokens != 0:  # the decode server computes the output
            sampling = replace(sampling, max_new_tokens=1, min_new_tokens=0)
        new = sampling.max_new_tokens
        num_output = 0 if new == 0 else 1
        if len(ids) + num_output > context:
            if not request.truncate:
                raise self._too_long(request, len(ids))
            ids = ids[: context - num_output]
            if request.wants_embedding and request.text is not None and len(self._suffix) < context:
                ids = ids[: context - len(self._suffix)] + self._suffix
        if new is not None and len(ids) + new > context:
            if not (request.truncate or request.cut_output):
                raise ContextOverflow(
                    f"Requested token count exceeds the model's maximum context length of {context} tokens. "
                    f"You requested a total of {len(ids) + new} tokens: {len(ids)} of input and "
                    f"{new} of output.",
                    param="max_new_tokens",
                )
            new = context - len(ids)
            sampling = replace(sampling, max_new_tokens=new, min_new_tokens=min(sampling.min_new_tokens, new))
        if request.logprobs is not None and request.logprobs.start >= len(ids):
            raise InvalidRequest(
                f"logprob_start_len ({request.logprobs.start}) is beyond the prompt's {len(ids)} tokens.",
                param="logprob_start_len",
            )
        return replace(request, ids=ids, sampling=sampling)

    def _too_long(self, request: Request, count: int) -> ContextOverflow:
        param = "text" if request.text is not None else "input_ids"
        return ContextOverflow.of_input(count, self.context_length, param)


def _breakers(tokenizer: Tokenizer | None) -> Breakers | None:
    if tokenizer is None or tokenizer.bytes_of is None:
        return None

    def encode(text: str) -> Seq[int]:
        return tokenizer.encode_batch([text], add_special_tokens=False)[0]

    return Breakers(tokenizer.bytes_of.rest, tokenizer.vocab_size, encode)


def _suffix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that end every encoded text, such as [SEP]. Truncation keeps them."""
    [with_special], [plain] = (tokenizer.encode_batch(["a"], add_special_tokens=special) for special in (True, False))
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return tuple(with_special[start + len(plain) :])
    return ()


def _uncut_texts(request: Request) -> list[str]:
    """Return the request's texts that truncation must not shorten, such as the first text of a pair."""
    if request.cuts:
        return [] if request.second_text is None else [request.text or ""]
    return [text for text in (request.text, request.second_text) if text]


def _check_embedding(request: Request) -> None:
    if request.sampling.n != 1:
        raise InvalidRequest("A prompt has one embedding; n must be 1.", param="n")
    if request.logprobs is not None:
        raise InvalidRequest(
            "Embeddings have no log-probabilities; return_logprob must be false.", param="return_logprob"
        )


def namespace_of(request: Request) -> Hashable:
    """Return the key that separates prefix trees.

    The key contains everything that changes the KV of equal tokens: adapter and row values.
    """
    if not request.row_values and request.adapter is None:
        return request.namespace
    adapter = None if request.adapter is None else request.adapter.content or request.adapter.id
    return (request.namespace, adapter, *sorted(request.row_values.items()))
