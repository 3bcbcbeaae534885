"""A server class for Ray Serve LLM (`ray.serve.llm`). Ray's ingress has OpenAI's routes; Penstock is the engine.

    LLMConfig(
        server_cls="serve.on_ray.llm_server.PenstockServer",
        model_loading_config={"model_id": "chat", "model_source": "/models/chat"},
        engine_kwargs={"max_running_requests": 64},
    )

`ray.serve.llm` imports its request types from vLLM or SGLang. Therefore one of these packages must be installed,
although its engine is not used.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Ray is an optional dependency.

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import orjson
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    EmbeddingResponse,
    ErrorInfo,
    ErrorResponse,
    ScoreResponse,
    TokenizeResponse,
)

from runtime.config import Args
from runtime.errors import ConfigurationError, InvalidRequest
from serve.on_ray.application import words_of
from serve.on_ray.ingress import VIA
from serve.on_ray.local_server import LocalServer

if TYPE_CHECKING:
    from pydantic import BaseModel
    from ray.llm._internal.serve.core.protocol import RawRequestInfo
    from ray.serve.llm import LLMConfig

# Headers that describe the client's body. They are not forwarded, because the body is serialized again.
BODY_HEADERS = frozenset(("content-length", "content-type", "content-encoding", "transfer-encoding"))

# Field of `LLMConfig` that Penstock does not support -> advice on what to set instead.
REFUSED = {
    "lora_config": "name the adapters in engine_kwargs: lora_paths or lora_dir",
    "placement_group_config": "the ranks of a replica run on one machine; set ray_actor_options in deployment_config",
}


class PenstockServer:
    """A replica of a model in Ray Serve LLM. It implements `LLMServerProtocol`."""

    async def __init__(self, llm_config: LLMConfig) -> None:
        """Load the model. `llm_config.engine_kwargs` has Penstock's options.

        Raises `ConfigurationError` for options that cannot be satisfied.
        """
        self._llm_config = llm_config
        self._server = LocalServer(words_of_config(llm_config))
        await self.start()

    async def start(self) -> None:
        """Start the engine."""
        await self._server.start()

    async def chat(self, request: BaseModel, raw_request_info: RawRequestInfo | None = None) -> AsyncIterator[Any]:
        """Answer `/v1/chat/completions`: yield the events of a stream, or one response."""
        async for part in self._call("/v1/chat/completions", request, raw_request_info, ChatCompletionResponse):
            yield part

    async def completions(
        self, request: BaseModel, raw_request_info: RawRequestInfo | None = None
    ) -> AsyncIterator[Any]:
        """Answer `/v1/completions`: yield the events of a stream, or one response."""
        async for part in self._call("/v1/completions", request, raw_request_info, CompletionResponse):
            yield part

    async def embeddings(
        self, request: BaseModel, raw_request_info: RawRequestInfo | None = None
    ) -> AsyncIterator[Any]:
        """Answer `/v1/embeddings`: yield one response."""
        async for part in self._call("/v1/embeddings", request, raw_request_info, EmbeddingResponse):
            yield part

    async def score(self, request: BaseModel, raw_request_info: RawRequestInfo | None = None) -> AsyncIterator[Any]:
        """Answer `/v1/score`: yield one response."""
        async for part in self._call("/v1/score", request, raw_request_info, ScoreResponse):
            yield part

    async def tokenize(self, request: BaseModel, raw_request_info: RawRequestInfo | None = None) -> AsyncIterator[Any]:
        """Answer `/tokenize`: yield one response."""
        async for part in self._call("/tokenize", request, raw_request_info, TokenizeResponse):
            yield part

    async def detokenize(
        self, request: BaseModel, raw_request_info: RawRequestInfo | None = None
    ) -> AsyncIterator[Any]:
        """Answer `/detokenize`: yield one response."""
        async for part in self._call("/detokenize", request, raw_request_info, DetokenizeResponse):
            yield part

    async def transcriptions(
        self, request: BaseModel, raw_request_info: RawRequestInfo | None = None
    ) -> AsyncIterator[Any]:
        """Yield an error with status 501, because Ray Serve LLM does not forward the client's audio file."""
        yield _error(501, "Ray Serve LLM passes no audio to Penstock; use `penstock ray` for transcriptions.")

    async def _call(
        self, path: str, request: BaseModel, info: RawRequestInfo | None, response: type[BaseModel]
    ) -> AsyncIterator[Any]:
        """Answer a request with Penstock's route `path`: yield the events of a stream, one `response`, or one error."""
        headers = [(b"content-type", b"application/json"), VIA]
        for name, value in (info.headers if info is not None else {}).items():
            if name.lower() not in BODY_HEADERS:
                headers.append((name.lower().encode(), value.encode()))
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "client": None,
            "server": None,
        }
        body = request.model_dump_json(exclude_unset=True).encode()
        async with aclosing(self._server.answer(scope, body)) as parts:
            status, fields = await anext(parts)
            if status == 200 and dict(fields).get(b"content-type", b"").startswith(b"text/event-stream"):
                async for part in parts:
                    yield part.decode()
                return
            whole = b"".join([part async for part in parts])
        yield response.model_validate(orjson.loads(whole)) if status == 200 else _error_of(status, whole)

    async def check_health(self) -> None:
        """Raise `RuntimeError` if the engine is not ready or a step hangs."""
        self._server.check_health()

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Raises `RuntimeError` while requests run or wait."""
        if not self._server.engine.flush_cache():
            raise RuntimeError("The cache was not emptied: requests are running or waiting.")

    async def sleep(self, tags: list[str] | None = None, level: int = 1) -> None:
        """Release the memory of "weights" and "kv_cache", or only of the kinds in `tags`.

        Weights that cannot be read from the checkpoint's files again, such as a trainer's, are written to a temporary
        file by level 1 and discarded by level 2. Raises `InvalidRequest` for another level.
        """
        if level not in (1, 2):
            raise InvalidRequest("level must be 1 or 2.", param="level")
        await self._server.engine.release_memory_occupation(tags, keep=level == 1)

    async def wakeup(self, tags: list[str] | None = None) -> None:
        """Allocate the released memory again."""
        await self._server.engine.resume_memory_occupation(tags)

    async def is_sleeping(self) -> bool:
        """Return whether any memory is released."""
        return bool(self._server.engine.core.weights.released)

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Pause generation.

        `mode` is a mode of `Engine.pause_generation`, or vLLM's "keep", which means "in_place". `clear_cache`: also
        empty the prefix cache, unless the mode is "in_place".
        """
        await self._server.engine.pause_generation("in_place" if mode == "keep" else mode)
        if clear_cache and mode not in ("in_place", "keep"):
            self._server.engine.core.pause.retract()

    async def resume(self) -> None:
        """Resume generation after `pause`."""
        await self._server.engine.continue_generation()

    async def is_paused(self) -> bool:
        """Return whether generation is paused or memory is released."""
        core = self._server.engine.core
        return core.pause.paused or bool(core.weights.released)

    async def llm_config(self) -> LLMConfig:
        """Return the configuration."""
        return self._llm_config

    async def __del__(self) -> None:
        """Release the engine. Ray Serve calls this after the last request has ended."""
        await self._server.aclose()

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """Return the options of the Ray deployment, with GPUs for all ranks.

        Raises `ConfigurationError` for unsupported fields and invalid options.
        """
        parallel = Args.parse(words_of_config(llm_config)).parallel
        options = copy.deepcopy(llm_config.deployment_config)
        actor = options.setdefault("ray_actor_options", {})
        if llm_config.accelerator_type is not None:
            actor.setdefault("num_gpus", parallel.tp_size * parallel.pp_size * parallel.dp_size)
            actor.setdefault("accelerator_type", llm_config.accelerator_type)
        if llm_config.runtime_env:
            actor["runtime_env"] = {**actor.get("runtime_env", {}), **llm_config.runtime_env}
        return options


