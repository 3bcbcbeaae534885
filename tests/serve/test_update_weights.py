"""Weight updates while requests run: earlier tokens come from the old weights, later ones from the new weights."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM

import http_server
import tiny_checkpoints
from runtime.errors import CheckpointError, EngineFailure, InvalidRequest
from runtime.loading import tensors
from runtime.worker import verbs
from serve import Engine, SyncEngine
from serve.server.app import build_app

PLAIN: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1}
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def checkpoint(seed: int) -> str:
    return tiny_checkpoints.cached("llama", seed=seed, vocab_size=131, max_position_embeddings=512)


def greedy(path: str, ids: list[int], new: int) -> list[int]:
    """Return the greedy tokens of transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
    return found[0, len(ids) :].tolist()


def body(ids: list[int], new: int) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
    }


@asynccontextmanager
async def serving(path: str, **options: Any) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    async with (
        Engine(path, **{**PLAIN, **options}) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        yield engine, http


async def output(http: httpx.AsyncClient, ids: list[int], new: int = 12) -> list[int]:
    response = await http.post("/generate", json=body(ids, new))
    assert response.status_code == 200, response.text
    return response.json()["output_ids"]


async def update(http: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    response = await http.post("/update_weights_from_disk", json={"model_path": path, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def stream_across(
    http: httpx.AsyncClient, path: str, ids: list[int], new: int, **fields: Any
) -> tuple[list[int], int, dict[str, Any]]:
    """Return all ids of a stream, the number that had arrived before the update, and the answer of the update."""
    found: list[int] = []
    updating: asyncio.Task[dict[str, Any]] | None = None
    asked = 0
    async with http.stream("POST", "/generate", json={**body(ids, new), "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                found += orjson.loads(line[6:])["output_ids"]
                if updating is None and len(found) >= 3:
                    asked = len(found)
                    updating = asyncio.create_task(update(http, path, **fields))
    assert updating is not None
    return found, asked, await updating


def could_choose(path: str, ids: list[int], found: list[int]) -> list[bool]:
    """Return for each token of `found` whether transformers scores it highest after its prefix, except for rounding."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids, *found[:-1]]])).logits[0, len(ids) - 1 :]
    chosen = logits.gather(1, torch.tensor(found)[:, None])[:, 0]
    return (logits.max(dim=1).values - chosen < 1e-5).tolist()


def new_from(found: list[int], ids: list[int], old: str, new: str) -> int | None:
    """Return the number of leading tokens from the old weights. All later tokens must come from the new weights."""
    before, after = could_choose(old, ids, found), could_choose(new, ids, found)
    return next((n for n in range(len(found) + 1) if all(before[:n]) and all(after[n:])), None)


SIZES = [
    pytest.param({}, id="alone"),
    pytest.param({"disable_overlap_schedule": True}, id="no-overlap"),
    pytest.param({"dp_size": 2}, id="dp"),
    pytest.param({"tp_size": 2}, id="tp", marks=pytest.mark.slow),
    pytest.param({"pp_size": 2}, id="pp"),
]


@pytest.mark.parametrize("sizes", SIZES)
async def test_a_stream_goes_on_with_the_new_weights(sizes: dict[str, Any]) -> None:
    old, new = checkpoint(0), checkpoint(1)
    async with serving(old, **sizes) as (engine, http):
        assert await output(http, PROMPT) == greedy(old, PROMPT, 12)
        found, asked, answer = await stream_across(http, new, PROMPT, 400, weight_version="step-1")
        assert answer["success"]
        assert answer["num_paused_requests"] == 1
        count = new_from(found, PROMPT, old, new)
        assert count is not None
        assert asked <= count < 400
        for ids in (PROMPT, PROMPT[:5], [3, 4]):
            assert [await output(http, ids) for _ in range(2)] == [greedy(new, ids, 12)] * 2
        assert (await http.get("/get_weight_version")).json() == {"weight_version": "step-1"}
        info = (await http.get("/get_model_info")).json()
        assert (info["model_path"], info["weight_version"]) == (new, "step-1")
        assert (await http.post("/generate", json=body(PROMPT, 1))).json()["meta_info"]["weight_version"] == "step-1"
        await update(http, old)
        assert await output(http, PROMPT) == greedy(old, PROMPT, 12)
        engine.core.check()


async def test_without_a_flush_kv_and_prefixes_stay() -> None:
    old, new = checkpoint(0), checkpoint(1)
    ids = list(range(3, 67))
    async with serving(old, page_size=4) as (engine, http):
        await output(http, ids)
        await update(http, new, flush_cache=False)
        meta = (await http.post("/generate", json=body(ids, 4))).json()
        assert meta["meta_info"]["cached_tokens"] >= 60
        assert meta["output_ids"] != greedy(new, ids, 4)
        await update(http, new, flush_cache=True)
        meta = (await http.post("/generate", json=body(ids, 4))).json()
        assert meta["meta_info"]["cached_tokens"] == 0
        assert meta["output_ids"] == greedy(new, ids, 4)
        found, _, answer = await stream_across(http, old, PROMPT, 60, flush_cache=False)
        assert (len(found), answer["success"]) == (60, True)
        engine.core.check()


async def test_all_requests_may_be_aborted_first() -> None:
    async with serving(checkpoint(0)) as (engine, http):
        found, _, _ = await stream_across(http, checkpoint(1), PROMPT, 400, abort_all_requests=True)
        assert len(found) < 400
        assert await output(http, PROMPT) == greedy(checkpoint(1), PROMPT, 12)
        engine.core.check()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "model_path"),
        ({"model_path": 3}, "model_path"),
        ({"model_path": ""}, "model_path"),
        ({"model_path": "a\0b"}, "model_path"),
        ({"model_path": "https://example.org/model"}, "model_path"),
        ({"model_path": "x", "flush_cache": "yes"}, "flush_cache"),
        ({"model_path": "x", "is_async": True}, "is_async"),
        ({"model_path": "x", "colour": 1}, "colour"),
        ({"model_path": checkpoint, "load_format": "pickle"}, "load_format"),
    ],
)
async def test_wrong_bodies_are_refused_with_the_field(fields: dict[str, Any], param: str) -> None:
    fields = {name: checkpoint(0) if value is checkpoint else value for name, value in fields.items()}
    async with serving(checkpoint(0)) as (_, http):
        response = await http.post("/update_weights_from_disk", json=fields)
        assert 400 <= response.status_code < 500 or response.status_code == 501
        assert response.json()["error"]["param"] == param


async def test_checkpoints_that_do_not_fit_are_refused_while_a_stream_runs(tmp_path: Path) -> None:
    old = checkpoint(0)
    (tmp_path / "empty").mkdir()
    cut = shutil.copytree(checkpoint(1), tmp_path / "cut")
    os.truncate(cut / "model.safetensors", 3000)
    wrong = {
        str(tmp_path / "none"): "There is no directory",
        str(tmp_path / "empty"): "no config.json",
        str(cut): "model.safetensors",
        tiny_checkpoints.cached("qwen3", vocab_size=131): "architecture is Qwen3ForCausalLM",
        tiny_checkpoints.cached("llama", vocab_size=130): "vocab_size is 130, not 131",
    }
    async with serving(old) as (engine, http):
        running = asyncio.create_task(output(http, PROMPT, 300))
        for path, message in wrong.items():
            response = await http.post("/update_weights_from_disk", json={"model_path": path})
            answer = response.json()
            assert (response.status_code, answer["success"], answer["num_paused_requests"]) == (400, False, 0)
            assert message in answer["message"]
        assert await running == greedy(old, PROMPT, 300)
        assert (await http.get("/get_model_info")).json()["model_path"] == old
        engine.core.check()


def fail_in_the_middle(monkeypatch: pytest.MonkeyPatch, path: str, after: int = 4) -> None:
    """Make reading from `path` fail at some tensor on rank 0."""
    read, count = tensors.TensorFiles.read, 0

    def failing(self: Any, name: str, cut: Any = ()) -> Any:
        nonlocal count
        count += str(self.files[0]).startswith(path)
        if str(self.files[0]).startswith(path) and count > after:
            raise OSError(5, "Input/output error")
        return read(self, name, cut)

    monkeypatch.setattr(tensors.TensorFiles, "read", failing)


@pytest.mark.parametrize("sizes", SIZES)
async def test_after_an_error_on_one_rank_all_have_the_old_weights(
    sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = checkpoint(0), checkpoint(1)
    async with serving(old, **sizes) as (engine, http):
        running = asyncio.create_task(output(http, PROMPT, 300))
        await asyncio.sleep(0.05)
        with monkeypatch.context() as broken:
            fail_in_the_middle(broken, new)
            response = await http.post("/update_weights_from_disk", json={"model_path": new})
        assert response.status_code == 400
        assert response.json()["message"] == (
            "The weights cannot be read: Input/output error. The old weights are in place again."
        )
        assert await running == greedy(old, PROMPT, 300)
        await update(http, new)
        assert await output(http, PROMPT) == greedy(new, PROMPT, 12)
        engine.core.check()


async def test_an_engine_without_weights_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    def restore(rank: Any, payload: Any) -> None:
        raise RuntimeError("the disk is gone")

    async with serving(checkpoint(0)) as (engine, http):
        fail_in_the_middle(monkeypatch, checkpoint(1))
        monkeypatch.setitem(verbs.VERBS, "restore_weights", restore)  # type: ignore[arg-type]
        running = asyncio.create_task(http.post("/generate", json=body(PROMPT, 400)))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineFailure, match="old ones could not be read"):
            await engine.update_weights_from_disk(checkpoint(1))
        assert (await running).status_code == 500
        with pytest.raises(EngineFailure):
            await engine.wait()


def test_scripts_replace_weights_too() -> None:
    with SyncEngine(checkpoint(0), **PLAIN) as engine:
        answer = engine.update_weights_from_disk(checkpoint(1), weight_version="2")
        assert answer["success"]
        found = engine.generate(input_ids=PROMPT, sampling_params=body([], 12)["sampling_params"])
        assert found["output_ids"] == greedy(checkpoint(1), PROMPT, 12)
        assert found["meta_info"]["weight_version"] == "2"
        with pytest.raises(CheckpointError, match="There is no directory"):
            engine.update_weights_from_disk("none")
        with pytest.raises(InvalidRequest, match="flush"):
            engine.update_weights_from_disk("none", flush=True)
