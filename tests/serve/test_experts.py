"""Experts through the engine and the server: records of their use, shared experts, and experts that move."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

import http_server
import tiny_checkpoints
from rank_cases import MIXTURES
from runtime.errors import ConfigurationError, InvalidRequest
from runtime.layers.expert_sharing import EXCHANGE_TOKENS, ExpertSharing
from serve import Engine
from serve.server.app import build_app

PLAIN = {"skip_tokenizer_init": True, "random_seed": 1, "max_total_tokens": 2048}
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
SOON = ("qwen3_moe",)  # families in the default test run
each_family = pytest.mark.parametrize(
    "family", [name if name in SOON else pytest.param(name, marks=pytest.mark.slow) for name in MIXTURES]
)
PROMPT = [3 + (7 * i) % 100 for i in range(33)]


def model_path(family: str = "qwen3_moe", seed: int = 0) -> str:
    groups = {"n_group": 4} if MIXTURES[family] == "n_routed_experts" else {}
    return tiny_checkpoints.cached(
        family,
        seed=seed,
        max_position_embeddings=512,
        vocab_size=131,
        head_dim=16,
        **{MIXTURES[family]: 8},
        **groups,
    )


def prompts() -> list[list[int]]:
    fresh = [[3 + (7 * i + n) % 100 for i in range(n)] for n in (1, 5, 16, 33, 60)]
    return fresh + [[*prompt[: 1 + len(prompt) // 2], 4, 5] for prompt in fresh]


async def outputs(engine: Engine) -> list[list[int]]:
    return [answer["output_ids"] for answer in await engine.generate(input_ids=prompts(), sampling_params=GREEDY)]


@cache
def chosen_by_transformers(path: str, ids: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the experts that transformers' model chooses, int [T, k] for each layer."""
    model: Any = tiny_checkpoints.auto_of(path).from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return [each.topk(2, dim=-1).indices for each in logits]


@pytest.mark.parametrize("graph", [True, False], ids=["C++ graph", "torch"])
async def test_counts_equal_the_choices_of_transformers(
    graph: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path))
    chosen = chosen_by_transformers(model_path(), tuple(PROMPT))
    options = {} if graph else {"attention_backend": "torch_native", "sampling_backend": "pytorch"}
    ask = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    async with (
        Engine(model_path(), **PLAIN, **options, expert_distribution_recorder_mode="stat") as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        first = (await http.post("/generate", json=ask)).json()["output_ids"]
        assert (await http.post("/dump_expert_distribution_record")).status_code == 400  # nothing was recorded
        await http.post("/flush_cache")
        assert (await http.post("/start_expert_distribution_record")).text == "Start recording expert distribution.\n"
        assert (await http.post("/generate", json=ask)).json()["output_ids"] == first
        assert (await http.post("/stop_expert_distribution_record")).status_code == 200
        await http.post("/generate", json=ask)
        [path] = (await http.post("/dump_expert_distribution_record")).text.split()[-1:]
        assert Path(path).parent == tmp_path
        body = torch.load(path, weights_only=True)
        await http.post("/flush_cache")
        await engine.start_expert_distribution_record()
        await http.post("/generate", json=ask)
        [summary] = await engine.dump_expert_distribution_record()
    counts = torch.stack([torch.bincount(each.flatten(), minlength=8) for each in chosen])
    assert body["logical_count"].sum(0).tolist() == counts.tolist()
    assert summary["logical_count"] == {str(layer): line for layer, line in enumerate(counts.tolist())}
    assert body["average_utilization_rate_over_window"] == 1.0  # there is one rank


@pytest.mark.parametrize("mode", ["per_pass", "per_token"])
async def test_single_steps_and_tokens_are_recorded(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path))
    chosen = torch.stack(chosen_by_transformers(model_path(), tuple(PROMPT)))  # [L, T, k]
    one = {"temperature": 0, "max_new_tokens": 1}
    async with Engine(model_path(), **PLAIN, expert_distribution_recorder_mode=mode, chunked_prefill_size=16) as engine:
        await engine.start_expert_distribution_record()
        await engine.generate(input_ids=PROMPT, sampling_params=one)
        [summary] = await engine.dump_expert_distribution_record()
    assert Path(summary["path"]).stat().st_mode & 0o777 == 0o600  # it has the tokens of prompts
    records = torch.load(summary["path"], weights_only=True)["records"]
    assert len(records) == summary["num_steps"] == 3
    if mode == "per_pass":
        found = torch.stack([record["global_physical_count"] for record in records])
        for part, counts in zip(chosen.split(16, dim=1), found, strict=True):
            assert counts.tolist() == [torch.bincount(each.flatten(), minlength=8).tolist() for each in part]
        return
    ids = torch.cat([record["topk_ids_of_layer"] for record in records], dim=1)
    assert ids.sort(-1).values.tolist() == chosen.sort(-1).values.tolist()
    assert torch.cat([record["input_ids"] for record in records]).tolist() == PROMPT
    assert torch.cat([record["positions"] for record in records]).tolist() == [*range(len(PROMPT))]


