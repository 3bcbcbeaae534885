"""Weights from a trainer: over a gloo group, in the body, and from the same process.

After an update, tokens, log-probabilities and the checksums of all parameters equal those of an engine that was started
with the new weights.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import lora_adapters
import quantized_checkpoints
import tiny_checkpoints
import trainer_process
from runtime.errors import CheckpointError, InvalidRequest
from runtime.loading import staged_weights
from serve import Engine, SyncEngine
from serve.demo import WEIGHTS
from weights_server import GREEDY, PLAIN, PROMPT, checkpoint, fresh_state, greedy, ids, post, scores, serving, state


def payload(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [base64.b64encode(save(tensors)).decode()]


# --- groups with a trainer ---

SIZES = [
    pytest.param({}, 1, id="alone"),
    pytest.param({"tp_size": 2}, 2, id="tp", marks=pytest.mark.slow),
    pytest.param({"pp_size": 2}, 2, id="pp", marks=pytest.mark.slow),
    pytest.param({"dp_size": 2}, 2, id="dp", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("sizes", "ranks"), SIZES)
async def test_a_trainer_broadcasts_weights_over_gloo(sizes: dict[str, Any], ranks: int) -> None:
    old, new = checkpoint(0), checkpoint(1)
    async with serving(old, **sizes) as (engine, http), trainer_process.trainer(1 + ranks) as trainer:
        assert (await http.get("/get_world_size")).json() == {"world_size": ranks}
        await asyncio.gather(post(http, "/init_weights_update_group", trainer.group), trainer.joined())
        assert await ids(http) == greedy(old)
        body = {**trainer_process.announcement(new), "group_name": trainer_process.GROUP, "weight_version": "7"}
        answer, _ = await asyncio.gather(post(http, "/update_weights_from_distributed", body), trainer.send(new))
        assert answer["success"]
        assert (await http.get("/get_weight_version")).json() == {"weight_version": "7"}
        assert await ids(http) == greedy(new)
        assert await state(engine) == await fresh_state(new, **sizes)
        for packing, extra in (("bucket", {"load_format": "flattened_bucket"}), ("none", {})):
            path = old if packing == "bucket" else new
            body = {**trainer_process.announcement(path), "group_name": trainer_process.GROUP, **extra}
            await asyncio.gather(post(http, "/update_weights_from_distributed", body), trainer.send(path, packing))
            assert await ids(http) == greedy(path)
        await post(http, "/destroy_weights_update_group", {"group_name": trainer_process.GROUP})
        await post(http, "/destroy_weights_update_group", {"group_name": trainer_process.GROUP}, status=400)
        engine.core.check()


async def test_vllms_contract_puts_all_weights_in_place_at_the_end() -> None:
    old, new = checkpoint(0), checkpoint(1)
    async with serving(old) as (engine, http), trainer_process.trainer(2) as trainer:
        info = {**trainer.group}
        await asyncio.gather(post(http, "/init_weight_transfer_engine", {"init_info": info}), trainer.joined())
        await post(http, "/finish_weight_update", status=400)
        await post(http, "/start_weight_update")
        told = trainer_process.announcement(new)
        update = {"names": told["names"], "dtype_names": told["dtypes"], "shapes": told["shapes"], "packed": True}
        update |= {"packed_buffer_size_bytes": 5000, "group_name": trainer_process.GROUP}
        body = {"update_info": update}
        await asyncio.gather(post(http, "/update_weights", body), trainer.send(new, "packed", 5000))
        assert await ids(http) == greedy(old)
        await post(http, "/finish_weight_update", {"weight_version": "9"})
        assert (await http.get("/weight_info")).json() == {"weight_version": "9"}
        assert await state(engine) == await fresh_state(new)


async def test_the_calls_of_trls_client() -> None:
    """The bodies and queries as TRL 1.16 sends them; its own client runs in tests/serve/clients/test_trainers.py."""
    sampling = {"repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 4}
    as_ids = {"model": "default", "return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
    async with serving(str(WEIGHTS), skip_tokenizer_init=False) as (_, http):
        told = (await http.get("/server_info", params={"config_format": "json"})).json()["vllm_config"]
        assert told["weight_transfer_config"] == {"backend": "gloo"}
        assert (await http.get("/get_world_size")).json() == {"world_size": 1}
        body = {**as_ids, **sampling, "prompt": [[5, 6, 7], [8, 9]], "n": 2, "logprobs": 0}
        choices = (await post(http, "/v1/completions", body))["choices"]
        assert [each["prompt_token_ids"] for each in choices[::2]] == [[5, 6, 7], [8, 9]]
        for each in choices:
            assert [int(name.removeprefix("token_id:")) for name in each["logprobs"]["tokens"]] == each["token_ids"]
        ids = [5, 6, 7, *choices[0]["token_ids"]]
        scored = {"model": "default", "prompt": [ids], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 3}
        [choice] = (await post(http, "/v1/completions", scored))["choices"]
        for token, entry in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
            assert str(token) in entry
            assert sorted(each["rank"] for each in entry.values())[:3] == [1, 2, 3]
        chat = {**as_ids, **sampling, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
        answer = await post(http, "/v1/chat/completions", {**chat, "top_logprobs": 0, "n": 1})
        assert len(answer["choices"][0]["logprobs"]["content"]) == 4
        assert (await post(http, "/reset_prefix_cache"))["success"]


async def test_a_trainer_that_dies_in_the_middle_leaves_the_old_weights() -> None:
    old, new = checkpoint(0), checkpoint(1)
    async with serving(old) as (engine, http):
        async with trainer_process.trainer(2) as trainer:
            await asyncio.gather(post(http, "/init_weights_update_group", trainer.group), trainer.joined())
            body = {**trainer_process.announcement(new), "group_name": trainer_process.GROUP}
            trainer.begin(new, count=5)
            answer = await post(http, "/update_weights_from_distributed", body, status=400)
            assert not answer["success"]
            assert "a peer is gone" in answer["message"]
            assert "The old weights stay." in answer["message"]
        await post(http, "/update_weights_from_distributed", body, status=400)  # the group has ended
        assert await state(engine) == await fresh_state(old)
        engine.core.check()


async def test_groups_are_checked() -> None:
    async with serving(checkpoint(0)) as (_, http):
        group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
        answer = await post(http, "/init_weights_update_group", group, status=400)
        assert "must be gloo" in answer["message"]
        for field, value in (("backend", "mpi"), ("master_port", 0), ("world_size", 0), ("rank_offset", -1)):
            await post(http, "/init_weights_update_group", {**group, "backend": "gloo", field: value}, status=400)
        body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
        assert "no group" in (await post(http, "/update_weights_from_distributed", body, status=400))["message"]


# --- tensors in the body ---


async def test_tensors_in_the_body_as_safetensors() -> None:
    old, new = checkpoint(0), checkpoint(1)
    tensors = trainer_process.tensors_of(new)
    async with serving(old) as (engine, http):
        body = {"serialized_named_tensors": payload(tensors), "weight_version": "2"}
        assert (await post(http, "/update_weights_from_tensor", body))["success"]
        assert await state(engine) == await fresh_state(new)
        parts = [
            {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
            for name, tensor in trainer_process.tensors_of(old).items()
        ]
        flat = torch.cat([t.view(-1).view(torch.uint8) for t in trainer_process.tensors_of(old).values()])
        content = save({"flattened_tensor": flat}, metadata={"metadata": json.dumps(parts)})
        body = {"serialized_named_tensors": [base64.b64encode(content).decode()], "load_format": "flattened_bucket"}
        await post(http, "/update_weights_from_tensor", body)
        assert await state(engine) == await fresh_state(old)


async def test_damaged_and_pickled_tensors_are_refused() -> None:
    old = checkpoint(0)
    good = save({"a": torch.ones(2)})
    pickled = pickle.dumps({"a": 1})
    cases = {
        base64.b64encode(pickled).decode(): "Send base64 of safetensors",
        "not base64!": "must be base64",
        base64.b64encode(good[:-1]).decode(): "not valid safetensors",
        base64.b64encode(b"\xff" * 64).decode(): "not valid safetensors",
        base64.b64encode(b"").decode(): "not valid safetensors",
        base64.b64encode(b"\x02" + b"\0" * 7 + b"[]").decode(): "not valid safetensors",
        base64.b64encode(good).decode(): "no tensors a",
    }
    async with serving(old) as (engine, http):
        for content, message in cases.items():
            answer = await post(http, "/update_weights_from_tensor", {"serialized_named_tensors": [content]}, 400)
            assert message in answer["message"], content[:20]
        twice = {"serialized_named_tensors": ["a", "b"]}
        assert "must be equal" in (await post(http, "/update_weights_from_tensor", twice, 400))["message"]
        assert await state(engine) == await fresh_state(old)


async def test_wrong_tensors_leave_the_old_weights() -> None:
    old, new = checkpoint(0), checkpoint(1)
    tensors = trainer_process.tensors_of(new)
    name = "model.layers.1.mlp.up_proj.weight"
    cases = {
        "of the wrong shape (model.layers.1.mlp.up_proj.weight is 48x31, must be 48x32)": {
            **tensors, name: tensors[name][:, :31].contiguous(),
        },
        "The model has no tensors model.layers.9.mlp.up_proj.weight": {
            **tensors, "model.layers.9.mlp.up_proj.weight": tensors[name].clone(),
        },
        "of an integer dtype (model.layers.1.mlp.up_proj.weight is torch.int8)": {
            **tensors, name: tensors[name].to(torch.int8),
        },
    }  # fmt: skip
    async with serving(old) as (engine, http):
        for message, wrong in cases.items():
            answer = await post(
                http, "/update_weights_from_tensor", {"serialized_named_tensors": payload(wrong)}, status=400
            )
            assert message in answer["message"]
            assert answer["message"].endswith("The old weights stay.")
            assert await state(engine) == await fresh_state(old)
        engine.core.check()


async def test_one_tensor_of_a_fused_layer_can_change_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = checkpoint(0), checkpoint(1)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors, others = trainer_process.tensors_of(new), trainer_process.tensors_of(old)
    async with serving(old) as (_, http):
        for each in (name, "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"):
            assert (
                await post(http, "/get_weights_by_name", {"name": each, "truncate_size": 9})
                == others[each][:9].tolist()
            )
        body = {"serialized_named_tensors": payload({name: tensors[name]})}
        assert (await post(http, "/update_weights_from_tensor", body))["waiting_for"] == []
        for each, source in ((name, tensors), ("model.layers.1.self_attn.q_proj.weight", others)):
            assert (
                await post(http, "/get_weights_by_name", {"name": each, "truncate_size": 9})
                == source[each][:9].tolist()
            )
        await post(http, "/get_weights_by_name", {"name": "model.layers.1.self_attn.z_proj.weight"}, status=400)
        monkeypatch.setattr(staged_weights, "MAX_READ", 100)
        answer = await post(http, "/get_weights_by_name", {"name": name, "truncate_size": 9}, status=400)
        assert "lower truncate_size" in answer["error"]["message"]


async def test_layers_that_lack_tensors_are_named() -> None:
    old, new = checkpoint(0), checkpoint(1)
    tensors = trainer_process.tensors_of(new)
    name = "model.layers.1.self_attn.k_proj.weight"
    lacking = {each: tensor for each, tensor in tensors.items() if each != name}
    async with serving(old, quantization="w8a8_int8") as (engine, http):
        answer = await post(http, "/update_weights_from_tensor", {"serialized_named_tensors": payload(lacking)})
        assert answer["waiting_for"] == [name]
        await post(http, "/update_weights_from_tensor", {"serialized_named_tensors": payload({name: tensors[name]})})
        assert await state(engine) == await fresh_state(new, quantization="w8a8_int8")
        await post(http, "/pause_generation", {"mode": "in_place"})
        only = {name: trainer_process.tensors_of(old)[name]}
        await post(http, "/update_weights_from_tensor", {"serialized_named_tensors": payload(only)})
        answer = await post(http, "/continue_generation", status=400)
        assert "q_proj.weight" in answer["error"]["message"]
        assert await state(engine) == await fresh_state(new, quantization="w8a8_int8")


# --- from the same process ---

FORMS = [
    pytest.param("llama", {}, id="dense"),
    pytest.param("llama", {"quantization": "w8a8_int8"}, id="int8"),
    pytest.param("llama", {"quantization": "w4a16"}, id="int4"),
    pytest.param("qwen3_moe", {}, id="experts"),
    pytest.param("qwen3_moe", {"tp_size": 2}, id="experts-tp"),
    pytest.param("phi3", {}, id="fused", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", {}, id="latent", marks=pytest.mark.slow),
    pytest.param("gpt_oss", {}, id="biased-experts", marks=pytest.mark.slow),
    pytest.param("qwen3_next", {}, id="recurrent", marks=pytest.mark.slow),
    pytest.param("gemma2", {}, id="tied", marks=pytest.mark.slow),
    pytest.param("llama", {"tp_size": 2, "quantization": "w8a8_int8"}, id="int8-tp", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "options"), FORMS)
async def test_an_update_equals_a_start_with_the_new_weights(family: str, options: dict[str, Any]) -> None:
    old, new = checkpoint(0, family), checkpoint(1, family)
    async with Engine(old, **PLAIN, **options) as engine:
        before = await scores(engine)
        async with engine.updating(weight_version="3") as update:
            for name, tensor in trainer_process.tensors_of(new).items():
                await update.load([(name, tensor)])
            assert await scores(engine) == before
        assert await state(engine) == await fresh_state(new, **options)
        assert before != await scores(engine)
        engine.core.check()


@pytest.mark.parametrize("form", ["gptq", "awq", "fp8"])
async def test_quantised_checkpoints_take_quantised_tensors(form: str, tmp_path: Path) -> None:
    sources = [tiny_checkpoints.cached("llama", seed=seed, **quantized_checkpoints.SHAPE) for seed in (0, 1)]
    old, new = (
        quantized_checkpoints.convert(Path(source), tmp_path / str(number), form)[0]
        for number, source in enumerate(sources)
    )
    async with Engine(old, **PLAIN) as engine:
        async with engine.updating() as update:
            for name, tensor in trainer_process.tensors_of(new).items():
                await update.load({name: tensor})
        assert await state(engine) == await fresh_state(new)
        tensors = trainer_process.tensors_of(old)
        first = dict(list(tensors.items())[:-3])
        answer = await engine.update_weights_from_tensor(first)
        assert answer["waiting_for"]
        assert not set(answer["waiting_for"]) & set(first)  # it names what is missing
        answer = await engine.update_weights_from_tensor(dict(list(tensors.items())[-3:]))
        assert answer["waiting_for"] == []
        assert await state(engine) == await fresh_state(old)
        with pytest.raises(CheckpointError, match="The old weights stay"):
            async with engine.updating(partial=True) as update:
                await update.load({name: tensor for name, tensor in tensors.items() if "scale" not in name})
        assert await state(engine) == await fresh_state(old)


async def test_experts_in_mxfp4_take_fused_tensors_in_16_bits(tmp_path: Path) -> None:
    """A trainer of gpt-oss has the experts in bfloat16. They are rounded to the checkpoint's format."""
    paths = []
    for seed in (0, 1):
        (target := tmp_path / str(seed)).mkdir()
        source = Path(tiny_checkpoints.cached("gpt_oss", seed=seed, hidden_size=64, intermediate_size=64))
        for file in source.glob("*.json"):
            shutil.copy(file, target)
        quantized_checkpoints.write_mxfp4(source, target)
        paths.append(str(target))
    old, new = paths
    sent = dict(trainer_process.tensors_of(new))
    for name in [name.removesuffix("_blocks") for name in sent if name.endswith("_blocks")]:
        packed = sent.pop(f"{name}_blocks"), sent.pop(f"{name}_scales")
        sent[name] = convert_moe_packed_tensors(*packed, dtype=torch.bfloat16)
    async with Engine(old, **PLAIN) as engine:
        before = await state(engine)
        async with engine.updating() as update:
            for name, tensor in sent.items():
                await update.load({name: tensor})
        assert await state(engine) == await fresh_state(new) != before
        name = next(name for name in sent if name.endswith("experts.down_proj"))
        with pytest.raises(CheckpointError, match=f"{name} has values that are not finite"):
            await engine.update_weights_from_tensor({name: sent[name] * torch.inf})
        assert await state(engine) == await fresh_state(new)


