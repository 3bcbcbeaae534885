"""Routes of SGLang and Ollama for which there is nothing here yet: they answer 501 and say what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.errors import NotSupported

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

# By path: the methods, and what is missing, as the beginning of a sentence.
GENERATING = {
    "/generate_from_file": (("POST",), "Input embeddings"),
    "/open_session": (("GET", "POST"), "Sessions"),
    "/close_session": (("GET", "POST"), "Sessions"),
}
CONTROL = {
    "/set_internal_state": (("POST", "PUT"), "Changing settings while the server runs"),
    "/clear_hicache_storage_backend": (("GET", "POST"), "A second level of the KV cache"),
    "/start_expert_distribution_record": (("GET", "POST"), "Recording which experts are used"),
    "/stop_expert_distribution_record": (("GET", "POST"), "Recording which experts are used"),
    "/dump_expert_distribution_record": (("GET", "POST"), "Recording which experts are used"),
    "/update_weights_from_disk": (("POST",), "Changing weights while the server runs"),
    "/init_weights_update_group": (("POST",), "Changing weights while the server runs"),
    "/update_weights_from_distributed": (("POST",), "Changing weights while the server runs"),
    "/update_weights_from_tensor": (("POST",), "Changing weights while the server runs"),
    "/update_weight_version": (("POST",), "Changing weights while the server runs"),
    "/get_weights_by_name": (("GET", "POST"), "Reading weights"),
    "/release_memory_occupation": (("GET", "POST"), "Giving memory back while the server runs"),
    "/resume_memory_occupation": (("GET", "POST"), "Giving memory back while the server runs"),
    "/slow_down": (("GET", "POST"), "Slowing the steps down"),
    "/load_lora_adapter": (("POST",), "Adapters (LoRA)"),
    "/unload_lora_adapter": (("POST",), "Adapters (LoRA)"),
    "/configure_logging": (("GET", "POST"), "Changing the log while the server runs"),
    "/pause_generation": (("POST",), "Pausing"),
    "/continue_generation": (("POST",), "Pausing"),
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
    """Always raises `NotSupported`."""
    raise NotSupported(f"{MISSING[http.url.path]}: this server does not support it yet.")
