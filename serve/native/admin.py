"""Handlers for health, metrics, server information, the prefix cache, aborts, and profiles."""

from __future__ import annotations

import dataclasses
import gc
import math
from typing import TYPE_CHECKING, Annotated

import anyio
import anyio.to_thread
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

import serve
from runtime.actors.scrape import exposition
from runtime.errors import EngineFailure, Forbidden, InvalidRequest, Overloaded, RequestError
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve.calls.client import CLIENT
from serve.calls.decode import Range
from serve.calls.media import takes_kind
from serve.calls.profile import ProfileBody, profile_options
from serve.calls.server_info import info_of, vllm_config
from serve.http.endpoint import compute, decodes, json_response, read_as

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

HEALTH_TIMEOUT_S = 20.0
DEFAULT_LEVEL = 2  # the default of --log-requests-level
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbortBody:
    """The body of `/abort_request`."""

    rid: str = ""
    abort_all: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoggingBody:
    """The body of `/configure_logging`. Fields that are absent or null keep their values."""

    log_requests: bool | None = None
    log_requests_level: Annotated[int, Range(0, 3)] | None = None


@decodes(LoggingBody)
async def configure_logging(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Turn the request log on or off, or change its level. Answers with the resulting values."""
    body = await read_as(http, LoggingBody)
    before = core.request_log_level
    on = body.log_requests if body.log_requests is not None else before is not None
    level = body.log_requests_level
    if level is not None and not on:
        raise InvalidRequest("log_requests_level needs log_requests: true.", param="log_requests_level")
    if level is None:
        level = DEFAULT_LEVEL if before is None else before
    core.request_log_level = level if on else None
    return json_response({"log_requests": on, "log_requests_level": core.request_log_level})


async def health(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Answer 200 while the engine accepts requests and no step hangs, else 503. The body is empty."""
    status = core.status()
    return Response(status_code=200 if status.state == "ready" and not status.hangs else 503)


async def ready(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Answer 200 if a request would be accepted now, else 503 with Retry-After.

    The body has the estimated wait in seconds.
    """
    status = core.status()
    is_ready = status.state == "ready" and not status.hangs and status.queue_space > 0
    body = {
        "ready": is_ready,
        "state": status.state,
        "estimated_wait_s": round(status.estimated_wait_s, 3),
        "num_waiting": status.num_waiting,
        "room": status.queue_space,
    }
    response = json_response(body)
    if not is_ready:
        response.status_code = 503
        response.headers["retry-after"] = str(min(60, max(1, math.ceil(status.estimated_wait_s))))
    return response


async def health_generate(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Generate one token as a probe. Answers 200 if this succeeds in time, or if the engine is paused or too busy."""
    if core.pause.paused or core.weights.released:
        return Response(status_code=200)
    is_embedding = core.plan.model.is_embedding
    probe = Request(
        ids=(core.facts.bos_id or 0,),
        sampling=SamplingParams(max_new_tokens=0 if is_embedding else 1, temperature=0.0),
        wants_embedding=is_embedding,
        counted=False,
        label=f"HEALTH_CHECK_{anyio.current_time():.6f}",
    )
    with anyio.move_on_after(HEALTH_TIMEOUT_S):
        try:
            await compute(http, core, [probe])
        except Overloaded:
            return Response(status_code=200)
        except (EngineFailure, RequestError):
            return Response(status_code=503)
        return Response(status_code=200)
    return Response(status_code=503)


async def metrics(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the metrics in Prometheus's text format. Answers 404 if metrics are disabled."""
    return Response(exposition(core), headers={"content-type": METRICS_TYPE})


async def model_info(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the served model and its preferred sampling parameters."""
    plan, facts = core.plan, core.facts
    preferred = plan.serve.preferred_sampling
    return json_response(
        {
            "model_path": plan.model.path,
            "tokenizer_path": plan.tokenizer.tokenizer_path,
            "is_generation": not plan.model.is_embedding,
            "preferred_sampling_params": orjson.dumps(dict(preferred)).decode() if preferred else None,
            "weight_version": plan.serve.weight_version,
            "model_type": facts.config.get("model_type"),
            "architectures": [facts.architecture],
            "has_image_understanding": takes_kind(core, "image"),
            "has_video_understanding": takes_kind(core, "video"),
            "has_audio_understanding": takes_kind(core, "audio"),
        }
    )


async def server_info(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the server's resolved settings as one flat object, and the state of the engine, without secrets.

    If the query parameter `config_format` is set (json or text, as in vLLM), the answer also has `vllm_config`: the
    parts of vLLM's configuration that its clients read.
    """
    info = info_of(core, serve.__version__)
    form = http.query_params.get("config_format")
    if form not in (None, "json", "text"):
        raise InvalidRequest("config_format must be json or text.", param="config_format")
    if form is not None:
        config = vllm_config(core)
        info["vllm_config"] = config if form == "json" else orjson.dumps(config).decode()
    return json_response(info)


async def version(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the server's version."""
    return json_response({"version": serve.__version__})


async def weight_version(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the version label of the weights (--weight-version)."""
    return json_response({"weight_version": core.plan.serve.weight_version})


async def load(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the number of KV cache tokens in use."""
    return json_response({"load": core.status().num_used_tokens})


async def server_load(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the number of requests in the server, as in vLLM."""
    status = core.status()
    return json_response({"server_load": status.num_running + status.num_waiting})


async def freeze_collector(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Exclude all live objects from garbage collection, which makes collections shorter.

    Call it once, after warm-up. It affects the process of the scheduler.
    """
    gc.collect()
    gc.freeze()
    return PlainTextResponse("Garbage collection frozen.\n")


async def flush_cache(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Empty the prefix cache. Refused while requests run or wait."""
    if not core.flush_cache():
        raise InvalidRequest("The cache was not flushed: requests are running or waiting.")
    return PlainTextResponse("Cache flushed.\n")


@decodes(AbortBody)
async def abort_request(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Abort the requests whose rid starts with the given rid, or all requests. Answers 200 even if none matches.

    An admin can abort the requests of all clients. A client with an API key can abort the requests of this key. Clients
    without a key must give the complete rid, so that they cannot abort the requests of others by guessing.
    """
    body = await read_as(http, AbortBody)
    if not body.abort_all and not body.rid:
        raise InvalidRequest("rid must not be empty unless abort_all is true.", param="rid")
    client = CLIENT.get()
    label = "" if body.abort_all else body.rid
    if client.is_admin:
        core.abort_label(label)
    elif client.name:
        core.abort_label(label, owner=client.name)
    elif label:
        core.abort_label(label, exact=True)
    else:
        raise Forbidden("abort_all requires an admin key.", param="abort_all")
    return Response(status_code=200)


@decodes(ProfileBody)
async def start_profile(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Profile the next steps, and write a Chrome trace of torch operations and of CPU graph or GPU kernels."""
    has_body = http.headers.get("content-length", "0") != "0" or "transfer-encoding" in http.headers
    body = ProfileBody()
    if has_body:
        body = await read_as(http, ProfileBody)
    await core.start_profile(await anyio.to_thread.run_sync(profile_options, body))
    return PlainTextResponse("Start profiling.\n")


async def stop_profile(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Stop profiling. Answers when the trace is written, with its path on the server."""
    return PlainTextResponse(f"Stop profiling. The profile is in {await core.stop_profile()}\n")


async def start_expert_record(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Clear the record of experts, and record which experts each of the next steps uses."""
    await core.start_expert_record()
    return PlainTextResponse("Start recording expert distribution.\n")


async def stop_expert_record(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Stop recording which experts the steps use."""
    await core.stop_expert_record()
    return PlainTextResponse("Stop recording expert distribution.\n")


async def dump_expert_record(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Write the record of experts to files, clear it, and answer with the paths on the server."""
    paths = ", ".join(record["path"] for record in await core.dump_expert_record())
    return PlainTextResponse(f"Dump expert distribution record. The record is in {paths}\n")
