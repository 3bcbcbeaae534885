"""Quantised checkpoints, written by their formats' libraries, are read with the same values as by the libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import cpp_kernels
import paged_forward
import quantized_checkpoints
import tiny_checkpoints
from ops.matmul.with_cpp import PackedWeight4
from ops.select import select
from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.layers.expert_sharing import ExpertSharing
from runtime.loading.checkpoint import WeightFiles
from runtime.loading.facts import read_facts
from runtime.loading.formats.stored import QuantizedTensors
from runtime.loading.loader import load_model
from runtime.loading.parameters import collect_shards
from runtime.loading.tensors import TensorFiles
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo
from serve import Engine

FORMS = [
    ("compressed-tensors", {"preset": "W4A16"}),
    ("compressed-tensors", {"preset": "W4A16", "symmetric": False}),
    ("compressed-tensors", {"preset": "W4A16", "g_idx": True}),
    ("compressed-tensors", {"preset": "W8A16"}),
    ("compressed-tensors", {"preset": "W8A8"}),
    ("compressed-tensors", {"preset": "FP8"}),
    ("compressed-tensors", {"preset": "FP8_DYNAMIC"}),
    ("compressed-tensors", {"preset": "NVFP4A16"}),
    ("compressed-tensors", {"preset": "NVFP4"}),
    ("compressed-tensors", {"preset": "MXFP4A16"}),
    ("bitsandbytes", {"kind": "nf4"}),
    ("bitsandbytes", {"kind": "nf4", "nested": True}),
    ("bitsandbytes", {"kind": "fp4"}),
    ("bitsandbytes", {"kind": "int8"}),
    ("gptq", {}),
    ("gptq", {"order": True}),
    ("gptq", {"bits": 8, "version": 2}),
    ("gptq", {"bits": 3}),
    ("gptq", {"bits": 2, "group_size": -1, "version": 2}),
    ("awq", {}),
    ("fp8", {"scope": "block"}),
    ("fp8", {"scope": "channel"}),
    ("fp8", {"scope": "tensor", "static": True}),
    ("torchao", {"kind": "int8"}),
    ("torchao", {"kind": "int8 dynamic"}),
    ("torchao", {"kind": "fp8"}),
    ("torchao", {"kind": "int4"}),
    ("gptq", {"by_gptqmodel": True}),
    ("gptq", {"by_gptqmodel": True, "bits": 3}),
    ("gptq", {"planes": True, "bits": 3}),
    ("gptq", {"planes": True, "bits": 7}),
    ("awq", {"zero_point": False}),
    ("awq", {"bits": 3}),
    ("awq", {"version": "gemv"}),
    ("modelopt", {"kind": "w4a16_awq"}),
    ("modelopt", {"kind": "mxfp4", "before": True}),
    ("modelopt", {"kind": "nvfp4"}),
    ("modelopt", {"kind": "fp8_pb_wo"}),
    ("quark", {"dtype": "int4"}),
    ("quark", {"dtype": "uint4", "reorder": False}),
    ("quark", {"dtype": "fp6_e2m3"}),
]
IDS = torch.randint(3, 128, (3, 40), generator=torch.Generator().manual_seed(0)).tolist()


# formats that are also tested with experts, with shards and in a server
OFTEN = [FORMS[index] for index in (0, 5, 9, 13, 18, 19)]


def opened(path: str, *, mmap: bool = True) -> QuantizedTensors:
    facts = read_facts(path)
    files = TensorFiles(WeightFiles("safetensors", (Path(path) / "model.safetensors",)), mmap=mmap)
    return QuantizedTensors(files, Fields(facts.config, "").child("quantization_config"))


def read_whole(tensors: QuantizedTensors) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    tensors.read_all(lambda name, _, part: found.update({name: part}), dict.fromkeys(tensors.shapes, ((),)))
    return found


def check_same_logits(quantized: str, plain: str, share: float = 0.02) -> None:
    ours, reference = paged_forward.load(quantized), paged_forward.load(plain)
    mine, theirs = (paged_forward.all_logits(model, IDS, 16) for model in (ours, reference))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=share * float(other.std()))


def check_same_tensors(found: dict[str, torch.Tensor], plain: str) -> None:
    wanted = load_file(Path(plain) / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():  # libraries that multiply in half precision round the results
        torch.testing.assert_close(found[name].float(), tensor.float(), rtol=5e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(("form", "options"), FORMS, ids=str)
def test_a_quantised_checkpoint_holds_what_its_library_reads(
    form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    quantized, plain = quantized_checkpoints.write(tmp_path, form, **options)
    check_same_tensors(read_whole(opened(quantized)), plain)
    # The library rounds fp4 weights to bfloat16.
    check_same_logits(quantized, plain, share=0.2 if "NVFP4" in options.get("preset", "") else 0.02)


@pytest.mark.parametrize(("form", "options"), OFTEN, ids=str)
def test_experts_are_read_as_every_layer_is(form: str, options: dict[str, Any], tmp_path: Path) -> None:
    quantized, plain = quantized_checkpoints.write(tmp_path, form, "qwen3_moe", **options)
    check_same_tensors(read_whole(opened(quantized, mmap=False)), plain)
    check_same_logits(quantized, plain)


@pytest.mark.parametrize(("form", "options"), OFTEN, ids=str)
def test_ranks_and_stages_get_their_share(form: str, options: dict[str, Any], tmp_path: Path) -> None:
    quantized, _ = quantized_checkpoints.write(tmp_path, form, "qwen3", **options)
    wanted = read_whole(opened(quantized))
    for rank in (
        RankInfo(rank=1, tp_size=2),
        RankInfo(rank=0, tp_size=2),
        RankInfo(rank=3, tp_size=2, pp_size=2),
    ):
        facts, axis = read_facts(quantized), Mesh(rank, torch.device("cpu")).axis("tp")
        plan = paged_forward.plan_for(quantized)
        model = load_model(facts, plan, select(), axis, rank.stage_layers(facts.num_layers))
        for name, shards in collect_shards(model).items():
            for shard in shards:
                if name in wanted:
                    assert torch.equal(shard.target, wanted[name][shard.cut]), name


@pytest.mark.parametrize(("form", "options"), OFTEN, ids=str)
async def test_a_quantised_checkpoint_is_served_as_the_ordinary_one(
    form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    answers = []
    for path in quantized_checkpoints.write(tmp_path, form, **options):
        async with Engine(path, skip_tokenizer_init=True) as engine:
            made = await engine.generate(input_ids=IDS, sampling_params={"temperature": 0, "max_new_tokens": 12})
            answers.append([each["output_ids"] for each in made])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
async def test_load_format_bitsandbytes_serves_such_checkpoints(kind: str, tmp_path: Path) -> None:
    quantized, plain = quantized_checkpoints.write(tmp_path, "bitsandbytes", kind=kind)
    answers = []
    for path, options in ((quantized, {"load_format": "bitsandbytes", "quantization": "bitsandbytes"}), (plain, {})):
        async with Engine(path, skip_tokenizer_init=True, **options) as engine:
            made = await engine.generate(input_ids=IDS, sampling_params={"temperature": 0, "max_new_tokens": 12})
            answers.append([each["output_ids"] for each in made])
    assert answers[0] == answers[1]


def changed(directory: Path, source: str, config: dict[str, Any], tensors: dict[str, Any] | None = None) -> str:
    """Copy a checkpoint with changed fields of its quantization_config (None removes a field) and changed tensors."""
    directory.mkdir()
    values = json.loads((Path(source) / "config.json").read_text())
    values["quantization_config"] = {**values["quantization_config"], **config}
    (directory / "config.json").write_text(json.dumps(values))
    stored = load_file(Path(source) / "model.safetensors") | (tensors or {})
    save_file({name: each for name, each in stored.items() if each is not None}, directory / "model.safetensors")
    return str(directory)


def test_a_form_is_found_in_the_files_of_older_tools(tmp_path: Path) -> None:
    for form, name, settings in (
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
        ("fp8", "hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8"}}),
    ):
        options = {"scope": "tensor"} if form == "fp8" else {}
        quantized, plain = quantized_checkpoints.write(tmp_path / form, form, **options)
        config = json.loads((Path(quantized) / "config.json").read_text())
        del config["quantization_config"]
        (Path(quantized) / "config.json").write_text(json.dumps(config))
        (Path(quantized) / name).write_text(json.dumps(settings))
        assert read_facts(quantized).quantization == {"fp8": "modelopt"}.get(form, form)
        check_same_tensors(read_whole(opened(quantized)), plain)
    (Path(plain) / "quanto_qmap.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"quantized \(quanto\)"):
        read_facts(plain)


@pytest.mark.parametrize(
    ("packing", "form", "options"),
    [
        ("auto_round:auto_gptq", "gptq", {}),
        ("auto_round", "gptq", {"version": 2, "bits": 2}),
        ("auto_round:auto_awq", "awq", {}),
        ("auto_round:llm_compressor", "compressed-tensors", {"preset": "W8A16"}),
    ],
)
def test_what_autoround_writes_is_read_as_its_packing_says(
    packing: str, form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    quantized, plain = quantized_checkpoints.write(tmp_path / "written", form, **options)
    named = {"quant_method": "auto-round", "packing_format": packing, "checkpoint_format": None}
    check_same_tensors(read_whole(opened(changed(tmp_path / "named", quantized, named))), plain)


def test_layers_of_gptq_may_have_bits_and_groups_of_their_own(tmp_path: Path) -> None:
    quantized, plain = quantized_checkpoints.write(tmp_path / "4", "gptq")
    other, plain_other = quantized_checkpoints.write(tmp_path / "8", "gptq", bits=8, group_size=16)
    stored, wanted = (load_file(Path(path) / "model.safetensors") for path in (other, plain_other))
    taken = {name: each for name, each in stored.items() if ".down_proj." in name}
    without_order = {name: None for name in stored if name.endswith(".g_idx")}
    dynamic = {r"+:.*\.down_proj": {"bits": 8, "group_size": 16}}
    mixed = changed(tmp_path / "mixed", quantized, {"dynamic": dynamic}, taken | without_order)
    found = read_whole(opened(mixed))
    for name, tensor in load_file(Path(plain) / "model.safetensors").items():
        torch.testing.assert_close(found[name], wanted[name] if ".down_proj." in name else tensor, msg=name)


def test_biases_that_are_zero_and_not_the_models_are_left_out(tmp_path: Path) -> None:
    quantized, plain = quantized_checkpoints.write(tmp_path, "gptq")
    name = "model.layers.1.mlp.up_proj.bias"
    check_same_logits(changed(tmp_path / "zero", quantized, {}, {name: torch.zeros(128)}), plain)
    with pytest.raises(CheckpointError, match=name):
        paged_forward.load(changed(tmp_path / "one", quantized, {}, {name: torch.ones(128)}))


def test_a_caches_scales_are_found_under_every_name(tmp_path: Path) -> None:
    layer = "model.layers.0.self_attn"
    quantized, _ = quantized_checkpoints.write(tmp_path, "fp8")
    for keys, values in (
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
    ):
        given = {f"{layer}.{keys}": torch.tensor(0.25), f"{layer}.{values}": torch.tensor([0.5])}
        path = changed(tmp_path / keys, quantized, {}, given)
        model: Any = paged_forward.load(path)
        assert model.layers[0].attention.kv_scales.values == {"k_scale": 0.25, "v_scale": 0.5}


def test_rotations_that_stand_in_the_weights_ask_for_nothing(tmp_path: Path) -> None:
    quantized, plain = quantized_checkpoints.write(tmp_path, "compressed-tensors", preset="W4A16")
    places = [{"location": "weight_output"}, {"location": "weight_input"}]
    rotated = {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": places}}}}
    check_same_tensors(read_whole(opened(changed(tmp_path / "rotated", quantized, rotated))), plain)


def test_experts_of_modelopt_may_be_together_and_with_inputs_first(tmp_path: Path) -> None:
    """As in gpt-oss and Llama 4: [X, I, O] with packed inputs in the middle, or fp8 with one scale per expert."""
    stored, plain = quantized_checkpoints.by_exponents(torch.randn(6, 64), 4)
    packed = stored["weight"].view(2, 3, 32).mT.contiguous()  # two experts of 64 inputs and 3 outputs
    exponents = stored["weight_scale"].view(2, 3, 2).mT.contiguous()
    narrow = torch.randn(2, 5, 4).to(torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 3.0])
    save_file(
        {"a": packed, "a_weight_scale": exponents, "a_input_scale": torch.ones(())}
        | {"b": narrow, "b_weight_scale": scales},
        tmp_path / "model.safetensors",
    )
    files = TensorFiles(WeightFiles("safetensors", (tmp_path / "model.safetensors",)))
    found = read_whole(QuantizedTensors(files, Fields({"quant_method": "modelopt"}, "")))
    wanted = {"a": plain.view(2, 3, 64).mT, "b": narrow.float() * scales[:, None, None]}
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("group", [16, 32])
def test_fp4_of_modelopt_is_numbers_times_two_scales(group: int, tmp_path: Path) -> None:
    packed = torch.randint(0, 256, (4, 16), dtype=torch.uint8)
    scale, whole = torch.rand(4, 32 // group).to(torch.float8_e4m3fn), torch.tensor(0.37)
    wanted = torch.empty(4, 32)
    for row in range(4):
        for column in range(32):
            code = int(packed[row, column // 2]) >> (4 * (column % 2)) & 15
            exponent, half = code >> 1 & 3, code & 1
            size = half / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + half / 2)
            wanted[row, column] = (-size if code & 8 else size) * float(scale[row, column // group]) * 0.37
    stored = {"a.weight": packed, "a.weight_scale": scale, "a.weight_scale_2": whole}
    save_file(stored | {"a.input_scale": torch.ones(())}, tmp_path / "model.safetensors")
    files = TensorFiles(WeightFiles("safetensors", (tmp_path / "model.safetensors",)))
    tensors = QuantizedTensors(files, Fields({"quant_method": "modelopt"}, ""))
    torch.testing.assert_close(read_whole(tensors), {"a.weight": wanted})


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 8, 2), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "model.safetensors")
    files = TensorFiles(WeightFiles("safetensors", (tmp_path / "model.safetensors",)))
    tensors = QuantizedTensors(files, Fields({"quant_method": "mxfp4"}, ""))
    wanted, found = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32), read_whole(tensors)
    for expert in range(3):
        for half, projection in enumerate(("gate_proj", "up_proj")):
            made = found[f"model.layers.0.mlp.experts.{expert}.{projection}.weight"]
            assert torch.equal(made, wanted[expert].T[half::2])
    assert len(found) == 6


def test_what_transformers_saves_with_torchao_is_read(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    source = tiny_checkpoints.cached("llama", **quantized_checkpoints.SHAPE)
    settings = TorchAoConfig(Int8WeightOnlyConfig())
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, quantization_config=settings)
    model.save_pretrained(tmp_path)
    facts = read_facts(str(tmp_path))
    assert facts.quantization == "torchao"
    found = read_whole(opened(str(tmp_path)))
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        wide = tensor.float()
        step = wide.abs().amax(-1, keepdim=True) / 127 if name.endswith("proj.weight") else torch.zeros(1)
        assert ((found[name].float() - wide).abs() <= 0.51 * step).all(), name


KEPT = [
    ("compressed-tensors", {"preset": "W4A16"}),
    ("compressed-tensors", {"preset": "W4A16", "symmetric": False}),
    ("gptq", {}),
    ("gptq", {"version": 2, "group_size": -1}),
    ("gptq", {"bits": 8}),
    ("compressed-tensors", {"preset": "W8A8"}),
    ("awq", {}),
    ("torchao", {"kind": "int4"}),
    ("modelopt", {"kind": "w4a16_awq"}),
    ("quark", {"dtype": "int4"}),
]


@pytest.mark.parametrize(("form", "options"), KEPT, ids=str)
def test_weights_of_few_bits_stay_so_where_there_are_kernels(
    form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    cpp_kernels.library()
    quantized, plain = quantized_checkpoints.write(tmp_path, form, "qwen3", **options)
    kernels = select(cpp_kernels.CHOICES)
    kept: Any = paged_forward.load(quantized, kernels=kernels)
    ordinary = paged_forward.load(plain, kernels=kernels)
    for layer in kept.layers:
        for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
            assert isinstance(linear.weight, PackedWeight4)
    mine, theirs = (paged_forward.all_logits(model, IDS, 16) for model in (kept, ordinary))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.01 * float(other.std()))


@pytest.mark.parametrize(("asked", "ep_size"), [(None, 1), ("w4a8", 1), (None, 2)])
@pytest.mark.parametrize(("form", "options"), [KEPT[1], KEPT[2], KEPT[6]], ids=str)
def test_experts_of_4_bits_stay_so_on_every_rank(
    form: str, options: dict[str, Any], asked: str | None, ep_size: int, tmp_path: Path
) -> None:
    cpp_kernels.library()
    quantized, plain = quantized_checkpoints.write(tmp_path, form, "qwen3_moe", **options)
    kernels = select(cpp_kernels.CHOICES)
    x, batch, sums = torch.randn(9, 64), None, []
    for path, quantization in ((quantized, asked), (plain, None)):
        plan = paged_forward.plan_for(path, quantization=quantization)
        total = torch.zeros(9, 64)
        for number in range(2):
            mesh = Mesh(RankInfo(rank=number, tp_size=2, ep_size=ep_size), torch.device("cpu"))
            experts = ExpertSharing(mesh.axis("ep")) if ep_size > 1 else None
            model = load_model(read_facts(path), plan, kernels, mesh.axis("tp"), experts=experts)
            layer: Any = model.layers[0]
            for weight in (layer.mlp.gate_up, layer.mlp.down):
                assert isinstance(weight, PackedWeight4) == (path == quantized)
            layer.mlp._summed_over = None
            total += layer.mlp(x, batch)
        sums.append(total)
    bound = 1e-4 if asked is None else 0.03
    torch.testing.assert_close(*sums, rtol=0, atol=bound * float(sums[1].abs().max()))


@pytest.mark.parametrize(("form", "options"), KEPT, ids=str)
def test_a_rank_keeps_whole_groups_and_dequantises_others(form: str, options: dict[str, Any], tmp_path: Path) -> None:
    cpp_kernels.library()
    quantized, plain = quantized_checkpoints.write(tmp_path, form, "qwen3", **options)
    kernels = select(cpp_kernels.CHOICES)
    for rank in (RankInfo(rank=0, tp_size=2), RankInfo(rank=1, tp_size=2)):
        models: list[Any] = []
        for path in (quantized, plain):
            plan = paged_forward.plan_for(path)
            axis = Mesh(rank, torch.device("cpu")).axis("tp")
            models.append(load_model(read_facts(path), plan, kernels, axis))
        kept, ordinary = models
        for layer, other in zip(kept.layers, ordinary.layers, strict=True):
            for part in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"):
                mine, theirs = layer.get_submodule(part), other.get_submodule(part)
                whole_rows = options.get("group_size") == -1 or options.get("preset") == "W8A8"
                kept_here = not whole_rows or part.endswith(("qkv", "gate_up"))
                assert isinstance(mine.weight, PackedWeight4) == kept_here
                x = torch.randn(3, mine.layout.in_size)
                products = [each.method.multiply(each, x, None, kernels) for each in (mine, theirs)]
                torch.testing.assert_close(products[0], products[1], rtol=1e-3, atol=1e-4)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("gptq", {"bits": 9}, {}, "bits must be from 2 to 8"),
    ("gptq", {"checkpoint_format": "bitblas"}, {}, "checkpoint_format must be gptq, gptq_v2 or gptq_p"),
    ("gptq", {"group_size": 0}, {}, "group_size"),
    ("gptq", {}, {"model.layers.0.mlp.up_proj.qweight": torch.zeros(16, 128).short()}, "pack_dtype is int32"),
    ("gptq", {}, {"model.layers.0.mlp.up_proj.qweight": torch.zeros(7, 128).int()}, "do not match"),
    ("gptq", {"quant_method": "hqq"}, {}, r"quantized \(hqq\)"),
    ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:fake"}, {}, "auto-round, fake"),
    ("gptq", {"checkpoint_format": "marlin"}, {}, r"quantized \(marlin\)"),
    ("gptq", {}, {"model.layers.0.mlp.up_proj.scales": None}, "lacks model.layers.0.mlp.up_proj.scales"),
    ("gptq", {}, {"model.layers.0.mlp.up_proj.g_idx": torch.full((64,), 9).int()}, "groups beyond"),
    ("awq", {"version": "gemv_fast"}, {}, "version gemv_fast"),
    ("awq", {"version": "gemv"}, {}, "do not match"),
    ("awq", {}, {"model.layers.0.mlp.up_proj.qzeros": torch.zeros(3, 16).int()}, "do not match"),
    ("awq", {"bits": 9}, {}, "bits must be from 2 to 8"),
    ("awq", {"bits": 8}, {}, "do not match"),
    ("fp8", {}, {"model.layers.0.mlp.up_proj.weight_scale_inv": None}, "lacks .*up_proj.weight_scale"),
    ("fp8", {}, {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(5, 2)}, "do not cover"),
    ("torchao", {}, {"model.layers.0.mlp.up_proj._weight_scale": None}, "lacks .*_weight_scale"),
    (
        "torchao",
        {},
        {"model.layers.0.mlp.up_proj._weight_qdata": torch.zeros(2, 2, 2, 2).int()},
        "for a GPU kernel",
    ),
    (
        "torchao",
        {},
        {"model.layers.0.mlp.up_proj._weight_scale": torch.ones(128, 2).to(torch.float8_e8m0fnu)},
        "microscaling",
    ),
    ("compressed-tensors", {"format": "marlin-24"}, {}, "marlin-24"),
    ("compressed-tensors", {"transform_config": {"config_groups": {"a": {}}}}, {}, "a rotates activations"),
    (
        "compressed-tensors",
        {"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}},
        {},
        "R4 rotates activations",
    ),
    (
        "compressed-tensors",
        {"config_groups": {"a": {"weights": {"num_bits": 4, "symmetric": False}}}},
        {},
        "lacks .*weight_zero_point",
    ),
    (
        "compressed-tensors",
        {"config_groups": {"a": {"weights": {"num_bits": 4, "actorder": "group"}}}},
        {},
        "lacks .*weight_g_idx",
    ),
    (
        "compressed-tensors",
        {},
        {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(128, 1)},
        "do not cover",
    ),
    ("compressed-tensors", {}, {"model.layers.0.mlp.up_proj.weight_shape": torch.ones(())}, "does not fit"),
    (
        "compressed-tensors",
        {},
        {"model.layers.0.mlp.up_proj.weight_packed": torch.ones(128).int()},
        "of 0 words",
    ),
    ("gptq", {"desc_act": True}, {"model.layers.0.mlp.up_proj.g_idx": None}, "lacks .*g_idx"),
    ("gptq", {}, {"model.layers.0.mlp.up_proj.scales": torch.ones(2, 64)}, "do not match"),
    ("bitsandbytes", {}, {"model.layers.0.mlp.up_proj.SCB": None}, "in torch.int8 without scales"),
    ("bitsandbytes", {}, {"model.layers.0.mlp.up_proj.SCB": torch.ones(64)}, "do not match"),
    ("torchao", {}, {"model.layers.0.mlp.up_proj._weight_scale": torch.ones(64, 1)}, "do not match"),
    ("torchao", {}, {"model.layers.0.mlp.up_proj._weight_scale": torch.ones(0, 1)}, "do not match"),
    ("awq", {}, {"model.layers.0.mlp.up_proj.scales": torch.ones(0, 128)}, "cannot be read"),
    ("modelopt", {"group_size": 64}, {}, "do not match"),
    ("modelopt", {}, {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 5).byte()}, "do not match"),
    ("modelopt", {}, {"model.layers.0.mlp.up_proj.pre_quant_scale": torch.ones(5)}, "does not match"),
    ("modelopt", {}, {"model.layers.0.mlp.up_proj.svdquant_lora_a": torch.ones(5)}, "SVDQuant"),
    ("quark", {}, {"model.layers.0.mlp.up_proj.weight_zero_point": None}, "lacks .*weight_zero_point"),
    ("quark", {}, {"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 5).int()}, "do not match"),
    ("quark", {"global_quant_config": {"weight": {"dtype": "int3"}}}, {}, "weights of int3"),
    ("quark", {"export": {"weight_format": "fake_quantized"}}, {}, "must be real_quantized"),
]


@pytest.mark.parametrize(("form", "config", "tensors", "reason"), REFUSED, ids=str)
def test_what_cannot_be_read_is_refused_by_name(
    form: str, config: dict[str, Any], tensors: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    options = {
        "bitsandbytes": {"kind": "int8"},
        "compressed-tensors": {"preset": "W4A16"},
        "modelopt": {"kind": "w4a16_awq"},
        "quark": {"dtype": "int4"},
        "torchao": {"kind": "int8"},
    }.get(form, {})
    quantized, _ = quantized_checkpoints.write(tmp_path / "whole", form, **options)
    with pytest.raises(CheckpointError, match=reason):
        paged_forward.load(changed(tmp_path / "changed", quantized, config, tensors))
