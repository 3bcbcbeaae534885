"""Routes of other servers that are not supported yet. They answer 501 and name the missing feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.errors import NotSupported

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

# Maps a path to its methods and to the missing feature, with which the error message begins.
GENERATING = {
    "/generate_from_file": (("POST",), "Input embeddings"),
    # OpenAI
    "/v1/audio/speech": (("POST",), "Making speech"),
    "/v1/audio/voices": (("GET",), "Making speech"),
    "/v1/realtime": (("GET", "POST"), "The realtime API"),
    "/v1/images/generations": (("POST",), "Making images"),
    "/v1/images/edits": (("POST",), "Making images"),
    "/v1/images/variations": (("POST",), "Making images"),
    "/v1/videos": (("GET", "POST"), "Making videos"),
    "/v1/moderations": (("POST",), "Moderation"),
    "/v1/responses/compact": (("POST",), "Compacting a conversation"),
    "/v1/conversations": (("POST",), "Stored conversations"),
    "/v1/assistants": (("GET", "POST"), "Assistants"),
    "/v1/threads": (("POST",), "Assistants"),
    "/v1/vector_stores": (("GET", "POST"), "Vector stores"),
    "/v1/uploads": (("POST",), "Uploads in parts; use /v1/files"),
    "/v1/fine_tuning/jobs": (("GET", "POST"), "Fine-tuning"),
    "/v1/evals": (("GET", "POST"), "Evals"),
    # vLLM, llama.cpp
    "/pooling": (("POST",), "Pooling of all tokens; use /v1/embeddings"),
    "/completion": (("POST",), "llama.cpp's completion; use /v1/completions"),
    "/infill": (("POST",), "llama.cpp's infill; use /v1/completions with suffix"),
    "/inference/v1/generate": (("POST",), "vLLM's generation from tokens; use /generate with input_ids"),
}
CONTROL = {
    "/set_internal_state": (("POST", "PUT"), "Changing settings while the server runs"),
    "/collective_rpc": (("POST",), "Calling functions of workers"),
}
OLLAMA = {
    "/api/pull": (("POST",), "Fetching models"),
    "/api/push": (("POST",), "Publishing models"),
    "/api/create": (("POST",), "Making models"),
    "/api/copy": (("POST",), "Copying models"),
    "/api/delete": (("DELETE",), "Deleting models"),
}
MISSING = {path: what for table in (GENERATING, CONTROL, OLLAMA) for path, (_, what) in table.items()}


async def answer(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Raise `NotSupported`, whose message names the missing feature."""
    missing, semicolon, instead = MISSING[http.url.path].partition(";")
    raise NotSupported(f"{missing}: this server does not support it yet{semicolon}{instead}.")
