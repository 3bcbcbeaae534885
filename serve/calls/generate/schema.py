"""The body of `/generate`, and its conversion to engine requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from uuid import uuid4

from runtime.errors import InvalidRequest
from runtime.logits_processors import check_name, name_of
from runtime.media_source import Kind
from runtime.request import LogprobParams, Request
from runtime.sampling_params import SamplingParams
from serve.calls.bootstrap import Hosts, Ports, Rooms, with_prefill_server
from serve.calls.decode import NotBuilt
from serve.calls.errors import renamed
from serve.calls.media import native_media
from serve.calls.prompts import (
    AdapterName,
    CacheKey,
    Ids,
    Label,
    Priority,
    Salt,
    StartLength,
    Texts,
    Tier,
    Timeout,
    batch_of,
    check_choices,
    check_length,
    check_parts,
    labels_of,
    namespaces_of,
    service_of,
    spread,
)
from serve.calls.sampling import read_sampling, sampling_params
from serve.calls.sessions import SessionBody
from serve.calls.work_budget import prompt_ids

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

Modality = Literal["image", "multi-images", "video", "audio"]


@dataclass(slots=True, kw_only=True)
class GenerateBody:
    """The body of `/generate`. A list in `text`, or a list of lists in `input_ids`, makes a batch."""

    # Internal fields of SGLang, and options of processors that are not used.
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"conversation_id", "label", "max_dynamic_patch", "min_dynamic_patch", "routing_key", "received_time"}
    )

    text: Texts | None = None
    input_ids: Ids | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: Label | list[Label] | None = None
    stream: bool = False
    incremental: bool = False  # whether events hold only the new text and log-probabilities
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int] | list[list[int] | None] | None = None
    return_text_in_logprobs: bool = False
    cache_salt: Salt | list[Salt] | None = None  # only prompts with equal salts share prefixes
    extra_key: Salt | list[Salt] | None = None  # only prompts with equal keys share prefixes
    priority: Priority | list[Priority | None] | None = None  # requires --enable-priority-scheduling
    timeout_s: Timeout | None = None  # seconds until the whole answer is due
    service_tier: Tier | None = None  # selects a priority (--service-tier-priorities)
    prompt_cache_key: CacheKey | None = None  # the prompt's pages stay cached under this key (--prefix-pin-share)
    session_id: CacheKey | None = None  # like prompt_cache_key, for all requests of a conversation
    session_params: SessionBody | None = None  # the session, and the earlier request to continue
    lora_path: AdapterName | list[AdapterName | None] | None = None  # name of the LoRA adapter of each prompt
    log_metrics: bool = True  # whether the request metrics count this call
    input_embeds: NotBuilt = None
    image_data: Any = None  # an image or a list of images; for a batch, a list with one of these per prompt
    video_data: Any = None  # like image_data
    audio_data: Any = None
    modalities: list[Modality] | Modality | None = None  # "video" is refused if image_data has the frames
    return_hidden_states: bool | list[bool] = False  # requires --enable-return-hidden-states; not with stream
    return_routed_experts: bool | list[bool] = False  # requires --enable-return-routed-experts; not with stream
    routed_experts_start_len: StartLength | list[StartLength] = 0  # index of the first token whose experts are returned
    custom_logit_processor: str | list[str | None] | None = None  # in the other APIs, this is a sampling parameter
    bootstrap_host: Hosts | None = None  # prefill server of the prompt, in the fields of SGLang's routers
    bootstrap_port: Ports | None = None
    bootstrap_room: Rooms | None = None
    bootstrap_pair_key: NotBuilt = None
    data_parallel_rank: NotBuilt = None
    routed_dp_rank: NotBuilt = None
    lora_id: NotBuilt = None
    background: NotBuilt = None
    no_logs: NotBuilt = None
    return_bytes: NotBuilt = None
    return_entropy: NotBuilt = None
    return_prompt_token_ids: NotBuilt = None
    require_reasoning: NotBuilt = None
    custom_labels: NotBuilt = None
    positional_embed_overrides: NotBuilt = None

    @property
    def is_batch(self) -> bool:
        if self.text is not None:
            return isinstance(self.text, list)
        return bool(self.input_ids) and isinstance(self.input_ids[0], list)


def requests_of(body: GenerateBody, core: EngineCore, *, cut: bool | None = None, owned: bool = False) -> list[Request]:
    """Return one request per prompt. Raises `InvalidRequest` if lists have different lengths or a field is invalid.

    `owned`: the body's lists belong to this call, so `prompt_ids` may empty the list of a prompt that is too long, and
    then raises `ContextOverflow`. `cut`: see `prompt_ids`.
    """
    prompts = _prompts(body)
    count = len(prompts)
    sampling = _with_processors(body, core, _sampling(body, core, count))
    if len({params.n for params in sampling}) > 1:
        raise InvalidRequest("n must be the same for all prompts of a batch.", param="sampling_params")
    check_choices(count, sampling[0].n)
    labels, logprobs = _labels(body, count), _logprobs(body, count)
    batch = batch_of(body.rid, is_batch=body.is_batch)
    namespaces = namespaces_of(body.cache_salt, body.extra_key, count)
    priorities = spread(body.priority, count, "priority")
    adapters = spread(body.lora_path, count, "lora_path")
    hidden = spread(body.return_hidden_states, count, "return_hidden_states")
    routed = spread(body.return_routed_experts, count, "return_routed_experts")
    check_parts(hidden=any(hidden), routed=any(routed), num_choices=count * sampling[0].n, stream=body.stream)
    firsts = spread(body.routed_experts_start_len, count, "routed_experts_start_len")
    if body.modalities is not None and "video" in body.modalities and body.image_data and not body.video_data:
        raise InvalidRequest(
            'modalities "video" with image_data is not supported. Leave it out to send the frames as images, or send '
            "the video as video_data.",
            param="modalities",
        )
    values: dict[Kind, Any] = {"image": body.image_data, "video": body.video_data, "audio": body.audio_data}
    media = native_media(values, count, is_batch=body.is_batch)
    if body.session_params is not None and (body.is_batch or sampling[0].n > 1):
        raise InvalidRequest("A request of a session has one prompt and one choice.", param="session_params")
    session = None if body.session_params is None else body.session_params.params()
    service = service_of(body.timeout_s, body.service_tier, body.prompt_cache_key, body.session_id)
    ids_of = partial(prompt_ids, plan=core.plan, cut=cut) if owned else tuple
    requests = [
        Request(
            text=prompt if isinstance(prompt, str) else None,
            ids=None if isinstance(prompt, str) else ids_of(prompt),
            media=media[index],
            sampling=sampling[index],
            logprobs=logprobs[index],
            returns_hidden=hidden[index],
            experts_from=firsts[index] if routed[index] else None,
            truncate=core.plan.serve.allow_auto_truncate,
            namespace=namespaces[index],
            priority=priorities[index],
            service=service,
            lora=adapters[index] or None,
            session=session,
            counted=body.log_metrics,
            label=labels[index],
            batch=batch,
        )
        for index, prompt in enumerate(prompts)
    ]
    return with_prefill_server(body, core, requests, joined=True)


def _prompts(body: GenerateBody) -> Sequence[str | list[int]]:
    if body.text is None and body.input_ids is None:
        raise InvalidRequest("Either text or input_ids must be given.", param="text")
    if body.text is not None and body.input_ids is not None:
        raise InvalidRequest("text and input_ids must not be given together.", param="text")
    value: Any = body.input_ids if body.text is None else body.text
    name = "input_ids" if body.text is None else "text"
    prompts = value if body.is_batch else [value]
    for index, prompt in enumerate(prompts):
        if not prompt:
            param = f"{name}.{index}" if body.is_batch else name
            raise InvalidRequest(f"{param} must not be empty.", param=param)
    return prompts


def _sampling(body: GenerateBody, core: EngineCore, count: int) -> list[SamplingParams]:
    preferred, params_or_list = core.plan.serve.preferred_sampling, body.sampling_params
    if not isinstance(params_or_list, list):
        return [_sampling_params(params_or_list or {}, preferred, "sampling_params")] * count
    check_length(params_or_list, count, "sampling_params")
    return [
        _sampling_params(params, preferred, f"sampling_params.{index}") for index, params in enumerate(params_or_list)
    ]


def _with_processors(body: GenerateBody, core: EngineCore, sampling: list[SamplingParams]) -> list[SamplingParams]:
    if body.custom_logit_processor is None:
        return sampling
    names = spread(body.custom_logit_processor, len(sampling), "custom_logit_processor")
    known = [name_of(path) for path in core.plan.serve.logits_processors or ()]
    for name in names:
        if name is not None:
            check_name(name, known)
    return [
        params if name is None else replace(params, custom_logit_processor=name)
        for params, name in zip(sampling, names)
    ]


def _sampling_params(body: Mapping[str, Any], preferred: Mapping[str, Any], path: str) -> SamplingParams:
    return sampling_params("native", read_sampling("native", body, path), preferred, path=path)


def _labels(body: GenerateBody, count: int) -> Sequence[str]:
    if body.rid is None:
        return [uuid4().hex for _ in range(count)]
    return labels_of(body.rid, count, is_batch=body.is_batch)


def _logprobs(body: GenerateBody, count: int) -> list[LogprobParams | None]:
    enabled = spread(body.return_logprob, count, "return_logprob")
    starts = spread(body.logprob_start_len, count, "logprob_start_len")
    tops = spread(body.top_logprobs_num, count, "top_logprobs_num")
    requested = body.token_ids_logprob or []
    if any(isinstance(ids, list) or ids is None for ids in requested):
        check_length(requested, count, "token_ids_logprob")
    else:
        requested = [requested] * count
    logprobs: list[LogprobParams | None] = []
    for index in range(count):
        if not enabled[index]:
            logprobs.append(None)
            continue
        try:
            logprobs.append(
                LogprobParams(
                    start=starts[index],
                    top=tops[index],
                    token_ids=tuple(requested[index] or ()),  # pyright: ignore[reportArgumentType]
                    text=body.return_text_in_logprobs,
                )
            )
        except InvalidRequest as error:
            name = str(error.param)
            param = f"{name}.{index}" if isinstance(getattr(body, name), list) and body.is_batch else name
            raise renamed(error, param) from None
    return logprobs
