"""Health, facts about the server, the cache and running requests."""

from __future__ import annotations

import dataclasses
from typing import Any

import anyio
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

import serve
from runtime.errors import EngineFailure, InvalidRequest, Overloaded, RequestError
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve.body import parse_object, read_body
from serve.core import EngineCore
from serve.decode import decode
from serve.replies import json_response, submit_all, wait_all

HEALTH_TIMEOUT_S = 20.0
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbortBody:
    """The body of `/abort_request`."""

    rid: str = ""
    abort_all: bool = False


class AdminDoor:
    """The endpoints that look at the engine or manage it. Only `health_generate` uses the model."""

    def __init__(self, core: EngineCore, *, max_body_bytes: int) -> None:
        self._core = core
        self._max_body_bytes = max_body_bytes

    async def health(self, http: HttpRequest) -> ASGIApp:
        """200 while the engine takes requests, else 503; empty either way."""
        return Response(status_code=200 if self._core.status().state == "ready" else 503)

    async def health_generate(self, http: HttpRequest) -> ASGIApp:
        """200 when one token came back in time. An engine too busy to take the request is a healthy one."""
        probe = Request(
            ids=(self._core.facts.bos_id or 0,),
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            label=f"HEALTH_CHECK_{anyio.current_time():.6f}",
        )
        with anyio.move_on_after(HEALTH_TIMEOUT_S):
            try:
                await wait_all(submit_all(self._core, [probe]), http.receive)
            except Overloaded:
                return Response(status_code=200)
            except (EngineFailure, RequestError):
                return Response(status_code=503)
            return Response(status_code=200)
        return Response(status_code=503)

    async def model_info(self, http: HttpRequest) -> ASGIApp:
        plan, facts = self._core.plan, self._core.facts
        preferred = plan.serve.preferred_sampling
        return json_response(
            {
                "model_path": plan.model.path,
                "tokenizer_path": plan.text.tokenizer_path,
                "is_generation": True,
                "preferred_sampling_params": orjson.dumps(dict(preferred)).decode() if preferred else None,
                "weight_version": plan.serve.weight_version,
                "model_type": facts.config.get("model_type"),
                "architectures": [facts.architecture],
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    async def server_info(self, http: HttpRequest) -> ASGIApp:
        """The whole plan, flattened, and the state of the engine. Secrets are left out."""
        core = self._core
        status = core.status()
        return json_response(
            {
                **_flattened(core.plan),
                "status": status.state,
                "max_total_num_tokens": status.max_total_tokens,
                "max_req_input_len": core.plan.model.context_length - 1,
                "internal_states": [
                    {
                        **_public(status),
                        "last_gen_throughput": status.gen_throughput,
                        "load": status.num_used_tokens,
                    }
                ],
                "version": serve.__version__,
            }
        )

    async def load(self, http: HttpRequest) -> ASGIApp:
        return json_response({"load": self._core.status().num_used_tokens})

    async def flush_cache(self, http: HttpRequest) -> ASGIApp:
        """400, and nothing done, while requests run or wait."""
        return PlainTextResponse(FLUSHED, 200 if self._core.flush_cache() else 400)

    async def abort(self, http: HttpRequest) -> ASGIApp:
        """Abort the requests whose rid starts with the given one, or all. 200 also when there were none."""
        body = await read_body(http, _abort_body, limit=self._max_body_bytes)
        if body.abort_all:
            self._core.abort_all()
        elif body.rid:
            self._core.abort_label(body.rid)
        else:
            raise InvalidRequest("rid must not be empty unless abort_all is true.", param="rid")
        return Response(status_code=200)


def _abort_body(raw: bytes) -> AbortBody:
    return decode(AbortBody, parse_object(raw))


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
    """A dataclass as JSON can carry it. Fields that are kept out of its repr are secrets and stay out."""
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
