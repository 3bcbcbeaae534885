"""The prompts of one call: how many there may be, what each is called and shares, whose it is, and whether it wants a
vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from runtime.errors import ContextOverflow, InvalidRequest
from runtime.request import NOBODY, Request
from runtime.sampling_params import MAX_INT32, SamplingParams
from serve.access import CALLER, CLIENT, THIS_PROCESS
from serve.decode import Length, Range
from serve.work_budget import check_logprobs

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

MAX_PROMPTS = 1024
MAX_CHOICES_IN_ALL = 4096  # prompts times n
MAX_CONTEXTS = 8  # of tokens in one text: who only counts may send more than the model can read
Label = Annotated[str, Length(1, 256)]
Salt = Annotated[str, Length(1, 256)]
Priority = Annotated[int, Range(-MAX_INT32, MAX_INT32)]


def check_choices(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES_IN_ALL:
        raise InvalidRequest(
            f"{num_prompts} prompts times n = {n} make {num_prompts * n} choices; "
            f"at most {MAX_CHOICES_IN_ALL} are accepted at once.",
            param="n",
        )


def check_counted(core: EngineCore, parts: Sequence[str], *, param: str) -> None:
    """Raises `InvalidRequest` where the text of these parts is too long to be encoded for its tokens alone."""
    if core.tokenizer is None or core.tokenizer.text_limit is None:
        return
    most = MAX_CONTEXTS * core.plan.model.context_length
    try:
        core.tokenizer.text_limit.check(parts, most)
    except ContextOverflow:
        raise InvalidRequest(
            f"A text of more than {most} tokens ({MAX_CONTEXTS} times the model's context) is not tokenized.",
            param=param,
        ) from None


def labels_of(rid: str | list[str], count: int, *, is_batch: bool) -> Sequence[str]:
    """The client's names for its prompts: a single one is numbered in a batch."""
    if isinstance(rid, str):
        return [f"{rid}_{index}" for index in range(count)] if is_batch else [rid]
    check_length(rid, count, "rid")
    return rid


def namespaces_of(
    cache_salt: str | list[str] | None, extra_key: str | list[str] | None, count: int
) -> list[tuple[str | None, str | None] | None]:
    """Within what each prompt shares prefixes; None: with all that have no salt and no key either."""
    salts, keys = spread(cache_salt, count, "cache_salt"), spread(extra_key, count, "extra_key")
    return [None if pair == (None, None) else pair for pair in zip(salts, keys, strict=True)]


def spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt."""
    if not isinstance(value, list):
        return [value] * count
    check_length(value, count, name)
    return value


def check_length(values: Sequence[Any], count: int, name: str) -> None:
    """Raises `InvalidRequest` where there is not one value for each prompt."""
    if len(values) != count:
        raise InvalidRequest(f"{name} has {len(values)} items for {count} prompts.", param=name)


def vector_requests(
    requests: Sequence[Request],
    core: EngineCore,
    *,
    prompt_name: str | None = None,
    truncate: bool | None = None,
) -> list[Request]:
    """The same prompts; what is wanted of each is its vector.

    Before a text comes the checkpoint's prompt of this name, or its default one. Raises `InvalidRequest` for a name
    that it does not have. A text that is too long is cut with `truncate`, which the server has a default for.
    """
    facts, sampling = core.facts, SamplingParams(max_new_tokens=0)
    name = facts.default_prompt if prompt_name is None else prompt_name
    if name is not None and name not in facts.prompts:
        known = ", ".join(facts.prompts) or "none"
        raise InvalidRequest(
            f"This model has no prompt of the name {name[:40]!r}; it has {known}.", param="prompt_name"
        )
    before = "" if name is None else facts.prompts[name]
    if truncate is None:
        truncate = core.plan.serve.allow_auto_truncate

    def wanted(request: Request) -> Request:
        text = request.text
        if text is not None:
            text = before + text
            text = text.lower() if facts.lower_case else text
        return replace(request, text=text, sampling=sampling, truncate=truncate, wants_embedding=True)

    return [wanted(request) for request in requests]


def of_client(core: EngineCore, requests: Sequence[Request]) -> list[Request]:
    """The requests as those of the client that this task answers.

    Raises `InvalidRequest` for more log-probabilities than a call may ask for, unless this process asks for itself.
    """
    client, caller = CLIENT.get(), CALLER.get()
    if client is not THIS_PROCESS:
        check_logprobs(requests, core.plan.model.context_length)
    if not client.name and caller is NOBODY:
        return list(requests)
    return [replace(request, owner=client.name, caller=caller) for request in requests]