async def fail_inside(engine: Engine, tensors: dict[str, torch.Tensor]) -> None:
    async with engine.updating() as update:
        await update.load(tensors)
        raise KeyError("the trainer's own error")


async def test_an_error_ends_the_update_and_keeps_the_old_weights() -> None:
    old, new = checkpoint(0), checkpoint(1)
    tensors = trainer_process.tensors_of(new)
    async with Engine(old, **PLAIN) as engine:
        before = await state(engine)
        with pytest.raises(CheckpointError, match=r"Tensors are missing: model\.norm\.weight\. The old weights stay"):
            async with engine.updating() as update:
                await update.load({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"})
        with pytest.raises(CheckpointError, match="wrong shape"):
            async with engine.updating() as update:
                await update.load({"model.norm.weight": torch.ones(3)})
        with pytest.raises(KeyError, match="own error"):
            await fail_inside(engine, tensors)
        async with engine.updating(partial=True) as update:
            with pytest.raises(InvalidRequest, match="open already"):
                async with engine.updating():
                    pass
            await update.load({})
        assert await state(engine) == before
        async with engine.updating(partial=True) as update:
            await update.load({"model.norm.weight": tensors["model.norm.weight"]})
        assert (await state(engine))[2] != before[2]


async def test_checkpoints_and_tensors_replace_each_other(tmp_path: Path) -> None:
    old, new = checkpoint(0), checkpoint(1)
    async with serving(old) as (engine, http):
        await engine.update_weights_from_tensor(trainer_process.tensors_of(new))
        broken = tmp_path / "broken"
        broken.mkdir()
        for file in Path(old).iterdir():
            (broken / file.name).write_bytes(file.read_bytes())
        wrong = {**trainer_process.tensors_of(old), "model.norm.weight": torch.ones(32, dtype=torch.float64)}
        save_file({**wrong, "model.norm.weight": torch.full((32,), 2.0)}, broken / "model.safetensors")
        from runtime.loading import weight_update

        original = weight_update.LoadedWeights._take
        calls = 0

        def failing(self: Any, *arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise OSError(5, "Input/output error")
            original(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weight_update.LoadedWeights, "_take", failing)
            await post(http, "/update_weights_from_disk", {"model_path": str(broken)}, status=400)
        assert calls == 3
        assert await state(engine) == await fresh_state(new)
        await post(http, "/update_weights_from_disk", {"model_path": old})
        assert await state(engine) == await fresh_state(old)


async def test_the_checker_finds_weights_that_an_update_misses() -> None:
    old, new = checkpoint(0), checkpoint(1)
    tensors = trainer_process.tensors_of(new)
    async with serving(old) as (engine, http):
        await post(http, "/weights_checker", {"action": "compare"}, status=400)
        await engine.update_weights_from_tensor(tensors)
        await post(http, "/weights_checker", {"action": "snapshot"})
        sums = await post(http, "/weight_checker", {"action": "checksum"})
        await post(http, "/weights_checker", {"action": "reset_tensors"})
        assert "differ" in (await post(http, "/weights_checker", {"action": "compare"}, status=400))["message"]
        await engine.update_weights_from_tensor({n: t for n, t in tensors.items() if n != "model.norm.weight"})
        answer = await post(http, "/weights_checker", {"action": "compare"}, status=400)
        assert answer["message"] == "1 tensors differ from the snapshot: norm.weight."
        await engine.update_weights_from_tensor(tensors)
        assert (await post(http, "/weights_checker", {"action": "compare"}))["success"]
        compare = {"action": "compare", "baseline": sums["checksums"]}
        assert await post(http, "/weight_checker", compare) == {"match": True, "mismatches": []}
        assert await state(engine) == await fresh_state(new)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("cycles", [5, pytest.param(50, marks=pytest.mark.long)])
async def test_requests_go_on_through_many_updates(cycles: int) -> None:
    """A cycle has two updates. Every token is the best one of the old or of the new weights."""
    paths = checkpoint(0), checkpoint(1)
    answers: set[tuple[int, ...]] = set()
    async with serving(paths[0]) as (engine, http), trainer_process.trainer(2) as trainer:
        await asyncio.gather(post(http, "/init_weights_update_group", trainer.group), trainer.joined())
        stop, tensors, resident = asyncio.Event(), trainer_process.tensors_of(paths[1]), 0
        body = {**trainer_process.announcement(paths[0]), "group_name": trainer_process.GROUP}

        async def traffic() -> int:
            count = 0
            while not stop.is_set():
                asked = {"input_ids": PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 20}}
                answers.add(tuple((await post(http, "/generate", asked))["output_ids"]))
                count += 1
            return count

        clients = [asyncio.create_task(traffic()) for _ in range(4)]
        for number in range(cycles):
            await engine.update_weights_from_tensor(tensors, weight_version=str(number))
            await asyncio.gather(post(http, "/update_weights_from_distributed", body), trainer.send(paths[0]))
            if number == cycles // 2:
                resident = resident_bytes()
        assert resident_bytes() - resident < 64 * 2**20
        stop.set()
        assert all(await asyncio.gather(*clients))
        old = paths[0]
        assert await state(engine) == await fresh_state(old)
        engine.core.check()
    for answer in sorted(answers)[:8]:
        ids = [*PROMPT, *answer]
        best = [tiny_checkpoints.reference(path, ids[:-1])[len(PROMPT) - 1 :].argmax(-1).tolist() for path in paths]
        assert all(token in choices for token, *choices in zip(answer, *best, strict=True))


@pytest.mark.slow
async def test_adapters_act_on_the_new_weights() -> None:
    old, new = checkpoint(0), checkpoint(1)
    options = {**PLAIN, "enable_lora": True, "lora_paths": [f"a={lora_adapters.adapter(old, 3)}"]}

    async def adapted(engine: Engine) -> Any:
        settings: dict[str, Any] = {"lora_path": "a", "return_logprob": True}
        found = await engine.generate(input_ids=PROMPT, sampling_params=GREEDY, **settings)
        return found["meta_info"]["output_token_logprobs"], await scores(engine)

    async with Engine(new, **options) as engine:
        wanted = await adapted(engine)
    async with Engine(old, **options) as engine:
        assert await adapted(engine) != wanted
        await engine.update_weights_from_tensor(trainer_process.tensors_of(new))
        assert await adapted(engine) == wanted


def test_scripts_update_weights_too() -> None:
    with SyncEngine(checkpoint(0), **PLAIN) as engine:
        engine.update_weights_from_tensor(trainer_process.tensors_of(checkpoint(1)).items(), weight_version="2")
        found = engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
        assert (found["output_ids"], found["meta_info"]["weight_version"]) == (greedy(checkpoint(1)), "2")
