"""Which routes of SGLang 0.5.2 exist, and the answers of unsupported ones."""

from __future__ import annotations

import gc

import pytest

import fake_core
from runtime.errors import ConfigurationError
from serve.server import unsupported
from serve.server.app import ROUTES, routes_for
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
    "/add_external_corpus",
    "/remove_external_corpus",
    "/list_external_corpora",
    "/load_lora_adapter",
    "/load_lora_adapter_from_tensors",
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
    "/freeze_gc",
    "/vertex_generate",
]
ABSENT = {**unsupported.GENERATING, **unsupported.CONTROL, **unsupported.OLLAMA}


def test_every_route_of_the_surface_answers() -> None:
    served = [spec.path for spec in ROUTES]
    assert set(SURFACE) - set(served) == set()
    pairs = [(method, spec.path) for spec in ROUTES for method in spec.methods]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("path", ABSENT)
async def test_route_that_waits_says_for_what(served: Served, path: str) -> None:
    methods, missing = ABSENT[path]
    feature, _, instead = missing.partition("; ")
    for method in methods:
        answer = await served.http.request(method, path, json={})
        assert answer.status_code == 501
        error = answer.json()["error"]
        if path in unsupported.OLLAMA:
            assert error.startswith(missing)
            continue
        assert error["message"].startswith(f"{feature}: this server")
        assert instead in error["message"]
        assert (error["type"], error["code"]) == ("NotImplementedError", 501)


async def test_sagemaker_and_versions(served: Served) -> None:
    assert (await served.http.get("/ping")).status_code == 200
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    assert (await served.post("/invocations", **body))["object"] == "chat.completion"
    assert (await served.http.get("/get_weight_version")).json() == {"weight_version": "default"}
    assert (await served.http.get("/version")).json()["version"]


async def test_vertex_predicts_one_answer_for_each_instance(served: Served) -> None:
    parameters = {"sampling_params": {"max_new_tokens": 3}}
    body = {"instances": [{"text": "a"}, {"text": "b"}], "parameters": parameters}
    predictions = (await served.post("/vertex_generate", **body))["predictions"]
    [first, second] = predictions
    assert [len(first["output_ids"]), len(second["output_ids"])] == [3, 3]
    assert [request.text for request in served.core.submitted] == ["a", "b"]
    assert await served.post("/vertex_generate", instances=[]) == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"instances": [{"text": "a"}, {"input_ids": [1]}]}, "instances.1"),
        ({"instances": [{}]}, "instances.0"),
        ({"instances": [{"text": "a", "image_data": "x"}]}, "instances.0.image_data"),
        ({"instances": [{"text": "a"}], "parameters": {"text": "b"}}, "parameters.text"),
        ({"parameters": {}}, "instances"),
    ],
)
async def test_vertex_refuses_what_it_cannot_do(served: Served, body: dict, param: str) -> None:
    answer = await served.http.post("/vertex_generate", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_vertex_names_its_routes_in_the_environment() -> None:
    paths = [spec.path for spec in routes_for({"AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/alive"})]
    assert {"/predict", "/alive", "/health"} <= set(paths)
    assert "/vertex_generate" not in paths
    assert routes_for({"AIP_HEALTH_ROUTE": "/ping"}) == ROUTES
    for wrong in ("/generate", "predict", "/{any}"):
        with pytest.raises(ConfigurationError, match="AIP_PREDICT_ROUTE"):
            routes_for({"AIP_PREDICT_ROUTE": wrong})


async def test_vllms_load_and_tokenizer_info(served: Served) -> None:
    assert (await served.http.get("/load")).json() == {"server_load": 0}
    info = (await served.http.get("/tokenizer_info")).json()
    assert info["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in info["chat_template"]
    assert info["max_model_len"] == fake_core.CONTEXT


async def test_frozen_collector_keeps_what_lives(served: Served) -> None:
    try:
        answer = await served.http.post("/freeze_gc")
        assert (answer.status_code, answer.text) == (200, "Garbage collection frozen.\n")
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


async def test_server_info_has_the_names_that_benchmarks_read(served: Served) -> None:
    info = (await served.http.get("/get_server_info")).json()
    assert (info["max_running_requests"], info["tokenizer_path"], info["page_size"]) == (8, "org/tiny", 16)
    [state] = info["internal_states"]
    assert state["memory_usage"]["token_capacity"] == info["max_total_num_tokens"]
    assert (state["dp_size"], state["effective_max_running_requests_per_dp"]) == (1, 8)
