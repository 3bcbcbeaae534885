"""Which routes of SGLang 0.5.2 there are, and what those answer that wait for something."""

from __future__ import annotations

import pytest

from serve import absent
from serve.app import ROUTES
from served_core import Served

SURFACE = [
    "/health",
    "/health_generate",
    "/get_model_info",
    "/get_weight_version",
    "/get_server_info",
    "/get_load",
    "/set_internal_state",
    "/generate",
    "/generate_from_file",
    "/encode",
    "/classify",
    "/flush_cache",
    "/clear_hicache_storage_backend",
    "/start_profile",
    "/stop_profile",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
    "/update_weights_from_disk",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weight_version",
    "/get_weights_by_name",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/slow_down",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/open_session",
    "/close_session",
    "/configure_logging",
    "/abort_request",
    "/parse_function_call",
    "/separate_reasoning",
    "/pause_generation",
    "/continue_generation",
    "/metrics",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/{model:path}",
    "/v1/score",
    "/v1/responses",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/rerank",
    "/ping",
    "/invocations",
]
NOT_THERE = {"/freeze_gc", "/vertex_generate"}
ABSENT = {**absent.GENERATING, **absent.OPENAI_GENERATING, **absent.CONTROL}


def test_every_route_of_the_surface_answers() -> None:
    served = [spec.path for spec in ROUTES]
    assert set(SURFACE) - set(served) == set()
    pairs = [(method, spec.path) for spec in ROUTES for method in spec.methods]
    assert len(pairs) == len(set(pairs))
    assert not NOT_THERE & set(served)  # move it to SURFACE when it is built


@pytest.mark.parametrize("path", ABSENT)
async def test_route_that_waits_says_for_what(served: Served, path: str) -> None:
    methods, missing = ABSENT[path]
    for method in methods:
        answer = await served.http.request(method, path, json={})
        assert answer.status_code == 501
        error = answer.json()["error"]
        assert error["message"].startswith(missing)
        assert (error["type"], error["code"]) == ("NotImplementedError", 501)


async def test_sagemaker_and_versions(served: Served) -> None:
    assert (await served.http.get("/ping")).status_code == 200
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    assert (await served.post("/invocations", **body))["object"] == "chat.completion"
    assert (await served.http.get("/get_weight_version")).json() == {"weight_version": "default"}
    assert (await served.http.get("/version")).json()["version"]