def words_of_config(llm_config: LLMConfig) -> list[str]:
    """Convert the configuration to command-line arguments. Raises `ConfigurationError` for unsupported fields."""
    for name, instead in REFUSED.items():
        if getattr(llm_config, name) is not None:
            raise ConfigurationError(f"LLMConfig.{name} has no effect on Penstock; {instead}.")
    model = llm_config.model_loading_config
    source = model.model_source or model.model_id
    if not isinstance(source, str):
        raise ConfigurationError("model_source must be a path, a URL or a name on the Hub, not a mirror's settings.")
    kind = getattr(llm_config.accelerator_config, "kind", "gpu")  # Ray's default is gpu, also without GPUs
    if kind not in ("cpu", "gpu"):
        raise ConfigurationError(f"Penstock does not run on an accelerator_config of the kind {kind}.")
    device = {"device": "cpu"} if kind == "cpu" else {}
    tokenizer = {} if model.tokenizer_source is None else {"tokenizer_path": model.tokenizer_source}
    values = {"model_path": source, "served_model_name": model.model_id, **tokenizer, **device}
    return words_of({**values, **llm_config.engine_kwargs})


def _error_of(status: int, body: bytes) -> ErrorResponse:
    """Convert Penstock's error answer to Ray Serve LLM's type."""
    try:
        fields = orjson.loads(body)["error"]
        return _error(status, str(fields["message"]), str(fields["type"]), fields.get("param"))
    except (ValueError, LookupError, TypeError):
        return _error(status, body.decode(errors="replace"))


def _error(status: int, message: str, kind: str = "ReplicaError", param: str | None = None) -> ErrorResponse:
    return ErrorResponse(error=ErrorInfo(message=message, type=kind, param=param, code=status))