async def test_balance_is_logged_from_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.core")
    async with Engine(model_path(), **PLAIN, enable_expert_distribution_metrics=True) as engine:
        await engine.generate(input_ids=[PROMPT], sampling_params={**GREEDY, "max_new_tokens": 90})
    assert "Expert balancedness of the last 40 steps: ranks 1.000, experts 0." in caplog.text


@pytest.mark.slow
async def test_replicas_without_steps_have_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path))
    async with Engine(model_path(), **PLAIN, dp_size=2, expert_distribution_recorder_mode="stat") as engine:
        await engine.start_expert_distribution_record()
        await engine.generate(input_ids=PROMPT, sampling_params={**GREEDY, "max_new_tokens": 3})
        [summary] = await engine.dump_expert_distribution_record()
        assert Path(summary["path"]).exists()
        with pytest.raises(InvalidRequest, match="No step has been recorded"):
            await engine.dump_expert_distribution_record()


@pytest.mark.parametrize("options", [{}, pytest.param({"tp_size": 2, "ep_size": 2}, marks=pytest.mark.slow)])
async def test_without_the_option_nothing_is_recorded(options: dict[str, Any]) -> None:
    async with (
        Engine(model_path(), **PLAIN, **options) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for route in ("start", "stop", "dump"):
            answer = await http.get(f"/{route}_expert_distribution_record")
            assert answer.status_code == 400
            assert "--expert-distribution-recorder-mode" in answer.text


async def places(engine: Engine) -> list[dict[str, list[int]]]:
    """Return the placement that each rank knows."""
    answers = [await asyncio.shield(runner.call("expert_places", {})) for runner in engine.core.runners]
    return [answer for of_replica in answers for answer in of_replica]


async def check_moving(family: str, **options: Any) -> None:
    """Check the tokens of one process's engine, while the experts of several ranks move."""
    async with Engine(model_path(family), **PLAIN) as engine:
        expected = await outputs(engine)
    async with Engine(
        model_path(family),
        **PLAIN,
        **{"chunked_prefill_size": 16, **options},
        enable_eplb=True,
        eplb_rebalance_num_iterations=10,
        eplb_rebalance_layers_per_chunk=1,
    ) as engine:
        first = await places(engine)
        for _ in range(20):
            assert await outputs(engine) == expected
            now = await places(engine)
            for each in now:  # all ranks of a stage know the same placement
                assert all(each == other or not each.keys() & other.keys() for other in now)
            if now != first:
                break
        assert now != first
        assert await outputs(engine) == expected


@each_family
async def test_tokens_stay_the_same_while_experts_move(family: str) -> None:
    algorithm = "deepseek_vec" if family in SOON else "auto"
    await check_moving(family, tp_size=2, ep_size=2, ep_num_redundant_experts=2, eplb_algorithm=algorithm)


@pytest.mark.slow
@each_family
async def test_four_ranks_while_experts_move(family: str) -> None:
    await check_moving(family, tp_size=4, ep_size=4, ep_dispatch_algorithm="dynamic", ep_num_redundant_experts=4)


@pytest.mark.slow
async def test_two_stages_of_two_parts(tmp_path: Path) -> None:
    options = {"tp_size": 2, "pp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 2}
    await check_moving("qwen3_moe", **options, eplb_algorithm="deepseek_vec")


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [2, 4])
async def test_groups_that_attend_to_their_own_tokens_share_experts(ep_size: int) -> None:
    """With data-parallel attention, all ranks hold experts, and rank 0 counts the tokens of all groups."""
    options = {"tp_size": ep_size, "dp_size": 2, "enable_dp_attention": True, "ep_size": ep_size}
    await check_moving("qwen3_moe", **options, ep_num_redundant_experts=ep_size)


@pytest.mark.slow
async def test_results_travel_by_all_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    combine, sizes = ExpertSharing.combine, []

    def counted(self: ExpertSharing, layer: int, chosen: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(chosen))
        return combine(self, layer, chosen, *rest)

    monkeypatch.setattr(ExpertSharing, "combine", counted)
    await check_moving(
        "qwen3_moe", tp_size=2, enable_ep_moe=True, moe_a2a_backend="all_to_all", chunked_prefill_size=128
    )
    assert sizes
    assert min(sizes) >= EXCHANGE_TOKENS  # smaller steps are summed


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["w8a8_int8", "w4a16"])
async def test_quantised_experts_move(quantization: str) -> None:
    common = {**PLAIN, "quantization": quantization, "dtype": "bfloat16"}
    async with Engine(model_path(), **common) as engine:
        expected = await outputs(engine)
    async with Engine(
        model_path(), **common, tp_size=2, ep_size=2, enable_eplb=True, eplb_rebalance_num_iterations=10
    ) as engine:
        first = await places(engine)
        while await places(engine) == first:
            found = await outputs(engine)
        same = sum(a == b for one, two in zip(found, expected) for a, b in zip(one, two))
        again = await outputs(engine)
    assert same > 0.5 * sum(map(len, expected))  # rounding of partial sums changes some tokens
    assert sum(a == b for one, two in zip(again, found) for a, b in zip(one, two)) > 0.8 * sum(map(len, found))


