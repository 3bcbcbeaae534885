"""A new server copies the weights of a running one, and then computes the same, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runtime.errors import CheckpointError, ConfigurationError
from runtime.worker import remote_instance
from serve import Engine
from weights_server import PLAIN, PREFIX, checkpoint, copied_from, free_ports, post, serving, state, without_weights


@pytest.mark.parametrize(
    ("family", "options", "ranks"),
    [
        pytest.param("llama", {}, 1, id="dense"),
        pytest.param("qwen3_moe", {}, 1, id="experts", marks=pytest.mark.slow),
        pytest.param("gemma2", {}, 1, id="tied", marks=pytest.mark.slow),
        pytest.param("llama", {"quantization": "w8a8_int8"}, 1, id="int8", marks=pytest.mark.slow),
        pytest.param("llama", {"tp_size": 2}, 2, id="tp", marks=pytest.mark.slow),
    ],
)
async def test_a_new_server_computes_the_same(family: str, options: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    path = checkpoint(0, family)
    folder = without_weights(path, tmp_path / "new")
    async with serving(path, **options) as (seed, http):
        changed = {name: each + 0.1 for name, each in load_file(next(Path(path).glob("*.safetensors"))).items()}
        await seed.update_weights_from_tensor(changed)  # so that no file has the weights
        wanted = await state(seed)
        async with Engine(folder, **PLAIN, **options, **copied_from(http.base_url.port or 0, ranks)) as engine:
            assert await state(engine) == wanted
            await engine.release_memory_occupation()
            await engine.resume_memory_occupation()
            assert await state(engine) == wanted
            await engine.update_weights_from_disk(path)
        assert await state(seed) == wanted
        seed.core.check()


async def test_a_model_with_another_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_ports(1)[0]}")  # unused: it would read the key
    path = checkpoint(0)
    folder = without_weights(path, tmp_path / "new", intermediate_size=96)
    async with serving(path) as (seed, http):
        wanted = await state(seed)
        with pytest.raises(CheckpointError, match="another layout"):
            async with Engine(folder, **PLAIN, **copied_from(http.base_url.port or 0)):
                pass
        assert await state(seed) == wanted


async def test_a_seed_that_goes_away_in_the_middle_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(0)
    folder = without_weights(path, tmp_path / "new")
    storages = remote_instance._storages

    def send(model: Any, group: Any) -> None:
        group.broadcast(remote_instance._digest(model), 0)
        group.broadcast(torch.zeros(1, dtype=torch.uint8), 1)
        group.broadcast(next(iter(storages(model))), 0)
        raise RuntimeError("the process is gone")

    monkeypatch.setattr("runtime.worker.weight_verbs.send_parameters", send)
    async with serving(path) as (seed, http):
        wanted = await state(seed)
        with pytest.raises(CheckpointError, match=r"is gone|refuses to send"):
            async with Engine(folder, **PLAIN, **copied_from(http.base_url.port or 0)):
                pass
        assert await state(seed) == wanted
        assert not await seed.core.weights.close_group("weight_send_group")


async def test_a_missing_seed_and_its_refusal_are_named(tmp_path: Path) -> None:
    path = checkpoint(0)
    [port] = free_ports(1)
    with pytest.raises(CheckpointError, match="cannot be reached"):
        async with Engine(path, **PLAIN, **copied_from(port)):
            pass
    async with serving(path) as (_, http):
        body = {"master_address": "127.0.0.1", "ports": "x"}
        route = "/init_weights_send_group_for_remote_instance"
        assert "ports" in (await post(http, route, body, status=400))["message"]
        assert "one per rank" in (await post(http, route, {**body, "ports": "81,82"}, status=400))["message"]
        assert "no group" in (await post(http, "/send_weights_to_remote_instance", status=400))["message"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"load_format": "remote_instance"}, "seed-instance-ip"),
        ({f"{PREFIX}_seed_instance_ip": "127.0.0.1"}, "needs --load-format remote_instance"),
        ({**copied_from(1), "tp_size": 2}, "with 2 ports"),
        ({**copied_from(1), "dp_size": 2}, "--dp-size"),
        ({**copied_from(1), "kv_cache_dtype": "fp8_e4m3"}, "8-bit KV cache"),
        ({**copied_from(1, ranks=2), "tp_size": 2, "enable_ep_moe": True}, "may have moved"),
    ],
)
async def test_options_that_do_not_fit_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        async with Engine(checkpoint(0), **PLAIN, **options):
            pass
