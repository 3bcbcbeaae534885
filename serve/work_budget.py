"""How many log-probabilities one call may ask for: a short body must not cause an answer of hundreds of megabytes.
And token ids that cannot be used, which nobody copies.

Choices and tokens alone cost what the model takes for them, which the queue bounds. Each token's log-probabilities
cost memory and time beside it: `n` 128 of 300 tokens with 128 each are 154 MB of JSON for 137 bytes of body.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized

from runtime.config.plan import Plan
from runtime.errors import ContextOverflow, InvalidRequest
from runtime.request import Request

MAX_LOGPROBS = 1_000_000  # of one call, over all prompts, choices and positions
MAX_REPEATED = 16_000_000  # the same, counted again in each event of a stream that repeats them
OPEN_ENDED_TOKENS = 4096  # counted where no length was asked for
MAX_JOINED = 16 * 1024 * 1024  # characters or token ids of the prompts that share a part: up to 128 MiB
CHARACTERS_PER_TOKEN = 2  # of a prompt that is still text; fewer are rare
FREED_AT_ONCE = 16_384  # token ids, in a tenth of a millisecond


def check_logprobs(requests: Sequence[Request], context_length: int) -> None:
    """Raises `InvalidRequest` when the requests of one call ask for too many log-probabilities together.

    num = sum over prompts of n x (output tokens + prompt tokens from `start` on) x (1 + top + requested ids)
    """
    num = 0
    for request in requests:
        if request.logprobs is not None:
            new, old, per_token = _counts(request, context_length)
            num += request.sampling.n * (new + old) * per_token
    if num > MAX_LOGPROBS:
        raise InvalidRequest(
            f"n, max_new_tokens, the length of the prompts (where their log-probabilities are asked for), "
            f"top_logprobs_num and token_ids_logprob make up to {num} log-probabilities; at most {MAX_LOGPROBS} are "
            "computed for one call.",
            param="top_logprobs_num",
        )


def check_repeated(requests: Sequence[Request], context_length: int) -> None:
    """As `check_logprobs`; also for a stream whose events would repeat too many log-probabilities.

    With N output tokens and P of the prompt, its events hold N x (P + N / 2) of them in all.
    """
    check_logprobs(requests, context_length)
    num = 0
    for request in requests:
        if request.logprobs is not None:
            new, old, per_token = _counts(request, context_length)
            num += request.sampling.n * new * (old + new // 2) * per_token
    if num > MAX_REPEATED:
        raise InvalidRequest(
            f"Each event of this stream repeats all log-probabilities so far, up to {num} in all, of at most "
            f"{MAX_REPEATED}; set incremental to true for events with the new ones only.",
            param="incremental",
        )


def prompt_ids(ids: list[int], plan: Plan, *, cut: bool | None = None) -> tuple[int, ...]:
    """The token ids of a prompt as a request has them. `cut`: it may be cut to the context; None: as the server's plan
    says. Raises `ContextOverflow` as the engine would, before millions of ids are copied.

    The list, which nobody else may want, is emptied then, a few ids at a time: freeing them holds the interpreter.
    """
    num_ids, context_length = len(ids), plan.model.context_length
    if num_ids > context_length and not (plan.serve.allow_auto_truncate if cut is None else cut):
        while ids:
            del ids[-FREED_AT_ONCE:]
        raise ContextOverflow.of_input(num_ids, context_length, "input_ids")
    return tuple(ids)


def check_joined(shared: Sized, parts: Iterable[Sized], param: str) -> None:
    """Raises `InvalidRequest` where a text, or token ids, would be repeated beside too many others, before they are.

    num = sum over parts of (len(shared) + len(part))
    """
    num = sum(len(shared) + len(part) for part in parts)
    if num > MAX_JOINED:
        raise InvalidRequest(
            f"{param} is repeated in each prompt of this call, which makes {num} characters or token ids; at most "
            f"{MAX_JOINED} are taken. Send a shorter one, or fewer prompts at once.",
            param=param,
        )


def _counts(request: Request, context_length: int) -> tuple[int, int, int]:
    """Output tokens, prompt tokens with log-probabilities, and how many of these each token has; at most."""
    wanted, new = request.logprobs, request.sampling.max_new_tokens
    if wanted is None:
        return 0, 0, 0
    new = min(OPEN_ENDED_TOKENS if new is None else new, context_length)
    old = 0
    if wanted.start >= 0:
        length = (
            len(request.ids) if request.ids is not None else len(request.text or "") // CHARACTERS_PER_TOKEN
        )
        old = max(0, min(length, context_length) - wanted.start)
    return new, old, 1 + wanted.top + len(wanted.token_ids)
