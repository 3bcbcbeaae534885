"""Limit the size of one call's answer, so that a short body cannot cause an answer of hundreds of megabytes.

Example: a stream has one event of up to 800 bytes per token of each choice. A body of 92 bytes with n = 128 and 1,000
tokens per choice causes 98 MB of events. Example with log-probabilities: a body of 137 bytes with n = 128, 300 tokens
and 128 alternatives per token causes 154 MB of JSON. The module also limits token ids and repeated texts before they
are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized

from runtime.config.plan import Plan
from runtime.errors import ContextOverflow, InvalidRequest
from runtime.request import Request

MAX_LOGPROBS = 1_000_000  # log-probabilities per call, over all prompts, choices and positions
MAX_REPEATED = 16_000_000  # log-probabilities in all events of a stream whose events repeat earlier log-probabilities
OPEN_ENDED_TOKENS = 4096  # output length assumed for requests without max_new_tokens
# limit on characters or token ids of all prompts, after the shared text is copied into each prompt; up to 128 MiB
MAX_JOINED = 16 * 1024 * 1024
CHARACTERS_PER_TOKEN = 2  # assumed for prompts that are not yet tokenized; most texts have more characters per token
FREED_AT_ONCE = 16_384  # number of token ids freed at a time, which takes 0.1 ms


def check_choice_tokens(requests: Sequence[Request], plan: Plan) -> None:
    """Raise `InvalidRequest` if n choices of one prompt may have more than `max_choice_tokens` tokens together."""
    for request in requests:
        n, num_new = request.sampling.n, _num_new(request, plan.model.context_length)
        if n > 1 and n * num_new > plan.serve.max_choice_tokens:
            raise InvalidRequest(
                f"n = {n} choices of up to {num_new} tokens are {n * num_new} tokens; this server allows "
                f"{plan.serve.max_choice_tokens} for one prompt (--max-choice-tokens). Lower n or max_new_tokens.",
                param="n",
            )


def check_logprobs(requests: Sequence[Request], context_length: int) -> None:
    """Raise `InvalidRequest` if the requests of one call ask for too many log-probabilities together.

    num = sum over prompts of n x (output tokens + prompt tokens from `start` on) x (1 + top + requested ids)
    """
    num = 0
    for request in requests:
        if request.logprobs is not None:
            num_new, num_old, per_token = _counts(request, context_length)
            num += request.sampling.n * (num_new + num_old) * per_token
    if num > MAX_LOGPROBS:
        raise InvalidRequest(
            f"n, max_new_tokens, the length of the prompts (where their log-probabilities are asked for), "
            f"top_logprobs_num and token_ids_logprob make up to {num} log-probabilities; at most {MAX_LOGPROBS} are "
            "computed for one call.",
            param="top_logprobs_num",
        )


def check_repeated(requests: Sequence[Request], context_length: int) -> None:
    """Raise `InvalidRequest` if a stream whose events repeat earlier log-probabilities would have too many of them.

    For N output tokens and P prompt tokens, the events have N x (P + N / 2) log-probabilities in total. Also raises
    like `check_logprobs`.
    """
    check_logprobs(requests, context_length)
    num = 0
    for request in requests:
        if request.logprobs is not None:
            num_new, num_old, per_token = _counts(request, context_length)
            num += request.sampling.n * num_new * (num_old + num_new // 2) * per_token
    if num > MAX_REPEATED:
        raise InvalidRequest(
            f"Each event of this stream repeats all log-probabilities so far, up to {num} in all, of at most "
            f"{MAX_REPEATED}; set incremental to true for events with the new ones only.",
            param="incremental",
        )


def prompt_ids(ids: list[int], plan: Plan, *, cut: bool | None = None) -> tuple[int, ...]:
    """Return the token ids of a prompt as a tuple.

    Raises `ContextOverflow` if there are more ids than the context has tokens, before millions of ids are copied. In
    this case, the list is emptied a few ids at a time, because freeing it at once would block the interpreter. `cut`:
    whether the engine may truncate the prompt to the context; None uses the server's setting.
    """
    num_ids, context_length = len(ids), plan.model.context_length
    if num_ids > context_length and not (plan.serve.allow_auto_truncate if cut is None else cut):
        while ids:
            del ids[-FREED_AT_ONCE:]
        raise ContextOverflow.of_input(num_ids, context_length, "input_ids")
    return tuple(ids)


def check_joined(shared: Sized, parts: Iterable[Sized], param: str) -> None:
    """Raise `InvalidRequest` if prompts made of `shared` and one of `parts` each would be too long together.

    num = sum over parts of (len(shared) + len(part)), in characters or token ids
    """
    num = sum(len(shared) + len(part) for part in parts)
    if num > MAX_JOINED:
        raise InvalidRequest(
            f"{param} is repeated in each prompt of this call, which makes {num} characters or token ids; at most "
            f"{MAX_JOINED} are taken. Send a shorter one, or fewer prompts at once.",
            param=param,
        )


def _counts(request: Request, context_length: int) -> tuple[int, int, int]:
    """Return estimates for a choice: output tokens, prompt tokens with logprobs, logprobs per token."""
    logprobs, num_new = request.logprobs, _num_new(request, context_length)
    if logprobs is None:
        return 0, 0, 0
    num_old = 0
    if logprobs.start >= 0:
        length = len(request.ids) if request.ids is not None else len(request.text or "") // CHARACTERS_PER_TOKEN
        num_old = max(0, min(length, context_length) - logprobs.start)
    return num_new, num_old, 1 + logprobs.top + len(logprobs.token_ids)


def _num_new(request: Request, context_length: int) -> int:
    """Return an estimate of the number of output tokens of a choice."""
    num_new = request.sampling.max_new_tokens
    return min(OPEN_ENDED_TOKENS if num_new is None else num_new, context_length)