@pytest.mark.slow
async def test_weights_are_updated_where_experts_have_moved() -> None:
    """New weights reach the slots of the current placement, from disk and by name."""
    paths = [model_path(seed=seed) for seed in (0, 1)]
    expected = []
    for path in paths:
        async with Engine(path, **PLAIN) as engine:
            expected.append(await outputs(engine))
    named = load_file(Path(paths[1]) / "model.safetensors")
    async with Engine(
        paths[0], **PLAIN, tp_size=2, ep_size=2, enable_eplb=True, eplb_rebalance_num_iterations=10
    ) as engine:
        first = await places(engine)
        while await places(engine) == first:
            assert await outputs(engine) == expected[0]
        await engine.update_weights_from_disk(paths[1])
        assert await outputs(engine) == expected[1]
        await engine.update_weights_from_disk(paths[0])
        for _ in range(3):
            assert await outputs(engine) == expected[0]
        await engine.update_weights_from_tensor([*named.items()])
        for _ in range(3):  # experts move again, with the new weights
            assert await outputs(engine) == expected[1]


@pytest.mark.parametrize("ext", ["json", "pt", "text"])
async def test_the_first_placement_is_read(ext: str, tmp_path: Path) -> None:
    table = [[7, 6, 5, 4, 3, 2, 1, 0]] * 3
    body: dict[str, Any] = {"physical_to_logical_map": table}
    location = json.dumps(body)
    if ext == "json":
        (tmp_path / "map.json").write_text(location)
        location = str(tmp_path / "map.json")
    elif ext == "pt":
        location = str(tmp_path / "record.pt")
        counts = torch.ones(2, 3, 8, dtype=torch.int32)
        counts[:, :, 0] = 100
        torch.save({"logical_count": counts}, location)
    async with Engine(model_path(), **PLAIN, tp_size=2, ep_size=2, init_expert_location=location) as engine:
        [first, second] = await places(engine)
    assert first == second
    if ext != "pt":
        assert [*first.values()] == table
    else:
        assert all(sorted(line) == [*range(8)] and line != sorted(line) for line in first.values())


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("{", "cannot be read"),
        ("nowhere.json", "cannot be read"),
        ('{"a": 1}', "physical_to_logical_map or logical_count is missing"),
        ('{"physical_to_logical_map": [[0, 1]]}', "has 1 layers, the model 3"),
        (json.dumps({"physical_to_logical_map": [[0, 1]] * 3}), "has 2 slots, not 8 experts"),
        (json.dumps({"physical_to_logical_map": [[1] * 8] * 3}), "must name each of the 8 experts"),
        ('{"physical_to_logical_map": [[0], [0, 1]]}', "different lengths"),
        ('{"logical_count": [[-1]]}', "numbers from 0 on"),
    ],
)
async def test_wrong_placements_are_refused(location: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        async with Engine(model_path(), **PLAIN, tp_size=2, ep_size=2, init_expert_location=location):
            pass
