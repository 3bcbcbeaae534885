"""Per-prompt fields of a call: request ids (`rid`), cache namespaces, clients, and limits on the number of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any

from runtime.actors.adapters import MAX_NAME
from runtime.errors import ContextOverflow, InvalidRequest
from runtime.request import ANONYMOUS, USUAL, Request, Service
from runtime.sampling_params import MAX_INT32, SamplingParams
from serve.calls.client import CALLER, CLIENT, THIS_PROCESS
from serve.calls.decode import Length, Range
from serve.calls.work_budget import check_choice_tokens, check_logprobs

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_CHOICES_IN_ALL = 4096  # maximum of (number of prompts) x n
MAX_HIDDEN_CHOICES = 16  # maximum of (number of prompts) x n in a call with hidden states
MAX_ROUTED_CHOICES = 64  # maximum of (number of prompts) x n in a call with routed experts
MAX_CONTEXTS = 8  # maximum length of a text whose tokens are counted, in multiples of the model's context
PINNED_CHARS = 4096  # characters at the beginning of each content that `pin_of` reads
Texts = str | Annotated[list[str], Length(1, MAX_PROMPTS)]
Ids = list[int] | Annotated[list[list[int]], Length(1, MAX_PROMPTS)]
Label = Annotated[str, Length(1, 256)]
AdapterName = Annotated[str, Length(0, MAX_NAME)]  # "": no adapter
Salt = Annotated[str, Length(1, 256)]
Priority = Annotated[int, Range(-MAX_INT32, MAX_INT32)]
Timeout = Annotated[float, Range(0.001, 86_400)]  # seconds
Tier = Annotated[str, Length(1, 32)]
CacheKey = Annotated[str, Length(1, 256)]
StartLength = Annotated[int, Range(0, MAX_INT32)]


def check_parts(*, hidden: bool, routed: bool, num_choices: int, stream: bool) -> None:
    """Raise `InvalidRequest` if a call for hidden states or routed experts is streamed or has too many choices."""
    for wanted, name, param, most in (
        (hidden, "hidden states", "return_hidden_states", MAX_HIDDEN_CHOICES),
        (routed, "routed experts", "return_routed_experts", MAX_ROUTED_CHOICES),
    ):
        if wanted and stream:
            raise InvalidRequest(f"{name.capitalize()} cannot be streamed; set stream to false.", param=param)
        if wanted and num_choices > most:
            raise InvalidRequest(f"A call with {name} has at most {most} choices of all prompts together.", param=param)


def check_choices(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES_IN_ALL:
        raise InvalidRequest(
            f"{num_prompts} prompts times n = {n} make {num_prompts * n} choices; "
            f"at most {MAX_CHOICES_IN_ALL} are accepted at once.",
            param="n",
        )


def check_counted(core: EngineCore, parts: Sequence[str], *, param: str) -> None:
    """Raise `InvalidRequest` if these parts have certainly more tokens than `MAX_CONTEXTS` context lengths."""
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
    """Return one request id per prompt. In a batch, a single `rid` becomes `rid_0`, `rid_1`, ..."""
    if isinstance(rid, str):
        return [f"{rid}_{index}" for index in range(count)] if is_batch else [rid]
    check_length(rid, count, "rid")
    return rid


def batch_of(rid: str | list[str] | None, *, is_batch: bool) -> str | None:
    """Return the value of `Request.batch`: the `rid` from which `labels_of` derives the labels of a batch, or None."""
    return rid if is_batch and isinstance(rid, str) else None


def namespaces_of(
    cache_salt: str | list[str] | None, extra_key: str | list[str] | None, count: int
) -> list[tuple[str | None, str | None] | None]:
    """Return the prefix-cache namespace of each prompt. Only prompts of the same namespace share prefixes.

    All prompts with neither a salt nor a key have the namespace None.
    """
    salts, keys = spread(cache_salt, count, "cache_salt"), spread(extra_key, count, "extra_key")
    return [None if pair == (None, None) else pair for pair in zip(salts, keys, strict=True)]


def spread(value: Any, count: int, name: str) -> list[Any]:
    """Return one value per prompt: the list itself if `value` is a list, else `value` for each prompt."""
    if not isinstance(value, list):
        return [value] * count
    check_length(value, count, name)
    return value


def check_length(values: Sequence[Any], count: int, name: str) -> None:
    """Raise `InvalidRequest` unless there is one value per prompt."""
    if len(values) != count:
        raise InvalidRequest(f"{name} has {len(values)} items for {count} prompts.", param=name)


def vector_requests(
    requests: Sequence[Request],
    core: EngineCore,
    *,
    prompt_name: str | None = None,
    truncate: bool | None = None,
) -> list[Request]:
    """Return copies of the requests that compute embeddings instead of generating text.

    Each text gets a prefix: the checkpoint's prompt named `prompt_name`, or its default prompt if `prompt_name` is
    None. Raises `InvalidRequest` if the checkpoint has no prompt of that name. `truncate`: whether texts that are too
    long are cut; None uses the server's setting.
    """
    facts, sampling = core.facts, SamplingParams(max_new_tokens=0)
    name = facts.default_prompt if prompt_name is None else prompt_name
    if name is not None and name not in facts.prompts:
        known = ", ".join(facts.prompts) or "none"
        raise InvalidRequest(f"This model has no prompt named {name[:40]!r}; it has {known}.", param="prompt_name")
    prefix = "" if name is None else facts.prompts[name]
    if truncate is None:
        truncate = core.plan.serve.allow_auto_truncate

    def vector_request(request: Request) -> Request:
        text = request.text
        if text is not None:
            text = prefix + text
            text = text.lower() if facts.lower_case else text
        return replace(request, text=text, sampling=sampling, truncate=truncate, wants_embedding=True)

    return [vector_request(request) for request in requests]


def service_of(
    timeout_s: float | None, tier: str | None, cache_key: str | None, session_id: str | None = None
) -> Service:
    """Return the `Service` of a request (timeout, priority tier, cache pin) from the fields of its body."""
    if timeout_s is None and tier is None and cache_key is None and session_id is None:
        return USUAL
    pin = f"key {cache_key}" if cache_key is not None else None if session_id is None else f"session {session_id}"
    return Service(timeout_s, tier, pin)


def pin_of(*contents: Any) -> str:
    """Return the name under which the KV cache pins a conversation that begins with these contents.

    A content is a text, a list of parts, or None.
    """
    texts = []
    for content in contents:
        first = content[0] if isinstance(content, list) and content else content
        text = first if isinstance(first, str) else getattr(first, "text", None)
        texts.append(text[:PINNED_CHARS] if isinstance(text, str) else "")
    return blake2b("\0".join(texts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def of_client(core: EngineCore, requests: Sequence[Request]) -> list[Request]:
    """Return the requests with the client and the caller data of the running task.

    Raises `InvalidRequest` if the requests exceed the output tokens or log-probabilities allowed for one call. Calls
    from this process have no such limits.
    """
    client, caller = CLIENT.get(), CALLER.get()
    if client is not THIS_PROCESS:
        check_choice_tokens(requests, core.plan)
        check_logprobs(requests, core.plan.model.context_length)
        num_with_hidden = sum(request.returns_hidden for request in requests)
        if num_with_hidden > 1:
            requests = [replace(request, num_with_hidden=num_with_hidden) for request in requests]
    if not client.name and caller is ANONYMOUS:
        return list(requests)
    return [
        replace(
            request, owner=client.name, caller=caller._replace(prefilled=caller.prefilled or request.caller.prefilled)
        )
        for request in requests
    ]
