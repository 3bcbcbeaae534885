"""The Ray Serve deployment that receives HTTP requests and sends each request to a replica."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Ray is an optional dependency.

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

import orjson
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Scope

from serve.calls.body import INLINE_BYTES, off_loop
from serve.calls.served_model import ANY_MODEL
from serve.http.access import RouteScope
from serve.http.errors import Failure
from serve.http.forwarding import failure, read_body, too_large
from serve.native.admin import METRICS_TYPE
from serve.on_ray.joined_metrics import joined_metrics
from serve.on_ray.local_server import REPLICA_HEADER
from serve.on_ray.prompt_key import PromptKey, RequestFields, prompt_key
from serve.server.app import ROUTES
from serve.server.forwarded_errors import STREAMS, error_end

KIND = "ReplicaError"
ATTEMPTS = 3  # maximum number of replicas that a request is sent to, if replicas end before they answer
SCOPE_FIELDS = ("type", "http_version", "method", "scheme", "query_string", "headers", "client", "server")
ADMIN_PATHS = frozenset(spec.path for spec in ROUTES if spec.scope is RouteScope.ADMIN)
METRICS, MODELS = "/metrics", "/v1/models"
# Routes whose requests are sent to every replica. A replica that starts later does not need them.
EVERYWHERE = frozenset(
    (METRICS, "/flush_cache", "/reset_prefix_cache", "/freeze_gc", "/abort_request", "/list_external_corpora")
)
INSTEAD: Mapping[str, str] = dict.fromkeys(
    ("/add_external_corpus", "/remove_external_corpus"),
    "deploy with --speculative-ngram-external-corpus-path instead",
)
EVERYWHERE_S = 30.0
MAX_EVERYWHERE_BYTES = 64 * 1024  # maximum size of a body that is sent to every replica
# A proxy header. It prevents replicas from treating forwarded requests as local requests of their own machine.
VIA = (b"via", b"1.1 penstock-ray")
LOST = "The replica that computed this answer has ended."
SILENT = "At least one replica did not answer; retry later."
BUSY = "All replicas are busy; retry later."

Answer = tuple[int, list[tuple[bytes, bytes]], bytes]  # status, headers, body

logger = logging.getLogger("penstock.server")


class Ingress:
    """Forwards requests to replicas, and streams the answers back."""

    def __init__(self, models: Mapping[str, DeploymentHandle], names: Mapping[str, Sequence[str]]) -> None:
        """Create the ingress of `models`, which maps each model's name to its deployment.

        `names` maps each model's name to a list: this name, the model's path, and the names of its adapters.
        """
        # Each handle has its own router with its own state, so there is one handle per model.
        self._models = {name: handle.options(stream=True, method_name="answer") for name, handle in models.items()}
        self._whole = {name: handle.options(method_name="whole_answer") for name, handle in models.items()}
        self._names = {name: tuple(others) for name, others in names.items()}

    async def __call__(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
        if path in ADMIN_PATHS and path not in EVERYWHERE:
            instead = INSTEAD.get(path, "update the deployment instead")
            message = f"{path} would not reach replicas that start later; {instead}."
            return failure(KIND, 501, message)
        try:
            body = await read_body(request)
        except ClientDisconnect:
            return Response(status_code=499)
        if body is None:
            return too_large(KIND)
        scope = {name: request.scope[name] for name in SCOPE_FIELDS} | {"path": path, "raw_path": path.encode()}
        scope["headers"] = [*scope["headers"], VIA]
        try:
            if path in EVERYWHERE:
                if len(body) > MAX_EVERYWHERE_BYTES:
                    return failure(KIND, 413, f"The body has more than {MAX_EVERYWHERE_BYTES} bytes.")
                return await self._everywhere(scope, body)
            if path == MODELS and len(self._models) > 1 and request.method in ("GET", "HEAD"):
                return await self._list_models(scope)
            return await self._forward(scope, body)
        except (BackPressureError, DeploymentUnavailableError):
            return failure(KIND, 503, BUSY, {"retry-after": "1"})
        except RayActorError:
            return failure(KIND, 503, LOST, {"retry-after": "1"})

    async def _forward(self, scope: Scope, body: bytes) -> Response:
        """Send the request to a replica of its model and return the answer."""
        model, name, key = await off_loop(partial(self._choose, scope, body), small=len(body) <= INLINE_BYTES)
        if name is None:
            served = ", ".join(self._models)
            return failure(KIND, 404, f"The model '{(model or '')[:200]}' does not exist; there are: {served}.")
        replicas = self._models[name]
        for _ in range(ATTEMPTS):
            parts: Any = replicas.remote(key, scope, body)
            try:
                status, headers = await anext(parts)
            except (RayActorError, StopAsyncIteration):
                logger.warning("A replica ended before its answer began; the request goes to another one.")
                continue
            response = StreamingResponse(_body(parts, scope["path"], dict(headers)), status_code=status)
            response.raw_headers = [field for field in headers if field[0] != b"x-request-id"]  # Ray Serve adds its own
            return response
        return failure(KIND, 503, LOST, {"retry-after": "1"})

    def _choose(self, scope: Scope, body: bytes) -> tuple[str | None, str | None, PromptKey]:
        """Return (requested model, its served name or None if it is not served, key for the request router)."""
        fields = RequestFields.of(body)
        name = self._model_of(fields.model, scope["path"])
        if name is None:
            return fields.model, None, PromptKey()
        names = (*self._names[name][:2], ANY_MODEL)
        return fields.model, name, prompt_key(fields, dict(scope["headers"]), scope["path"], names)

    def _model_of(self, model: str | None, path: str) -> str | None:
        """Return the served name of the requested model, or of the first if none is named; None for unknown models."""
        first = next(iter(self._models))
        if len(self._models) == 1:
            return first  # the only model, whose server checks the names of adapters
        if model is None and path.startswith(f"{MODELS}/"):
            model = unquote(path.removeprefix(f"{MODELS}/"))
        if model in (None, ANY_MODEL):
            return first
        for name, known in self._names.items():
            if model in known or model.rpartition(":")[0] in known[:2]:  # "BASE:ADAPTER"
                return name
        return None

    async def _list_models(self, scope: Scope) -> Response:
        """Return the models of all deployments."""
        scope = {**scope, "method": "GET"}
        answers = await asyncio.gather(*(handle.remote(scope, b"") for handle in self._whole.values()))
        for answer in answers:
            if answer[0] != 200:
                return _response(answer)
        lists = [orjson.loads(answer[2]) for answer in answers]
        return Response(
            orjson.dumps({**lists[0], "data": [card for each in lists for card in each["data"]]}),
            media_type="application/json",
        )

    async def _everywhere(self, scope: Scope, body: bytes) -> Response:
        """Send the request to all replicas, and return the answer with the highest status, so that errors are shown.

        For `/metrics`, return the metrics of all replicas that answer, with the label `replica`.
        """
        calls = [handle.broadcast("whole_answer", scope, body) for handle in self._whole.values()]
        try:
            results = await asyncio.gather(
                *(call.results_async(timeout_s=EVERYWHERE_S, return_exceptions=True) for call in calls)
            )
        except TimeoutError:
            return failure(KIND, 503, SILENT, {"retry-after": "1"})
        answers: list[Any] = [each for result in results for each in result]
        if scope["path"] == METRICS:
            texts = {dict(each[1])[REPLICA_HEADER].decode(): each[2].decode() for each in answers if _succeeded(each)}
            if texts:
                return Response(joined_metrics(texts), media_type=METRICS_TYPE)
        elif not answers or any(isinstance(each, Exception) for each in answers):
            return failure(KIND, 503, SILENT, {"retry-after": "1"})
        whole = [each for each in answers if not isinstance(each, Exception)]
        return _response(max(whole, key=lambda answer: answer[0])) if whole else failure(KIND, 503, SILENT)


def _succeeded(answer: Answer | Exception) -> bool:
    return not isinstance(answer, Exception) and answer[0] == 200


def _response(answer: Answer) -> Response:
    status, headers, body = answer
    media_type = dict(headers).get(b"content-type")
    return Response(body, status_code=status, headers={"content-type": media_type.decode()} if media_type else None)


async def _body(parts: Any, path: str, headers: Mapping[bytes, bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of the body.

    If the replica ends during a stream of events or lines, the stream ends with an error in the format of the request's
    API. Any other body is cut off, which the client detects by its length.
    """
    last = b""
    try:
        async for part in parts:
            last = part
            yield part
    except (RayActorError, RayTaskError):
        logger.warning("A replica ended during an answer.")
        if not headers.get(b"content-type", b"").decode("latin-1").startswith(STREAMS):
            raise
        yield error_end(path, Failure(503, KIND, LOST), last)
    finally:
        parts.cancel()  # does nothing after the end of the answer
