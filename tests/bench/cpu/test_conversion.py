"""The conversions written here: a peer must read the same weights from the file as Penstock from the checkpoint."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from safetensors.torch import load_file

from bench.checkpoints import Shape, write_checkpoint
from bench.cpu.engines import SCRIPTS
from bench.families import write_family
from bench.test_families import tiny
from runtime.loading.formats.bits import unpack

TINY = Shape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, vocab=320, tied=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(TINY, tmp_path)
    return tmp_path


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return import_module(name)


def test_llama_cpp_gets_every_weight_bit_by_bit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = load_file(str(checkpoint / "model.safetensors"))
    read = dict(script("gguf_file", monkeypatch).read_safetensors(checkpoint / "model.safetensors"))
    assert read.keys() == ours.keys()
    assert all(torch.equal(torch.tensor(read[name]), ours[name].float()) for name in ours)


def test_llama_cpp_rotates_pairs_where_we_rotate_halves(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    convert = script("gguf_file", monkeypatch).tensors
    written = {name: torch.tensor(w) for name, w in convert(checkpoint, config)}
    ours = load_file(str(checkpoint / "model.safetensors"))
    assert len(written) == len(ours)
    for name, part, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        weight = ours[f"model.layers.1.self_attn.{part}.weight"].float().view(heads, 2, 4, 32)
        pairs = written[f"blk.1.{name}.weight"].view(heads, 4, 2, 32)
        assert torch.equal(pairs[:, :, 0], weight[:, 0])
        assert torch.equal(pairs[:, :, 1], weight[:, 1])
    assert torch.equal(written["blk.0.attn_v.weight"], ours["model.layers.0.self_attn.v_proj.weight"].float())


@pytest.mark.parametrize(
    ("family", "written"),
    [
        ("M", {"blk.1.ffn_gate_exps.weight": (4, 24, 64), "blk.0.ffn_gate_inp.weight": (4, 64)}),
        ("G", {"blk.1.post_ffw_norm.weight": (64,), "blk.0.attn_q_norm.weight": (16,)}),
        ("H", {"blk.0.ssm_a": (8, 1), "blk.0.ssm_dt.bias": (8,), "blk.0.ssm_norm.weight": (1, 128)}),
    ],
)
def test_llama_cpp_gets_every_number_of_other_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, written: dict[str, tuple[int, ...]]
) -> None:
    write_family(tiny(family), tmp_path)
    ours = load_file(str(tmp_path / "model.safetensors"))
    config = json.loads((tmp_path / "config.json").read_text())
    found = dict(script("gguf_file", monkeypatch).tensors(tmp_path, config))
    assert {name: found[name].shape for name in written} == written
    assert sum(weight.size for weight in found.values()) == sum(weight.numel() for weight in ours.values())
    writer = Mock()
    script("gguf_file", monkeypatch).describe(writer, config)
    writer.add_head_count_kv.assert_called_once_with([0, 2] if family == "H" else 2)
    assert writer.add_expert_count.call_args_list == ([call(4)] if family == "M" else [])


def test_a_common_prefix_leaves_each_prompt_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    common_prefix = script("run_llama", monkeypatch).common_prefix
    long = list(range(100))
    assert common_prefix([[*long, 7], [*long, 8, 9]]) == long
    assert common_prefix([long, long]) == long[:-1]
    assert common_prefix([[1, 2, 3], [1, 2, 4]]) == []
    assert common_prefix([long]) == []


def test_vllm_gets_weights_in_eight_bits_near_ours(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = load_file(str(checkpoint / "model.safetensors"))
    script("run_vllm", monkeypatch).quantize(checkpoint, "int8")
    theirs = load_file(str(checkpoint / "model.safetensors"))
    name = "model.layers.0.mlp.down_proj.weight"
    assert theirs[name].dtype == torch.int8
    back = theirs[name].float() * theirs[f"{name}_scale"]
    assert (back - ours[name].float()).abs().max() <= theirs[f"{name}_scale"].max() / 2 * 1.01
    assert torch.equal(theirs["lm_head.weight"], ours["lm_head.weight"])
    assert "quantization_config" in json.loads((checkpoint / "config.json").read_text())


def test_vllm_gets_weights_in_four_bits_near_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(8, 256)
    packed, scales, shape = script("run_vllm", monkeypatch).four_bits("w", weight).values()
    assert shape.tolist() == [8, 256]
    steps = scales.float().repeat_interleave(128, dim=1)
    assert ((unpack(packed, 4, 256) - 8) * steps - weight).abs().max() <= steps.max() * 0.52
