"""Health, metrics, facts about the server, the prefix cache, and aborting requests."""

from __future__ import annotations

import dataclasses
import gc
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

import serve
from runtime.actors.scrape import exposition
from runtime.config import in_its_words, options
from runtime.errors import EngineFailure, Forbidden, InvalidRequest, Overloaded, RequestError
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve.access import CLIENT
from serve.decode import decode
from serve.endpoint import json_response, parse_object, read_all_or_disconnect, read_body
from serve.prompts import of_client

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.config.plan import Plan

HEALTH_TIMEOUT_S = 20.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbortBody:
    """The body of `/abort_request`."""

    rid: str = ""
    abort_all: bool = False


async def health(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """200 while the engine accepts requests and no step takes much longer than it should; else 503. Empty."""
    status = core.status()
    return Response(status_code=200 if status.state == "ready" and not status.hangs else 503)


async def ready(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """200 where a request that comes now is let in, else 503 with Retry-After; both say how long it would wait."""
    status = core.status()
    is_ready = status.state == "ready" and not status.hangs and status.room > 0
    body = {
        "ready": is_ready,
        "state": status.state,
        "estimated_wait_s": round(status.estimated_wait_s, 3),
        "num_waiting": status.num_waiting,
        "room": status.room,
    }
    response = json_response(body)
    if not is_ready:
        response.status_code = 503
        response.headers["retry-after"] = str(min(60, max(1, math.ceil(status.estimated_wait_s))))
    return response


async def health_generate(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """200 when the model generated one token in time. An engine too busy to accept the request is healthy."""
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
            await read_all_or_disconnect(await core.submit_all(of_client(core, [probe])), http.receive)
        except Overloaded:
            return Response(status_code=200)
        except (EngineFailure, RequestError):
            return Response(status_code=503)
        return Response(status_code=200)
    return Response(status_code=503)


async def metrics(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The metrics in Prometheus's text format. 404 where they are off."""
    return Response(exposition(core), headers={"content-type": METRICS_TYPE})


async def model_info(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """What model is served, and its preferred sampling parameters."""
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
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


async def server_info(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The whole plan, flattened, and the state of the engine. Secrets are left out."""
    status = core.status()
    plan = core.plan
    state = {
        **_public(status),
        "last_gen_throughput": status.gen_throughput,
        "load": status.num_used_tokens,
        "memory_usage": {"token_capacity": status.max_total_tokens},
        "dp_size": plan.parallel.dp_size,
        "effective_max_running_requests_per_dp": plan.scheduler.max_running,
    }
    return json_response(
        {
            **by_option(plan),
            **_flattened(plan),
            "status": status.state,
            "max_total_num_tokens": status.max_total_tokens,
            "max_req_input_len": core.plan.model.context_length - 1,
            "internal_states": [state],
            "version": serve.__version__,
        }
    )


async def version(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The server's version."""
    return json_response({"version": serve.__version__})


async def weight_version(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The text of --weight-version."""
    return json_response({"weight_version": core.plan.serve.weight_version})


async def load(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Tokens in use, as a number."""
    return json_response({"load": core.status().num_used_tokens})


async def server_load(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """How many requests are in the server, as vLLM says it."""
    status = core.status()
    return json_response({"server_load": status.num_running + status.num_waiting})


async def freeze_collector(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """What lives now is left out of garbage collections from now on, which makes them shorter.

    Call it once, when the server is warm. Of several processes it is the one that schedules.
    """
    gc.collect()
    gc.freeze()
    return PlainTextResponse("Garbage collection frozen.\n")


async def flush_cache(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Empty the prefix cache. Raises `InvalidRequest`, and nothing is done, while requests run or wait."""
    if not core.flush_cache():
        raise InvalidRequest("The cache is flushed only while no request runs or waits; nothing was done.")
    return PlainTextResponse("Cache flushed.\n")


async def abort_request(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Abort the requests whose rid starts with the given one, or all. 200 also when there were none.

    An admin may end everybody's, the holder of a key those of the key. Who has no key and is no admin must give a
    rid in full, so that nobody ends by a guess what others started.
    """
    body = await read_body(http, lambda raw: decode(AbortBody, parse_object(raw)))
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


def by_option(plan: Plan) -> dict[str, Any]:
    """What is done about each option, by its name: `max_running_requests`, as clients of SGLang read it.

    Those are left out whose values do not say what is done.
    """
    found = {}
    for option in options():
        if option.spec.plan is not None and not option.spec.secret:
            with suppress(LookupError):
                found[option.name] = _plain(in_its_words(option, plan.decision(option.spec.plan)[0]))
    return found


def _flattened(plan: Any) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section in dataclasses.fields(plan):
        value = getattr(plan, section.name)
        if dataclasses.is_dataclass(value):
            flat |= {
                "model_path" if (section.name, name) == ("model", "path") else name: item
                for name, item in _public(value).items()
            }
    return flat


def _public(section: Any) -> dict[str, Any]:
    """A dataclass as JSON values. Fields excluded from its repr are secrets and are left out."""
    return {
        field.name: _plain(getattr(section, field.name))
        for field in dataclasses.fields(section)
        if field.repr
    }


def _plain(value: Any) -> Any:
    return (
        value
        if isinstance(value, str | int | float | bool | None)
        else orjson.loads(orjson.dumps(value, default=str))
    )
